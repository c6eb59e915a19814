"""Pictures of the trainings: how they went, and where each seed ended."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.paper import verdicts
from experiments.paper.claims import ExperimentResults, half, paper_difference, same
from experiments.paper.recipe_results import PRESET, SCALES, STANDS_FOR
from mgk._core.io import replacing
from mgk.analysis.report.curves import read_metrics
from mgk.training.config import ModelSpec
from mgk.training.results import curve_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of a picture's file: a digest of the numbers drawn, so that one sees whether it is still the picture of the results.
DRAWN_FROM = "Drawn from"
COLOURS = {"softmax": "black", "mgk": "tab:blue", "smgk": "tab:orange", "linear": "grey", "mlk": "tab:green"}
VERDICT_COLOURS = {verdicts.HOLDS: "tab:green", verdicts.FAILS: "tab:red"}
STYLES = {8: "-", 4: "--", 2: "-.", 1: ":"}
NAMES_A_COLUMN = 12  # of a legend
PANELS_A_LINE = 4


@dataclass(frozen=True)
class Picture:
    """What is drawn, as plain numbers, and the function that draws it."""

    name: str
    data: Any
    draw: Callable[[Any], Figure]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.data, sort_keys=True).encode()).hexdigest()[:16]

    def write(self, folder: Path) -> Path:
        from matplotlib import pyplot

        figure, path = self.draw(self.data), folder / f"{self.name}.png"
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=110, format="png", metadata={DRAWN_FROM: self.digest, "Software": None})
        pyplot.close(figure)
        return path


def curves(parts: list[ExperimentResults], results: Path) -> Picture:
    """Loss and metric of the development set against the step, as in Fig. 1 and 4, of tasks with several models."""
    panels = []
    for part in parts:
        lines = []
        for row in part.rows:
            for seed, path in curve_files(results, part.found.recipe.name, row, PRESET).items():
                own = {c.metric: c for c in read_metrics(path, str(row)) if c.split == "dev"}
                values = {metric: [curve.steps, curve.values] for metric, curve in own.items()}
                lines.append({"row": str(row), "seed": str(seed), "metrics": values})
        if len({line["row"] for line in lines}) > 1:
            panels.append({"title": part.title, "lines": lines})
    return Picture("evidence-curves", panels, draw_curves)


def ends(parts: list[ExperimentResults]) -> Picture:
    """Where each seed ended, on the set that decides, beside the paper's number."""
    panels = []
    for part in parts:
        if part.found.runs:
            split = max(part.found.runs[0].examples, key=lambda name: part.found.runs[0].examples[name])
            dots = [[str(run.row), run.values[split], run.learnt] for run in part.found.runs if split in run.values]
            # A stand-in's values are of another task than the paper's.
            paper = {str(row): v for row in part.found.rows if (v := part.found.recipe.paper.get(str(row))) is not None}
            shown = "accuracy, %" if part.found.scale.sign > 0 else "perplexity"
            panels.append({"title": part.title, "split": f"{split} {shown}", "dots": dots, "paper": paper})
    return Picture("evidence-accuracy", panels, draw_ends)


def differences(parts: list[ExperimentResults]) -> Picture:
    """Every pair that was measured: the difference with its interval, the margin, and the paper's difference."""
    panels = []
    for title, judge in (("half the heads", half), ("as many heads", same)):
        lines = []
        for part in parts:
            for each in judge(part):
                found = each.compared
                if found is not None:
                    label = f"{'control: ' if each.control else ''}{each}   {part.title}"
                    paper = (
                        None if part.found.recipe.name in STANDS_FOR else paper_difference(part, each.ours, each.theirs)
                    )
                    values = [None if v is None else round(v, 6) for v in (found.difference, found.half_width, paper)]
                    lines.append([label, each.verdict, each.control, *values])
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
    """A row for each task: the loss, the metric, and the names beside them."""
    count = max(1, len(panels))
    figure, axes = _pyplot().subplots(count, 2, figsize=(10.5, 2.5 * count), squeeze=False, constrained_layout=True)
    for places, panel in zip(axes, panels, strict=False):
        for line in panel["lines"]:
            row, metrics = ModelSpec.parse(line["row"]), line["metrics"]
            colour, style = COLOURS.get(row.variant.split("-")[0], "tab:purple"), STYLES.get(row.heads, "-")
            others = [metric for metric in metrics if metric != "loss"]
            dots = None if row.kv_heads is None else "."
            for axis, metric in zip(places, ["loss", *others], strict=False):
                if metric in metrics:
                    axis.plot(*metrics[metric], style, color=colour, marker=dots, linewidth=1, label=line["row"])
                    axis.set_ylabel(f"dev {metric}", fontsize=8)
                    if metric == "perplexity":
                        axis.set_yscale("log")
                        axis.yaxis.set_major_formatter("{x:g}")
                        axis.yaxis.set_minor_formatter("{x:g}")
        places[0].set_title(panel["title"], fontsize=9, loc="left")
        for axis in places:
            axis.tick_params(labelsize=7, which="both")
            axis.set_xlabel("step", fontsize=8)
        # Seeds of a model have one name.
        handles, labels = places[1].get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True))
        columns = -(-len(named) // NAMES_A_COLUMN)
        places[1].legend(
            named.values(), named, fontsize=7, ncols=columns, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False
        )
    return figure


def draw_ends(panels: list[dict[str, Any]]) -> Figure:
    counts = [len({name for name, *_ in panel["dots"]}) for panel in panels] or [1]
    starts = range(0, len(counts), PANELS_A_LINE)
    heights = [1.0 + 0.26 * max(counts[start : start + PANELS_A_LINE]) for start in starts]
    figure, axes = _pyplot().subplots(
        len(heights), PANELS_A_LINE, figsize=(3.0 * PANELS_A_LINE, sum(heights)), squeeze=False,
        constrained_layout=True, gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes.flat, panels, strict=False):
        names = list(dict.fromkeys(name for name, *_ in panel["dots"]))
        for name, value, learnt in panel["dots"]:
            face = "tab:blue" if learnt else "none"
            axis.plot(value, names.index(name), "o", color="tab:blue", markerfacecolor=face)
        for name, value in panel["paper"].items():
            axis.plot(value, names.index(name), "x", color="black")
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.margins(x=0.1)
        axis.set_xlabel(panel["split"], fontsize=8)
        axis.set_title(panel["title"].replace(" (", "\n(", 1), fontsize=9)
        axis.grid(axis="x", alpha=0.3)
    return figure


def draw_differences(data: dict[str, Any]) -> Figure:
    panels = data["panels"]
    counts = [max(1, len(panel["lines"])) for panel in panels]
    figure, axes = _pyplot().subplots(
        len(panels), 1, figsize=(8, 1.4 + 0.27 * sum(counts)), sharex=True, squeeze=False,
        gridspec_kw={"height_ratios": counts}, constrained_layout=True,
    )  # fmt: skip
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        for place, (_, verdict, control, difference, width, paper) in enumerate(panel["lines"]):
            colour = VERDICT_COLOURS.get(verdict, "grey")
            axis.errorbar(difference, place, xerr=width or None, fmt="s" if control else "o", color=colour, capsize=3)
            if paper is not None:
                axis.plot(paper, place, "x", color="black")
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(panel["lines"])), [label for label, *_ in panel["lines"]], fontsize=8)
        axis.set_ylim(counts[panels.index(panel)] - 0.5, -0.5)
        axis.set_title(f"{panel['title']}, minus the baseline", fontsize=9)
        axis.grid(axis="x", alpha=0.3)
    axes[0, 0].axvline(-data["margin"], color="black", linewidth=0.8, linestyle=":")
    axes[-1, 0].margins(x=0.08)
    words = "points (language model: 100 × nats a token) with the 95 % interval, none where it is not known\n"
    figure.supxlabel(
        f"{words}green: holds, red: does not hold, grey: cannot be told; ×: the paper's difference; dotted: the margin",
        fontsize=8,
    )
    return figure
