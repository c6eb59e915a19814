"""Picture of the study: perplexity against training time, cache and parameters, with the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, cast

from experiments.cost_quality.plan import Arm, Plan
from experiments.cost_quality.summary import ArmSummary, family_spread
from experiments.pictures import Picture
from experiments.statistics import Spread, mean_interval
from mgk._core.palette import colour_of, name_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

PICTURE = "cost-quality"  # name of the file
MIN_ARMS = 3  # of the picture
SIZE, DPI = (8.0, 13.0), 110  # inches; 880 pixels wide
FONT = 9  # points
SIDE_BY_SIDE = " (arms of equal size side by side)"
# Panels of the picture: title and value.
PANELS: tuple[tuple[str, Callable[[ArmSummary], float | None]], ...] = (
    ("training time (steps × step alone), minutes", lambda summary: summary.minutes),
    (f"cache, KiB per token{SIDE_BY_SIDE}", lambda summary: (summary.cache_bytes or 0) / 1024),
    (f"parameters, millions{SIDE_BY_SIDE}", lambda summary: summary.params / 1e6),
)
SAME_COST = 3.0  # pixels
DODGE = 9.0  # pixels between the markers of arms with equal cost
# Distances of a label from its marker in pixels, and the directions that are tried.
DISTANCES = (9, 20, 34, 50, 70, 95, 125)
DIRECTIONS = ((1, 0), (1, 0.7), (1, -0.7), (-1, 0), (-1, 0.7), (-1, -0.7), (0, 1), (0, -1))


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Box) -> bool:
        """Return whether two rectangles have points in common."""
        is_apart = self.left >= other.right or other.left >= self.right
        return not (is_apart or self.bottom >= other.top or other.bottom >= self.top)

    def is_inside(self, other: Box) -> bool:
        """Return whether the rectangle lies in another one."""
        return (
            self.left >= other.left
            and self.right <= other.right
            and self.bottom >= other.bottom
            and self.top <= other.top
        )


class Marker(NamedTuple):
    """An arm in a panel: its cost, its perplexity and the half-width of its interval."""

    summary: ArmSummary
    cost: float
    half_width: float


def plotted_recipe(summaries: dict[Arm, ArmSummary]) -> str | None:
    """Return the recipe of the picture, the first of a language model.

    The result is None if fewer than MIN_ARMS have results, or if all have one seed: without intervals, the Pareto front
    would be one of noise.
    """
    arms = {arm: summary for arm, summary in summaries.items() if summary.is_language_model and not arm.overrides}
    recipe = next((arm.recipe for arm in arms), None)
    seeds = [len(summary.values) for arm, summary in arms.items() if arm.recipe == recipe]
    return recipe if len(seeds) >= MIN_ARMS and max(seeds) > 1 else None


def _plotted_arms(summaries: dict[Arm, ArmSummary], recipe: str) -> list[ArmSummary]:
    return [summary for arm, summary in summaries.items() if arm.recipe == recipe and not arm.overrides]


def picture_data(summaries: dict[Arm, ArmSummary], recipe: str) -> list[list[object]]:
    """Return the numbers that `draw` plots."""
    return [
        [str(summary.arm), list(summary.values.values()), *(cost_of(summary) for _, cost_of in PANELS)]
        for summary in _plotted_arms(summaries, recipe)
    ]


def pareto_front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other point beats in cost and perplexity, by increasing cost."""
    front: list[tuple[float, float]] = []
    for cost, value in sorted(points):
        if not front or value < front[-1][1]:
            front.append((cost, value))
    return front


def pictures(plan: Plan, summaries: dict[Arm, ArmSummary]) -> list[Picture]:
    """Return the picture of the study; none if too few of its language models have results."""
    recipe = plotted_recipe(summaries)
    if recipe is None:
        return []
    return [Picture(PICTURE, picture_data(summaries, recipe), lambda _: draw(plan, summaries, recipe), DPI)]


def draw(plan: Plan, summaries: dict[Arm, ArmSummary], recipe: str) -> Figure:
    """Draw perplexity against training time, cache and parameters.

    Arms on the Pareto front and those of the primary questions are labelled.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    spread = family_spread(plan, summaries, recipe)
    arms = _plotted_arms(summaries, recipe)
    named = {arm for question in plan.primary_questions for arm in (question.first, question.second)}
    figure = Figure(figsize=SIZE, dpi=DPI)
    FigureCanvasAgg(figure)
    # A fixed layout: the positions of the labels are computed in pixels.
    figure.subplots_adjust(left=0.09, right=0.98, bottom=0.045, top=0.95, hspace=0.2)
    for axis, (title, cost_of) in zip(figure.subplots(len(PANELS), 1), PANELS, strict=True):
        costs = [(summary, cost_of(summary)) for summary in arms]
        markers = [Marker(summary, cost, _half_width(summary, spread)) for summary, cost in costs if cost is not None]
        _draw_panel(axis, markers, named, SIDE_BY_SIDE in title)
        axis.set_xlabel(title, fontsize=FONT)
        axis.set_ylabel("perplexity", fontsize=FONT)
    _add_legend(figure, arms)
    return figure


def _half_width(summary: ArmSummary, spread: Spread | None) -> float:
    """Return the half-width of the interval of an arm's perplexity; 0 if it is unknown."""
    width = mean_interval(list(summary.values.values()), spread).half_width
    return 0.0 if math.isnan(width) else summary.quality * width


def _draw_panel(axis: Axes, markers: list[Marker], named: set[Arm], is_apart: bool) -> None:
    """Draw a panel; with `is_apart`, arms of equal cost are moved side by side."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=FONT)
    if not markers:
        return
    low = min(marker.summary.quality - marker.half_width for marker in markers)
    high = max(marker.summary.quality + marker.half_width for marker in markers)
    margin = 0.08 * (high - low or 1)
    costs = [marker.cost for marker in markers]
    width = 0.12 * (max(costs) - min(costs) or max(costs))
    axis.set_ylim(low - margin, high + margin)
    axis.set_xlim(min(costs) - width, max(costs) + width)
    front = pareto_front([(marker.cost, marker.summary.quality) for marker in markers])
    # The last point extends to the edge: more cost does not lower the perplexity.
    line = [*front, (axis.get_xlim()[1], front[-1][1])]
    axis.plot(*zip(*line, strict=True), color="#bbbbbb", linewidth=1.5, zorder=0, drawstyle="steps-post")
    positions = _side_by_side(axis, markers) if is_apart else costs
    labels, obstacles = [], []
    for marker, x in zip(markers, positions, strict=True):
        arm, quality, colour = marker.summary.arm, marker.summary.quality, colour_of(marker.summary.arm.model.variant)
        fill = "white" if arm.time_of is not None else colour
        axis.errorbar(
            x, quality, yerr=marker.half_width or None, fmt="o", color=colour, markerfacecolor=fill, capsize=3,
            markersize=6, elinewidth=1.2, zorder=4,
        )  # fmt: skip
        left, center = axis.transData.transform((x, quality))
        _, top = axis.transData.transform((x, quality + marker.half_width))
        obstacles.append(Box(left - 5, 2 * center - top - 2, left + 5, top + 2))
        if arm in named or (marker.cost, quality) in front:
            labels.append((str(arm), (float(left), float(center)), colour))
    _add_labels(axis, labels, obstacles)


def _side_by_side(axis: Axes, markers: list[Marker]) -> list[float]:
    """Return the horizontal positions of markers; those of (nearly) equal cost are moved apart."""
    pixels = [float(axis.transData.transform((marker.cost, 0))[0]) for marker in markers]
    groups: list[list[int]] = []
    for index in sorted(range(len(markers)), key=lambda index: (pixels[index], index)):
        if groups and pixels[index] - pixels[groups[-1][-1]] < SAME_COST:
            groups[-1].append(index)
        else:
            groups.append([index])
    positions = list(pixels)
    for group in groups:
        center = sum(pixels[index] for index in group) / len(group)
        for number, index in enumerate(group):
            positions[index] = center + DODGE * (number - (len(group) - 1) / 2)
    return [float(axis.transData.inverted().transform((x, 0))[0]) for x in positions]


def place_labels(
    sizes: list[tuple[float, float]], anchors: list[tuple[float, float]], obstacles: Iterable[Box], frame: Box
) -> list[Box]:
    """Return the places of labels beside their markers, without overlaps as far as there is room.

    Args:
        sizes: Width and height of each label in pixels.
        anchors: Positions of the markers.
        obstacles: Rectangles that labels must not cover.
        frame: Rectangle that contains all labels.
    """
    taken, placed = list(obstacles), []
    for (width, height), (x, y) in zip(sizes, anchors, strict=True):
        boxes = []
        for distance in DISTANCES:
            for right, up in DIRECTIONS:
                center_x = x + right * (distance + width / 2)
                center_y = y + up * (distance + height / 2)
                boxes.append(
                    Box(center_x - width / 2, center_y - height / 2, center_x + width / 2, center_y + height / 2)
                )
        inside = [box for box in boxes if box.is_inside(frame)] or boxes
        best = min(inside, key=lambda box: sum(map(box.overlaps, taken)))  # the first one without overlaps
        taken.append(best)
        placed.append(best)
    return placed


def _add_labels(axis: Axes, labels: list[tuple[str, tuple[float, float], str]], obstacles: list[Box]) -> None:
    """Write labels beside markers, with a line to those farther away."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.patheffects import withStroke

    renderer = cast("FigureCanvasAgg", axis.figure.canvas).get_renderer()
    font = FontProperties(size=FONT)
    sizes = [renderer.get_text_width_height_descent(text, font, False)[:2] for text, _, _ in labels]
    frame = Box(*axis.get_window_extent().extents)
    boxes = place_labels(sizes, [anchor for _, anchor, _ in labels], obstacles, frame)
    for (text, anchor, colour), box in zip(labels, boxes, strict=True):
        x, y = axis.transData.inverted().transform(((box.left + box.right) / 2, (box.bottom + box.top) / 2))
        near = min(max(anchor[0], box.left), box.right), min(max(anchor[1], box.bottom), box.top)
        axis.annotate(
            text, (x, y), ha="center", va="center", fontsize=FONT, color=colour,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )  # fmt: skip
        if math.dist(anchor, near) > DISTANCES[0] + 4:
            line = axis.transData.inverted().transform([anchor, near])
            axis.plot(*line.T, color=colour, linewidth=0.6, alpha=0.7)


def _add_legend(figure: Figure, arms: list[ArmSummary]) -> None:
    from matplotlib.lines import Line2D

    variants = dict.fromkeys(summary.arm.model.variant for summary in arms)
    handles = []
    for variant in variants:
        handles.append(Line2D([], [], color=colour_of(variant), marker="o", linestyle="", label=name_of(variant)))
    if any(summary.arm.time_of is not None for summary in arms):
        label = "equal training time"
        handles.append(Line2D([], [], color="black", markerfacecolor="white", marker="o", linestyle="", label=label))
    handles.append(Line2D([], [], color="#bbbbbb", linewidth=1.5, label="Pareto front"))
    figure.legend(handles=handles, loc="upper center", ncols=5, fontsize=FONT, frameon=False)
