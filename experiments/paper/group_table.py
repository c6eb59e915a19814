"""Table of the groups of shapes: geometric means of the ratios beside their targets."""

from __future__ import annotations

from experiments.paper import kernel_targets
from mgk._core.io import markdown_table
from mgk.bench.groups import GROUPS, MAX_EXCESS, Group, Pair
from mgk.bench.timing import PASSES

Record = dict[str, str]
NOT_MEASURED = "not measured"
HEADER = [
    "group", "B × H × N × D", "sMGK, H/2 heads", "needed", "aim", "MGK, H/2 heads", "needed", "sMGK, H heads", "needed",
    "aim",
]  # fmt: skip
EXCESS_HEADER = ["B × H × N × D", "variant, H/2 heads", "pass", "measured", "needed"]


def table(rows: list[Record]) -> str:
    """Return the table, the shapes that exceed a target by too much, and the commits of the measurements."""
    measured = sorted(kernel_targets.on_gpu(rows), key=lambda row: row["date"])
    measured = [row for row in measured if row["task"] in ("speed", "groups") and row["backend"] == "triton"]
    measured = [row for row in measured if _is_shown(row)]
    lines = [HEADER]
    for group in GROUPS:
        lines.append([
            group.name, " · ".join(map(str, group.shapes)),
            _measured(group, measured, "smgk"), _target(group.smgk_needed), _target(group.smgk_aim),
            _measured(group, measured, "mgk"), _target(group.mgk_needed),
            _mean(group, measured, "smgk", 1, PASSES[1]) or NOT_MEASURED, _number(group.equal_needed),
            _number(group.equal_aim),
        ])  # fmt: skip
    above = _excesses(measured)
    commits = ", ".join(sorted({row["commit"] for row in measured})) or "none"
    sentence = f"More than {MAX_EXCESS - 1:.0%} above the needed number of their group"
    sentence += f":\n\n{markdown_table([EXCESS_HEADER, *above])}" if above else ": none."
    return f"{markdown_table(lines)}\n\n{sentence}\n\nCommits of the measurements: {commits}."


SHAPE_NAMES = {str(shape) for group in GROUPS for shape in group.shapes}


def _is_shown(row: Record) -> bool:
    """Return whether a row is of a shape, a variant and a number of heads of the table."""
    is_half, is_equal = kernel_targets.has_heads(row, 2, 2), kernel_targets.has_heads(row, 1, 1)
    is_variant = (row["variant"] in ("smgk", "mgk") and is_half) or (row["variant"] == "smgk" and is_equal)
    return is_variant and row["components"] == "2" and kernel_targets.shape_of(row) in SHAPE_NAMES


def _ratios(group: Group, rows: list[Record], variant: str, share: int, which: str) -> dict[str, float]:
    """Return the latest ratio by shape, with H/share heads."""
    shapes = set(map(str, group.shapes))
    return {
        shape: float(row["ratio"])
        for row in rows
        if row["pass"] == which and row["variant"] == variant and row["ratio"]
        if kernel_targets.has_heads(row, share, share) and (shape := kernel_targets.shape_of(row)) in shapes
    }


def _mean(group: Group, rows: list[Record], variant: str, share: int, which: str) -> str | None:
    """Return the geometric mean of a pass, with the number of shapes if some are missing; None without any."""
    ratios = _ratios(group, rows, variant, share, which)
    if not ratios:
        return None
    mean = f"{kernel_targets.geometric_mean(list(ratios.values())):.2f}"
    return mean if len(ratios) == len(group.shapes) else f"{mean} ({len(ratios)} of {len(group.shapes)} shapes)"


def _measured(group: Group, rows: list[Record], variant: str) -> str:
    means = [_mean(group, rows, variant, 2, which) for which in PASSES]
    return NOT_MEASURED if None in means else " / ".join(str(mean) for mean in means)


def _target(pair: Pair | None) -> str:
    return "–" if pair is None else f"{pair[0]:.2f} / {pair[1]:.2f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _excesses(rows: list[Record]) -> list[list[str]]:
    """Return table lines of the ratios that exceed the needed number of their group by more than MAX_EXCESS."""
    lines = []
    for group in GROUPS:
        for variant, needed in (("smgk", group.smgk_needed), ("mgk", group.mgk_needed)):
            for which, limit in zip(PASSES, needed, strict=True):
                ratios = _ratios(group, rows, variant, 2, which)
                lines += [
                    [shape, kernel_targets.NAMES[variant], which, f"{ratio:.2f}", f"{limit:.2f}"]
                    for shape, ratio in ratios.items()
                    if ratio > MAX_EXCESS * limit
                ]
    return lines
