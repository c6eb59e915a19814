"""Merges of heads are optimal, commute with rotary embeddings, and group the right heads."""

import math
from itertools import combinations, permutations
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from mgk.hf.upcycling.algebra import NO_PLANES, Planes, merge_loss, merge_mean, merge_svd
from mgk.hf.upcycling.budget import cache_width, choose_head_counts, divisors
from mgk.hf.upcycling.grouping import order_heads

HEADS, DIM, TOKENS = 3, 4, 500
HALVES = Planes((0, 1), (2, 3))
PARTIAL = Planes((0,), (1,))


def sample(scale=1.0):
    """Return correlated heads [N, g·D], their second moment, and weights of unequal size [g, D, D]."""
    mix = torch.randn(HEADS * DIM, HEADS * DIM, dtype=torch.float64)
    heads = scale * torch.randn(TOKENS, HEADS * DIM, dtype=torch.float64) @ mix
    queries = torch.randn(HEADS, 50, DIM, dtype=torch.float64) * torch.tensor([1.0, 3.0, 0.3]).double()[:, None, None]
    return heads, heads.T @ heads / TOKENS, queries.mT @ queries / 50


def error(merge, heads, weights):
    """Compute the weighted squared error of the merged heads literally."""
    merged = heads @ merge.compress.T
    total = 0.0
    for u in range(len(weights)):
        difference = heads[:, u * DIM : (u + 1) * DIM] - merged @ merge.expand[u].T
        total += float(((difference @ weights[u]) * difference).sum(-1).mean())
    return total


def test_loss_is_the_error_and_no_change_reduces_it():
    heads, moment, weights = sample()
    merge = merge_svd(moment, weights)
    assert error(merge, heads, weights) == pytest.approx(merge.loss, rel=1e-9)
    assert merge_loss(moment, weights) == pytest.approx(merge.loss, rel=1e-9)
    mean = merge_mean(moment, weights)
    assert error(mean, heads, weights) == pytest.approx(mean.loss, rel=1e-9)
    assert merge.loss < mean.loss
    assert merge.energy == pytest.approx(mean.energy)
    # P and A are a stationary point.
    compress, expand = merge.compress.clone().requires_grad_(), merge.expand.clone().requires_grad_()
    difference = torch.eye(HEADS * DIM, dtype=torch.float64) - expand.reshape(-1, DIM) @ compress
    loss = torch.trace(torch.block_diag(*weights) @ difference @ moment @ difference.T)
    gradients = torch.autograd.grad(loss, (compress, expand))
    assert all(gradient.abs().max() < 1e-8 * merge.energy for gradient in gradients)
    assert loss.item() == pytest.approx(merge.loss, rel=1e-9)


@pytest.mark.parametrize("planes", [NO_PLANES, HALVES, PARTIAL], ids=["free", "halves", "partial"])
def test_heads_that_are_transformed_copies_merge_without_loss(planes):
    first = torch.randn(TOKENS, DIM, dtype=torch.float64)
    transforms = torch.eye(DIM, dtype=torch.float64).repeat(HEADS, 1, 1)
    for u in range(1, HEADS):
        for i, j in zip(planes.first, planes.second, strict=True):
            a, b = torch.randn(2).tolist()
            transforms[u][i, i] = transforms[u][j, j] = a
            transforms[u][i, j], transforms[u][j, i] = -b, b
        free = planes.free(DIM)
        if free:
            transforms[u][torch.tensor(free)[:, None], torch.tensor(free)] = torch.randn(len(free), len(free)).double()
    heads = torch.cat([first @ transform.T for transform in transforms], 1)
    weights = sample()[2]
    merge = merge_svd(heads.T @ heads / TOKENS, weights, planes)
    assert merge.loss < 1e-12 * merge.energy
    assert error(merge, heads, weights) < 1e-12 * merge.energy


@pytest.mark.parametrize("planes", [HALVES, PARTIAL], ids=["halves", "partial"])
def test_merges_commute_with_rotations(planes):
    _, moment, weights = sample()
    merge = merge_svd(moment, weights, planes)
    rotation = torch.eye(DIM, dtype=torch.float64)
    for i, j in zip(planes.first, planes.second, strict=True):
        angle = float(torch.rand(()) * 6)
        rotation[i, i] = rotation[j, j] = math.cos(angle)
        rotation[i, j], rotation[j, i] = -math.sin(angle), math.sin(angle)
    for expand in merge.expand:
        torch.testing.assert_close(expand @ rotation, rotation @ expand)
    rotated = torch.block_diag(*[rotation] * HEADS)
    torch.testing.assert_close(merge.compress @ rotated, rotation @ merge.compress)
    assert merge.loss == pytest.approx(merge_loss(moment, weights, planes), rel=1e-9)
    # Free dimensions allow more merges than planes.
    assert merge.loss > merge_svd(moment, weights).loss


def test_loss_of_a_plane_is_the_error_over_all_rotations():
    _, moment, weights = sample()
    index = torch.tensor([u * DIM + i for u in range(HEADS) for i in (0, 1)])
    moment, weights = moment[index][:, index], weights[:, :2, :2]
    merge = merge_svd(moment, weights, Planes((0,), (1,)))
    difference = torch.eye(2 * HEADS, dtype=torch.float64) - merge.expand.reshape(-1, 2) @ merge.compress
    covariance = difference @ moment @ difference.T
    total = 0.0
    for step in range(4):
        angle = step * math.pi / 2
        turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]).double()
        for u in range(HEADS):
            block = covariance[2 * u : 2 * u + 2, 2 * u : 2 * u + 2]
            total += float(torch.trace(weights[u] @ turn @ block @ turn.T)) / 4
    assert total == pytest.approx(merge.loss, rel=1e-9)


def random_cost():
    costs = {}

    def cost(group):
        return costs.setdefault(group, float(torch.rand(())) * len(group))

    return cost


def blocks(order, count):
    size = len(order) // count
    return [frozenset(order[start : start + size]) for start in range(0, len(order), size)]


def total(order, key_heads, value_heads, key_cost, value_cost):
    loss = sum(map(key_cost, blocks(order, key_heads))) if key_heads < len(order) else 0
    return loss + (sum(map(value_cost, blocks(order, value_heads))) if value_heads < len(order) else 0)


@pytest.mark.parametrize(("key_heads", "value_heads"), [(3, 6), (6, 3), (3, 3)])
def test_pairs_are_matched_optimally(key_heads, value_heads):
    key_cost, value_cost = random_cost(), random_cost()
    order = order_heads(6, key_heads, value_heads, key_cost, value_cost)
    best = min(total(candidate, key_heads, value_heads, key_cost, value_cost) for candidate in permutations(range(6)))
    assert total(order, key_heads, value_heads, key_cost, value_cost) == pytest.approx(best)


@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 12), (2, 12), (4, 12), (3, 6), (6, 3), (4, 2), (12, 12)])
def test_planted_groups_are_found(key_heads, value_heads):
    """Check larger and nested groups, whose planted order loses nothing."""
    planted = torch.randperm(12).tolist()
    keys, values = set(blocks(planted, key_heads)), set(blocks(planted, value_heads))

    def cost(groups):
        # Heads of different planted groups are expensive in proportion to the number of groups that they come from.
        return lambda group: float(sum(bool(group & planted_group) for planted_group in groups) - 1)

    order = order_heads(12, key_heads, value_heads, cost(keys), cost(values))
    assert sorted(order) == list(range(12))
    assert total(order, key_heads, value_heads, cost(keys), cost(values)) == 0


def test_no_exchange_of_two_heads_improves_overlapping_groups():
    key_cost, value_cost = random_cost(), random_cost()
    order = order_heads(12, 6, 4, key_cost, value_cost)
    best = total(order, 6, 4, key_cost, value_cost)
    for i, j in combinations(range(12), 2):
        changed = order.copy()
        changed[i], changed[j] = order[j], order[i]
        assert total(changed, 6, 4, key_cost, value_cost) >= best - 1e-6


@pytest.mark.parametrize("cache", [0.9, 0.5, 0.2])
def test_budget_is_used_up(cache):
    """Check that no reduction can be undone within the cache, and that fixed keys stay."""
    layers = [
        SimpleNamespace(
            name=str(i), kv_heads=12, key_dim=4, value_dim=4 + 2 * i, fixed_keys="yes" if i == 2 else "", is_cached=True
        )
        for i in range(3)
    ]
    losses = {
        (layer.name, kind, n): float(torch.rand(())) / n for layer in layers for kind in (0, 1) for n in divisors(12)
    }

    def loss(layer, key_heads, value_heads):
        return losses[(layer.name, 0, key_heads) if value_heads == 12 else (layer.name, 1, value_heads)]

    if cache == 0.2:
        with pytest.raises(ValueError, match="is too small: the smallest possible cache is 0"):
            choose_head_counts(layers, cache, loss)
        return
    numbers = choose_head_counts(layers, cache, loss)
    full = sum(cache_width(layer, 12, 12) for layer in layers)
    width = sum(cache_width(layer, *numbers[layer.name]) for layer in layers)
    assert width <= cache * full
    assert numbers["2"][0] == 12
    for layer in layers:
        for kind, dim in ((0, layer.key_dim), (1, layer.value_dim)):
            present = numbers[layer.name][kind]
            before = 0.0 if present == 12 else losses[layer.name, kind, present]
            for number in divisors(12):
                after = 0.0 if number == 12 else losses[layer.name, kind, number]
                if number > present and after < before:
                    assert width + (number - present) * dim > cache * full
