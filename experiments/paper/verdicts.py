"""Verdicts on the claims of the paper, by the rules of rules.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from experiments.paper.comparisons import Difference
from experiments.paper.recipe_results import SCALES

HOLDS, SO_FAR, FAILS = "holds", "holds so far", "does not hold"
OPEN, MISSING = "undecided", "not measured yet"
ALL = (HOLDS, SO_FAR, FAILS, OPEN, MISSING)
MISSING_SENTENCE = f"{MISSING.capitalize()}."
# Tolerances of a ratio. Two measurements of the same training step differed by up to 4.5 %, and of its memory by 13 %;
# a ratio has two measurements. An operator is timed in the same run as its baseline. Steps under SHORT milliseconds
# differed by up to 25 %: they are bound by kernel launches and the host.
TIMING, STEPS, SHORT_STEPS, MEMORY = 0.03, 0.06, 0.25, 0.2
SHORT = 1.6


def suffices(difference: Difference | None, margin: float) -> str:
    """Judge whether the first model loses less than the margin."""
    return _compare_with_bound(difference, -margin)


def better(difference: Difference | None) -> str:
    """Judge whether the first model is better than the second."""
    return _compare_with_bound(difference, 0.0)


def narrows(difference: Difference | None, gap: Difference | None) -> tuple[str, str]:
    """Judge whether a mixture of linear attention narrows the gap to softmax; return the verdict and a remark."""
    if difference is None or gap is None:
        return MISSING, ""
    if gap.remark or gap.low is None:
        return OPEN, f"gap to softmax: {gap.remark}"
    if gap.low <= 0:
        return OPEN, "no significant gap: its interval contains 0"
    return better(difference), difference.remark


def cheaper(ratio: float | None, tolerance: float = 0.0) -> str:
    """Judge whether a cost ratio is below 1 by more than the tolerance."""
    if ratio is None:
        return MISSING
    if abs(ratio - 1) <= tolerance:
        return OPEN
    return HOLDS if ratio < 1 else FAILS


def _compare_with_bound(difference: Difference | None, bound: float) -> str:
    if difference is None:
        return MISSING
    if difference.remark or difference.low is None or difference.high is None:
        return OPEN
    if difference.low > bound:
        return HOLDS
    return FAILS if difference.high < bound else OPEN


def overall(verdicts: Sequence[str]) -> str:
    """Combine the verdicts on all pairs of a claim on a task."""
    measured = [verdict for verdict in verdicts if verdict != MISSING]
    if not measured:
        return MISSING
    if FAILS in measured:
        return FAILS
    if set(measured) != {HOLDS}:
        return OPEN
    return HOLDS if len(measured) == len(verdicts) else SO_FAR


def format_counts(verdicts: Sequence[str]) -> str:
    """Format the numbers of pairs that hold and that do not; the others are undecided."""
    counts = Counter(verdicts)
    words = {HOLDS: ("holds", "hold"), FAILS: ("does not", "do not")}
    return ", ".join(
        f"{counts[verdict]} {forms[counts[verdict] > 1]}" for verdict, forms in words.items() if counts[verdict]
    )


def rules() -> str:
    """Return the rules as Markdown, with the numbers of this module."""
    return (
        Path(__file__)
        .with_name("rules.md")
        .read_text(encoding="utf-8")
        .strip()
        .format(
            margin_points=SCALES["classification"].margin,
            margin_nats=SCALES["language-model"].margin,
            timing=100 * TIMING,
            steps=100 * STEPS,
            short_steps=100 * SHORT_STEPS,
            short=SHORT,
            memory=100 * MEMORY,
            open=OPEN,
        )
    )
