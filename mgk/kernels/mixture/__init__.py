"""Kernels of mixture attention (MGK, sMGK)."""
