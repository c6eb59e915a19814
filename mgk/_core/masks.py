"""Which pairs (i, j) may attend: the masks of a call, made for a block of queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from mgk._core.calls import Packed

# Stands for -inf where that would turn a row of it into NaN. Far below any logit, far above fp32's limit.
MASK_VALUE = -1e30


def cu_seqlens_to_segments(cu_seqlens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The sequence each of `length` rows belongs to, and its position there. Both [length]."""
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
    """Bool, broadcastable to [B, H, rows, keys]; None when every pair may attend. Float masks are not looked at."""
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
        mask = block_of_rows(attn_mask, rows)
        allowed = mask if allowed is None else mask & allowed
    return allowed


def block_of_rows(mask: Tensor, rows: slice) -> Tensor:
    """The rows of a mask [B, H, L, S] whose L may be 1."""
    return mask if mask.shape[-2] == 1 else mask[..., rows, :]


def repeat_heads(tensor: Tensor, group: int) -> Tensor:
    """Key-head tensors [B, Hk or 1, ...] for the query heads, [B, H or 1, ...], to be broadcast where it is 1."""
    if group == 1 or tensor.shape[1] == 1:
        return tensor
    return tensor.repeat_interleave(group, dim=1)
