"""Parameters and forward FLOPs of a model against heads and length, for every variant: counted, not estimated.

The counting itself, on the meta device, belongs to the models (`mgk.training.evaluate`) and is handed in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Count = Callable[[Any, int], tuple[int, int]]  # a configuration and a length -> parameters, FLOPs of one example


@dataclass(frozen=True)
class ModelCost:
    variant: str
    heads: int
    length: int
    params: int
    flops: int

    @property
    def row(self) -> str:
        return f"{self.variant}:{self.heads}"


def costs(
    config: Any, variants: Sequence[str], heads: Sequence[int], lengths: Sequence[int], count: Count
) -> list[ModelCost]:
    """The model of `config` with each variant, number of heads (of the same width) and length."""
    found = []
    for variant in variants:
        for number in heads:
            for length in lengths:
                changed = dataclasses.replace(
                    config, variant=variant, num_heads=number, num_kv_heads=None, max_length=length
                )
                found.append(ModelCost(variant, number, length, *count(changed, length)))
    return found


def smaller(heads: int) -> list[int]:
    """The numbers of heads worth looking at below and at `heads`: it, its halves, and 1."""
    numbers = {heads, 1}
    while heads > 1:
        heads = heads // 2
        numbers.add(heads)
    return sorted(numbers)


@dataclass(frozen=True)
class PerHead:
    """What one head of one layer costs, from the widths alone: the estimate for models that are not built here."""

    params: int
    flops: int


def per_head(width: int, head_dim: int, kv_share: float, length: int) -> PerHead:
    """Projections of query and output, the head's share of those of key and value, and two products a pair.

    width: of the model. kv_share: key heads over query heads. FLOPs of one forward, 2 a multiply-add.
    """
    params = round(width * head_dim * (2 + 2 * kv_share))
    return PerHead(params, 2 * params * length + 4 * head_dim * length**2)
