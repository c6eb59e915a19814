"""Choice of the heads that are merged with one another, by the energy that their merge loses.

The attention operators share keys and values between neighbouring heads. The order of the heads is free; a grouping is
therefore a permutation of the heads, whose blocks of n/Nk heads share a key and whose blocks of n/Nv heads share a
value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations

Cost = Callable[[frozenset[int]], float]


def order_heads(count: int, key_heads: int, value_heads: int, key_cost: Cost, value_cost: Cost) -> list[int]:
    """Return the order of the heads whose blocks lose the least energy.

    Pairs are matched optimally (Edmonds' algorithm). Larger groups are merged step by step, the cheapest pair of groups
    first, and then improved by exchanging heads until no exchange of two heads reduces the loss.

    Args:
        count: Number of heads n.
        key_heads: Number of groups that share a key; divides n.
        value_heads: Number of groups that share a value; divides n.
        key_cost: Loss of merging the keys of a set of heads.
        value_cost: Loss of merging the values of a set of heads.

    Returns:
        A permutation of range(n).
    """
    costs = [
        (count // heads, cache(cost))
        for heads, cost in ((key_heads, key_cost), (value_heads, value_cost))
        if heads < count
    ]
    if not costs:
        return list(range(count))
    sizes = sorted({size for size, _ in costs})

    def block_cost(group: frozenset[int]) -> float:
        return sum(cost(group) for size, cost in costs if size == len(group))

    groups = [frozenset([head]) for head in range(count)]
    for size in sizes:
        if size % len(groups[0]) == 0:
            groups = _grow(groups, size, lambda group: sum(cost(group) for _, cost in costs))
    if sizes == [2]:
        return [head for group in groups for head in sorted(group)]
    order = [head for group in groups for head in _arrange(group, sizes, costs)]
    return _exchange(order, sizes, block_cost)


def _grow(groups: list[frozenset[int]], size: int, cost: Cost) -> list[frozenset[int]]:
    """Merge groups of equal size into groups of `size` heads."""
    factor = size // len(groups[0])
    if factor == 1:
        return groups
    if factor == len(groups):
        return [frozenset().union(*groups)]
    if factor == 2:
        return _match(groups, cost)
    merged = {group: [group] for group in groups}
    while any(len(parts) < factor for parts in merged.values()):
        pairs = [
            (first, second)
            for first, second in combinations(merged, 2)
            if len(merged[first]) + len(merged[second]) <= factor
            and _can_complete([len(p) for g, p in merged.items() if g not in (first, second)],
                              len(merged[first]) + len(merged[second]), factor)
        ]  # fmt: skip
        first, second = min(pairs, key=lambda pair: cost(pair[0] | pair[1]) - cost(pair[0]) - cost(pair[1]))
        merged[first | second] = merged.pop(first) + merged.pop(second)
    return list(merged)


def _can_complete(others: Sequence[int], new: int, size: int) -> bool:
    """Return whether groups with these numbers of parts can be joined to groups of `size` parts."""
    remaining = sorted([*others, new], reverse=True)
    free: list[int] = []
    for parts in remaining:
        fitting = [room for room in free if room >= parts]
        if fitting:
            room = min(fitting)
            free.remove(room)
            free.append(room - parts)
        else:
            free.append(size - parts)
    return len(free) * size == sum(remaining)


def _match(groups: list[frozenset[int]], cost: Cost) -> list[frozenset[int]]:
    """Return the perfect matching of groups with the least total loss."""
    import networkx

    graph = networkx.Graph()
    graph.add_weighted_edges_from((first, second, cost(first | second)) for first, second in combinations(groups, 2))
    pairs = networkx.min_weight_matching(graph)
    return sorted((first | second for first, second in pairs), key=min)


def _arrange(group: frozenset[int], sizes: Sequence[int], costs: Sequence[tuple[int, Cost]]) -> list[int]:
    """Order the heads of a group so that the blocks of the smaller sizes lose little."""
    smaller = [size for size in sizes if size < len(group)]
    if not smaller:
        return sorted(group)
    parts = [frozenset([head]) for head in sorted(group)]
    size = smaller[-1]
    if len(group) % size:
        return sorted(group)
    parts = _grow(parts, size, lambda part: sum(cost(part) for block, cost in costs if block == size))
    return [head for part in parts for head in sorted(part)]


def _exchange(order: list[int], sizes: Sequence[int], cost: Cost) -> list[int]:
    """Exchange two heads at a time while that reduces the loss."""
    cost = cache(cost)

    def blocks(heads: Sequence[int], positions: Sequence[int]) -> float:
        starts = {(size, position // size * size) for size in sizes for position in positions}
        return sum(cost(frozenset(heads[start : start + size])) for size, start in starts)

    improved = True
    while improved:
        improved = False
        for i, j in combinations(range(len(order)), 2):
            changed = order.copy()
            changed[i], changed[j] = order[j], order[i]
            before, after = blocks(order, (i, j)), blocks(changed, (i, j))
            if after < before * (1 - 1e-9):
                order, improved = changed, True
    return order
