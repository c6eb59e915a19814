"""GPU kernels of mixture and linear attention, in Triton. README.md describes them.

B batch, H query heads, HK key heads, M components, L queries, S keys, D head width, E value width.
"""
