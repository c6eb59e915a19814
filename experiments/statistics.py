"""Intervals for differences between models, for all experiments.

The rules were fixed before any result of the study of cost and quality was seen.

- The value of a run is its mean loss in nats per token on the judged split, or its accuracy on the test set.
- The deviation over seeds is pooled over all models of a family; its degrees of freedom are the number of runs minus
  the number of models.
- The deviation over text is that of the difference of block means, blocks of 4,096 tokens, each arm averaged over its
  seeds; for accuracy, that of the difference per example.
- Both errors are independent; the interval is Student's t with Welch and Satterthwaite's degrees of freedom.
- Two models are equal if the whole interval lies within EQUIVALENCE: 0.5 % of perplexity, or 0.5 points of accuracy.
  Otherwise an interval without 0 decides, and one with 0 leaves the question undecided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.95
EQUIVALENCE = 0.5  # per cent of perplexity, or points of accuracy


class SquaredError(NamedTuple):
    """Squared standard error of a mean or of a difference, and its degrees of freedom."""

    value: float
    degrees: float


@dataclass(frozen=True)
class Spread:
    """Standard deviation over seeds, pooled over the arms of a family."""

    deviation: float
    degrees: int

    def error(self, *counts: int) -> SquaredError:
        """Return the error of a mean over a number of runs, or of a difference of two means."""
        return SquaredError(self.deviation**2 * sum(1 / count for count in counts), self.degrees)


@dataclass(frozen=True)
class Interval:
    """A difference with the half-width of its 95 % interval; the half-width is NaN if it is unknown."""

    difference: float
    half_width: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval has one sign."""
        return abs(self.difference) > self.half_width

    def is_within(self, margin: float) -> bool:
        """Return whether the whole interval lies within ± a margin."""
        return abs(self.difference) + self.half_width <= margin


def pooled_spread(family: Sequence[Sequence[float]]) -> Spread | None:
    """Pool the deviations of a family; None if no arm has two runs."""
    degrees = sum(len(values) - 1 for values in family if len(values))
    if degrees == 0:
        return None
    squares = sum((len(values) - 1) * float(np.var(values, ddof=1)) for values in family if len(values) > 1)
    return Spread(math.sqrt(squares / degrees), degrees)


def half_width(errors: Sequence[SquaredError]) -> float:
    """Return the half-width of the 95 % interval of a sum of independent errors.

    It is Student's t with Welch and Satterthwaite's degrees of freedom, times the standard error.
    """
    total = sum(error.value for error in errors)
    if total == 0:
        return 0.0
    degrees = total**2 / sum(error.value**2 / error.degrees for error in errors)
    return float(stats.t.ppf(0.5 + LEVEL / 2, degrees)) * math.sqrt(total)


def paired_error(first: np.ndarray | None, second: np.ndarray | None) -> SquaredError | None:
    """Return the error of the mean paired difference; None if the values are missing or cannot be paired."""
    if first is None or second is None or len(first) != len(second) or len(first) < 2:
        return None
    return SquaredError(float(np.var(first - second, ddof=1)) / len(first), len(first) - 1)


def compare(
    first: Sequence[float],
    second: Sequence[float],
    spread: Spread | None,
    blocks: tuple[np.ndarray | None, np.ndarray | None],
) -> Interval:
    """Compare two arms.

    Args:
        first: Values of the runs of the first arm, one per seed.
        second: Values of the runs of the second arm.
        spread: Deviation over seeds of the family.
        blocks: Means over blocks of text (or correctness of examples) of both arms, averaged over seeds; None if they
            were not stored.

    Returns:
        First minus second with its interval. The half-width is NaN if an error is unknown.
    """
    difference = float(np.mean(first) - np.mean(second))
    text = paired_error(*blocks)
    if spread is None or text is None:
        return Interval(difference, math.nan)
    return Interval(difference, half_width([spread.error(len(first), len(second)), text]))


def mean_interval(values: Sequence[float], spread: Spread | None) -> Interval:
    """Return the mean of an arm with its interval over seeds."""
    mean = float(np.mean(values))
    return Interval(mean, math.nan if spread is None else half_width([spread.error(len(values))]))
