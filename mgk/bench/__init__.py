"""`mgk bench`: time and memory of the operators with H/2 heads against PyTorch's SDPA with H heads.

Shapes: B batch, H heads of softmax attention, M components per key, N length, D head width.
"""
