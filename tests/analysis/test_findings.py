"""Sentences of `mgk analyze` for models with no important head, a single head, and identical heads."""

from types import SimpleNamespace

import numpy as np
import pytest

from mgk.analysis.flops import ModelCost
from mgk.analysis.report import findings, verdicts
from mgk.analysis.similarity import Similarity


def layer(heads, overlap=0.0, flipped=None, changed=None):
    """Return a layer; overlap: similarity of any two heads; flipped, changed: effect of removing each head."""
    divergence = (1 - overlap) * (1 - np.eye(heads))
    group = [0] * heads if overlap > 0.9 else list(range(heads))
    removal = None
    if flipped is not None or changed is not None:
        removal = SimpleNamespace(
            flipped=None if flipped is None else np.array(flipped), change=np.array(changed or [0.5] * heads)
        )
    return SimpleNamespace(
        heads=heads,
        similarity=Similarity(divergence, 1 - divergence, None, list(range(heads)), group),
        ranks=SimpleNamespace(rank=np.array([5, 5]), size=np.array([10, 10])),
        removal=removal,
        mixture=None,
    )


def describe(*layers, costs=(), cost=None):
    different = {"maps": sum(one.similarity.different["maps"] for one in layers)}
    analysis = SimpleNamespace(
        layers=list(layers), heads=sum(one.heads for one in layers), different=different, different_by_chance={}
    )
    return verdicts.headline(analysis), findings.sentences(analysis, costs, cost, None)


def test_no_head_is_named_if_none_matters():
    _, sentences = describe(layer(4, flipped=[0.0] * 4), layer(4, flipped=[0.0] * 4))
    expected = "No single head matters: removing any one of them, without retraining, changes 0 % of the predictions"
    assert f"{expected} on these samples." in sentences
    _, sentences = describe(layer(2, flipped=[0.0, 0.004]))
    assert any(line.startswith("Single heads hardly matter") and "at most 0.4 %" in line for line in sentences)


def test_least_and_most_important_heads_are_named():
    _, sentences = describe(layer(2, flipped=[0.02, 0.3]), layer(2, flipped=[0.5, 0.01]))
    assert (
        "Removing one head, without retraining, changes at least 1.0 % of the predictions (layer 2, head 2) and "
        "at most 50.0 % (layer 2, head 1)."
    ) in sentences
    _, sentences = describe(layer(2, changed=[0.02, 0.3]))
    assert (
        "Removing one head, without retraining, changes the output by at least 2.0 % (layer 1, head 1) and at most "
        "30.0 % (layer 1, head 2)."
    ) in sentences


def test_single_head_is_not_compared():
    headline, sentences = describe(layer(1, flipped=[0.25]))
    assert headline == "Each layer has one head: there are no heads to compare."
    assert "Removing the only head, without retraining, changes 25.0 % of the predictions." in sentences
    assert not any("similar" in line or "identical map" in line for line in sentences)


@pytest.mark.parametrize(
    ("overlap", "grade"), [(0.0, "little"), (0.4, "some"), (0.6, "clear"), (1.0, "strong")], ids=str
)
def test_headline_grades_the_redundancy(overlap, grade):
    headline, sentences = describe(layer(8, overlap), layer(8, overlap))
    assert headline.endswith(f"{grade} redundancy.")
    # Equal layers are not named.
    assert any(line.startswith("The layers do not differ") for line in sentences)


def test_layers_that_differ_are_named():
    _, sentences = describe(layer(4, 0.0), layer(4, 1.0))
    assert "The heads are most similar in layer 2 (1.0 of 4 different), least in layer 1 (4.0 of 4)." in sentences


def test_layers_with_equal_rounded_numbers_are_not_ranked():
    first, second = layer(2, 0.94), layer(2, 0.97)
    fewer, more = (one.similarity.different["maps"] / 2 for one in (second, first))
    assert more - fewer > findings.EQUAL_LAYERS
    _, sentences = describe(first, second)
    assert "The layers hardly differ: 1.1 of 2 heads are different in each layer." in sentences


def test_equal_costs_are_not_called_fewer():
    cost = ModelCost("linear", 8, 100, 1000, 10**9)
    half = [ModelCost("linear", 4, 100, 1001, 5 * 10**8), ModelCost("smlk", 4, 100, 1200, 6 * 10**8)]
    _, sentences = describe(layer(8), costs=half, cost=cost)
    savings = next(line for line in sentences if line.startswith("Half the heads"))
    assert "linear with 4 heads has the same number of parameters and 50 % fewer FLOPs" in savings
    assert "smlk with 4 heads has 20 % more parameters and 40 % fewer FLOPs" in savings


def test_groups_of_identical_heads_are_listed_by_size():
    two = layer(4)
    two.similarity.groups[:] = [0, 1, 1, 2]
    _, sentences = describe(two, layer(3, 1.0))
    assert "Nearly identical maps: all 3 heads of layer 2; heads 2 and 3 of layer 1." in sentences
    _, sentences = describe(*(layer(2, 1.0) for _ in range(4)))
    assert any(line.endswith("all 2 heads of layer 3; and 1 more group.") for line in sentences)


def test_redundancy_without_identical_heads():
    partial = "No two heads of a layer have nearly identical maps, but their maps overlap in part."
    assert partial in describe(layer(8, 0.6))[1]
    assert "No two heads of a layer have nearly identical maps." in describe(layer(8, 0.1))[1]
