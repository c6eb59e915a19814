"""Tables and plot of results/attention.csv: operators with H/2 heads against the best SDPA with H heads, and goals.

    python -m experiments.paper.attention_report        writes results/attention.md and results/attention.png

Only the latest measurement of each case on a GPU is used.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from experiments.paper import kernel_targets
from experiments.paper.kernel_targets import (
    GOAL_SHAPES,
    MEANS,
    NAMES,
    SMALL_SHAPE,
    Record,
    geometric_mean,
    plain_ratios,
    ratios,
    select,
    shape_of,
)
from mgk._core.io import format_number, markdown_table, replacing, write_atomically
from mgk.bench.timing import PASSES
from mgk.training import results

SHAPES = (*GOAL_SHAPES, SMALL_SHAPE)
SDPA_HEADS = {"H heads": (1, 1), "H heads, H/2 key heads": (1, 2), "H/2 heads": (2, 2)}


def speed_table(rows: list[Record]) -> str:
    """Return the table of times relative to the best SDPA."""
    columns = {(name, which): ratios(rows, name, which) for name in NAMES for which in PASSES}
    lines = [["B × H × N × D", *(f"{NAMES[name]} {which}" for name, which in columns)]]
    lines += [[shape, *(format_number(by_shape.get(shape)) for by_shape in columns.values())] for shape in SHAPES]
    means, largest = ["**geometric mean without the last**"], ["largest of them"]
    for by_shape in columns.values():
        values = [by_shape[shape] for shape in GOAL_SHAPES if shape in by_shape]
        mean = kernel_targets.mean(by_shape)
        means.append("–" if mean is None else f"**{mean:.2f}**")
        largest.append(format_number(max(values, default=None)))
    eager = ["mean of eager calls, with launch overhead"]
    for name, which in columns:
        eager.append(format_number(kernel_targets.mean(plain_ratios(rows, name, which))))
    goals = ["goal of the mean", *(format_number(MEANS[name][PASSES.index(which)]) for name, which in columns)]
    return markdown_table([*lines, means, largest, goals, eager])


# `flex-4` was called `flex` until commit 7208069.
FLEX = {
    "flex": "FlexAttention expressing sMGK, H/2 heads",
    "flex-4": "FlexAttention, an older expression with four loads per pair",
}


def baselines_table(rows: list[Record]) -> str:
    """Return the table of other implementations relative to the best SDPA."""
    lines = [["", *PASSES]]
    for heads, (share, key_share) in SDPA_HEADS.items():
        for backend in ("cudnn", "flash"):
            cells = [sdpa_mean(rows, backend, share, key_share, which) for which in PASSES]
            lines.append([f"SDPA {backend}, {heads}", *cells])
    for backend, description in FLEX.items():
        flex = [select(rows, "speed", which, backend=backend) for which in PASSES]
        if any(flex):
            cells = [", ".join(f"{float(row['ratio']):.2f} ({shape_of(row)})" for row in of_pass) for of_pass in flex]
            lines.append([description, *cells])
    return markdown_table(lines)


def sdpa_mean(rows: list[Record], backend: str, share: int, key_share: int, which: str) -> str:
    """Return the geometric mean of SDPA's ratios with H / share heads and H / key_share key heads."""
    by_shape = {
        shape_of(row): float(row["ratio"])
        for row in select(rows, "speed", which, variant="softmax", backend=backend)
        if kernel_targets.has_heads(row, share, key_share)
    }
    values = [by_shape[shape] for shape in GOAL_SHAPES if shape in by_shape]
    return format_number(geometric_mean(values)) if values else "–"


def part_table(rows: list[Record], task: str, unit: str) -> str:
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


def report(rows: list[Record]) -> str:
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


def draw_speed(axis: Axes, rows: list[Record], which: str) -> None:
    """Draw the ratios of one pass as bars."""
    width = 0.2
    for n, name in enumerate(NAMES):
        by_shape = ratios(rows, name, which)
        positions = [i + (n - 1.5) * width for i, shape in enumerate(SHAPES) if shape in by_shape]
        heights = [by_shape[shape] for shape in SHAPES if shape in by_shape]
        axis.bar(positions, heights, width, label=f"{NAMES[name]}, H/2 heads")
    axis.axhline(1, color="black", linewidth=1)
    labels = [shape.replace("xcausal", "\ncausal").replace("x", "·") for shape in SHAPES]
    axis.set_xticks(range(len(SHAPES)), labels, fontsize=7, rotation=35, ha="right", rotation_mode="anchor")
    axis.set_xlabel("batch · H · length · head width", fontsize=8)
    axis.set_title(which.replace("+", " + "), fontsize=10)
    axis.grid(axis="y", alpha=0.3)


def draw_linear(axis: Axes, rows: list[Record]) -> None:
    """Draw the times of linear attention against the length."""
    selected = select(rows, "linear")
    for variant, name in (("mlk", "MLK, H/2 heads"), ("softmax", "best SDPA, H heads")):
        for which, style in zip(PASSES, ("-", "--"), strict=True):
            times: dict[int, float] = {}
            for row in (r for r in selected if r["variant"] == variant and r["pass"] == which):
                n, ms = int(row["length"]), float(row["value"])
                times[n] = min(ms, times.get(n, ms))
            color = "tab:blue" if variant == "mlk" else "black"
            axis.plot(sorted(times), [times[n] for n in sorted(times)], style, marker="o", color=color,
                      label=f"{name}, {which}")  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("length")
    axis.set_ylabel("device time, ms")
    axis.set_title("causal linear attention", fontsize=10)
    axis.grid(alpha=0.3)
    axis.set_ylim(bottom=axis.get_ylim()[0] / 4)  # space for the legend
    axis.legend(fontsize=7, loc="lower right", handlelength=4)


def draw(rows: list[Record], path: Path) -> None:
    """Draw the speed and, if there are several lengths, linear attention to a PNG file."""
    linear = len({row["length"] for row in select(rows, "linear")}) > 1
    figure, axes = pyplot.subplots(1, 2 + linear, figsize=(11 + 4 * linear, 4.2), constrained_layout=True)
    for axis, which in zip(axes, PASSES, strict=False):
        draw_speed(axis, rows, which)
    top = max(axis.get_ylim()[1] for axis in axes[:2])
    for axis in axes[:2]:
        axis.set_ylim(0, top)
    axes[0].set_ylabel("device time relative to the best SDPA with H heads")
    axes[0].legend(fontsize=8)
    if linear:
        draw_linear(axes[2], rows)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
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
