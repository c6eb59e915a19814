"""Observation, not a claim of the paper: the step at which a mixture leaves the plateau of ListOps, against softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from experiments.paper import verdicts
from experiments.paper.claims.quality import BASELINES, ExperimentResults
from experiments.statistics import SquaredError, half_width, pooled_spread
from mgk._core.markdown import format_number, format_signed, markdown_table
from mgk.training.config import ModelSpec

MIXTURES = tuple(mixture for mixture, baseline in BASELINES.items() if baseline == "softmax")


@dataclass(frozen=True)
class PlateauDifference:
    """Step at which a mixture leaves the plateau minus that of softmax with the same heads.

    The mean is over the pairs of an experiment and a number of heads. The deviation over seeds is pooled over their
    models. `p_value` is that of Student's t test of a difference of 0.
    """

    mixture: str
    pairs: int
    counts: tuple[int, int]
    difference: float
    half_width: float
    p_value: float


def compare(experiments: list[ExperimentResults], mixture: str) -> PlateauDifference | None:
    """Compare a mixture with softmax over all experiments with a plateau; None if the error is unknown.

    Pairs in which a run never left the plateau are omitted: the step of such a run is unknown.
    """
    pairs = []
    for item in experiments:
        for row in item.results.rows:
            models = (row, ModelSpec("softmax", row.heads, row.kv_heads))
            steps = [[float(run.left_at or 0) for run in item.results.runs_of(model)] for model in models]
            if row.variant == mixture and all(steps) and all(min(values) > 0 for values in steps):
                pairs.append(steps)
    spread = pooled_spread([values for steps in pairs for values in steps])
    if spread is None:
        return None
    difference = float(np.mean([np.mean(first) - np.mean(second) for first, second in pairs]))
    variance = sum(spread.error(len(first), len(second)).value for first, second in pairs) / len(pairs) ** 2
    t = abs(difference) / math.sqrt(variance) if variance else math.inf
    counts = sum(len(first) for first, _ in pairs), sum(len(second) for _, second in pairs)
    width = half_width([SquaredError(variance, spread.degrees)])
    p_value = float(2 * stats.t.sf(t, spread.degrees))
    return PlateauDifference(mixture, len(pairs), counts, difference, width, p_value)


def sentences(experiments: list[ExperimentResults]) -> str:
    """State the difference of each mixture in words."""
    known = [result for mixture in MIXTURES if (result := compare(experiments, mixture)) is not None]
    return " ".join(map(_sentence, known)) or verdicts.MISSING_SENTENCE


def _sentence(result: PlateauDifference) -> str:
    direction = "earlier" if result.difference < 0 else "later"
    steps = f"{abs(result.difference):.0f} ± {result.half_width:.0f} steps {direction}"
    return (
        f"{result.mixture} leaves the plateau of ListOps {steps} than "
        f"softmax with the same heads (p = {result.p_value:.3f}; {result.counts[0]} and {result.counts[1]} runs)."
    )


def table(experiments: list[ExperimentResults]) -> str:
    """Format the differences of all mixtures from softmax."""
    lines = [["mixture − softmax, same heads", "pairs of models", "runs", "steps", "p"]]
    for mixture in MIXTURES:
        result = compare(experiments, mixture)
        if result is not None:
            steps = f"{format_signed(result.difference, 0)} ± {format_number(result.half_width, 0)}"
            runs = f"{result.counts[0]} − {result.counts[1]}"
            lines.append([mixture, str(result.pairs), runs, steps, f"{result.p_value:.3f}"])
    return markdown_table(lines) if len(lines) > 1 else verdicts.MISSING_SENTENCE
