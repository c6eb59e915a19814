"""Private parts of the operators and layers: call records, validation, masks, key projections, priors, EM.

Shapes: B batch, H query heads, Hk key heads, M components, L queries, S keys, D head dimension, E value dimension,
F features, N packed sequences, P positions with separate priors.
"""
