"""Figures of the training runs: learning curves, final results of each seed, and differences."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.paper import verdicts
from experiments.paper.claims.quality import ExperimentResults, judge_half, judge_same, paper_difference
from experiments.paper.recipe_results import PRESET, SCALES, STANDS_FOR
from experiments.pictures import Picture
from mgk._core.palette import colour_of
from mgk.analysis.report.curves import read_metrics
from mgk.analysis.report.drawing import End, label_ends
from mgk.training.config import ModelSpec
from mgk.training.results import curve_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Marker of a difference by its verdict: filled, crossed or, if undecided, open.
VERDICT_MARKERS = {verdicts.HOLDS: "o", verdicts.FAILS: "X"}
MIN_MODELS = 3  # of a panel of final results
PANELS_PER_LINE = 3
CURVES_PER_LINE = 2


def curves(experiments: list[ExperimentResults], results: Path) -> Picture:
    """Plot the development metric against the step (Fig. 1 and 4): means over seeds of the first claim's models."""
    panels = []
    for item in experiments:
        lines = []
        for row in compared_rows(item.rows):
            files = curve_files(results, item.results.recipe.name, row, PRESET)
            of_seeds = [
                {curve.metric: curve for curve in read_metrics(path, str(row)) if curve.split == "dev"}
                for path in files.values()
            ]
            metrics = {metric for of_seed in of_seeds for metric in of_seed if metric != "loss"}
            if metrics:
                metric = min(metrics)
                points = [dict(zip(c[metric].steps, c[metric].values, strict=True)) for c in of_seeds if metric in c]
                steps = sorted(set.intersection(*map(set, points)))
                means = [statistics.mean(of_seed[step] for of_seed in points) for step in steps]
                lines.append({"row": str(row), "seeds": len(points), "metric": metric, "curve": [steps, means]})
        if len(lines) >= MIN_MODELS:
            panels.append({"title": item.title, "lines": lines})
    return Picture("evidence-curves", panels, draw_curves)


def compared_rows(rows: Iterable[ModelSpec]) -> list[ModelSpec]:
    """Return softmax with the most heads, and softmax, MGK and sMGK with half of these heads."""
    plain = [row for row in rows if row.kv_heads is None and row.key_heads is None]
    heads = max((row.heads for row in plain if row.variant == "softmax"), default=0)
    wanted = [ModelSpec("softmax", heads), *(ModelSpec(name, heads // 2) for name in ("softmax", "mgk", "smgk"))]
    return [row for row in wanted if row in plain]


def endpoints(experiments: list[ExperimentResults]) -> Picture:
    """Plot the final result of each seed on the largest test set, together with the paper's number."""
    panels = []
    for item in experiments:
        results = item.results
        if results.runs:
            split = results.judged_split(results.runs[0].examples)
            assert split is not None
            dots = [[str(run.row), run.values[split], run.learnt] for run in results.runs if split in run.values]
            # Recipes of stand-ins have no `paper` numbers: those belong to the original task.
            numbers = results.recipe.paper
            paper = {str(row): numbers[str(row)] for row in results.rows if numbers.get(str(row)) is not None}
            metric = "accuracy, %" if results.scale.sign > 0 else "perplexity"
            panels.append({"title": item.title, "split": f"{split} {metric}", "dots": dots, "paper": paper})
    return Picture("evidence-accuracy", panels, draw_endpoints)


def differences(experiments: list[ExperimentResults]) -> Picture:
    """Plot every measured difference with its interval, the margin and the paper's difference."""
    panels = []
    for title, judge in (("half the heads", judge_half), ("the same number of heads", judge_same)):
        lines = []
        for item in experiments:
            for verdict in judge(item):
                result = verdict.difference
                if result is not None:
                    label = f"{'control: ' if verdict.control else ''}{verdict}   {item.title}"
                    stand_in = item.results.recipe.name in STANDS_FOR
                    paper = None if stand_in else paper_difference(item, verdict.first, verdict.second)
                    numbers = (result.difference, result.half_width, paper)
                    values = [None if number is None else round(number, 6) for number in numbers]
                    lines.append([label, verdict.verdict, verdict.control, *values])
        panels.append({"title": title, "lines": lines})
    return Picture(
        "evidence-differences", {"panels": panels, "margin": SCALES["classification"].margin}, draw_differences
    )


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_curves(panels: list[dict[str, Any]]) -> Figure:
    """Draw a panel per task, with the names of the models at the ends of their lines."""
    count = -(-max(1, len(panels)) // CURVES_PER_LINE)
    figure, axes = _pyplot().subplots(
        count, CURVES_PER_LINE, figsize=(8.8, 2.7 * count), squeeze=False, constrained_layout=True
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes.flat, panels, strict=False):
        for line in panel["lines"]:
            row = ModelSpec.parse(line["row"])
            is_half = row.heads < max(ModelSpec.parse(other["row"]).heads for other in panel["lines"])
            style = (0, (4, 1.5)) if is_half and row.variant == "softmax" else "-"
            axis.plot(*line["curve"], linestyle=style, color=colour_of(row.variant), linewidth=1.5)
        metric = panel["lines"][0]["metric"]
        if metric == "perplexity":
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
        axis.set_title(panel["title"], fontsize=10)
        axis.set_ylabel(f"dev {metric}", fontsize=9)
        axis.set_xlabel("step", fontsize=9)
        axis.tick_params(labelsize=8, which="both")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        ends = []
        for line in panel["lines"]:
            row = line["row"]
            x, y = (values[-1] for values in line["curve"])
            ends.append(End(x, y, f"{row}{', 1 seed' if line['seeds'] == 1 else ''}", colour_of(row.partition(":")[0])))
        label_ends(axis, ends)
    return figure


def draw_endpoints(panels: list[dict[str, Any]]) -> Figure:
    """Draw the panels with dots for at least MIN_MODELS models."""
    panels = [panel for panel in panels if len({name for name, *_ in panel["dots"]}) >= MIN_MODELS]
    counts = [len({name for name, *_ in panel["dots"]}) for panel in panels] or [1]
    starts = range(0, len(counts), PANELS_PER_LINE)
    heights = [1.1 + 0.27 * max(counts[start : start + PANELS_PER_LINE]) for start in starts]
    figure, axes = _pyplot().subplots(
        len(heights), PANELS_PER_LINE, figsize=(8.8, sum(heights)), squeeze=False,
        constrained_layout=True, gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes.flat, panels, strict=False):
        names = list(dict.fromkeys(name for name, *_ in panel["dots"]))
        for name, value, learnt in panel["dots"]:
            colour = colour_of(ModelSpec.parse(name).variant)
            axis.plot(value, names.index(name), "o", color=colour, markerfacecolor=colour if learnt else "none")
        for name, value in panel["paper"].items():
            axis.plot(value, names.index(name), "x", color="black")
        axis.set_yticks(range(len(names)), names, fontsize=9)
        for label in axis.get_yticklabels():
            label.set_color(colour_of(ModelSpec.parse(label.get_text()).variant))
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.margins(x=0.1)
        axis.tick_params(axis="x", labelsize=9)
        axis.set_xlabel(panel["split"], fontsize=9)
        axis.set_title(panel["title"].replace(" (", "\n(", 1), fontsize=10)
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("each seed: ● learnt the task, ○ did not; ×: the paper's number", fontsize=10)
    return figure


def draw_differences(data: dict[str, Any]) -> Figure:
    """Draw a panel per claim, a line per pair of models."""
    panels = data["panels"]
    counts = [max(1, len(panel["lines"])) for panel in panels]
    figure, axes = _pyplot().subplots(
        len(panels), 1, figsize=(8.8, 1.8 + 0.23 * sum(counts)), sharex=True, squeeze=False,
        gridspec_kw={"height_ratios": counts}, constrained_layout=True,
    )  # fmt: skip
    for axis, panel, count in zip(axes[:, 0], panels, counts, strict=True):
        _draw_pairs(axis, panel["lines"])
        axis.set_ylim(count - 0.5, -0.5)
        axis.set_title(f"{panel['title']}, minus the baseline", fontsize=11)
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].axvline(-data["margin"], color="black", linewidth=0.8, linestyle=":")
    # The points set the scale: intervals of models that rarely learn are many times longer than all differences.
    largest = max((abs(line[3]) for panel in panels for line in panel["lines"]), default=1.0)
    bound = max(1.1 * largest, 2 * data["margin"])
    axes[-1, 0].set_xlim(-bound, bound)
    words = "difference in points, for language models in 100 × nats per token; to the right of 0 is better\n"
    words += "bars: 95 % interval, if known, cut at the frame; "
    figure.supxlabel(
        f"{words}dotted: the margin; pale: controls\n● holds, ○ undecided, ✖ does not hold, × the paper's difference",
        fontsize=9,
    )
    return figure


def _draw_pairs(axis: Any, lines: list[list[Any]]) -> None:
    """Draw a difference with its interval per line, the pairs on the left and the tasks on the right."""
    previous = None
    names = []
    for position, (label, verdict, control, difference, width, paper) in enumerate(lines):
        name, _, task = label.partition("   ")
        names.append(name)
        marker, colour = VERDICT_MARKERS.get(verdict), _colour_of_pair(name)
        axis.errorbar(
            difference, position, xerr=width or None, fmt=marker or "o", color=colour, capsize=2, markersize=6,
            markerfacecolor=colour if marker else "white", alpha=0.55 if control else 1.0,
        )  # fmt: skip
        if paper is not None:
            axis.plot(paper, position, "x", color="black", markersize=5)
        # The name of the task stands once, at its first line.
        if task != previous:
            axis.axhline(position - 0.5, color="#cccccc", linewidth=0.8)
            short = re.sub(r"\((\S+) stand-in, ", "(", task)
            axis.annotate(
                textwrap.fill(short, 26), xy=(1.01, position - 0.42), xycoords=("axes fraction", "data"), va="top",
                fontsize=9, annotation_clip=False,
            )  # fmt: skip
            previous = task
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(names)), names, fontsize=9)
    for label, name in zip(axis.get_yticklabels(), names, strict=True):
        label.set_color(_colour_of_pair(name))


def _colour_of_pair(name: str) -> str:
    """Return the colour of the first model of a pair such as "control: softmax:4 − softmax:8"."""
    return colour_of(ModelSpec.parse(name.removeprefix("control: ").partition(" − ")[0]).variant)
