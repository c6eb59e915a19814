"""How a layer is to attend this time: causality, masks, packing, a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mgk._core.calls import and_mask, check_cu_seqlens, check_max_seqlen
from mgk._core.masks import MASK_VALUE
from mgk._core.validation import check_padding, fail
from mgk.cache import Cache


@dataclass(frozen=True)
class AttentionArgs:
    """How a layer is to attend this time."""

    is_causal: bool
    key_padding_mask: Tensor | None = None
    key_bias: Tensor | None = None  # floating point, added to the logits of each key, [B, S]
    attn_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cache: Cache | None = None
    need_weights: bool = False
    max_seqlen: int | None = None

    def check(self, query: Tensor, self_attention: bool, kind: type[Cache]) -> None:
        """Whether cache, which the layer wants of this kind, and packing go with the query [B, L, ...]."""
        cache = self.cache
        if cache is not None and not isinstance(cache, kind):
            fail("cache", f"must come from this layer's make_cache, got {type(cache).__name__}")
        if cache is not None and cache.batch_size != query.shape[0]:
            fail("cache", f"was made for a batch of {cache.batch_size}, got {query.shape[0]}")
        if self.cu_seqlens is not None:
            if not self_attention or cache is not None:
                fail("cu_seqlens", "goes with self-attention without a cache")
            check_cu_seqlens("cu_seqlens", self.cu_seqlens, query, query.shape[1])
            check_max_seqlen("max_seqlen", self.max_seqlen, self.cu_seqlens)
        elif self.max_seqlen is not None:
            fail("max_seqlen", "goes with cu_seqlens, which is not given")

    def mask(self, query: Tensor, length: int) -> Tensor | None:
        """key_padding_mask and attn_mask as one mask in SDPA's sense."""
        mask = self.attn_mask
        if self.key_bias is not None:
            bias = self.key_bias[:, None, None, :]
            mask = bias if mask is None else as_float(mask, bias.dtype) + bias
        if self.key_padding_mask is None:
            return mask
        attend = ~check_padding(self.key_padding_mask, query.shape[0], length, query)[:, None, None, :]
        if mask is not None and not isinstance(mask, Tensor):
            fail("attn_mask", f"must be a tensor, got {type(mask).__name__}")
        return and_mask(attend, mask)

    def counted(self) -> Tensor | None:
        """Of self-attention, whose queries are its keys: those that are no padding, bool [B, L]; None: all of them."""
        counted = None if self.key_bias is None else self.key_bias >= MASK_VALUE
        if self.key_padding_mask is None:
            return counted
        return ~self.key_padding_mask if counted is None else counted & ~self.key_padding_mask


def as_float(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask (True = attend) as one to be added."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)
