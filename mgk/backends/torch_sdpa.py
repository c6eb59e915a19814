"""PyTorch's own attention, for the calls that are plain softmax attention: one component, dot products, no prior."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mgk._core.calls import MixtureCall
from mgk._core.masks import MASK_VALUE
from mgk.backends import triton


def refuses(call: MixtureCall) -> str | None:
    if call.components != 1 or isinstance(call.tau, Tensor) or call.tau != 0:
        return "it is for plain softmax attention alone: one component and similarity 'dot'"
    if call.shift is not None or call.log_prior is not None or isinstance(call.scale, Tensor):
        return "it takes no shift, log_prior or tensor of scales"
    if call.return_weights or call.return_lse:
        return "it returns the output alone"
    if call.packed is not None:
        return "it has no packed sequences"
    if call.count is not None:
        return "it reads all keys, also those beyond the count"
    if call.causal and call.attn_mask is not None:
        return "it takes a mask or is_causal, not both"
    if _bottom_right(call):
        return "it aligns the causal diagonal top-left"
    return None


def slower(call: MixtureCall) -> str | None:
    """Measured on an H200: with padding 1.2 (forward) and 1.3 times (with gradients) the time of the fused kernels; one
    token at a time, by a cache that grows, 50 ms for 16 layers against 8."""
    mask = call.attn_mask
    if call.query.is_cuda and _one_token(call) and triton.decodes(call) and triton.refuses(call) is None:
        return "cuDNN plans anew for every number of keys"
    if mask is not None and mask.shape[2] == 1 and triton.refuses(call) is None:
        return "triton reads a mask that is the same for every query once a key, and leaves out what it hides"
    return None


def _one_token(call: MixtureCall) -> bool:
    """A query, many keys, a key head each and 2-byte numbers: what cuDNN would take, and `triton` has a kernel for."""
    query, keys = call.query, call.keys
    return query.dtype.itemsize == 2 and call.group == 1 and query.shape[2] == 1 and keys.shape[-2] > 1


def _bottom_right(call: MixtureCall) -> bool:
    """Bottom-right alignment that is neither top-left (as many queries as keys) nor no mask at all (one query)."""
    queries, length = call.query.shape[2], call.keys.shape[-2]
    return call.causal == "bottom-right" and queries not in (1, length)


def run(call: MixtureCall) -> tuple[Tensor, None, None]:
    mask = call.attn_mask
    empty = None
    if mask is not None:
        seen = mask if mask.dtype == torch.bool else mask >= MASK_VALUE
        empty = ~seen.any(-1, keepdim=True)
        # A row that sees nothing is NaN in some of SDPA's kernels: it sees everything here, and is zeroed below.
        mask = mask | empty if mask.dtype == torch.bool else mask.to(call.query.dtype).masked_fill(empty, 0)
    assert not isinstance(call.scale, Tensor)
    queries, length = call.query.shape[2], call.keys.shape[-2]
    output = F.scaled_dot_product_attention(
        call.query,
        call.keys.squeeze(2),
        call.value,
        attn_mask=mask,
        dropout_p=call.dropout_p,
        is_causal=call.causal == "top-left" or (call.causal == "bottom-right" and queries == length),
        scale=call.scale,
        # While torch.jit.trace looks on, numbers of heads are tensors.
        enable_gqa=bool(call.group > 1),
    )
    return output if empty is None else output.masked_fill(empty, 0), None, None
