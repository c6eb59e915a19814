"""GPU kernels of mixture and linear attention, in Triton. README.md describes them.

Shapes: B batch, H query heads, HK key heads, M components, L queries, S keys, D head dimension, E value dimension.
"""
