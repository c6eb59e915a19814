"""Intervals for differences between arms. The rules were fixed before any result was seen.

- The value of a run is its mean loss in nats per token on the judged split, or its accuracy on the test set.
- The deviation over seeds is pooled over all arms of a recipe (the family); its degrees of freedom are the number of
  runs minus the number of arms.
- The deviation over text is that of the difference of block means, blocks of at least 4,096 tokens, each arm averaged
  over its seeds; for accuracy, that of the difference per example.
- Both errors are independent; the interval is Student's t with Welch and Satterthwaite's degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

MIN_BLOCK = 4096  # tokens; losses of shorter blocks are correlated
LEVEL = 0.95


@dataclass(frozen=True)
class Spread:
    """Standard deviation over seeds, pooled over the arms of a family."""

    deviation: float
    degrees: int


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
    degrees = sum(len(values) - 1 for values in family)
    if degrees == 0:
        return None
    squares = sum((len(values) - 1) * float(np.var(values, ddof=1)) for values in family if len(values) > 1)
    return Spread(math.sqrt(squares / degrees), degrees)


def merge_blocks(means: np.ndarray, block: int) -> np.ndarray:
    """Average means over blocks of `block` tokens to blocks of at least MIN_BLOCK tokens; a remainder is dropped."""
    group = -(-MIN_BLOCK // block)
    whole = len(means) // group * group
    merged: np.ndarray = means[:whole].reshape(-1, group).mean(1)
    return merged


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
    if spread is None or paired is None or len(paired[0]) != len(paired[1]) or len(paired[0]) < 2:
        return Interval(difference, math.nan)
    over_seeds = spread.deviation**2 * (1 / len(first) + 1 / len(second))
    differences = paired[0] - paired[1]
    over_text = float(np.var(differences, ddof=1)) / len(differences)
    total = over_seeds + over_text
    if total == 0:
        return Interval(difference, 0.0)
    degrees = total**2 / (over_seeds**2 / spread.degrees + over_text**2 / (len(differences) - 1))
    return Interval(difference, float(stats.t.ppf(0.5 + LEVEL / 2, degrees)) * math.sqrt(total))


def mean_interval(values: Sequence[float], spread: Spread | None) -> Interval:
    """Return the mean of an arm with its interval over seeds."""
    mean = float(np.mean(values))
    if spread is None:
        return Interval(mean, math.nan)
    return Interval(
        mean, float(stats.t.ppf(0.5 + LEVEL / 2, spread.degrees)) * spread.deviation / math.sqrt(len(values))
    )
