"""Claims about quality, pair by pair.

Half the heads suffice; mixtures are better with the same number of heads; MLK narrows the gap; hard assignment is as
good as soft.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.paper import verdicts
from experiments.paper.comparisons import Difference, compare
from experiments.paper.plan import Experiment
from experiments.paper.recipe_results import STANDS_FOR, RecipeResults, TrainedRun
from mgk._core.markdown import format_number, format_signed, markdown_table
from mgk.training.config import ModelSpec
from mgk.training.sweep import metric_format

# Baseline of each mixture, and names of the two families of attention.
BASELINES = {"mgk": "softmax", "smgk": "softmax", "mlk": "linear", "smlk": "linear"}
FAMILIES = {"softmax": "softmax to MGK", "linear": "linear to MLK"}
# Table 4: other ways to learn a mixture, and the soft mixture learned by gradient descent that each is compared with.
# The paper claims that only the first is as good.
LEARNING = {"smgk-hard": "smgk", "smgk-em": "smgk", "mgk-hard": "mgk", "mgk-em": "mgk"}
CLAIMED_LEARNING = "smgk-hard"


@dataclass(frozen=True)
class ExperimentResults:
    """An experiment and its results."""

    experiment: Experiment
    results: RecipeResults

    @property
    def rows(self) -> list[ModelSpec]:
        """Models that are planned or have results."""
        return list(dict.fromkeys((*self.experiment.seeds, *self.results.rows)))

    @property
    def title(self) -> str:
        return self.experiment.title


@dataclass(frozen=True)
class Verdict:
    """One comparison and its verdict."""

    first: ModelSpec
    second: ModelSpec
    difference: Difference | None
    verdict: str
    remark: str = ""
    control: bool = False

    @property
    def family(self) -> str:
        return FAMILIES[self.second.variant]

    def __str__(self) -> str:
        return f"{self.first} − {self.second}"


def judge_half(item: ExperimentResults) -> list[Verdict]:
    """Compare mixtures with half the heads with their baselines. Baselines with half the heads are controls."""
    rows = [row for row in item.rows if row.kv_heads is None and row.key_heads is None]
    return _judge_suffices(
        item, [(row, ModelSpec(BASELINES.get(row.variant, row.variant), 2 * row.heads)) for row in rows]
    )


def judge_half_keys(item: ExperimentResults) -> list[Verdict]:
    """Compare models with half the key heads with the baselines with all; this is not in the paper."""
    rows = [row for row in item.rows if row.kv_heads is not None and 2 * row.kv_heads == row.heads]
    return _judge_suffices(item, [(row, ModelSpec(BASELINES.get(row.variant, row.variant), row.heads)) for row in rows])


def _judge_suffices(item: ExperimentResults, pairs: list[tuple[ModelSpec, ModelSpec]]) -> list[Verdict]:
    """Judge the pairs; mixtures come first, then the controls."""
    judged = []
    for first, second in sorted(pairs, key=lambda pair: pair[0].variant in FAMILIES):
        if second in item.rows:
            result = compare(item.results, first, second)
            verdict = verdicts.suffices(result, item.results.scale.margin)
            judged.append(_make_verdict(first, second, result, verdict, first.variant in FAMILIES))
    return judged


def judge_same(item: ExperimentResults) -> list[Verdict]:
    """Compare mixtures with the baselines that have the same numbers of heads and key heads."""
    judged = []
    for first in item.rows:
        second = ModelSpec(BASELINES.get(first.variant, ""), first.heads, first.kv_heads)
        if second in item.rows:
            result = compare(item.results, first, second)
            judged.append(_make_verdict(first, second, result, verdicts.better(result)))
    return judged


def judge_learning(item: ExperimentResults) -> list[Verdict]:
    """Compare hard assignments and EM priors with soft assignments and learned priors.

    Combinations for which the paper does not claim equality are controls.
    """
    judged = []
    for first in item.rows:
        second = ModelSpec(LEARNING.get(first.variant, ""), first.heads, first.kv_heads)
        if second in item.rows:
            result = compare(item.results, first, second)
            verdict = verdicts.suffices(result, item.results.scale.margin)
            judged.append(_make_verdict(first, second, result, verdict, first.variant != CLAIMED_LEARNING))
    return judged


def _make_verdict(
    first: ModelSpec, second: ModelSpec, result: Difference | None, verdict: str, control: bool = False
) -> Verdict:
    return Verdict(first, second, result, verdict, result.remark if result else "", control)


@dataclass(frozen=True)
class GapVerdict:
    """Linear attention, its mixture and softmax with the same number of heads."""

    verdict: Verdict
    gap: Difference | None


def judge_gaps(item: ExperimentResults) -> list[GapVerdict]:
    """Judge whether mixtures narrow the gap between linear attention and softmax with the same number of heads."""
    judged = []
    for mixture in item.rows:
        linear, softmax = ModelSpec("linear", mixture.heads), ModelSpec("softmax", mixture.heads)
        if BASELINES.get(mixture.variant) == "linear" and linear in item.rows and softmax in item.rows:
            result, gap = compare(item.results, mixture, linear), compare(item.results, softmax, linear)
            verdict, remark = verdicts.narrows(result, gap)
            judged.append(GapVerdict(Verdict(mixture, linear, result, verdict, remark), gap))
    return judged


def paper_difference(item: ExperimentResults, first: ModelSpec, second: ModelSpec) -> float | None:
    """Return the paper's difference of two models on the scale; None if it lacks one of them."""
    results = item.results
    scores = [results.scale.score(value) for row in (first, second) if (value := results.paper(row)) is not None]
    return scores[0] - scores[1] if len(scores) == 2 else None


def _cells(item: ExperimentResults, judged: Verdict) -> list[str]:
    result = judged.difference
    assert result is not None
    interval = "–" if result.low is None else f"{format_signed(result.low)} to {format_signed(result.high)}"
    verdict = f"**{judged.verdict}**" + (f" ({judged.remark})" if judged.remark else "")
    return [
        str(judged),
        format_signed(paper_difference(item, judged.first, judged.second)),
        format_signed(result.difference),
        f"± {format_number(result.over_seeds)}" if result.over_seeds is not None else "unknown",
        f"± {format_number(result.over_examples)}" if result.over_examples is not None else "unknown",
        interval,
        " − ".join(format_learnt(item.results.runs_of(row)) for row in (judged.first, judged.second)),
        verdict,
    ]


def table(item: ExperimentResults, judged: list[Verdict], control: str = "control") -> str:
    """Format the measured comparisons, controls last, and the names of the missing ones.

    Args:
        item: Experiment of the comparisons.
        judged: Comparisons with their verdicts.
        control: Label of the control comparisons.
    """
    unit = item.results.scale.unit
    header = ["pair", f"paper, {unit}", f"ours, {unit}", "seeds", "examples", "95 % interval", "runs that learnt"]
    measured = [verdict for verdict in judged if verdict.difference is not None]
    lines = [[*header, "verdict"], *(_cells(item, verdict) for verdict in measured if not verdict.control)]
    for verdict in (verdict for verdict in measured if verdict.control):
        first, *cells = _cells(item, verdict)
        lines.append([f"{control}: {first}", *cells])
    missing = ", ".join(str(verdict) for verdict in judged if verdict.difference is None)
    splits = " and ".join(sorted({verdict.difference.split for verdict in measured if verdict.difference}))
    text = [f"**{item.title}**" + (f" (`{splits}` examples)" if splits else "")]
    text += [markdown_table(lines)] if measured else []
    text += [f"Not measured yet: {missing}."] if missing else []
    return "\n\n".join(text)


def gap_table(item: ExperimentResults, gaps: list[GapVerdict]) -> str:
    """Format the gaps of an experiment, and the names of those that are not measured."""
    unit = item.results.scale.unit
    lines = [
        ["models", f"softmax − linear, {unit}", f"mixture − linear, {unit}", "share of the gap", "paper", "verdict"]
    ]
    for entry in gaps:
        judged, gap = entry.verdict, entry.gap
        difference = judged.difference
        if difference is None or gap is None:
            continue
        softmax = ModelSpec("softmax", judged.first.heads)
        in_paper = [paper_difference(item, row, judged.second) for row in (softmax, judged.first)]
        paper = "–" if None in in_paper else f"{format_signed(in_paper[1])} of {format_signed(in_paper[0])}"
        decided = judged.verdict in (verdicts.HOLDS, verdicts.FAILS) and gap.difference > 0
        share = f"{100 * difference.difference / gap.difference:.0f} %" if decided else "–"
        widths = ["" if x.half_width is None else f" ± {format_number(x.half_width)}" for x in (gap, difference)]
        cells = [format_signed(x.difference) + width for x, width in zip((gap, difference), widths, strict=True)]
        verdict = f"**{judged.verdict}**" + (f" ({judged.remark})" if judged.remark else "")
        lines.append([f"{judged.first}, {judged.second}, {softmax}", *cells, share, paper, verdict])
    missing = ", ".join(str(entry.verdict) for entry in gaps if entry.verdict.verdict == verdicts.MISSING)
    text = [f"**{item.title}**"]
    text += [markdown_table(lines)] if len(lines) > 1 else []
    text += [f"Not measured yet: {missing}."] if missing else []
    return "\n\n".join(text)


def runs_table(item: ExperimentResults) -> str:
    """Format the results of every seed."""
    results = item.results
    if not results.runs:
        return f"**{item.title}**: not run yet."
    splits = sorted({split for run in results.runs for split in run.values}, key=lambda name: (name != "test", name))
    titles = [f"{split} {metric_format(results.recipe).title}" for split in splits]
    plateau = results.recipe.plateau is not None
    paper = f"paper, {STANDS_FOR[results.recipe.name]}" if results.recipe.name in STANDS_FOR else "paper"
    lines = [["model", "seeds", *titles, *(["left the plateau at step"] if plateau else []), "learnt", paper]]
    for row in results.rows:
        runs = results.runs_of(row)
        cells = [str(row), " ".join(str(run.seed) for run in runs)]
        cells += [" ".join(format_number(run.values.get(split)) for run in runs) for split in splits]
        cells += [" ".join(f"{run.left_at:,}" if run.left_at else "never" for run in runs)] if plateau else []
        lines.append([*cells, format_learnt(runs), format_number(results.paper(row))])
    return f"**{item.title}**\n\n{markdown_table(lines)}"


def format_learnt(runs: list[TrainedRun]) -> str:
    """Format the number of runs that learnt the task."""
    return f"{sum(run.learnt for run in runs)} of {len(runs)}"


def format_cell(judged: list[str]) -> str:
    """Format the overall verdict, the number of measured pairs, and the counts of verdicts if they differ."""
    if not judged:
        return "–"
    measured = [verdict for verdict in judged if verdict != verdicts.MISSING]
    counts = "; " + verdicts.format_counts(measured) if len(set(measured)) > 1 else ""
    return f"**{verdicts.overall(judged)}** ({len(measured)} of {len(judged)}{counts})"


def group_by_verdict(judged: dict[str, list[str]]) -> str:
    """List the tasks by overall verdict."""
    tasks: dict[str, list[str]] = {}
    for task, results in judged.items():
        tasks.setdefault(verdicts.overall(results), []).append(task)
    return "; ".join(f"**{verdict}** on {', '.join(tasks[verdict])}" for verdict in verdicts.ALL if verdict in tasks)


def sentence(claim: str, judged: dict[str, list[str]]) -> str:
    """State the verdicts on a claim in one sentence."""
    return f"Verdict, {claim}: {group_by_verdict(judged)}."
