"""The sentences of `mgk analyze`, read for models at the edges: no head matters, one head, all heads the same."""

from types import SimpleNamespace

import numpy as np
import pytest

from mgk.analysis.flops import ModelCost
from mgk.analysis.report import findings
from mgk.analysis.similarity import Similarity


def layer(heads, alike=0.0, missed=None, changed=None):
    """alike: what two heads have in common; missed, changed: per head, of the predictions or of the output."""
    divergence = (1 - alike) * (1 - np.eye(heads))
    group = [0] * heads if alike > 0.9 else list(range(heads))
    removal = None
    if missed is not None or changed is not None:
        flipped = None if missed is None else np.array(missed)
        removal = SimpleNamespace(flipped=flipped, change=np.array(changed or [0.5] * heads))
    return SimpleNamespace(
        heads=heads,
        similarity=Similarity(divergence, 1 - divergence, None, list(range(heads)), group),
        ranks=SimpleNamespace(rank=np.array([5, 5]), size=np.array([10, 10])),
        removal=removal,
        mixture=None,
    )


def told(*layers, costs=(), own=None):
    each = [one.similarity.different for one in layers]
    different = {"maps": sum(one["maps"] for one in each)}
    analysis = SimpleNamespace(layers=list(layers), heads=sum(one.heads for one in layers), different=different)
    return findings.headline(analysis), findings.sentences(analysis, costs, own, None)


def test_when_no_head_is_missed_no_head_is_named():
    _, sentences = told(layer(4, missed=[0.0] * 4), layer(4, missed=[0.0] * 4))
    expected = "No head is missed: silencing any one of them, without retraining, changes 0 % of the predictions"
    assert f"{expected} on these samples." in sentences
    _, sentences = told(layer(2, missed=[0.0, 0.004]))
    assert any(each.startswith("Hardly a head is missed") and "0.4 %" in each for each in sentences)


def test_the_heads_that_are_missed_least_and_most_are_named():
    _, sentences = told(layer(2, missed=[0.02, 0.3]), layer(2, missed=[0.5, 0.01]))
    assert (
        "Silencing one head, without retraining, changes 1.0 % of the predictions at least (layer 2, head 2) and "
        "50.0 % at most (layer 2, head 1)."
    ) in sentences
    _, sentences = told(layer(2, changed=[0.02, 0.3]))
    assert (
        "Silencing one head, without retraining, changes the output by 2.0 % at least (layer 1, head 1) and 30.0 % at "
        "most (layer 1, head 2)."
    ) in sentences


def test_one_head_is_not_like_another():
    headline, sentences = told(layer(1, missed=[0.25]))
    assert headline == "One head a layer: there are no two to be alike."
    assert "Silencing its only head, without retraining, changes 25.0 % of the predictions." in sentences
    assert not any("alike" in each or "same map" in each for each in sentences)


@pytest.mark.parametrize(("alike", "grade"), [(0.0, "little"), (0.4, "some"), (0.6, "clear"), (1.0, "strong")], ids=str)
def test_the_headline_grades_the_redundancy(alike, grade):
    headline, sentences = told(layer(8, alike), layer(8, alike))
    assert headline.endswith(f"{grade} redundancy.")
    # No layer stands out, so none is named.
    assert any(each.startswith("It is the same in every layer") for each in sentences)


def test_the_layers_that_stand_out_are_named():
    _, sentences = told(layer(4, 0.0), layer(4, 1.0))
    assert "The heads of layer 2 are most alike (1.0 of 4 different), those of layer 1 least (4.0 of 4)." in sentences


def test_layers_that_are_told_the_same_number_are_not_ranked():
    first, second = layer(2, 0.94), layer(2, 0.97)
    fewer, more = (one.similarity.different["maps"] / 2 for one in (second, first))
    assert more - fewer > findings.SAME
    _, sentences = told(first, second)
    assert "It is about the same in every layer: 1.1 of 2 heads are different." in sentences


def test_what_costs_the_same_is_not_fewer():
    own = ModelCost("linear", 8, 100, 1000, 10**9)
    half = [ModelCost("linear", 4, 100, 1001, 5 * 10**8), ModelCost("smlk", 4, 100, 1200, 6 * 10**8)]
    _, sentences = told(layer(8), costs=half, own=own)
    said = next(each for each in sentences if each.startswith("Half the heads"))
    assert "linear with 4 has as many parameters and 50 % fewer FLOPs" in said
    assert "smlk with 4 has 20 % more parameters and 40 % fewer FLOPs" in said


def test_heads_with_the_same_map_are_listed_the_largest_groups_first():
    two = layer(4)
    two.similarity.groups[:] = [0, 1, 1, 2]
    _, sentences = told(two, layer(3, 1.0))
    assert "Nearly the same maps: all 3 heads of layer 2; heads 2 and 3 of layer 1." in sentences
    _, sentences = told(*(layer(2, 1.0) for _ in range(4)))
    assert any(each.endswith("all 2 heads of layer 3; and 1 more group.") for each in sentences)


def test_redundancy_without_two_heads_that_are_the_same_is_no_contradiction():
    assert "Yet no two heads of a layer have nearly the same map: they overlap in part." in told(layer(8, 0.6))[1]
    assert "No two heads of a layer have nearly the same map." in told(layer(8, 0.1))[1]
