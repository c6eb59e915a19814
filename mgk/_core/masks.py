"""Masks: the value of masked logits, conversions between mask conventions, and masks of a block of queries."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mgk._core.calls import Packed

# Finite stand-in for -inf, which gives NaN in a row where all logits are masked. Far below any logit and far above the
# lowest fp32 number. Values of an additive mask below it mask the pair.
MASK_VALUE = -1e30
# Replaces the lse -inf of a row where all keys are masked: every recomputed weight of the row is exp(-1e30) = 0.
MASKED_ROW_LSE = -MASK_VALUE


def is_masked(logits: Tensor) -> Tensor:
    """Return which logits, or logsumexps of logits, are masked by MASK_VALUE, to which finite terms may be added."""
    return logits < MASK_VALUE / 2


def and_mask(attend: Tensor, mask: Tensor | None) -> Tensor:
    """Combine a bool mask (True = attend) with an SDPA mask, bool or additive."""
    if mask is None:
        return attend
    return mask & attend if mask.dtype == torch.bool else mask.masked_fill(~attend, -math.inf)


def as_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask (True = attend) to an additive one; return additive masks unchanged."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


def as_bool(mask: Tensor) -> Tensor:
    """Convert an additive mask to a bool one (True = attend); return bool masks unchanged."""
    if mask.dtype == torch.bool:
        return mask
    # MASK_VALUE overflows to -inf in fp16, where only -inf itself masks.
    return mask > -math.inf if mask.dtype == torch.float16 else mask >= MASK_VALUE


def attended_keys(mask: Tensor, group: int) -> Tensor:
    """Return which keys any query of their head attends to, bool [B or 1, Hk or 1, S or 1].

    Args:
        mask: Bool (True = attend) or additive, broadcastable to [B, H, L, S].
        group: Number of query heads per key head.
    """
    attended = as_bool(mask).any(-2)
    if group > 1 and attended.shape[1] > 1:
        attended = attended.unflatten(1, (-1, group)).any(2)
    return attended


def cu_seqlens_to_segments(cu_seqlens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the sequence index of each of `length` rows and its position in the sequence, both [length]."""
    rows = torch.arange(length, device=cu_seqlens.device)
    segment = torch.bucketize(rows, cu_seqlens[1:].long(), right=True)
    starts = torch.cat([cu_seqlens.long(), cu_seqlens[-1:].long()])
    return segment, rows - starts[segment]


def allowed_pairs(
    rows: slice,
    queries: int,
    keys: int,
    attn_mask: Tensor | None,
    causal: str | None,
    packed: Packed | None,
    like: Tensor,
) -> Tensor | None:
    """Return which queries of a block may attend to which keys; None if all may attend to all.

    Additive masks are ignored.

    Args:
        rows: Block of queries.
        queries: Number of queries L.
        keys: Number of keys S.
        attn_mask: Broadcastable to [B, H, L, S], or None.
        causal: None, "top-left" or "bottom-right".
        packed: Offsets of packed sequences, or None.
        like: Tensor on the device of the result.

    Returns:
        bool, True = attend, broadcastable to [B, H, rows, S], or None.
    """
    allowed = None
    if packed is not None:
        q_segment, q_position = cu_seqlens_to_segments(packed.cu_seqlens_q, queries)
        k_segment, k_position = cu_seqlens_to_segments(packed.cu_seqlens_k, keys)
        q_segment, q_position = q_segment[rows, None], q_position[rows, None]
        allowed = q_segment == k_segment
        if causal == "bottom-right":
            extra = packed.cu_seqlens_k.diff() - packed.cu_seqlens_q.diff()
            q_position = q_position + extra[q_segment.clamp(max=extra.numel() - 1)]
        if causal is not None:
            allowed = allowed & (k_position <= q_position)
    elif causal is not None:
        last = torch.arange(queries, device=like.device)[rows, None]
        if causal == "bottom-right":
            last = last + (keys - queries)
        allowed = torch.arange(keys, device=like.device) <= last
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = and_mask(block_of_rows(attn_mask, rows), allowed)
    return allowed


def block_of_rows(mask: Tensor, rows: slice) -> Tensor:
    """Return the rows of a block of queries from a mask [B, H, L or 1, S]."""
    return mask if mask.shape[-2] == 1 else mask[..., rows, :]
