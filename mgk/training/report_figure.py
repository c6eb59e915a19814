"""Plot of a sweep: scores of the models with every seed, and their costs."""

from __future__ import annotations

import itertools
import statistics
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mgk._core.palette import COLOURS, colour_of
from mgk.training.config import ModelSpec, Recipe
from mgk.training.report import ModelSummary, binomial_half_width, ordered_splits
from mgk.training.sweep import metric_format
from mgk.variants import VARIANTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 8.8  # inches
LINE_WIDTH = 62  # letters of the legend below the scores
# Units of a cost panel, from the largest: the first that makes the largest value at least 1 is used.
COUNT_UNITS = ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))
FLOP_UNITS = ((1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs"))


def sort_key(row: ModelSpec) -> tuple[Any, ...]:
    """Return a sort key that places models with the same numbers of heads together, linear attention last."""
    variant = VARIANTS.get(row.variant)
    is_linear = variant is not None and variant.similarity == "linear"
    order = list(COLOURS).index(row.variant) if row.variant in COLOURS else len(COLOURS)
    return (is_linear, *head_counts(row), order, str(row))


def head_counts(row: ModelSpec) -> tuple[int, int, int]:
    """Return the negated numbers of heads, value heads and key heads."""
    kv_heads = row.kv_heads or row.heads
    return -row.heads, -kv_heads, -(row.key_heads or kv_heads)


def cost_panels(summaries: Sequence[ModelSummary]) -> list[tuple[str, list[float]]]:
    """Return title and values of each cost that is known for all models."""
    panels = []
    for name, units, counts in (
        ("parameters, {}", COUNT_UNITS, [summary.params for summary in summaries]),
        ("{} per forward pass", FLOP_UNITS, [summary.flops for summary in summaries]),
    ):
        unit, unit_name = next((entry for entry in units if entry[0] <= max(counts)), units[-1])
        panels.append((name.format(unit_name), [count / unit for count in counts]))
    times = [summary.step_ms for summary in summaries if summary.step_ms is not None]
    if len(times) == len(summaries):
        panels.append(("training step, ms", times))
    return panels


def make_figure(summaries: Sequence[ModelSummary], recipe: Recipe, chance: float | None = None) -> Figure:
    """Plot the scores and costs of each model, with models of the same numbers of heads together.

    Args:
        summaries: Models of the plot.
        recipe: Recipe of the sweep.
        chance: Accuracy of always predicting the most frequent class.

    Returns:
        A Matplotlib figure with one panel of scores and up to three of costs.
    """
    from matplotlib.figure import Figure

    from mgk.analysis.report.figures import escape_dollars

    summaries = sorted(summaries, key=lambda summary: sort_key(summary.row))
    costs = cost_panels(summaries)
    figure = Figure(figsize=(WIDTH, 1.8 + 0.36 * len(summaries)), layout="constrained")
    panels = figure.subplots(1, 1 + len(costs), sharey=True, squeeze=False, width_ratios=[2.6, *[1] * len(costs)])
    score_axes, *cost_axes = panels[0]
    _plot_scores(score_axes, summaries, recipe, chance)
    colours = [colour_of(summary.row.variant) for summary in summaries]
    for axes, (title, values) in zip(cost_axes, costs, strict=True):
        _plot_costs(axes, values, colours)
        axes.set_title(textwrap.fill(title, 14), fontsize=9)
    for axes in panels[0]:
        axes.tick_params(labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        for y, (above, below) in enumerate(itertools.pairwise(summaries)):
            if head_counts(above.row) != head_counts(below.row):
                axes.axhline(y + 0.5, color="#d0d0d0", linewidth=0.8, zorder=0)
    score_axes.set_yticks(range(len(summaries)), [str(summary.row) for summary in summaries])
    for label, colour in zip(score_axes.get_yticklabels(), colours, strict=True):
        label.set_color(colour)
    score_axes.set_ylim(len(summaries) - 0.5, -0.6)
    figure.suptitle(escape_dollars(textwrap.fill(recipe.title, 100)), fontsize=10)
    return figure


def _plot_costs(axes: Any, values: Sequence[float], colours: Sequence[str]) -> None:
    """Plot a dot and its number per model, on an axis that resolves the differences."""
    from matplotlib.ticker import MaxNLocator

    span = max(values) - min(values) or 0.1 * max(values)
    for y, (value, colour) in enumerate(zip(values, colours, strict=True)):
        axes.plot(value, y, "o", color=colour, markersize=5)
        digits = 4 if span < 0.1 * value else 3
        number = f"{value:,.0f}" if value >= 1000 else f"{value:#.{digits}g}".rstrip(".")
        axes.annotate(
            number, (value, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9, color=colour
        )
    # Space on the right for the numbers.
    axes.set_xlim(min(values) - 0.15 * span, max(values) + 0.9 * span)
    axes.xaxis.set_major_locator(MaxNLocator(2))
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)


def _plot_scores(axes: Any, summaries: Sequence[ModelSummary], recipe: Recipe, chance: float | None) -> None:
    style, split = metric_format(recipe), ordered_splits(list(summaries))[0]
    is_accuracy = style.metric == "accuracy"
    has_excluded = False
    drawn: list[float] = []
    for y, summary in enumerate(summaries):
        scores, colour = summary.scores(split), colour_of(summary.row.variant)
        by_seed = summary.values.get(split, {})
        # The dot is the mean of the ticks; seeds that stayed on the plateau are crosses.
        excluded = [score for seed, score in by_seed.items() if seed not in summary.counted_seeds]
        has_excluded = has_excluded or bool(excluded)
        if len(scores) > 1:
            axes.plot(scores, [y] * len(scores), "|", color=colour, markersize=11, markeredgewidth=1.5)
        axes.plot(excluded, [y] * len(excluded), "x", color=colour, markersize=5, alpha=0.7)
        drawn += [*scores, *excluded]
        if scores:
            mean = statistics.mean(scores)
            # One definition for all models: the deviation over seeds is unknown for those with one seed.
            width = binomial_half_width(mean, summary.examples[split]) if is_accuracy else None
            axes.errorbar(mean, y, xerr=width, fmt="o", markersize=5, elinewidth=1, color=colour)
            axes.annotate(
                f"{mean:.1f}", (mean, y), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=9,
                color=colour,
            )  # fmt: skip
            drawn += [mean - width, mean + width] if width else []
        if str(summary.row) in recipe.paper:
            axes.plot(recipe.paper[str(summary.row)], y, "D", color="black", fillstyle="none", markersize=6)
            drawn.append(recipe.paper[str(summary.row)])
    several = any(len(summary.scores(split)) > 1 for summary in summaries)
    legend = ["● mean over seeds", "| each seed"] if several else ["● one seed"]
    legend += ["line: 95 % interval of the test set"] if is_accuracy else []
    legend += ["◇ the paper"] if recipe.paper else []
    legend += ["× stayed on the plateau"] if has_excluded else []
    if chance is not None:
        # The line would compress the differences of models that are far better.
        is_near = bool(drawn) and chance > min(drawn) - (max(drawn) - min(drawn))
        legend.append(f"{'dotted: ' if is_near else ''}most frequent class{'' if is_near else f': {chance:.1f} %'}")
        if is_near:
            axes.axvline(chance, color="black", linestyle=":", linewidth=1)
    axes.set_xlabel(f"{split} {style.title}\n{textwrap.fill(', '.join(legend), LINE_WIDTH)}", fontsize=9)
    axes.margins(x=0.08)
    axes.grid(axis="x", alpha=0.3)
