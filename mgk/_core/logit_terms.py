"""Terms of the mixture logits ℓ_ijr = λ q_i·k_jr + c_jr that do not depend on pairs of query and key."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mgk._core.calls import MixtureCall
from mgk._core.heads import repeat_heads
from mgk._core.masks import MASK_VALUE
from mgk.equations import squared_norms


def scale_and_tau(call: MixtureCall, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scale λ, and τ as [1, Hk or 1, 1, 1]."""
    scale = torch.as_tensor(call.scale, dtype=dtype, device=call.query.device)
    return scale, torch.as_tensor(call.tau, dtype=dtype, device=call.query.device).reshape(1, -1, 1, 1)


def scaled_query(call: MixtureCall, dtype: torch.dtype) -> Tensor:
    """Return λ q_i, [B, H, L, D], for a λ shared by all components."""
    scale, _ = scale_and_tau(call, dtype)
    return call.query.to(dtype) * (scale if scale.dim() == 0 else repeat_heads(scale, call.group))


def key_terms(call: MixtureCall, keys: Tensor) -> Tensor:
    """Return c_jr = log π_jr − τ λ/2 ‖k_jr‖², [B, Hk, M, S], at least MASK_VALUE. keys: [B, Hk, M, S, D]."""
    scale, tau = scale_and_tau(call, keys.dtype)
    log_prior = -math.log(call.components) if call.log_prior is None else call.log_prior.to(keys.dtype)
    return (log_prior - 0.5 * tau * scale * squared_norms(keys)).clamp(min=MASK_VALUE)


def query_norm_term(call: MixtureCall, dtype: torch.dtype) -> Tensor:
    """Return −τ λ/2 ‖q_i‖², [B, H, L], for a λ shared by all components. It cancels in the weights, not in the lse."""
    scale, tau = scale_and_tau(call, dtype)
    factor = tau[..., 0] * (scale if scale.dim() == 0 else scale[..., 0])  # [1 or B, 1 or Hk, 1]
    return -0.5 * repeat_heads(factor, call.group) * call.query.to(dtype).square().sum(-1)
