"""Figures of an analysis as PNG and SVG files, drawn with matplotlib."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from mgk._core.io import replacing
from mgk._core.palette import colour_of
from mgk.analysis.analyse import Analysis
from mgk.analysis.attention_maps import PALETTE
from mgk.analysis.flops import ModelCost
from mgk.analysis.report.curves import Curve

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.colors import ListedColormap

DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5)))
STYLES: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 9,
    # Keep text as text in SVG files, and make the files reproducible.
    "svg.fonttype": "none",
    "svg.hashsalt": "mgk",
}
FORMATS = ("png", "svg")
LETTERS_PER_INCH = 13  # of a title
MAX_RANK_LAYERS = 6


def _save(figure: Any, directory: Path, name: str) -> list[str]:
    directory.mkdir(parents=True, exist_ok=True)
    for kind in FORMATS:
        metadata = {"Date": None} if kind == "svg" else {}
        with matplotlib.rc_context(STYLES), replacing(directory / f"{name}.{kind}") as temporary:
            figure.savefig(temporary, format=kind, dpi=150, metadata=metadata)
    pyplot.close(figure)
    return [f"{name}.{kind}" for kind in FORMATS]


def _grid(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    with matplotlib.rc_context(STYLES):
        return pyplot.subplots(
            rows, columns, figsize=(width * columns, height * rows), squeeze=False, constrained_layout=True
        )


def literal(text: str) -> str:
    """Escape the dollar signs of a text, between which matplotlib would parse TeX."""
    return text.replace("$", r"\$")


def _title(figure: Any, title: str) -> None:
    """Set the title above all panels, wrapped to the width of the figure."""
    figure.suptitle(literal(textwrap.fill(title, int(LETTERS_PER_INCH * figure.get_figwidth()))), fontsize=9)


def _line_styles(variants: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the style of each model's line: the colour of its variant, dashes and widths that differ.

    Later lines are thinner and dashed, so that coinciding lines stay visible.
    """
    return {
        model: {
            "color": colour_of(variant),
            "linestyle": DASHES[number % len(DASHES)],
            "linewidth": min(4.0, 1.4 + 0.9 * (len(variants) - 1 - number)),
        }
        for number, (model, variant) in enumerate(variants.items())
    }


def _times(rows: int, columns: int) -> str:
    """Return "rows × columns" with no-break spaces."""
    return f"{rows}\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}{columns}"


def draw_maps(analysis: Analysis, model: str, directory: Path, name: str, pooling: str = "mean") -> list[str]:
    """Draw the maps of all heads (across) and layers (down): Fig. 2 left, 5 and 8 of the paper.

    Args:
        analysis: The analysis.
        model: Name of the model, for the title.
        directory: Folder of the files.
        name: File name without extension.
        pooling: "mean" or "max".

    Returns:
        The names of the files.
    """
    columns = max(layer.heads for layer in analysis.layers)
    figure, axes = _grid(len(analysis.layers), columns, 1.6, 1.7)
    for number, layer in enumerate(analysis.layers):
        for head in range(columns):
            panel = axes[number][head]
            panel.set_axis_off()
            if head < layer.heads:
                levels = layer.maps.pooled[pooling][head]
                colours = ListedColormap(np.frombuffer(PALETTE, np.uint8).reshape(256, 3) / 255)
                panel.imshow(levels, cmap=colours, vmin=0, vmax=255, interpolation="nearest", aspect="auto")
                panel.set_title(f"layer {number + 1}, head {head + 1}", fontsize=7)
    maps = analysis.layers[0].maps
    pooled = "" if maps.factor == 1 else f", {pooling} of {_times(maps.factor, maps.factor)}"
    _title(figure, f"{model}: attention maps, {_times(maps.queries, maps.keys)}{pooled}")
    return _save(figure, directory, name)


def spread(depth: int, most: int) -> list[int]:
    """Return at most `most` of `depth` layer numbers, evenly spaced, with the first and the last."""
    return [round(position) for position in np.linspace(0, depth - 1, min(depth, most))]


def draw_ranks(analyses: dict[str, Analysis], variants: dict[str, str], directory: Path, name: str) -> list[str]:
    """Draw histograms of ranks (above) and effective ranks (below), one column per layer.

    Fig. 2 right and 6 of the paper. At most `MAX_RANK_LAYERS` layers are drawn.

    Args:
        analyses: Analyses by model name.
        variants: Variants by model name, in the order of their styles.
        directory: Folder of the files.
        name: File name without extension.

    Returns:
        The names of the files.
    """
    styles = _line_styles(variants)
    depth = max(len(analysis.layers) for analysis in analyses.values())
    layers = spread(depth, MAX_RANK_LAYERS)
    figure, axes = _grid(2, len(layers), 3.0, 2.2)
    for column, number in enumerate(layers):
        for row, measure in enumerate(("rank", "effective")):
            panel = axes[row][column]
            percentages = {
                model: 100 * getattr(analysis.layers[number].ranks, measure) / analysis.layers[number].ranks.size
                for model, analysis in analyses.items()
                if number < len(analysis.layers) and len(analysis.layers[number].ranks.rank)
            }
            for model, values in percentages.items():
                bins: dict[str, Any] = {
                    "bins": np.linspace(0, 100, 26),
                    "weights": np.full(len(values), 100 / len(values)),
                }
                panel.hist(values, histtype="stepfilled", alpha=0.12, color=styles[model]["color"], **bins)
                panel.hist(values, histtype="step", label=literal(model), **styles[model], **bins)
            panel.set_xlabel(f"{'rank' if measure == 'rank' else 'effective rank'}, % of the matrix's size", fontsize=8)
            panel.set_ylabel("% of matrices", fontsize=8)
            panel.set_title(f"layer {number + 1}", fontsize=8)
    axes[0][0].legend(fontsize=7, frameon=False)
    return _save(figure, directory, name)


def draw_similarity(analysis: Analysis, model: str, directory: Path, name: str) -> list[str]:
    """Draw the similarity of the heads of each layer, with similar heads adjacent.

    Args:
        analysis: The analysis.
        model: Name of the model, for the title.
        directory: Folder of the files.
        name: File name without extension.

    Returns:
        The names of the files.
    """
    depth = len(analysis.layers)
    columns = min(depth, 4)
    figure, axes = _grid(math.ceil(depth / columns), columns, 2.3, 2.4)
    for number, panel in enumerate(axes.flat):
        panel.grid(visible=False)
        if number >= depth:
            panel.set_axis_off()
            continue
        similarity = analysis.layers[number].similarity
        order = similarity.order
        image = panel.imshow(1 - similarity.divergence[np.ix_(order, order)], vmin=0, vmax=1, cmap="Blues")
        panel.set_xticks(range(len(order)), [str(head + 1) for head in order], fontsize=6)
        panel.set_yticks(range(len(order)), [str(head + 1) for head in order], fontsize=6)
        panel.set_title(f"layer {number + 1}: {similarity.different['maps']:.1f} of {len(order)} different", fontsize=8)
    figure.colorbar(image, ax=axes, label="1 − Jensen–Shannon divergence", shrink=0.8)
    _title(figure, f"{model}: similarity of the heads")
    return _save(figure, directory, name)


def draw_curves(curves: list[Curve], variants: dict[str, str], directory: Path, name: str) -> list[str]:
    """Draw every metric against the step, one line per run: Fig. 1 and 4 of the paper.

    Args:
        curves: Learning curves of all runs.
        variants: Variants by name of the run, in the order of their styles.
        directory: Folder of the files.
        name: File name without extension.

    Returns:
        The names of the files.
    """
    styles = _line_styles(variants)
    panels = list(dict.fromkeys((curve.metric, curve.split) for curve in curves))
    columns = min(len(panels), 2)
    figure, axes = _grid(math.ceil(len(panels) / columns), columns, 3.6, 2.6)
    for panel in list(axes.flat)[len(panels) :]:
        panel.set_axis_off()
    for (metric, split), panel in zip(panels, axes.flat, strict=False):
        for curve in (c for c in curves if (c.metric, c.split) == (metric, split)):
            panel.plot(curve.steps, curve.values, label=literal(curve.run), **styles[curve.run])
        # Nearly constant values would be labelled with their differences from an offset.
        panel.ticklabel_format(axis="y", useOffset=False)
        panel.set_xlabel("step")
        panel.set_title(literal(f"{metric}, {split}"), fontsize=9)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, frameon=False, loc="outside lower center")
    return _save(figure, directory, name)


def draw_costs(
    lines: dict[str, list[tuple[int, ModelCost]]], directory: Path, name: str, title: str, label: str
) -> list[str]:
    """Draw FLOPs (left) and parameters (right): Fig. 3 and 7 of the paper.

    Args:
        lines: Points of each line, (x, cost), by the name of the line.
        directory: Folder of the files.
        name: File name without extension.
        title: Title of the figure.
        label: Label of the x axis.

    Returns:
        The names of the files.
    """
    figure, axes = _grid(1, 2, 3.8, 2.9)
    ticks = sorted({x for points in lines.values() for x, _ in points})
    measures = (("flops", 1e9, "GFLOPs of one forward"), ("params", 1e3, "parameters, thousands"))
    for panel, (measure, unit, description) in zip(axes[0], measures, strict=True):
        for number, (line, points) in enumerate(lines.items()):
            style = {"marker": "osD^v<>p"[number % 8], "color": colour_of(points[0][1].variant), "label": literal(line)}
            values = [getattr(cost, measure) / unit for _, cost in points]
            # Later lines are thinner, so that coinciding lines stay visible.
            linewidth = 1.5 + 1.2 * (len(lines) - 1 - number)
            x = [x for x, _ in points]
            panel.plot(x, values, markersize=3 + linewidth, linewidth=linewidth, alpha=0.75, **style)
        panel.set_xlabel(label)
        panel.set_ylabel(description)
        panel.set_ylim(bottom=0)
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        panel.minorticks_off()
    axes[0][0].legend(fontsize=7, frameon=False)
    _title(figure, title)
    return _save(figure, directory, name)


def draw_all(
    directory: Path, analyses: dict[str, Analysis], curves: list[Curve], variants: dict[str, str] | None = None
) -> list[str]:
    """Draw all figures that accompany a report.

    Args:
        directory: Folder of the files.
        analyses: Analyses by model name.
        curves: Learning curves of all runs.
        variants: Variants by model name, which decide the colours. Default: other variants.

    Returns:
        The names of the files.
    """
    names = [*analyses, *(curve.run for curve in curves)]
    variants = {name: (variants or {}).get(name, "") for name in names}
    written = []
    for number, (model, analysis) in enumerate(analyses.items()):
        suffix = "" if len(analyses) == 1 else f"-{number + 1}"
        written += draw_maps(analysis, model, directory, f"maps{suffix}")
        written += draw_similarity(analysis, model, directory, f"similarity{suffix}")
    written += draw_ranks(analyses, variants, directory, "ranks")
    return written + (draw_curves(curves, variants, directory, "curves") if curves else [])
