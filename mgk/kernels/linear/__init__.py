"""Kernels of linear attention (MLK, sMLK)."""
