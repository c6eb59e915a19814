"""Table of the groups of shapes: geometric means of the ratios beside their targets.

A ratio is the time of an operator over that of the best SDPA with H heads, forward / with all gradients.
"""

from __future__ import annotations

from typing import NamedTuple

from experiments.paper import kernel_targets
from experiments.result_rows import Row, Rows
from mgk._core.markdown import markdown_table
from mgk.bench.groups import GROUPS, Group
from mgk.bench.implementations import Shape
from mgk.bench.timing import PASSES

Pair = tuple[float, float]  # forward, forward + backward


class Targets(NamedTuple):
    """Targets for the geometric mean of a group: half the heads and, with gradients, equal heads."""

    smgk_needed: Pair
    smgk_aim: Pair | None
    mgk_needed: Pair
    equal_needed: float | None = None  # sMGK with H heads, with gradients
    equal_aim: float | None = None


EQUAL = (1.30, 1.15)
TARGETS = {
    "training lengths": Targets((0.65, 0.70), (0.55, 0.60), (0.95, 0.95), *EQUAL),
    "short": Targets((0.90, 0.80), (0.80, 0.70), (1.05, 0.95)),
    "short, D 16": Targets((0.65, 0.55), None, (1.05, 0.95)),
    "long, D 64": Targets((0.58, 0.65), (0.53, 0.57), (0.85, 0.95), *EQUAL),
    "long, D 128": Targets((0.62, 0.68), (0.53, 0.57), (0.90, 1.00), *EQUAL),
    "D 32": Targets((0.48, 0.57), (0.46, 0.52), (0.73, 0.80)),
    "D 80 and 96": Targets((0.68, 0.74), None, (1.0, 1.05)),
    "D 256": Targets((0.80, 0.85), None, (1.1, 1.2)),
}
# Shapes of the sentence about equal heads: at least this length, and these widths.
USUAL_LENGTH, USUAL_WIDTHS = 512, (32, 128)
# No shape may exceed the target of its group by more than this factor.
MAX_EXCESS = 1.15
NOT_MEASURED = "not measured"
HEADER = [
    "group", "B × H × N × D", "sMGK, H/2 heads", "needed", "aim", "MGK, H/2 heads", "needed", "sMGK, H heads", "needed",
    "aim", "commit",
]  # fmt: skip
EXCESS_HEADER = ["B × H × N × D", "variant, H/2 heads", "pass", "measured", "needed"]


def table(rows: Rows) -> str:
    """Return the table with the commits of the measurements, and the shapes that exceed a target by too much."""
    measured = _shown(rows)
    lines = [HEADER]
    for group in GROUPS:
        targets = TARGETS[group.name]
        lines.append([
            group.name, " · ".join(map(str, group.shapes)),
            _measured(group, measured, "smgk"), _target(targets.smgk_needed), _target(targets.smgk_aim),
            _measured(group, measured, "mgk"), _target(targets.mgk_needed),
            _measured(group, measured, "smgk", 1), _gradients(targets.equal_needed), _gradients(targets.equal_aim),
            _commits(group, measured),
        ])  # fmt: skip
    above = _excesses(measured)
    sentence = f"More than {MAX_EXCESS - 1:.0%} above the needed number of their group"
    sentence += f":\n\n{markdown_table([EXCESS_HEADER, *above])}" if above else ": none."
    return f"{markdown_table(lines)}\n\n{sentence}"


def equal_ratios(rows: Rows) -> dict[str, float]:
    """Return the latest ratios of sMGK with H heads and all gradients, of the shapes of usual lengths and widths."""
    measured = _shown(rows)
    groups = [_ratios(group, measured, "smgk", 1, PASSES[1]) for group in GROUPS]
    return {shape: ratio for ratios in groups for shape, ratio in ratios.items() if _is_usual(Shape.parse(shape))}


def _is_usual(shape: Shape) -> bool:
    return shape.length >= USUAL_LENGTH and USUAL_WIDTHS[0] <= shape.width <= USUAL_WIDTHS[1]


def _shown(rows: Rows) -> Rows:
    """Return the rows of the table, the latest of each measurement, by date."""
    measured = sorted(kernel_targets.on_gpu(rows), key=lambda row: row["date"])
    measured = [row for row in measured if row["task"] in ("speed", "groups") and row["backend"] == "triton"]
    return [row for row in measured if _is_shown(row)]


SHAPE_NAMES = {str(shape) for group in GROUPS for shape in group.shapes}


def _is_shown(row: Row) -> bool:
    """Return whether a row is of a shape, a variant and a number of heads of the table."""
    is_half, is_equal = kernel_targets.has_heads(row, 2, 2), kernel_targets.has_heads(row, 1, 1)
    is_variant = (row["variant"] in ("smgk", "mgk") and is_half) or (row["variant"] == "smgk" and is_equal)
    return is_variant and row["components"] == "2" and kernel_targets.shape_of(row) in SHAPE_NAMES


def _ratios(group: Group, rows: Rows, variant: str, share: int, pass_: str) -> dict[str, float]:
    """Return the latest ratio by shape, with H/share heads."""
    shapes = set(map(str, group.shapes))
    return {
        shape: float(row["ratio"])
        for row in rows
        if row["pass"] == pass_ and row["variant"] == variant and row["ratio"]
        if kernel_targets.has_heads(row, share, share) and (shape := kernel_targets.shape_of(row)) in shapes
    }


def _mean(group: Group, rows: Rows, variant: str, share: int, pass_: str) -> str | None:
    """Return the geometric mean of a pass, with the number of shapes if some are missing; None without any."""
    ratios = _ratios(group, rows, variant, share, pass_)
    if not ratios:
        return None
    mean = f"{kernel_targets.geometric_mean(list(ratios.values())):.2f}"
    return mean if len(ratios) == len(group.shapes) else f"{mean} ({len(ratios)} of {len(group.shapes)} shapes)"


def _measured(group: Group, rows: Rows, variant: str, share: int = 2) -> str:
    means = [_mean(group, rows, variant, share, pass_) for pass_ in PASSES]
    return NOT_MEASURED if None in means else " / ".join(str(mean) for mean in means)


def _target(pair: Pair | None) -> str:
    return "–" if pair is None else f"{pair[0]:.2f} / {pair[1]:.2f}"


def _gradients(value: float | None) -> str:
    """Format a target that only the time with all gradients has."""
    return "–" if value is None else f"– / {value:.2f}"


def _commits(group: Group, rows: Rows) -> str:
    """Return the commits of the latest measurements of a group."""
    shapes = set(map(str, group.shapes))
    latest = {
        (row["variant"], row["heads"], row["pass"], shape): row["commit"]
        for row in rows
        if row["ratio"] and (shape := kernel_targets.shape_of(row)) in shapes
    }
    return ", ".join(sorted(set(latest.values()))) or "–"


def _excesses(rows: Rows) -> list[list[str]]:
    """Return table lines of the ratios that exceed the needed number of their group by more than MAX_EXCESS."""
    lines = []
    for group in GROUPS:
        targets = TARGETS[group.name]
        for variant, needed in (("smgk", targets.smgk_needed), ("mgk", targets.mgk_needed)):
            for pass_, limit in zip(PASSES, needed, strict=True):
                ratios = _ratios(group, rows, variant, 2, pass_)
                lines += [
                    [shape, kernel_targets.NAMES[variant], pass_, f"{ratio:.2f}", f"{limit:.2f}"]
                    for shape, ratio in ratios.items()
                    if ratio > MAX_EXCESS * limit
                ]
    return lines
