"""The claims about accuracy, pair by pair: half the heads suffice, the same heads are better, MLK narrows the gap, a
hard assignment is as good."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.paper import verdicts
from experiments.paper.plan import Experiment
from experiments.paper.recipe_results import STANDS_FOR, RecipeResults, TrainedRun
from experiments.paper.statistics import Difference, compare
from mgk._core.io import format_number, format_signed, markdown_table
from mgk.training.config import ModelSpec
from mgk.training.sweep import metric_format

# What each mixture takes the place of, and what the two kinds of attention are called.
BASELINES = {"mgk": "softmax", "smgk": "softmax", "mlk": "linear", "smlk": "linear"}
FAMILIES = {"softmax": "softmax to MGK", "linear": "linear to MLK"}
# Table 4: the other ways to learn a mixture, and the soft one by gradient descent that each is held against. The paper
# claims only of the first that it is as good.
WAYS = {"smgk-hard": "smgk", "smgk-em": "smgk", "mgk-hard": "mgk", "mgk-em": "mgk"}
CLAIMED_WAY = "smgk-hard"


@dataclass(frozen=True)
class ExperimentResults:
    """An experiment and what results/ has of it."""

    experiment: Experiment
    found: RecipeResults

    @property
    def rows(self) -> list[ModelSpec]:
        """Planned or run."""
        return list(dict.fromkeys((*self.experiment.seeds, *self.found.rows)))

    @property
    def title(self) -> str:
        return self.experiment.title


@dataclass(frozen=True)
class Judged:
    """One comparison and its verdict."""

    ours: ModelSpec
    theirs: ModelSpec
    compared: Difference | None
    verdict: str
    remark: str = ""
    control: bool = False

    @property
    def family(self) -> str:
        return FAMILIES[self.theirs.variant]

    def __str__(self) -> str:
        return f"{self.ours} − {self.theirs}"


def half(part: ExperimentResults) -> list[Judged]:
    """Mixtures with half the heads against their baselines, and the baselines with half the heads: controls."""
    rows = [row for row in part.rows if row.kv_heads is None]
    return _suffice(part, [(row, ModelSpec(BASELINES.get(row.variant, row.variant), 2 * row.heads)) for row in rows])


def half_the_keys(part: ExperimentResults) -> list[Judged]:
    """Models with all query heads and half the key heads against the baselines with all: the baselines' are controls.
    The paper has none."""
    rows = [row for row in part.rows if row.kv_heads is not None and 2 * row.kv_heads == row.heads]
    return _suffice(part, [(row, ModelSpec(BASELINES.get(row.variant, row.variant), row.heads)) for row in rows])


def _suffice(part: ExperimentResults, pairs: list[tuple[ModelSpec, ModelSpec]]) -> list[Judged]:
    """Mixtures first, then the controls."""
    found = []
    for ours, theirs in sorted(pairs, key=lambda pair: pair[0].variant in FAMILIES):
        if theirs in part.rows:
            result = compare(part.found, ours, theirs)
            verdict = verdicts.suffices(result, part.found.scale.margin)
            found.append(_judged(ours, theirs, result, verdict, ours.variant in FAMILIES))
    return found


def same(part: ExperimentResults) -> list[Judged]:
    """Mixtures against their baselines with as many heads and key heads."""
    found = []
    for ours in part.rows:
        theirs = ModelSpec(BASELINES.get(ours.variant, ""), ours.heads, ours.kv_heads)
        if theirs in part.rows:
            result = compare(part.found, ours, theirs)
            found.append(_judged(ours, theirs, result, verdicts.better(result)))
    return found


def ways(part: ExperimentResults) -> list[Judged]:
    """Mixtures with hard assignments or priors from EM against the same ones with soft assignments and learned
    priors; those of which the paper does not claim that they are as good: controls."""
    found = []
    for ours in part.rows:
        theirs = ModelSpec(WAYS.get(ours.variant, ""), ours.heads, ours.kv_heads)
        if theirs in part.rows:
            result = compare(part.found, ours, theirs)
            verdict = verdicts.suffices(result, part.found.scale.margin)
            found.append(_judged(ours, theirs, result, verdict, ours.variant != CLAIMED_WAY))
    return found


def _judged(
    ours: ModelSpec, theirs: ModelSpec, result: Difference | None, verdict: str, control: bool = False
) -> Judged:
    return Judged(ours, theirs, result, verdict, result.remark if result else "", control)


@dataclass(frozen=True)
class Gap:
    """Linear attention, its mixture and softmax, all with as many heads."""

    judged: Judged
    gap: Difference | None


def gaps(part: ExperimentResults) -> list[Gap]:
    found = []
    for ours in part.rows:
        linear, softmax = ModelSpec("linear", ours.heads), ModelSpec("softmax", ours.heads)
        if BASELINES.get(ours.variant) == "linear" and linear in part.rows and softmax in part.rows:
            result, gap = compare(part.found, ours, linear), compare(part.found, softmax, linear)
            verdict, remark = verdicts.narrows(result, gap)
            found.append(Gap(Judged(ours, linear, result, verdict, remark), gap))
    return found


def paper_difference(part: ExperimentResults, ours: ModelSpec, theirs: ModelSpec) -> float | None:
    worth = [part.found.scale.worth(value) for row in (ours, theirs) if (value := part.found.paper(row)) is not None]
    return worth[0] - worth[1] if len(worth) == 2 else None


def line(part: ExperimentResults, judged: Judged) -> list[str]:
    result = judged.compared
    assert result is not None
    interval = "–" if result.low is None else f"{format_signed(result.low)} to {format_signed(result.high)}"
    verdict = f"**{judged.verdict}**" + (f" ({judged.remark})" if judged.remark else "")
    return [
        str(judged),
        format_signed(paper_difference(part, judged.ours, judged.theirs)),
        format_signed(result.difference),
        f"± {format_number(result.over_seeds)}" if result.over_seeds is not None else "not known",
        f"± {format_number(result.over_examples)}" if result.over_examples is not None else "not known",
        interval,
        " − ".join(learnt(part.found.of(row)) for row in (judged.ours, judged.theirs)),
        verdict,
    ]


def table(part: ExperimentResults, judged: list[Judged], control: str = "control") -> str:
    """What was measured, control comparisons last, and the names of what was not. control: what those are called."""
    unit = part.found.scale.unit
    header = ["pair", f"paper, {unit}", f"ours, {unit}", "seeds", "examples", "95 % interval", "runs that learnt"]
    measured = [each for each in judged if each.compared is not None]
    lines = [[*header, "verdict"]]
    lines += [line(part, each) for each in measured if not each.control]
    lines += [
        [f"{control}: {cells[0]}", *cells[1:]] for each in measured if each.control for cells in [line(part, each)]
    ]
    rest = ", ".join(str(each) for each in judged if each.compared is None)
    splits = " and ".join(sorted({each.compared.split for each in measured if each.compared}))
    text = [f"**{part.title}**" + (f" (`{splits}` examples)" if splits else "")]
    text += [markdown_table(lines)] if measured else []
    text += [f"Not measured yet: {rest}."] if rest else []
    return "\n\n".join(text)


def gap_table(part: ExperimentResults, found: list[Gap]) -> str:
    unit = part.found.scale.unit
    lines = [
        ["models", f"softmax − linear, {unit}", f"mixture − linear, {unit}", "share of the gap", "paper", "verdict"]
    ]
    for each in found:
        judged, gap = each.judged, each.gap
        if judged.compared is None or gap is None:
            continue
        softmax = ModelSpec("softmax", judged.ours.heads)
        theirs = [paper_difference(part, row, judged.theirs) for row in (softmax, judged.ours)]
        paper = "–" if None in theirs else f"{format_signed(theirs[1])} of {format_signed(theirs[0])}"
        told = judged.verdict in (verdicts.HOLDS, verdicts.FAILS) and gap.difference > 0
        share = f"{100 * judged.compared.difference / gap.difference:.0f} %" if told else "–"
        widths = ["" if x.half_width is None else f" ± {format_number(x.half_width)}" for x in (gap, judged.compared)]
        cells = [format_signed(x.difference) + width for x, width in zip((gap, judged.compared), widths, strict=True)]
        verdict = f"**{judged.verdict}**" + (f" ({judged.remark})" if judged.remark else "")
        lines.append([f"{judged.ours}, {judged.theirs}, {softmax}", *cells, share, paper, verdict])
    rest = ", ".join(f"{each.judged}" for each in found if each.judged.verdict == verdicts.MISSING)
    text = [f"**{part.title}**"]
    text += [markdown_table(lines)] if len(lines) > 1 else []
    text += [f"Not measured yet: {rest}."] if rest else []
    return "\n\n".join(text)


def runs_table(part: ExperimentResults) -> str:
    """Each seed by itself."""
    found = part.found
    if not found.runs:
        return f"**{part.title}**: not run yet."
    splits = sorted({split for run in found.runs for split in run.values}, key=lambda name: (name != "test", name))
    named = [f"{split} {metric_format(found.recipe).title}" for split in splits]
    plateau = found.recipe.plateau is not None
    paper = f"paper, {STANDS_FOR[found.recipe.name]}" if found.recipe.name in STANDS_FOR else "paper"
    lines = [["model", "seeds", *named, *(["left the plateau at step"] if plateau else []), "learnt", paper]]
    for row in found.rows:
        runs = found.of(row)
        cells = [str(row), " ".join(str(run.seed) for run in runs)]
        cells += [" ".join(format_number(run.values.get(split)) for run in runs) for split in splits]
        cells += [" ".join(f"{run.left_at:,}" if run.left_at else "never" for run in runs)] if plateau else []
        lines.append([*cells, learnt(runs), format_number(found.paper(row))])
    return f"**{part.title}**\n\n{markdown_table(lines)}"


def learnt(runs: list[TrainedRun]) -> str:
    return f"{sum(run.learnt for run in runs)} of {len(runs)}"


def cell(found: list[str]) -> str:
    """A verdict, of how many pairs of all it is, and what these are where they differ."""
    if not found:
        return "–"
    measured = [each for each in found if each != verdicts.MISSING]
    parts = "; " + verdicts.counted(measured) if len(set(measured)) > 1 else ""
    return f"**{verdicts.overall(found)}** ({len(measured)} of {len(found)}{parts})"


def by_verdict(found: dict[str, list[str]]) -> str:
    """In words: where which verdict stands."""
    places: dict[str, list[str]] = {}
    for place, each in found.items():
        places.setdefault(verdicts.overall(each), []).append(place)
    return "; ".join(f"**{verdict}** on {', '.join(places[verdict])}" for verdict in verdicts.ALL if verdict in places)


def sentence(claim: str, found: dict[str, list[str]]) -> str:
    """One claim in one sentence: what may be said of it, and where."""
    return f"Verdict, {claim}: {by_verdict(found)}."
