"""The picture of a comparison: a line for each model, with what it reaches and what it costs."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgk._core.io import replacing
from mgk.training.config import Recipe
from mgk.training.summary import Summary, all_splits
from mgk.training.sweep import metric_format

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Title of a panel, and the cost that it shows; a panel stands where every model has it.
COSTS = (
    ("parameters, thousands", lambda summary: summary.params / 1e3),
    ("GFLOPs of one forward", lambda summary: summary.flops / 1e9),
    ("training step, ms", lambda summary: summary.step_ms),
)


def draw(summaries: list[Summary], recipe: Recipe, path: Path, chance: float | None = None) -> None:
    """chance: the accuracy of always naming the most frequent class."""
    with replacing(path) as temporary:
        figure_of(summaries, recipe, chance).savefig(temporary, dpi=150, format="png")


def figure_of(summaries: list[Summary], recipe: Recipe, chance: float | None = None) -> Figure:
    """What each model reaches, seed by seed, with its interval and the paper's number, and bars of its costs."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    costs = [(title, list(map(cost, summaries))) for title, cost in COSTS]
    costs = [(title, values) for title, values in costs if None not in values]
    figure = Figure(figsize=(5 + 1.9 * len(costs), 1.6 + 0.36 * len(summaries)), layout="constrained")
    panels = figure.subplots(1, 1 + len(costs), sharey=True, squeeze=False, width_ratios=[2.6, *[1] * len(costs)])
    first, *others = panels[0]
    variants = dict.fromkeys(summary.row.variant for summary in summaries)
    colours = {variant: f"C{n % 10}" for n, variant in enumerate(variants)}
    _reached(first, summaries, recipe, colours, chance)
    for axes, (title, values) in zip(others, costs, strict=True):
        bars = axes.barh(range(len(values)), values, 0.6, color=[colours[s.row.variant] for s in summaries], alpha=0.6)
        axes.bar_label(
            bars, [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values], padding=2, fontsize=9
        )
        # Room for the numbers behind the bars.
        axes.margins(x=0.55)
        axes.set_xlim(left=0)
        axes.set_title(title, fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.tick_params(axis="y", length=0)
    for axes in panels[0]:
        axes.tick_params(labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    first.set_yticks(range(len(summaries)), [str(summary.row) for summary in summaries])
    first.set_ylim(len(summaries) - 0.4, -0.6)
    figure.suptitle(recipe.title, fontsize=10, wrap=True)
    return figure


def _reached(
    axes: Any, summaries: list[Summary], recipe: Recipe, colours: dict[str, str], chance: float | None
) -> None:
    how, split = metric_format(recipe), all_splits(summaries)[0]
    for place, summary in enumerate(summaries):
        values, colour = summary.of(split), colours[summary.row.variant]
        every = list(summary.values.get(split, {}).values())
        axes.plot(every, [place] * len(every), "|", color=colour, markersize=9, alpha=0.7)
        if values:
            axes.errorbar(
                statistics.mean(values), place, xerr=summary.spread(split, how), fmt="o", capsize=3, color=colour
            )
        if str(summary.row) in recipe.paper:
            axes.plot(recipe.paper[str(summary.row)], place, "D", color="black", fillstyle="none", markersize=7)
    if chance is not None:
        axes.axvline(chance, color="black", linestyle=":", linewidth=1)
    names = ["● mean ± as in the table", "| each seed", *(["◇ the paper"] if recipe.paper else [])]
    names += [] if chance is None else ["dotted: most frequent class"]
    axes.set_xlabel(f"{split} {how.title}\n({', '.join(names)})", fontsize=9)
    axes.margins(x=0.08)
    axes.grid(axis="x", alpha=0.3)
