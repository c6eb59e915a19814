"""Query, key and value heads: their numbers, and repetition of heads that several query heads share."""

from __future__ import annotations

import math

from torch import Tensor

from mgk._core.validation import fail, positive_integer


def count_heads(num_heads: int, num_kv_heads: int | None, num_key_heads: int | None) -> tuple[int, int]:
    """Return the numbers of key and of value heads: divisors of num_heads, but not necessarily of each other."""
    value_heads = num_heads if num_kv_heads is None else positive_integer("num_kv_heads", num_kv_heads)
    key_heads = value_heads if num_key_heads is None else positive_integer("num_key_heads", num_key_heads)
    for name, count in (("num_kv_heads", value_heads), ("num_key_heads", key_heads)):
        if num_heads % count:
            fail(name, f"= {count} must divide num_heads = {num_heads}")
    return key_heads, value_heads


def repeat_heads(tensor: Tensor, group: int) -> Tensor:
    """Repeat every head of [B, heads, ...] `group` times; a single head is not repeated, since it broadcasts."""
    if group == 1 or tensor.shape[1] == 1:
        return tensor
    return tensor.repeat_interleave(group, dim=1)


def pair_heads(key_heads: int, value_heads: int) -> int:
    """Return the number of heads that both key and value heads can be repeated to; it divides the query heads.

    It is the number of sums Σ φ̃ vᵀ of linear attention: a query head needs the sum of its key and its value head.
    """
    return key_heads if key_heads == value_heads else math.lcm(key_heads, value_heads)


def pair_key_and_value(keys: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys [B, Hk, ...] and value [B, Hv, ...] to `pair_heads`, also a single head."""
    heads = pair_heads(keys.shape[1], value.shape[1])
    repeats = (heads // keys.shape[1], heads // value.shape[1])
    keys, value = (x if n == 1 else x.repeat_interleave(n, dim=1) for x, n in zip((keys, value), repeats, strict=True))
    return keys, value
