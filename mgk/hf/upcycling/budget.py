"""Numbers of key heads and value heads per layer for a given size of the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mgk._core.validation import fail
from mgk.hf.upcycling.layers import MergeableLayer

# Loss of the model's outputs if one layer has these numbers of key heads and value heads.
Loss = Callable[[MergeableLayer, int, int], float]
# Numbers of key heads and value heads by the name of the layer.
HeadCounts = dict[str, tuple[int, int]]
KEYS, VALUES = 0, 1  # positions in a pair of numbers


class _Change(NamedTuple):
    """Another number of key heads or value heads for a layer."""

    layer: MergeableLayer
    part: int  # KEYS or VALUES
    number: int
    width: int  # change of the number of cached elements per token


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, the largest first."""
    return [d for d in range(number, 0, -1) if number % d == 0]


def cache_width(layer: MergeableLayer, key_heads: int, value_heads: int) -> int:
    """Return the number of cached elements per token of a layer."""
    if not layer.is_cached:
        return 0
    return key_heads * layer.key_dim + value_heads * layer.value_dim


def choose_head_counts(layers: Sequence[MergeableLayer], cache: float, loss: Loss) -> HeadCounts:
    """Choose numbers of heads per layer so that the cache has at most the given share of its size.

    Starting from the present numbers, the reduction with the smallest increase of the loss per cached element is
    applied until the cache is small enough. Then reductions are undone, that with the largest loss first, as far as the
    cache permits. The loss of each reduction is measured with the other layers, and the other of keys and values,
    unchanged.

    Args:
        layers: The layers. Those that are not cached keep their heads.
        cache: Share of the present size of the cache, between 0 and 1.
        loss: Function that measures the loss.

    Returns:
        (key heads, value heads) by name of the layer.
    """
    full = sum(cache_width(layer, layer.kv_heads, layer.kv_heads) for layer in layers)
    smallest = sum(cache_width(layer, layer.kv_heads if layer.fixed_keys else 1, 1) for layer in layers)
    if smallest > cache * full:
        fail("cache", f"= {cache:g} is too small: the smallest possible cache is {smallest / full:.3f}")
    numbers = {layer.name: [layer.kv_heads, layer.kv_heads] for layer in layers}
    losses: dict[tuple[str, int, int], float] = {}

    def measured_loss(layer: MergeableLayer, part: int, number: int) -> float:
        if number == layer.kv_heads:
            return 0.0
        key = (layer.name, part, number)
        if key not in losses:
            pair = (number, layer.kv_heads) if part == KEYS else (layer.kv_heads, number)
            losses[key] = loss(layer, *pair)
        return losses[key]

    def possible_changes() -> Iterator[_Change]:
        for layer in layers:
            if not layer.is_cached:
                continue
            for part, dim in ((KEYS, layer.key_dim), (VALUES, layer.value_dim)):
                if part == KEYS and layer.fixed_keys:
                    continue
                for number in divisors(layer.kv_heads):
                    yield _Change(layer, part, number, (number - numbers[layer.name][part]) * dim)

    def added_loss(change: _Change) -> float:
        layer, part = change.layer, change.part
        return measured_loss(layer, part, change.number) - measured_loss(layer, part, numbers[layer.name][part])

    def apply(change: _Change) -> None:
        numbers[change.layer.name][change.part] = change.number

    width = full
    while width > cache * full:
        reductions = [change for change in possible_changes() if change.width < 0]
        reduction = min(reductions, key=lambda change: max(added_loss(change), 0.0) / -change.width)
        apply(reduction)
        width += reduction.width
    while True:
        growths = [change for change in possible_changes() if change.width > 0 and width + change.width <= cache * full]
        growth = min(growths, key=added_loss, default=None)
        if growth is None or added_loss(growth) >= 0:
            break
        apply(growth)
        width += growth.width
    return {name: (pair[KEYS], pair[VALUES]) for name, pair in numbers.items()}
