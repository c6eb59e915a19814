"""Test verdicts, pooled deviations and the cells of the summary."""

import pytest

from experiments.paper import verdicts
from experiments.paper.claims import cost, quality
from experiments.paper.comparisons import Difference
from experiments.paper.verdicts import FAILS, HOLDS, MISSING, OPEN, SO_FAR


def difference_of(difference: float, half_width: float | None, remark: str = "") -> Difference:
    return Difference("test", difference, half_width, 0.0, half_width, (2, 2), remark)


@pytest.mark.parametrize(
    ("difference", "suffices", "better"),
    [
        (difference_of(+0.5, 0.4), HOLDS, HOLDS),
        (difference_of(-0.5, 0.4), HOLDS, FAILS),
        (difference_of(-0.5, 0.6), OPEN, OPEN),
        (difference_of(-2.0, 0.9), FAILS, FAILS),
        (difference_of(+3.0, None), OPEN, OPEN),
        (difference_of(+3.0, 0.1, "neither has learnt"), OPEN, OPEN),
        (None, MISSING, MISSING),
    ],
)
def test_verdict_follows_from_the_interval(difference, suffices, better):
    assert (verdicts.suffices(difference, 1.0), verdicts.better(difference)) == (suffices, better)


@pytest.mark.parametrize(
    ("difference", "gap", "verdict"),
    [
        (difference_of(1, 0.5), difference_of(5, 1), HOLDS),
        (difference_of(-1, 0.5), difference_of(5, 1), FAILS),
        (difference_of(1, 0.5), difference_of(5, 6), OPEN),  # no significant gap
        (difference_of(1, 0.5), None, MISSING),
    ],
)
def test_narrowing_requires_a_significant_gap(difference, gap, verdict):
    assert verdicts.narrows(difference, gap)[0] == verdict


def test_counts_are_exact_and_times_have_tolerances():
    assert [verdicts.cheaper(ratio) for ratio in (0.99, 1.0, 1.01, None)] == [HOLDS, OPEN, FAILS, MISSING]
    for name, noise in (("training step", verdicts.STEPS), ("memory of the step", verdicts.MEMORY)):
        ratios = (0.99 - noise, 1.01 - noise, 0.99 + noise, 1.01 + noise)
        assert [cost.judge(name, 10 * ratio, 10.0) for ratio in ratios] == [HOLDS, OPEN, OPEN, FAILS]
    assert cost.judge("parameters", 1.001, 1.0) == FAILS
    # Short steps have a larger tolerance.
    assert [cost.judge("inference", ms, 1.7) for ms in (1.2, 1.4, 1.61, 1.9)] == [HOLDS, OPEN, OPEN, FAILS]


@pytest.mark.parametrize(
    ("judged", "verdict"),
    [
        ([HOLDS, HOLDS], HOLDS),
        ([HOLDS, MISSING], SO_FAR),
        ([HOLDS, OPEN], OPEN),
        ([HOLDS, FAILS], FAILS),
        ([MISSING], MISSING),
        ([], MISSING),
    ],
)
def test_claim_holds_if_it_holds_for_every_measured_pair(judged, verdict):
    assert verdicts.overall(judged) == verdict


@pytest.mark.parametrize(
    ("judged", "cell"),
    [
        ([], "–"),
        ([HOLDS, HOLDS], f"**{HOLDS}** (2 of 2)"),
        ([HOLDS, OPEN, MISSING], f"**{OPEN}** (2 of 3; 1 holds)"),
        ([HOLDS, FAILS, HOLDS, OPEN], f"**{FAILS}** (4 of 4; 2 hold, 1 does not)"),
    ],
)
def test_cell_counts_the_pairs_of_its_verdict(judged, cell):
    assert quality.format_cell(judged) == cell
