"""sMGK with few key heads whose shifts belong to query heads: the keys are shared, each head adds its own shifts.

The cache holds the keys without shifts, as in sMGK, so that shifts per query head cost no cache. This layer repeats the
keys in memory and trains only: it has no cache for decoding.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mgk._core.validation import fail
from mgk.attention import Attention
from mgk.models.attention_layer import register_attention


class RepeatedHeads(nn.Linear):
    """Linear projection to a few heads, each repeated for consecutive query heads.

    Args:
        in_features: Dimension of the input.
        heads: Number of projected heads.
        repeats: Number of copies of each head.
        head_dim: Dimension of a head.
        bias: Whether the projection has a bias.
    """

    def __init__(self, in_features: int, heads: int, repeats: int, head_dim: int, *, bias: bool) -> None:
        super().__init__(in_features, heads * head_dim, bias=bias)
        self.heads, self.repeats = heads, repeats

    def forward(self, x: Tensor) -> Tensor:
        keys: Tensor = super().forward(x).unflatten(-1, (self.heads, -1))
        return keys.repeat_interleave(self.repeats, dim=-2).flatten(-2)


class QueryShiftAttention(Attention):
    """`mgk.Attention` of the variant smgk with shifts and priors per query head, and few key heads.

    Args:
        embed_dim: Dimension of the model.
        num_heads: Number of query heads.
        num_key_heads: Number of key heads, a divisor of num_heads.
        num_kv_heads: Number of value heads, a divisor of num_heads.
        **options: Further arguments of Attention.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, num_key_heads: int, num_kv_heads: int | None = None, **options: Any
    ) -> None:
        super().__init__(embed_dim, num_heads, num_key_heads=num_heads, num_kv_heads=num_kv_heads, **options)
        self.cached_key_heads = num_key_heads
        if num_heads % num_key_heads:
            fail("num_key_heads", f"= {num_key_heads} must divide num_heads = {num_heads}")
        self.keys.projection = RepeatedHeads(
            embed_dim, num_key_heads, num_heads // num_key_heads, self.head_dim, bias=self.query.bias is not None
        )
        self.keys.reset_parameters()  # type: ignore[operator]

    @property
    def cache_width(self) -> int:
        """Number of cached values per token."""
        return (self.cached_key_heads + self.num_kv_heads) * self.head_dim

    def make_cache(self, batch_size: int, max_length: int) -> Any:
        fail("cache", "is not supported by sMGK with shifts per query head")


def make_query_shifts(config: Any, *, layer_index: int, is_causal: bool, rotary: float | None) -> QueryShiftAttention:
    """Make the layer "smgk-query-shifts" of a model: `smgk-query-shifts:8/2/8` has the cache of `smgk:8/2/8`."""
    return QueryShiftAttention(
        config.embed_dim,
        config.num_heads,
        head_dim=config.head_dim,
        num_key_heads=config.num_key_heads or config.num_kv_heads or config.num_heads,
        num_kv_heads=config.num_kv_heads,
        num_components=config.num_components,
        preset=config.preset,
        dropout=config.attention_dropout,
        is_causal=is_causal,
        rotary=rotary,
        backend=config.backend,
    )


register_attention("smgk-query-shifts", make_query_shifts)
