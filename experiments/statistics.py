"""Intervals for differences between models, for all experiments.

The rules were fixed before any result of the study of cost and quality was seen.

- The value of a run is its mean loss in nats per token on the judged split, or its accuracy on the test set.
- The deviation over seeds is pooled over all models of a family; its degrees of freedom are the number of runs minus
  the number of models.
- The deviation over text is that of the difference of block means, blocks of 4,096 tokens, each arm averaged over its
  seeds; for accuracy, that of the difference per example.
- Both errors are independent; the interval is Student's t with Welch and Satterthwaite's degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True)
class Spread:
    """Standard deviation over seeds, pooled over the arms of a family."""

    deviation: float
    degrees: int

    def error(self, *counts: int) -> tuple[float, float]:
        """Return the squared standard error of a mean over runs, or of a difference of two, and its degrees."""
        return self.deviation**2 * sum(1 / count for count in counts), self.degrees


@dataclass(frozen=True)
class Interval:
    """A difference with the half-width of its 95 % interval; the half-width is NaN if it is unknown."""

    difference: float
    half_width: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval has one sign."""
        return abs(self.difference) > self.half_width


def pooled_spread(family: Sequence[Sequence[float]]) -> Spread | None:
    """Pool the deviations of a family; None if no arm has two runs."""
    degrees = sum(len(values) - 1 for values in family if len(values))
    if degrees == 0:
        return None
    squares = sum((len(values) - 1) * float(np.var(values, ddof=1)) for values in family if len(values) > 1)
    return Spread(math.sqrt(squares / degrees), degrees)


def half_width(errors: Sequence[tuple[float, float]]) -> float:
    """Return the half-width of the 95 % interval of a sum of independent errors.

    Args:
        errors: Squared standard error and degrees of freedom of each part.

    Returns:
        Student's t with Welch and Satterthwaite's degrees of freedom, times the standard error.
    """
    total = sum(square for square, _ in errors)
    if total == 0:
        return 0.0
    degrees = total**2 / sum(square**2 / freedom for square, freedom in errors)
    return float(stats.t.ppf(0.5 + LEVEL / 2, degrees)) * math.sqrt(total)


def paired_error(first: np.ndarray, second: np.ndarray) -> tuple[float, float] | None:
    """Return the squared standard error of the mean paired difference and its degrees of freedom; None if unknown."""
    if len(first) != len(second) or len(first) < 2:
        return None
    return float(np.var(first - second, ddof=1)) / len(first), len(first) - 1


def compare(
    first: Sequence[float], second: Sequence[float], spread: Spread | None, paired: tuple[np.ndarray, np.ndarray] | None
) -> Interval:
    """Compare two arms.

    Args:
        first: Values of the runs of the first arm, one per seed.
        second: Values of the runs of the second arm.
        spread: Deviation over seeds of the family.
        paired: Means over blocks of text (or correctness of examples) of both arms, averaged over seeds.

    Returns:
        First minus second with its interval. The half-width is NaN if an error is unknown.
    """
    difference = float(np.mean(first) - np.mean(second))
    text = None if paired is None else paired_error(*paired)
    if spread is None or text is None:
        return Interval(difference, math.nan)
    return Interval(difference, half_width([spread.error(len(first), len(second)), text]))


def mean_interval(values: Sequence[float], spread: Spread | None) -> Interval:
    """Return the mean of an arm with its interval over seeds."""
    mean = float(np.mean(values))
    return Interval(mean, math.nan if spread is None else half_width([spread.error(len(values))]))
