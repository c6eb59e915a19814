"""Figures of an analysis as PNG and SVG files, drawn with matplotlib."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from mgk._core.io import replacing
from mgk._core.palette import colour_of
from mgk.analysis.analyse import Analysis
from mgk.analysis.attention_maps import LOWEST, PALETTE, Maps
from mgk.analysis.flops import ModelCost
from mgk.analysis.layer import Ranks
from mgk.analysis.report.curves import Curve
from mgk.analysis.report.drawing import End, label_ends, save_png, shorten_names
from mgk.analysis.similarity import Similarity

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.colors import ListedColormap
from matplotlib.ticker import LogLocator

DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5)))
STYLES: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "grid.alpha": 0.25,
    "font.size": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    # Keep text as text in SVG files, and make the files reproducible.
    "svg.fonttype": "none",
    "svg.hashsalt": "mgk",
}
DPI = 140  # of PNG files
MAP_DPI = 110  # maps are mostly noise, which PNG files do not compress
MIN_TICK_LEVEL = 12  # of a colour bar of maps: lower ticks overlap that of 0
WIDTH = 8.8  # inches, the widest figure: text of 9 points is legible where it is shown in 880 pixels
LETTERS_PER_INCH = 13  # of a title
MAX_LAYERS = 4  # of figures with a panel per layer
RANK_BINS = 40
# Possible ends of the axis of a histogram of ranks, in % of the full rank.
LOW_ENDS, HIGH_ENDS = (90, 80, 50, 0), (5, 10, 25, 50, 100)
# Lines closer than this, relative to the values, are drawn with alternating dashes.
SAME_LINE = 0.01
DASH = 7.0  # length of such a dash, in line widths


def _save(figure: Any, directory: Path, name: str, dpi: int = DPI) -> list[str]:
    directory.mkdir(parents=True, exist_ok=True)
    save_png(figure, directory / f"{name}.png", dpi)
    with matplotlib.rc_context(STYLES), replacing(directory / f"{name}.svg") as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return [f"{name}.png", f"{name}.svg"]


def _grid(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """Return a figure and its panels; width and height are those of the figure, in inches."""
    return pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, constrained_layout=True, **options)


def escape_dollars(text: str) -> str:
    """Escape the dollar signs of a text: matplotlib would parse TeX between them."""
    return text.replace("$", r"\$")


def _title(figure: Any, title: str) -> None:
    """Set the title above all panels, wrapped to the width of the figure."""
    figure.suptitle(escape_dollars(textwrap.fill(title, int(LETTERS_PER_INCH * figure.get_figwidth()))), fontsize=10)


def _line_styles(variants: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the style of each model's line: the colour of its variant, and dashes for further models of a variant."""
    styles = {}
    for number, (model, variant) in enumerate(variants.items()):
        earlier = list(variants.values())[:number].count(variant)
        styles[model] = {"color": colour_of(variant), "linestyle": DASHES[earlier % len(DASHES)], "linewidth": 1.6}
    return styles


def _format_size(rows: int, columns: int) -> str:
    """Return "rows × columns" with no-break spaces."""
    return f"{rows}\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}{columns}"


def spaced_layers(depth: int, most: int) -> list[int]:
    """Return at most `most` of `depth` layer numbers, evenly spaced, with the first and the last."""
    return [round(position) for position in np.linspace(0, depth - 1, min(depth, most))]


def draw_maps(analysis: Analysis, model: str, directory: Path, name: str, pooling: str = "mean") -> list[str]:
    """Draw the maps of all heads (across) and at most `MAX_LAYERS` layers (down): Fig. 2 left, 5 and 8 of the paper.

    Args:
        analysis: The analysis.
        model: Name of the model, for the title.
        directory: Folder of the files.
        name: File name without extension.
        pooling: "mean" or "max".

    Returns:
        The names of the files.
    """
    return draw_layer_maps([layer.maps for layer in analysis.layers], model, directory, name, pooling)


@matplotlib.rc_context(STYLES)
def draw_layer_maps(layers: Sequence[Maps], model: str, directory: Path, name: str, pooling: str = "mean") -> list[str]:
    """Draw the maps of each layer, as `draw_maps` does."""
    columns = max(len(maps.pooled[pooling]) for maps in layers)
    shown = spaced_layers(len(layers), MAX_LAYERS)
    side = min(2.0, (WIDTH - 1.2) / columns)
    figure, axes = _grid(len(shown), columns, 1.2 + side * columns, 0.9 + 0.95 * side * len(shown))
    colours = ListedColormap(np.frombuffer(PALETTE, np.uint8).reshape(256, 3) / 255)
    image = None
    for row, number in enumerate(shown):
        maps = layers[number]
        for head, panel in enumerate(axes[row]):
            if head >= len(maps.pooled[pooling]):
                panel.set_axis_off()
                continue
            image = panel.imshow(
                maps.pooled[pooling][head], cmap=colours, vmin=0, vmax=255, interpolation="nearest", aspect="auto",
                extent=(0, maps.keys, maps.queries, 0),
            )  # fmt: skip
            panel.grid(visible=False)
            panel.set_xticks([0, maps.keys] if row == len(shown) - 1 else [])
            panel.set_yticks([0, maps.queries] if head == 0 else [])
            if row == 0:
                panel.set_title(f"head {head + 1}")
        axes[row][0].set_ylabel(f"layer {number + 1}\nquery")
    for panel in axes[-1]:
        panel.set_xlabel("key", labelpad=-6)
    maps = layers[0]
    _weight_scale(figure.colorbar(image, ax=axes, aspect=30, pad=0.02), maps.keys)
    pooled = "" if maps.factor == 1 else f", {pooling} of {_format_size(maps.factor, maps.factor)}"
    layer_names = "" if len(shown) == len(layers) else f", {len(shown)} of {len(layers)} layers"
    _title(figure, f"{model}: attention maps, {_format_size(maps.queries, maps.keys)}{pooled}{layer_names}")
    return _save(figure, directory, name, MAP_DPI)


def _weight_scale(bar: Any, keys: int) -> None:
    """Label a colour bar of levels with the weights that they stand for."""
    highest = math.log10(max(keys, 1))
    levels = {power: 1 + 254 * (power + highest - LOWEST) / (highest - LOWEST) for power in range(-9, 1)}
    ticks = {level: f"{10.0**power:g}" for power, level in levels.items() if level > MIN_TICK_LEVEL}
    bar.set_ticks([0, *ticks], labels=["0", *ticks.values()])
    bar.set_label(f"attention weight (uniform: 1/{keys})", fontsize=9)
    bar.outline.set_visible(False)


@matplotlib.rc_context(STYLES)
def draw_ranks(ranks: dict[str, list[Ranks]], variants: dict[str, str], directory: Path, name: str) -> list[str]:
    """Draw histograms of ranks (above) and effective ranks (below), a column per layer and a row per model.

    Fig. 2 right and 6 of the paper. At most `MAX_LAYERS` layers are drawn.

    Args:
        ranks: Ranks of the layers by model name.
        variants: Variants by model name.
        directory: Folder of the files.
        name: File name without extension.

    Returns:
        The names of the files.
    """
    depth = max(map(len, ranks.values()))
    layers = spaced_layers(depth, MAX_LAYERS)
    short, shared = shorten_names(list(ranks))
    figure, axes = _grid(2, len(layers), WIDTH if len(layers) > 1 else 5, 1.6 + 0.9 * len(ranks), sharey=True)
    for row, measure in enumerate(("rank", "effective")):
        percentages = {
            (model, number): 100 * getattr(of_layers[number], measure) / of_layers[number].size
            for model, of_layers in ranks.items()
            for number in layers
            if number < len(of_layers) and len(of_layers[number].rank)
        }
        edges = _rank_bins(np.concatenate(list(percentages.values())))
        for panel, number in zip(axes[row], layers, strict=True):
            for position, model in enumerate(ranks):
                if (model, number) in percentages:
                    values = percentages[model, number]
                    _draw_histogram(panel, values, edges, position, colour_of(variants[model]))
            panel.set_ylim(len(ranks) - 0.9, -1)
            panel.set_xlim(1.01 * edges[0] - 0.01 * edges[-1], 1.01 * edges[-1] - 0.01 * edges[0])
            panel.tick_params(axis="y", length=0)
            panel.spines["left"].set_visible(False)
            panel.grid(axis="y", visible=False)
            panel.set_xlabel("rank, %" if measure == "rank" else "effective rank, %")
            if row == 0:
                panel.set_title(f"layer {number + 1}")
        axes[row][0].set_yticks(range(len(ranks)), [escape_dollars(short[model]) for model in ranks], fontsize=9)
        for label, model in zip(axes[row][0].get_yticklabels(), ranks, strict=True):
            label.set(color=colour_of(variants[model]), va="bottom")
    size = int(next(of.size.max() for of_layers in ranks.values() for of in of_layers if len(of.size)))
    count = max(len(of.rank) for of_layers in ranks.values() for of in of_layers)
    words = f"{count:,} matrices per layer; % of the full rank, {size:,}; scaled to equal height; bar: median"
    _title(figure, f"{shared}: {words}" if shared else words)
    return _save(figure, directory, name)


def _rank_bins(percentages: Any) -> Any:
    """Return the edges of the bins of a histogram of all these percentages."""
    high = next(end for end in HIGH_ENDS if end >= percentages.max() or end == HIGH_ENDS[-1])
    low = next(end for end in LOW_ENDS if end <= percentages.min()) if high == HIGH_ENDS[-1] else 0
    return np.linspace(low, high, RANK_BINS + 1)


def _draw_histogram(panel: Any, values: Any, edges: Any, position: int, colour: str) -> None:
    """Draw a histogram that stands on a line of the panel."""
    counts, _ = np.histogram(values, edges)
    top = position - 0.85 * counts / max(1, counts.max())
    panel.stairs(top, edges, baseline=position, fill=True, color=colour, alpha=0.35, linewidth=0)
    panel.stairs(top, edges, baseline=position, color=colour, linewidth=1)
    panel.plot([np.median(values)] * 2, [position, position - 0.85], color=colour, linewidth=2)


@matplotlib.rc_context(STYLES)
def draw_similarity(layers: Sequence[Similarity], model: str, directory: Path, name: str) -> list[str]:
    """Draw the similarity of the heads of each layer, with similar heads adjacent.

    Args:
        layers: Similarities of the layers.
        model: Name of the model, for the title.
        directory: Folder of the files.
        name: File name without extension.

    Returns:
        The names of the files.
    """
    columns = min(len(layers), 4)
    rows = math.ceil(len(layers) / columns)
    figure, axes = _grid(rows, columns, max(4.0, 0.8 + 2 * columns), 0.6 + 2.1 * rows)
    for number, panel in enumerate(axes.flat):
        panel.grid(visible=False)
        if number >= len(layers):
            panel.set_axis_off()
            continue
        similarity = layers[number]
        order = similarity.order
        image = panel.imshow(1 - similarity.divergence[np.ix_(order, order)], vmin=0, vmax=1, cmap="Blues")
        panel.set_xticks(range(len(order)), [str(head + 1) for head in order], fontsize=7)
        panel.set_yticks(range(len(order)), [str(head + 1) for head in order], fontsize=7)
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
        panel.set_title(f"layer {number + 1}: {similarity.different['maps']:.1f} of {len(order)} different", fontsize=8)
        if number % columns == 0:
            panel.set_ylabel("head", fontsize=8)
        if number + columns >= len(layers):
            panel.set_xlabel("head", fontsize=8)
    figure.colorbar(image, ax=axes, label="1 − Jensen–Shannon divergence", shrink=0.9, aspect=12 * rows)
    _title(figure, f"{model}: similarity of the heads' maps")
    return _save(figure, directory, name)


@matplotlib.rc_context(STYLES)
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
    short, shared = shorten_names([curve.run for curve in curves])
    panels = list(dict.fromkeys((curve.metric, curve.split) for curve in curves))
    columns = min(len(panels), 2)
    rows = math.ceil(len(panels) / columns)
    figure, axes = _grid(rows, columns, WIDTH * columns / 2, 0.4 + 2.5 * rows)
    if shared:
        _title(figure, shared)
    for panel in list(axes.flat)[len(panels) :]:
        panel.set_axis_off()
    for (metric, split), panel in zip(panels, axes.flat, strict=False):
        for curve in (c for c in curves if (c.metric, c.split) == (metric, split)):
            panel.plot(curve.steps, curve.values, **styles[curve.run])
        if metric.startswith("perplexity"):
            panel.set_yscale("log")
            panel.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter("{x:g}")
            panel.tick_params(axis="y", which="minor", labelsize=8)
        else:
            # Nearly constant values would be labelled with their differences from an offset.
            panel.ticklabel_format(axis="y", useOffset=False)
        panel.set_xlabel("step")
        panel.set_title(escape_dollars(f"{metric}, {split}"))
    for (metric, split), panel in zip(panels, axes.flat, strict=False):
        ends = [
            End(curve.steps[-1], curve.values[-1], escape_dollars(short[curve.run]), styles[curve.run]["color"])
            for curve in curves
            if (curve.metric, curve.split) == (metric, split)
        ]
        label_ends(panel, ends)
    return _save(figure, directory, name)


@matplotlib.rc_context(STYLES)
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
    figure, axes = _grid(1, 2, WIDTH, 3.4)
    _title(figure, title)
    ticks = sorted({x for points in lines.values() for x, _ in points})
    measures = (("flops", 1e9, "GFLOPs of one forward pass"), ("params", 1e3, "parameters, thousands"))
    ends: list[list[End]] = []
    for panel, (measure, unit, description) in zip(axes[0], measures, strict=True):
        values = {line: [getattr(cost, measure) / unit for _, cost in points] for line, points in lines.items()}
        dashes = alternating_dashes(values)
        ends.append([])
        for line, points in lines.items():
            x, colour = [x for x, _ in points], colour_of(points[0][1].variant)
            panel.plot(x, values[line], linestyle=dashes[line], color=colour, linewidth=2)
            panel.plot(x, values[line], "o", color=colour, markersize=3)
            ends[-1].append(End(x[-1], values[line][-1], escape_dollars(line), colour))
        panel.set_xlabel(label)
        panel.set_title(description)
        panel.set_ylim(bottom=0)
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        panel.minorticks_off()
    for panel, of_panel in zip(axes[0], ends, strict=True):
        label_ends(panel, of_panel)
    return _save(figure, directory, name)


def alternating_dashes(values: dict[str, list[float]]) -> dict[str, Any]:
    """Return a line style for each line: coinciding lines have dashes that fill one another's gaps."""
    groups: list[list[str]] = []
    for line, points in values.items():
        same = (
            group for group in groups
            if len(values[group[0]]) == len(points) and np.allclose(values[group[0]], points, rtol=SAME_LINE)
        )  # fmt: skip
        group = next(same, None)
        if group is None:
            groups.append([line])
        else:
            group.append(line)
    return {
        line: "-" if len(group) == 1 else (-DASH * number, (DASH, DASH * (len(group) - 1)))
        for group in groups
        for number, line in enumerate(group)
    }


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
        similarities = [layer.similarity for layer in analysis.layers]
        written += draw_similarity(similarities, model, directory, f"similarity{suffix}")
    ranks = {model: [layer.ranks for layer in analysis.layers] for model, analysis in analyses.items()}
    written += draw_ranks(ranks, variants, directory, "ranks")
    return written + (draw_curves(curves, variants, directory, "curves") if curves else [])
