"""Parameters and forward FLOPs of a model for other variants, numbers of heads and lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Maps a configuration and a length to parameters and FLOPs per example, counted on the meta device.
Count = Callable[[Any, int], tuple[int, int]]


@dataclass(frozen=True)
class ModelCost:
    """Counted cost of a model."""

    variant: str
    heads: int
    length: int
    params: int
    flops: int

    @property
    def row(self) -> str:
        return f"{self.variant}:{self.heads}"


def count_costs(
    config: Any, variants: Sequence[str], heads: Sequence[int], lengths: Sequence[int], count: Count
) -> list[ModelCost]:
    """Count the cost of a model with each variant, number of heads and length.

    Args:
        config: Configuration of the model.
        variants: Names of attention variants.
        heads: Numbers of heads, of unchanged width.
        lengths: Numbers of tokens; ignored for a model of images, whose size is fixed.
        count: Function that counts parameters and FLOPs of a configuration.
    """
    has_length = "max_length" in {field.name for field in dataclasses.fields(config)}
    if not has_length:
        lengths = [config.max_length]  # determined by other settings: image and patch size
    counted = []
    for variant in variants:
        for number in heads:
            for length in lengths:
                sizes = {"max_length": length} if has_length else {}
                heads_only = {"num_heads": number, "num_kv_heads": None, "num_key_heads": None}
                changed = dataclasses.replace(config, variant=variant, **heads_only, **sizes)
                counted.append(ModelCost(variant, number, length, *count(changed, length)))
    return counted


def fewer_heads(heads: int) -> list[int]:
    """Return the numbers of heads to compare, ascending: `heads`, its successive halves, and 1."""
    numbers = {heads, 1}
    while heads > 1:
        heads = heads // 2
        numbers.add(heads)
    return sorted(numbers)


@dataclass(frozen=True)
class HeadCost:
    """Cost of one head of one layer, estimated from the widths alone."""

    params: int
    flops: int


def estimate_head_cost(width: int, head_dim: int, kv_share: float, length: int) -> HeadCost:
    """Estimate the cost of a head: its share of the four projections, and two GEMMs over all pairs.

    Args:
        width: Width of the model.
        head_dim: Width of a head.
        kv_share: Ratio of key heads to query heads.
        length: Number of tokens.

    Returns:
        Parameters, and FLOPs of one forward pass (2 per multiply-add).
    """
    params = round(width * head_dim * (2 + 2 * kv_share))
    return HeadCost(params, 2 * params * length + 4 * head_dim * length**2)
