"""Communities of a graph by the Louvain method (Blondel et al. 2008), identical on every machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

SWEEPS = 20  # maximum number of passes over all nodes


def find_communities(links: Iterable[tuple[int, int]], order: Sequence[bytes], resolution: int = 1) -> dict[int, int]:
    """Return the community of each node that has a link.

    Args:
        links: Pairs of nodes.
        order: Sort key of each node. Nodes are visited in this order.
        resolution: Values above 1 give more and smaller communities.
    """
    graph: dict[int, Counter[int]] = {}
    for a, b in links:
        graph.setdefault(a, Counter())[b] += 1
        graph.setdefault(b, Counter())[a] += 1
    nodes = sorted(graph, key=lambda node: order[node])
    community_of = {node: node for node in nodes}
    while True:
        label = move_nodes(graph, nodes, resolution)
        if len(set(label.values())) == len(nodes):
            return community_of
        community_of = {node: label[community] for node, community in community_of.items()}
        graph = contract(graph, label)
        nodes = [node for node in nodes if node in graph]


def move_nodes(graph: dict[int, Counter[int]], nodes: Sequence[int], resolution: int) -> dict[int, int]:
    """Move each node to the neighbouring community with the largest gain in modularity, until no move gains."""
    degree = {node: sum(graph[node].values()) for node in nodes}
    total = sum(degree.values())
    label = {node: node for node in nodes}
    weight = dict(degree)  # sum of the degrees of each community
    for _ in range(SWEEPS):
        moved = False
        for node in nodes:
            current = label[node]
            weight[current] -= degree[node]
            links: Counter[int] = Counter({current: 0})
            for neighbour, count in graph[node].items():
                if neighbour != node:
                    links[label[neighbour]] += count
            # Integers, so that rounding does not affect the result.
            gain = {c: n * total - resolution * degree[node] * weight[c] for c, n in links.items()}
            best = max(gain, key=lambda c: (gain[c], c == current, -c))
            weight[best] += degree[node]
            label[node] = best
            moved = moved or best != current
        if not moved:
            break
    return label


def contract(graph: dict[int, Counter[int]], label: dict[int, int]) -> dict[int, Counter[int]]:
    """Return the graph of the communities. The label of a community is one of its nodes."""
    result: dict[int, Counter[int]] = {}
    for node, neighbours in graph.items():
        links = result.setdefault(label[node], Counter())
        for neighbour, count in neighbours.items():
            links[label[neighbour]] += count
    return result
