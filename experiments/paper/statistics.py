"""Two models of a recipe against each other: the difference, and how far seeds and test examples leave it open."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.paper.recipe_results import RecipeResults, Scale, TrainedRun
from mgk.training import predictions
from mgk.training.config import ModelSpec
from mgk.training.report import binomial_half_width

# Student's t, two-sided 95 %, for 1, 2, … 30 degrees of freedom; beyond, the last one, which is a little wide.
T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Spread:
    """The standard deviation over seeds, pooled over models."""

    deviation: float
    freedom: int  # degrees of it

    def half_width(self, ours: int, theirs: int) -> float:
        """Of the 95 % interval of a difference between means over so many seeds."""
        return T[min(self.freedom, len(T)) - 1] * self.deviation * math.sqrt(1 / ours + 1 / theirs)


def pooled(groups: Sequence[Sequence[float]]) -> Spread | None:
    """None where no group has two values."""
    several = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in several)
    if not freedom:
        return None
    squares = sum(statistics.variance(group) * (len(group) - 1) for group in several)
    return Spread(math.sqrt(squares / freedom), freedom)


@dataclass(frozen=True)
class Difference:
    """Ours minus theirs, in the scale's unit; more is better for ours."""

    split: str
    difference: float
    over_seeds: float | None  # half-widths of 95 % intervals; None: not known
    over_examples: float | None
    counts: tuple[int, int]  # runs compared
    remark: str = ""  # why the difference cannot decide anything, whatever its interval

    @property
    def half_width(self) -> float | None:
        """Both together, as independent errors add."""
        if self.over_seeds is None or self.over_examples is None:
            return None
        return math.hypot(self.over_seeds, self.over_examples)

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.difference - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.difference + self.half_width


def same_state(ours: list[TrainedRun], theirs: list[TrainedRun]) -> tuple[list[TrainedRun], list[TrainedRun], str]:
    """Runs that have learnt the task against runs that have; all against all where only one of the two models has. And
    why that decides nothing, where chance did."""
    learnt = [run for run in ours if run.learnt], [run for run in theirs if run.learnt]
    late = any(run.late for run in (*learnt[0], *learnt[1]))
    if all(learnt):
        return *learnt, "a run had only just left the plateau" if late else ""
    if not any(learnt):
        return ours, theirs, "neither has learnt the task"
    every, some = (ours, learnt[0]) if learnt[0] else (theirs, learnt[1])
    always = len(every) == len(some) and min(len(ours), len(theirs)) > 1 and not late
    stuck = len(ours) + len(theirs) - len(every)
    told = f"one has not learnt the task in {stuck}, the other in {len(some)} of {len(every)} runs"
    return ours, theirs, "" if always else told


def compare(found: RecipeResults, ours: ModelSpec, theirs: ModelSpec) -> Difference | None:
    """None where one of the two has not been run."""
    a, b, remark = same_state(found.of(ours), found.of(theirs))
    splits = [name for name in (a[0].examples if a else {}) if b and name in b[0].examples]
    if not splits:
        return None
    split = max(splits, key=lambda name: a[0].examples[name])
    means = [statistics.mean(worths(found.scale, runs, split)) for runs in (a, b)]
    states = {run.learnt for run in (*a, *b)}
    # A run that had no time to end anywhere says nothing of how far those that had lie apart.
    groups = [
        worths(found.scale, [run for run in found.of(row) if run.learnt == state and not run.late], split)
        for row in found.rows
        for state in states
    ]
    spread = pooled(groups)
    # The deviation is one among runs that have learnt, or among those that have not: of a mean over both it says
    # nothing.
    mixed = any(len({run.learnt for run in side}) > 1 for side in (a, b))
    seeds = None if spread is None or mixed else spread.half_width(len(a), len(b))
    if not remark and spread is None:
        remark = "one seed each: what another would say is not known"
    return Difference(split, means[0] - means[1], seeds, over_examples(found, a, b, split), (len(a), len(b)), remark)


def worths(scale: Scale, runs: list[TrainedRun], split: str) -> list[float]:
    return [scale.worth(run.values[split]) for run in runs if split in run.values]


def over_examples(found: RecipeResults, a: list[TrainedRun], b: list[TrainedRun], split: str) -> float | None:
    """Paired over the same examples where every run's answers were kept, otherwise of two separate samples."""
    kept = found.kept(a, split), found.kept(b, split)
    if len(kept[0]) == len(a) and len(kept[1]) == len(b):
        difference = predictions.paired_difference(*kept)
        if difference is not None:
            return 100 * difference.half_width
    if found.scale.sign < 0:
        return None
    return math.hypot(
        *(statistics.mean(binomial_half_width(r.values[split], r.examples[split]) for r in side) for side in (a, b))
    )
