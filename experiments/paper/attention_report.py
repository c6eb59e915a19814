"""Tables and plot of results/attention.csv: operators with H/2 heads against the best SDPA with H heads, and goals.

    python -m experiments.paper.attention_report        writes results/attention.md and results/attention.png

Only the latest measurement of each case on a GPU is used.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from experiments.paper import kernel_targets
from experiments.paper.kernel_targets import (
    GOAL_SHAPES,
    MEANS,
    NAMES,
    SMALL_SHAPE,
    geometric_mean,
    plain_ratios,
    ratios,
    select,
    shape_of,
)
from experiments.paper.speed_table import half_softmax_ratios
from experiments.result_rows import Rows
from mgk._core.io import replacing, write_atomically
from mgk._core.markdown import format_number, markdown_table
from mgk._core.palette import COLOURS
from mgk.bench.implementations import Shape
from mgk.bench.timing import PASSES
from mgk.training import results

SHAPES = (*GOAL_SHAPES, SMALL_SHAPE)
SDPA_HEADS = {"H heads": (1, 1), "H heads, H/2 key heads": (1, 2), "H/2 heads": (2, 2)}


def speed_table(rows: Rows) -> str:
    """Return the table of times relative to the best SDPA."""
    columns = {(name, pass_): ratios(rows, name, pass_) for name in NAMES for pass_ in PASSES}
    lines = [["B × H × N × D", *(f"{NAMES[name]} {pass_}" for name, pass_ in columns)]]
    lines += [[shape, *(format_number(by_shape.get(shape)) for by_shape in columns.values())] for shape in SHAPES]
    means, largest = ["**geometric mean without the last**"], ["largest of them"]
    for by_shape in columns.values():
        values = [by_shape[shape] for shape in GOAL_SHAPES if shape in by_shape]
        mean = kernel_targets.mean(by_shape)
        means.append("–" if mean is None else f"**{mean:.2f}**")
        largest.append(format_number(max(values, default=None)))
    eager = ["mean of eager calls, with launch overhead"]
    for name, pass_ in columns:
        eager.append(format_number(kernel_targets.mean(plain_ratios(rows, name, pass_))))
    goals = ["goal of the mean", *(format_number(MEANS[name][PASSES.index(pass_)]) for name, pass_ in columns)]
    return markdown_table([*lines, means, largest, goals, eager])


# `flex-4` was called `flex` until commit 7208069.
FLEX = {
    "flex": "FlexAttention expressing sMGK, H/2 heads",
    "flex-4": "FlexAttention, an older expression with four loads per pair",
}


def baselines_table(rows: Rows) -> str:
    """Return the table of other implementations relative to the best SDPA."""
    lines = [["", *PASSES]]
    for heads, (share, key_share) in SDPA_HEADS.items():
        for backend in ("cudnn", "flash"):
            cells = [sdpa_mean(rows, backend, share, key_share, pass_) for pass_ in PASSES]
            lines.append([f"SDPA {backend}, {heads}", *cells])
    for backend, description in FLEX.items():
        flex = [select(rows, "speed", pass_, backend=backend) for pass_ in PASSES]
        if any(flex):
            cells = [", ".join(f"{float(row['ratio']):.2f} ({shape_of(row)})" for row in of_pass) for of_pass in flex]
            lines.append([description, *cells])
    return markdown_table(lines)


def sdpa_mean(rows: Rows, backend: str, share: int, key_share: int, pass_: str) -> str:
    """Return the geometric mean of SDPA's ratios with H / share heads and H / key_share key heads."""
    by_shape = {
        shape_of(row): float(row["ratio"])
        for row in select(rows, "speed", pass_, variant="softmax", backend=backend)
        if kernel_targets.has_heads(row, share, key_share)
    }
    values = [by_shape[shape] for shape in GOAL_SHAPES if shape in by_shape]
    return format_number(geometric_mean(values)) if values else "–"


def part_table(rows: Rows, task: str, unit: str) -> str:
    """Return the table of all measurements of a part of the benchmark."""
    lines = [["B × H × N × D", "pass", "variant", "backend", "heads", "M", unit, "ratio", "eager ms"]]
    for row in sorted(select(rows, task), key=lambda r: (int(r["length"]), shape_of(r), r["pass"])):
        heads = row["heads"] if row["heads"] == row["kv_heads"] else f"{row['heads']}:{row['kv_heads']}"
        kind = [row["variant"], row["backend"], heads, row["components"]]
        lines.append([shape_of(row), row["pass"], *kind, row["value"], row["ratio"] or "–", row["step_ms"] or "–"])
    return markdown_table(lines)


TITLES = {
    "memory": (
        "Memory in MB beyond inputs, outputs and gradients; ratio to SDPA-flash with the same number of heads",
        "extra MB",
    ),
    "decoding": ("One query against a long cache; ratio to the best SDPA with H heads", "device ms"),
    "linear": ("Causal linear attention with mixture keys; ratio to the best SDPA with H heads", "device ms"),
    "whole": ("Non-causal linear attention with mixture keys; ratio to the best SDPA with H heads", "device ms"),
    "em": ("A training layer; ratio of EM priors to learned priors", "device ms"),
}


def report(rows: Rows) -> str:
    """Return the contents of results/attention.md."""
    last = rows[-1]
    commits, dates = (", ".join(sorted({row[name] for row in rows})) for name in ("commit", "date"))
    reached = [
        [goal.title, f"{goal.measured:.3f}", f"{goal.limit:.2f}", "yes" if goal.reached else "**no**"]
        for goal in kernel_targets.goals(rows)
    ]
    text = [
        "# Mixture attention with H/2 heads against SDPA with H heads\n",
        f"{last['gpu']}, {last['dtype']}, torch {last['torch']}, triton {last['triton']}, {dates}, commits "
        f"{commits}. Device time of the whole operator, medians of CUDA graph replays on both sides; below 1 this "
        "package is faster. Forward + backward includes all gradients. M = 2. Generated by "
        "`python -m experiments.paper.attention_report` from `attention.csv`, which `mgk bench` writes.\n",
        "## Time relative to the best SDPA with H heads\n",
        speed_table(rows),
        "\nOther implementations relative to the best SDPA with H heads, geometric means over the same shapes:\n",
        baselines_table(rows),
        "\n## Goals\n",
        markdown_table([["quantity", "measured", "goal, at most", "reached"], *reached]),
    ]
    for task, (title, unit) in TITLES.items():
        if select(rows, task):
            text += [f"\n## {title}\n", part_table(rows, task, unit)]
    return "\n".join(text) + "\n"


def draw_speed(axis: Axes, rows: Rows, pass_: str) -> None:
    """Draw the ratios of one pass as dots, a line per shape; softmax with half the heads is a vertical tick."""
    control = half_softmax_ratios(rows, pass_)
    for y, shape in enumerate(SHAPES):
        measured = {name: ratio for name in NAMES if (ratio := ratios(rows, name, pass_).get(shape)) is not None}
        if measured:
            axis.plot([min(measured.values()), max(measured.values())], [y, y], color="#d0d0d0", linewidth=2, zorder=1)
        if shape in control:
            axis.plot(control[shape], y, "|", color=COLOURS["softmax"], markersize=15, markeredgewidth=2.5)
        for name, ratio in measured.items():
            axis.plot(ratio, y, "o", color=COLOURS[name], markersize=8, zorder=2)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xlim(0.35, 1.4)
    axis.set_ylim(len(SHAPES) - 0.5, -0.5)
    title = pass_ if pass_ == PASSES[0] else "forward + backward, all gradients"
    axis.set_title(title, fontsize=11)
    axis.set_xlabel("time relative to the best SDPA with H heads", fontsize=10)
    axis.grid(axis="x", alpha=0.3)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def describe_shape(shape: str) -> str:
    """Return the length and width of a shape, and whether it is causal."""
    parsed = Shape.parse(shape)
    causal = ", causal" if parsed.causal else ""
    return f"{parsed.length:,} × {parsed.width}{causal}"


def draw_linear(axis: Axes, rows: Rows) -> None:
    """Draw the times of linear attention against the length, with the names at the ends of the lines."""
    selected = select(rows, "linear")
    for variant, name in (("mlk", "MLK, H/2 heads"), ("softmax", "best SDPA, H heads")):
        for pass_, style in zip(PASSES, ("-", "--"), strict=True):
            times: dict[int, float] = {}
            for row in (r for r in selected if r["variant"] == variant and r["pass"] == pass_):
                n, ms = int(row["length"]), float(row["value"])
                times[n] = min(ms, times.get(n, ms))
            if times:
                x = sorted(times)
                axis.plot(x, [times[n] for n in x], style, marker="o", color=COLOURS[variant])
                label = name if pass_ == PASSES[0] else f"{name}, with gradients"
                axis.annotate(
                    label, (x[-1], times[x[-1]]), xytext=(8, 0), textcoords="offset points", va="center", fontsize=10,
                    color=COLOURS[variant],
                )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    lengths = sorted({int(row["length"]) for row in selected})
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.set_xlabel("length", fontsize=10)
    axis.set_ylabel("device time, ms", fontsize=10)
    axis.set_title("causal linear attention", fontsize=11)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def draw(rows: Rows, path: Path) -> None:
    """Draw the speed and, if there are several lengths, linear attention to a PNG file."""
    linear = len({row["length"] for row in select(rows, "linear")}) > 1
    heights = [3.6, 2.6][: 1 + linear]
    figure = pyplot.figure(figsize=(8.8, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    speed = parts[0].subplots(1, len(PASSES), sharey=True)
    for axis, pass_ in zip(speed, PASSES, strict=True):
        draw_speed(axis, rows, pass_)
    speed[0].set_yticks(range(len(SHAPES)), [describe_shape(shape) for shape in SHAPES], fontsize=10)
    speed[0].set_ylabel("length × head width", fontsize=10)
    handles = [Line2D([], [], marker="o", linestyle="", color=COLOURS[name], label=NAMES[name]) for name in NAMES]
    tick: dict[str, Any] = {"marker": "|", "markersize": 12, "markeredgewidth": 2.5, "linestyle": ""}
    handles.append(Line2D([], [], label="softmax, H/2 heads", color=COLOURS["softmax"], **tick))
    parts[0].legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=10)
    if linear:
        axis = parts[1].subplots()
        draw_linear(axis, rows)
        axis.set_xlim(right=axis.get_xlim()[1] * 4)  # space for the names
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=180, format="png")
    pyplot.close(figure)


def main() -> None:
    """Write the tables and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"))
    folder = parser.parse_args().results
    rows = kernel_targets.on_gpu(results.read([folder / "attention.csv"]))
    if not rows:
        raise SystemExit(f"{folder / 'attention.csv'} has no measurements on a GPU: run `mgk bench` on a GPU first")
    write_atomically(folder / "attention.md", report(rows))
    draw(rows, folder / "attention.png")
    print(f"{folder / 'attention.md'}  {folder / 'attention.png'}")


if __name__ == "__main__":
    main()
