"""Communities of a graph by Louvain's method (Blondel et al. 2008), the same on every machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

SWEEPS = 20


def communities(links: Iterable[tuple[int, int]], order: Sequence[bytes], resolution: int = 1) -> dict[int, int]:
    """The community of each node that has a link; nodes are looked at in the order given for each.

    A resolution above 1 gives more and smaller communities.
    """
    graph: dict[int, Counter[int]] = {}
    for a, b in links:
        graph.setdefault(a, Counter())[b] += 1
        graph.setdefault(b, Counter())[a] += 1
    nodes = sorted(graph, key=lambda node: order[node])
    community = {node: node for node in nodes}
    while True:
        joined = sweep(graph, nodes, resolution)
        if len(set(joined.values())) == len(nodes):
            return community
        community = {node: joined[c] for node, c in community.items()}
        graph = contract(graph, joined)
        nodes = [node for node in nodes if node in graph]


def sweep(graph: dict[int, Counter[int]], nodes: Sequence[int], resolution: int) -> dict[int, int]:
    """Moves each node to the neighbouring community where modularity gains most, until none gains."""
    degree = {node: sum(graph[node].values()) for node in nodes}
    total = sum(degree.values())
    label = {node: node for node in nodes}
    weight = dict(degree)
    for _ in range(SWEEPS):
        moved = False
        for node in nodes:
            here = label[node]
            weight[here] -= degree[node]
            links: Counter[int] = Counter({here: 0})
            for neighbour, count in graph[node].items():
                if neighbour != node:
                    links[label[neighbour]] += count
            # Whole numbers: no rounding decides.
            gain = {c: n * total - resolution * degree[node] * weight[c] for c, n in links.items()}
            best = max(gain, key=lambda c: (gain[c], c == here, -c))
            weight[best] += degree[node]
            label[node] = best
            moved = moved or best != here
        if not moved:
            break
    return label


def contract(graph: dict[int, Counter[int]], label: dict[int, int]) -> dict[int, Counter[int]]:
    """The graph whose nodes are the communities, named after one of their members."""
    result: dict[int, Counter[int]] = {}
    for node, neighbours in graph.items():
        ours = result.setdefault(label[node], Counter())
        for neighbour, count in neighbours.items():
            ours[label[neighbour]] += count
    return result
