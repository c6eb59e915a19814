"""What may be said of a claim, by rules that were written down before an interval was computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from experiments.paper.recipe_results import SCALES
from experiments.paper.statistics import Difference

HOLDS, SO_FAR, FAILS = "holds", "holds so far", "does not hold"
OPEN, MISSING = "cannot be told apart at this size", "not measured yet"
ALL = (HOLDS, SO_FAR, FAILS, OPEN, MISSING)
# Noise of a ratio. Two measurements of the same training step differed by up to 4.5 %, of its memory by 13 %, and a
# ratio has two; an operator is timed beside its peer. Steps under SHORT milliseconds differed by up to 25 %: their
# launches and batches wait for the host.
TIMING, STEPS, SHORT_STEPS, MEMORY = 0.03, 0.06, 0.25, 0.2
SHORT = 1.6


def suffices(found: Difference | None, margin: float) -> str:
    """Ours loses less than the margin."""
    return _beyond(found, -margin)


def better(found: Difference | None) -> str:
    """Ours is better at all."""
    return _beyond(found, 0.0)


def narrows(found: Difference | None, gap: Difference | None) -> tuple[str, str]:
    """Ours is better than what it replaces, and there is a gap for it to narrow; with a remark."""
    if found is None or gap is None:
        return MISSING, ""
    if gap.remark or gap.low is None or gap.low <= 0:
        return OPEN, f"no gap that could be told: {gap.remark or 'its interval holds 0'}"
    return better(found), found.remark


def cheaper(ratio: float | None, tolerance: float = 0.0) -> str:
    """Ours over theirs: of a count exactly, of a time within the tolerance."""
    if ratio is None:
        return MISSING
    if abs(ratio - 1) <= tolerance:
        return OPEN
    return HOLDS if ratio < 1 else FAILS


def _beyond(found: Difference | None, bound: float) -> str:
    if found is None:
        return MISSING
    if found.remark or found.low is None or found.high is None:
        return OPEN
    if found.low > bound:
        return HOLDS
    return FAILS if found.high < bound else OPEN


def overall(verdicts: Sequence[str]) -> str:
    """Of all pairs of a claim on a task: holds if it holds for every pair, so far if some are not measured; fails if it
    fails for one."""
    measured = [each for each in verdicts if each != MISSING]
    if not measured:
        return MISSING
    if FAILS in measured:
        return FAILS
    if set(measured) != {HOLDS}:
        return OPEN
    return HOLDS if len(measured) == len(verdicts) else SO_FAR


def counted(verdicts: Sequence[str]) -> str:
    """In words: how many pairs hold and how many do not; the others cannot be told."""
    count = Counter(verdicts)
    said = {HOLDS: ("holds", "hold"), FAILS: ("does not", "do not")}
    return ", ".join(f"{count[each]} {words[count[each] > 1]}" for each, words in said.items() if count[each])


RULES = f"""\
- **Margin.** A loss of less than {SCALES["classification"].margin:g} point of accuracy counts as none: about the \
standard error of LRA's own 2,000 test examples of ListOps. For language models: \
{SCALES["language-model"].margin:g} % of perplexity (counted as 100 times the nats a token, so that −3.7 is a factor \
of 1.038), what lies between softmax and the best MGK in the paper (34.29, 33.93).
- **Half the heads suffice**: *holds* if the whole 95 % interval of (mixture with H/2 heads − baseline with H) lies \
above −margin, *does not hold* if it lies below. Softmax and linear attention with half the heads are held to the \
same rule, as the control: where they pass it too, the task does not show that the mixture was needed.
- **With the same heads the mixture is better**: *holds* if the interval of the difference lies above 0, *does not \
hold* if below.
- **MLK narrows the gap**: *holds* if softmax is better than linear attention with the same heads (interval above 0) \
and MLK is better than linear.
- **Ranks are higher and heads less alike**: four numbers a model (means over layers), each *holds* if the interval of \
the mixture minus the baseline lies above 0; seeds alone make the interval, since the matrices of one model are no \
sample of models.
- **Parameters, FLOPs, time, memory**: counts exactly; the rest alone on the machine, where ratios cannot be told from \
1 within {100 * TIMING:g} % (means of operators' times), {100 * STEPS:g} % (a training step, a forward; \
{100 * SHORT_STEPS:g} % if one of the two takes less than {SHORT:g} ms) and {100 * MEMORY:g} % (its memory): two \
measurements of the same step have differed by 4.5 %, of shorter ones by 25 %, of its memory by 13 %, and a ratio has \
two. (Short steps had the limit of the others until those of ListOps and Text had been measured twice.)
- **sMGK + Hard-E is as good as sMGK** (Table 4): *holds* if the interval of (hard − soft, with as many heads) lies \
above −margin, *does not hold* if below. The other ways of that table, priors from EM (Soft-E) and MGK + Hard-E, are \
held to the same rule; of them the paper does not claim it, and its own MGK + Hard-E on ListOps (19.40, with a soft \
assignment 37.13) is far from it.
- **The interval** has two parts that are added as independent errors are. *Seeds*: Student's t, with the deviation \
over seeds pooled over all models of the recipe that have two or more (assumed alike for all; with few seeds it is \
itself hardly known, which the t-factor pays for). *Examples*: the difference on the same test examples, of the \
largest test set whose answers were kept (ListOps: 50,000 fresh ones). Where no model of a recipe has two seeds the \
verdict is *{OPEN}*.
- **Runs that did not learn.** A run counts as having learnt the task if it left the plateau (where a recipe names \
one) and beats the most frequent class by more than its interval. Runs that have are compared with runs that have; \
how many have not is shown. If of two models one never learns and the other always does, in two runs or more each, \
all runs are compared as they are; if neither does, or one never and the other by chance, or a run that is compared \
left the plateau in the last tenth of its steps and had no time to end anywhere, the verdict is *{OPEN}*. (The rule \
about chance was added after second seeds of linear models had left the plateau where the first had not; that such a \
late run does not count in the deviation over seeds of other models, after a third seed of smlk:2 had ended 8 points \
above a first that left the plateau in its last step, which made every interval on ListOps three times as wide.)
- **A claim on a task** holds if it holds for every pair there (so far, where some are not measured yet), fails if it \
fails for one, and otherwise cannot be told. Every interval is of 95 % by itself, not corrected for their number. The \
rules are code (`mgk/evidence/verdicts.py`)."""
