"""Differences between two models of a recipe, with intervals over seeds and test examples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.paper.recipe_results import RecipeResults, Scale, TrainedRun
from mgk.training import predictions
from mgk.training.config import ModelSpec
from mgk.training.report import binomial_half_width

# Student's t, two-sided 95 %, for 1 to 30 degrees of freedom. Beyond 30 the last value is used, which is slightly wide.
T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)

ONE_SEED = "one seed each: the deviation over seeds is unknown"


@dataclass(frozen=True)
class Spread:
    """Standard deviation over seeds, pooled over models."""

    deviation: float
    degrees_of_freedom: int

    def half_width(self, first: int, second: int) -> float:
        """Return the half-width of the 95 % interval of a difference between means over these numbers of seeds."""
        t = T_95[min(self.degrees_of_freedom, len(T_95)) - 1]
        return t * self.deviation * math.sqrt(1 / first + 1 / second)


def pooled_std(groups: Sequence[Sequence[float]]) -> Spread | None:
    """Pool the standard deviations of the groups; None if no group has two values."""
    several = [group for group in groups if len(group) > 1]
    degrees = sum(len(group) - 1 for group in several)
    if not degrees:
        return None
    squares = sum(statistics.variance(group) * (len(group) - 1) for group in several)
    return Spread(math.sqrt(squares / degrees), degrees)


@dataclass(frozen=True)
class Difference:
    """First model minus second, in the unit of the scale; positive favours the first."""

    split: str
    difference: float
    over_seeds: float | None  # half-widths of 95 % intervals; None: unknown
    over_examples: float | None
    counts: tuple[int, int]  # runs compared
    remark: str = ""  # why the difference is inconclusive despite its interval

    @property
    def half_width(self) -> float | None:
        """Half-width of the two errors combined as independent errors; None if one is unknown."""
        if self.over_seeds is None or self.over_examples is None:
            return None
        return math.hypot(self.over_seeds, self.over_examples)

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.difference - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.difference + self.half_width


def comparable_runs(
    first: list[TrainedRun], second: list[TrainedRun]
) -> tuple[list[TrainedRun], list[TrainedRun], str]:
    """Select the runs to compare, with a remark if the comparison is inconclusive.

    Runs that learnt the task are compared with each other. If only one of the two models learnt it, or neither did,
    all runs are compared.
    """
    learnt = [run for run in first if run.learnt], [run for run in second if run.learnt]
    late = any(run.late for run in (*learnt[0], *learnt[1]))
    if all(learnt):
        return *learnt, "a run left the plateau in its last steps" if late else ""
    if not any(learnt):
        return first, second, "neither has learnt the task"
    runs, successes = (first, learnt[0]) if learnt[0] else (second, learnt[1])
    always = len(runs) == len(successes) and min(len(first), len(second)) > 1 and not late
    stuck = len(first) + len(second) - len(runs)
    remark = f"one learnt the task in 0 of {stuck} runs, the other in {len(successes)} of {len(runs)}"
    return first, second, "" if always else remark


def compare(results: RecipeResults, first: ModelSpec, second: ModelSpec) -> Difference | None:
    """Compare two models; None if one of them has not been run."""
    a, b, remark = comparable_runs(results.runs_of(first), results.runs_of(second))
    splits = [name for name in (a[0].examples if a else {}) if b and name in b[0].examples]
    if not splits:
        return None
    split = max(splits, key=lambda name: a[0].examples[name])
    means = [statistics.mean(scores(results.scale, runs, split)) for runs in (a, b)]
    states = {run.learnt for run in (*a, *b)}
    # Exclude runs that left the plateau late from the seed variance.
    groups = [
        scores(results.scale, [run for run in results.runs_of(row) if run.learnt == state and not run.late], split)
        for row in results.rows
        for state in states
    ]
    spread = pooled_std(groups)
    # The deviation is pooled over runs in the same state, so it does not apply to a mean over both states.
    mixed = any(len({run.learnt for run in side}) > 1 for side in (a, b))
    seeds = None if spread is None or mixed else spread.half_width(len(a), len(b))
    if not remark and spread is None:
        remark = ONE_SEED
    examples = examples_half_width(results, a, b, split)
    return Difference(split, means[0] - means[1], seeds, examples, (len(a), len(b)), remark)


def scores(scale: Scale, runs: list[TrainedRun], split: str) -> list[float]:
    return [scale.score(run.values[split]) for run in runs if split in run.values]


def examples_half_width(results: RecipeResults, a: list[TrainedRun], b: list[TrainedRun], split: str) -> float | None:
    """Return the half-width over examples: paired if every run has stored predictions, else of two samples."""
    stored = results.predictions_of(a, split), results.predictions_of(b, split)
    if len(stored[0]) == len(a) and len(stored[1]) == len(b):
        difference = predictions.paired_difference(*stored)
        if difference is not None:
            return 100 * difference.half_width
    if results.scale.sign < 0:
        return None
    return math.hypot(
        *(statistics.mean(binomial_half_width(r.values[split], r.examples[split]) for r in side) for side in (a, b))
    )
