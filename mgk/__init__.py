"""Attention with mixtures of Gaussian keys: half the heads do the work."""

from mgk.features import DPFP, FAVOR
from mgk.functional import explain_backend, mgk_attention, mlk_attention, smgk_attention, smlk_attention

__all__ = ["DPFP", "FAVOR", "explain_backend", "mgk_attention", "mlk_attention", "smgk_attention", "smlk_attention"]
