"""Numbers of key heads and value heads per layer for a given size of the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mgk._core.validation import fail
from mgk.hf.upcycling.layers import MergeableLayer

# Loss of the model's outputs if one layer has these numbers of key heads and value heads.
Loss = Callable[[MergeableLayer, int, int], float]
Numbers = dict[str, tuple[int, int]]


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, the largest first."""
    return [d for d in range(number, 0, -1) if number % d == 0]


def cache_width(layer: MergeableLayer, key_heads: int, value_heads: int) -> int:
    """Return the number of cached elements per token."""
    return key_heads * layer.key_dim + value_heads * layer.value_dim


def choose_numbers(layers: Sequence[MergeableLayer], cache: float, loss: Loss) -> Numbers:
    """Choose numbers of heads per layer so that the cache has at most the given share of its size.

    Starting from the present numbers, the reduction with the smallest increase of the loss per cached element is
    applied until the cache is small enough. Then reductions are undone, that with the largest loss first, as far as the
    cache permits. The loss of each reduction is measured with the other layers, and the other of keys and values,
    unchanged.

    Args:
        layers: The layers.
        cache: Share of the present size of the cache, between 0 and 1.
        loss: Function that measures the loss.

    Returns:
        (key heads, value heads) by name of the layer.
    """
    full = sum(cache_width(layer, layer.units, layer.units) for layer in layers)
    smallest = sum(cache_width(layer, layer.units if layer.fixed_keys else 1, 1) for layer in layers)
    if smallest > cache * full:
        fail("cache", f"= {cache:g} is too small: the smallest possible cache is {smallest / full:.3f}")
    numbers = {layer.name: [layer.units, layer.units] for layer in layers}
    losses: dict[tuple[str, int, int], float] = {}

    def measured(layer: MergeableLayer, index: int, number: int) -> float:
        if number == layer.units:
            return 0.0
        key = (layer.name, index, number)
        if key not in losses:
            pair = (number, layer.units) if index == 0 else (layer.units, number)
            losses[key] = loss(layer, *pair)
        return losses[key]

    def width() -> int:
        return sum(cache_width(layer, *numbers[layer.name]) for layer in layers)

    while width() > cache * full:
        best: tuple[float, str, int, int] | None = None
        for layer in layers:
            for index, dim in enumerate((layer.key_dim, layer.value_dim)):
                present = numbers[layer.name][index]
                if index == 0 and layer.fixed_keys:
                    continue
                for number in divisors(layer.units):
                    if number < present:
                        increase = measured(layer, index, number) - measured(layer, index, present)
                        price = max(increase, 0.0) / ((present - number) * dim)
                        if best is None or price < best[0]:
                            best = (price, layer.name, index, number)
        assert best is not None
        numbers[best[1]][best[2]] = best[3]
    while True:
        gains: list[tuple[float, str, int, int]] = []
        for layer in layers:
            for index, dim in enumerate((layer.key_dim, layer.value_dim)):
                present = numbers[layer.name][index]
                for number in divisors(layer.units):
                    if number > present and width() + (number - present) * dim <= cache * full:
                        gain = measured(layer, index, present) - measured(layer, index, number)
                        gains.append((gain, layer.name, index, number))
        if not gains or max(gains)[0] <= 0:
            break
        _, name, index, number = max(gains)
        numbers[name][index] = number
    return {name: (pair[0], pair[1]) for name, pair in numbers.items()}
