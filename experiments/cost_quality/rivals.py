"""Other ways to improve attention or to shrink its cache, as layers for `mgk.models`.

Differential attention (Ye et al. 2024, arXiv:2410.05258) and multi-head latent attention (DeepSeek-AI 2024,
arXiv:2405.04434). Both train and evaluate; they have no cache for decoding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from mgk._core.validation import fail
from mgk.models.attention_layer import register_attention
from mgk.rotary import Rotary

EPS = 1e-6


def check_supported(key_padding_mask: Any, cu_seqlens: Any, max_seqlen: Any, cache: Any) -> None:
    """Raise a ValueError if an option of `mgk.Attention` is used that the rivals lack."""
    options = {"key_padding_mask": key_padding_mask, "cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "cache": cache}
    for name, option in options.items():
        if option is not None:
            fail(name, "is not supported by differential and latent attention")


class DifferentialAttention(nn.Module):
    """Differential attention: the difference of two softmax maps, Eq. 1 to 3 of the paper.

    A head has two queries and two keys of width `head_dim` and a value of twice that width, so that `num_heads` maps
    make num_heads / 2 heads with the parameters and the cache of softmax attention with num_heads heads.

    Args:
        embed_dim: Dimension of the model.
        num_heads: Number of query maps, even.
        num_kv_heads: Number of key maps, even; it divides num_heads.
        head_dim: Width of a query or key.
        layer_index: Index of the layer from 0; it determines the initial λ.
        is_causal: Whether a position attends only to itself and earlier ones.
        rotary: Base of the rotary embedding, or None.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        layer_index: int = 0,
        is_causal: bool = True,
        rotary: float | None = 10000.0,
    ) -> None:
        super().__init__()
        for name, heads in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
            if heads % 2:
                fail(name, f"must be even for differential attention, whose heads have two maps, got {heads}")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads // 2, num_kv_heads // 2, head_dim
        self.is_causal = is_causal
        self.query = nn.Linear(embed_dim, num_heads * head_dim, bias=False)
        self.key = nn.Linear(embed_dim, num_kv_heads * head_dim, bias=False)
        self.value = nn.Linear(embed_dim, num_kv_heads * head_dim, bias=False)
        self.out = nn.Linear(num_heads * head_dim, embed_dim, bias=False)
        self.rotary = None if rotary is None else Rotary(head_dim, rotary)
        self.initial_lambda = 0.8 - 0.6 * math.exp(-0.3 * layer_index)
        # λ = exp(λ_q1 · λ_k1) - exp(λ_q2 · λ_k2) + λ_init, with vectors shared by the heads of the layer.
        self.lambdas = nn.Parameter(0.1 * torch.randn(2, 2, head_dim))
        self.head_norm = nn.RMSNorm(2 * head_dim, eps=EPS)

    @property
    def cache_width(self) -> int:
        """Number of cached values per token."""
        return self.key.out_features + self.value.out_features

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: Any = None,
    ) -> Tensor:
        check_supported(key_padding_mask, cu_seqlens, max_seqlen, cache)
        # [B, heads, 2, L, D]; the value has width 2 D.
        query, key = (
            projection(x).unflatten(-1, (heads, 2, self.head_dim)).permute(0, 2, 3, 1, 4)
            for projection, heads in ((self.query, self.num_heads), (self.key, self.num_kv_heads))
        )
        value = self.value(x).unflatten(-1, (self.num_kv_heads, 2 * self.head_dim)).transpose(1, 2)
        if self.rotary is not None:
            positions = torch.arange(x.shape[1], device=x.device) if position_ids is None else position_ids
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        # Two calls instead of two maps in memory: (A1 - λ A2) V = A1 V - λ A2 V.
        first, second = (
            nn.functional.scaled_dot_product_attention(
                query[:, :, n],
                key[:, :, n],
                value,
                is_causal=self.is_causal,
                enable_gqa=self.num_heads != self.num_kv_heads,
            )
            for n in range(2)
        )
        products = (self.lambdas[0] * self.lambdas[1]).sum(-1)
        factor = (products[0].exp() - products[1].exp() + self.initial_lambda).to(first.dtype)
        heads = self.head_norm(first - factor * second) * (1 - self.initial_lambda)
        output: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return output


class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values from one cached latent vector, Eq. 9 to 19 of DeepSeek-V2.

    The cache of a token is the latent vector and one rotary key shared by all heads.

    Args:
        embed_dim: Dimension of the model.
        num_heads: Number of heads.
        head_dim: Width of the part of queries and keys without rotation, and of values.
        latent_dim: Width of the latent vector of keys and values.
        query_latent_dim: Width of the latent vector of the queries.
        rotary_dim: Width of the rotated part of queries and keys.
        is_causal: Whether a position attends only to itself and earlier ones.
        rotary: Base of the rotary embedding.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        *,
        latent_dim: int,
        query_latent_dim: int,
        rotary_dim: int,
        is_causal: bool = True,
        rotary: float = 10000.0,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.rotary_dim, self.is_causal = num_heads, head_dim, rotary_dim, is_causal
        self.query_latent = nn.Linear(embed_dim, query_latent_dim, bias=False)
        self.query_norm = nn.RMSNorm(query_latent_dim, eps=EPS)
        self.query = nn.Linear(query_latent_dim, num_heads * (head_dim + rotary_dim), bias=False)
        self.latent = nn.Linear(embed_dim, latent_dim, bias=False)
        self.latent_norm = nn.RMSNorm(latent_dim, eps=EPS)
        self.key = nn.Linear(latent_dim, num_heads * head_dim, bias=False)
        self.value = nn.Linear(latent_dim, num_heads * head_dim, bias=False)
        self.rotary_key = nn.Linear(embed_dim, rotary_dim, bias=False)
        self.out = nn.Linear(num_heads * head_dim, embed_dim, bias=False)
        self.rotary = Rotary(rotary_dim, rotary)

    @property
    def cache_width(self) -> int:
        """Number of cached values per token."""
        return self.latent.out_features + self.rotary_dim

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: Any = None,
    ) -> Tensor:
        check_supported(key_padding_mask, cu_seqlens, max_seqlen, cache)
        positions = torch.arange(x.shape[1], device=x.device) if position_ids is None else position_ids
        query = self.query(self.query_norm(self.query_latent(x)))
        query = query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        plain_query, rotary_query = query.split([self.head_dim, self.rotary_dim], dim=-1)
        latent = self.latent_norm(self.latent(x))
        plain_key = self.key(latent).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        value = self.value(latent).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        rotary_key = self.rotary(self.rotary_key(x).unsqueeze(1), positions).expand(-1, self.num_heads, -1, -1)
        query = torch.cat([plain_query, self.rotary(rotary_query, positions)], dim=-1)
        key = torch.cat([plain_key, rotary_key], dim=-1)
        # SDPA scales by the width of a query, head_dim + rotary_dim, as Eq. 18 does.
        heads = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        output: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return output


def make_differential(config: Any, *, layer_index: int, is_causal: bool, rotary: float | None) -> DifferentialAttention:
    """Make the layer "diff" of a model: `diff:8/4` has the parameters and the cache of `softmax:8/4`."""
    return DifferentialAttention(
        config.embed_dim,
        config.num_heads,
        config.num_kv_heads or config.num_heads,
        config.head_dim,
        layer_index=layer_index,
        is_causal=is_causal,
        rotary=rotary,
    )


def make_latent(config: Any, *, layer_index: int, is_causal: bool, rotary: float | None) -> LatentAttention:
    """Make the layer "mla" of a model: `mla:8/4` has the cache of `softmax:8/4`, and half-width rotary keys."""
    if rotary is None:
        fail("positions", "must be 'rotary' for latent attention")
    rotary_dim = config.head_dim // 2
    kv_heads = config.num_kv_heads or config.num_heads
    return LatentAttention(
        config.embed_dim,
        config.num_heads,
        config.head_dim,
        latent_dim=2 * kv_heads * config.head_dim - rotary_dim,
        query_latent_dim=config.embed_dim,
        rotary_dim=rotary_dim,
        is_causal=is_causal,
        rotary=rotary,
    )


register_attention("diff", make_differential)
register_attention("mla", make_latent)
