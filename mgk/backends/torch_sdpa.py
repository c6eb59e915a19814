"""torch's scaled_dot_product_attention ("plain"), for softmax attention: one component, dot products, no prior."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mgk._core.calls import MixtureCall
from mgk._core.heads import pair_key_and_value
from mgk._core.masks import as_bool


def unsupported_reason(call: MixtureCall) -> str | None:
    """Return why the call is not supported, or None."""
    if call.components != 1 or isinstance(call.tau, Tensor) or call.tau != 0:
        return "it computes softmax attention only: one component and similarity 'dot'"
    if call.shift is not None or call.log_prior is not None or isinstance(call.scale, Tensor):
        return "it does not support a shift, a log_prior or a scale tensor"
    if call.return_weights or call.return_lse:
        return "it returns the output only"
    if call.packed is not None:
        return "it does not support packed sequences"
    if call.num_valid_keys is not None:
        return "it does not support a count of valid keys"
    if call.causal and call.attn_mask is not None:
        return "it supports attn_mask or is_causal, not both"
    if _needs_bottom_right_mask(call):
        return "it aligns the causal diagonal top-left"
    return None


def _needs_bottom_right_mask(call: MixtureCall) -> bool:
    """Return whether bottom-right alignment differs from top-left (L = S) and from no mask (L = 1)."""
    queries, length = call.query.shape[2], call.keys.shape[-2]
    return call.causal == "bottom-right" and queries not in (1, length)


def run(call: MixtureCall) -> tuple[Tensor, None, None]:
    """Return the output [B, H, L, E]; None for the lse and the weights."""
    mask = call.attn_mask
    empty = None
    if mask is not None:
        attendable = as_bool(mask)
        empty = ~attendable.any(-1, keepdim=True)
        # Some of SDPA's kernels return NaN for a fully masked row: unmask it here, and zero it below.
        mask = mask | empty if mask.dtype == torch.bool else mask.to(call.query.dtype).masked_fill(empty, 0)
    assert not isinstance(call.scale, Tensor)
    queries, length = call.query.shape[2], call.keys.shape[-2]
    # SDPA's fused kernels require as many key heads as value heads.
    keys, value = pair_key_and_value(call.keys.squeeze(2), call.value)
    output = F.scaled_dot_product_attention(
        call.query,
        keys,
        value,
        attn_mask=mask,
        dropout_p=call.dropout_p,
        is_causal=call.causal == "top-left" or (call.causal == "bottom-right" and queries == length),
        scale=call.scale,
        # Under torch.jit.trace numbers of heads are tensors.
        enable_gqa=bool(call.query.shape[1] > keys.shape[1]),
    )
    return output if empty is None else output.masked_fill(empty, 0), None, None
