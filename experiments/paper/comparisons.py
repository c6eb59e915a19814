"""Differences between two models of a recipe, with intervals over seeds and over test examples or text."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from experiments.paper.recipe_results import RecipeResults, Scale, TrainedRun
from experiments.statistics import Spread, SquaredError, half_width, paired_error, pooled_spread
from mgk.training.config import ModelSpec
from mgk.variants import VARIANTS

ONE_SEED = "one seed each, deviation unknown"


@dataclass(frozen=True)
class Difference:
    """First model minus second, in the unit of the scale; positive favours the first."""

    split: str
    difference: float
    over_seeds: float | None  # half-widths of 95 % intervals; None: unknown
    over_examples: float | None
    half_width: float | None  # of both errors together
    counts: tuple[int, int]  # runs compared
    remark: str = ""  # why the difference is inconclusive despite its interval

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
    all runs are compared. A comparison that leaves out runs is inconclusive: it selects runs by their result.
    """
    learnt = [run for run in first if run.learnt], [run for run in second if run.learnt]
    late = any(run.late for run in (*learnt[0], *learnt[1]))
    if all(learnt):
        partial = [
            f"{runs[0].row} learnt the task in {len(successes)} of {len(runs)} runs"
            for runs, successes in zip((first, second), learnt, strict=True)
            if len(successes) < len(runs)
        ]
        return *learnt, "; ".join([*partial, *(["a run left the plateau in its last steps"] if late else [])])
    if not any(learnt):
        return first, second, "neither has learnt the task"
    runs, successes = (first, learnt[0]) if learnt[0] else (second, learnt[1])
    always = len(runs) == len(successes) and min(len(first), len(second)) > 1 and not late
    stuck = len(first) + len(second) - len(runs)
    remark = f"one learnt the task in 0 of {stuck} runs, the other in {len(successes)} of {len(runs)}"
    return first, second, "" if always else remark


def family_spread(results: RecipeResults, side: list[TrainedRun], split: str) -> Spread | None:
    """Pool the deviation over seeds of the models of one family; runs that learnt and that did not are apart.

    The families are the softmax models with their mixtures, and the linear models with theirs.
    """
    linear, states = _is_linear(side[0].row), {run.learnt for run in side}
    # The deviation is pooled over runs in the same state, so it does not apply to a mean over both states.
    if len(states) > 1:
        return None
    rows = [row for row in results.rows if _is_linear(row) == linear]
    return pooled_spread(
        [scores(results.scale, [run for run in results.runs_of(row) if run.learnt in states], split) for row in rows]
    )


def _is_linear(row: ModelSpec) -> bool:
    return VARIANTS[row.variant].similarity == "linear"


def seed_errors(
    results: RecipeResults, a: list[TrainedRun], b: list[TrainedRun], split: str
) -> list[SquaredError] | None:
    """Return the error over seeds: one part within a family, two between families; None if one is unknown."""
    spreads = family_spread(results, a, split), family_spread(results, b, split)
    if spreads[0] is None or spreads[1] is None:
        return None
    if spreads[0] == spreads[1]:
        return [spreads[0].error(len(a), len(b))]
    return [spreads[0].error(len(a)), spreads[1].error(len(b))]


def compare(results: RecipeResults, first: ModelSpec, second: ModelSpec) -> Difference | None:
    """Compare two models; None if one of them has not been run."""
    a, b, remark = comparable_runs(results.runs_of(first), results.runs_of(second))
    if not a or not b:
        return None
    split = results.judged_split([name for name in a[0].examples if name in b[0].examples])
    if split is None:
        return None
    means = [statistics.mean(scores(results.scale, runs, split)) for runs in (a, b)]
    seeds = seed_errors(results, a, b, split)
    if seeds is None and not remark:
        remark = ONE_SEED
    examples = example_errors(results, a, b, split)
    return Difference(
        split,
        means[0] - means[1],
        None if seeds is None else half_width(seeds),
        None if examples is None else half_width(examples),
        None if seeds is None or examples is None else half_width([*seeds, *examples]),
        (len(a), len(b)),
        remark,
    )


def scores(scale: Scale, runs: list[TrainedRun], split: str) -> list[float]:
    """Return the scores of the runs that have a value on a split."""
    return [scale.score(run.values[split]) for run in runs if split in run.values]


def example_errors(
    results: RecipeResults, a: list[TrainedRun], b: list[TrainedRun], split: str
) -> list[SquaredError] | None:
    """Return the error over examples: paired if every run has stored predictions, otherwise of two samples.

    Losses are those of independent blocks of text.
    """
    stored = [results.predictions_of(side, split) for side in (a, b)]
    lengths = {len(array) for side in stored for array in side}
    if len(stored[0]) == len(a) and len(stored[1]) == len(b) and len(lengths) == 1:
        means = [100 * np.mean(side, axis=0) for side in stored]
        error = paired_error(means[0], means[1])
        return None if error is None else [error]
    if results.scale.sign < 0:
        return None
    shares = [statistics.mean(run.values[split] for run in side) / 100 for side in (a, b)]
    counts = [side[0].examples[split] for side in (a, b)]
    return [
        SquaredError(100**2 * share * (1 - share) / count, max(count - 1, 1))
        for share, count in zip(shares, counts, strict=True)
    ]
