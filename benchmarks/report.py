"""Tables and picture of results/attention.csv: ours with H/2 heads against the best SDPA with H, beside the goals.

    python benchmarks/report.py        writes results/attention.md and results/attention.png

Of several measurements of the same thing the last counts. Measurements on a processor are left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from experiments.paper import speed_goals
from experiments.paper.speed_goals import (
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
SIDES = {"H heads": (1, 1), "H heads, H/2 key heads": (1, 2), "H/2 heads": (2, 2)}


def speed_table(rows: list[Record]) -> str:
    columns = {(name, which): ratios(rows, name, which) for name in NAMES for which in PASSES}
    lines = [["B × H × N × D", *(f"{NAMES[name]} {which}" for name, which in columns)]]
    lines += [[shape, *(format_number(found.get(shape)) for found in columns.values())] for shape in SHAPES]
    means, largest = ["**geometric mean without the last**"], ["largest of them"]
    for found in columns.values():
        values = [found[shape] for shape in GOAL_SHAPES if shape in found]
        mean = speed_goals.mean(found)
        means.append("–" if mean is None else f"**{mean:.2f}**")
        largest.append(format_number(max(values, default=None)))
    plain = ["mean in plain calls, with their Python"]
    for name, which in columns:
        plain.append(format_number(speed_goals.mean(plain_ratios(rows, name, which))))
    wanted = ["goal of the mean", *(format_number(MEANS[name][PASSES.index(which)]) for name, which in columns)]
    return markdown_table([*lines, means, largest, wanted, plain])


# `flex-4` is what `mgk bench` timed as `flex` until commit 7208069.
FLEX = {
    "flex": "FlexAttention expressing sMGK, H/2 heads",
    "flex-4": "FlexAttention, an older expression that looks up four numbers a pair",
}


def peers_table(rows: list[Record]) -> str:
    lines = [["", *PASSES]]
    for words, (share, key_share) in SIDES.items():
        for backend in ("cudnn", "flash"):
            lines.append([f"SDPA {backend}, {words}", *(peer(rows, backend, share, key_share, p) for p in PASSES)])
    for backend, words in FLEX.items():
        flex = [select(rows, "speed", which, backend=backend) for which in PASSES]
        if any(flex):
            cells = [", ".join(f"{float(row['ratio']):.2f} ({shape_of(row)})" for row in found) for found in flex]
            lines.append([words, *cells])
    return markdown_table(lines)


def peer(rows: list[Record], backend: str, share: int, key_share: int, which: str) -> str:
    found = {
        shape_of(row): float(row["ratio"])
        for row in select(rows, "speed", which, variant="softmax", backend=backend)
        if speed_goals.has_heads(row, share, key_share)
    }
    values = [found[shape] for shape in GOAL_SHAPES if shape in found]
    return format_number(geometric_mean(values)) if values else "–"


def part_table(rows: list[Record], task: str, unit: str) -> str:
    """Every measurement of one part."""
    lines = [["B × H × N × D", "pass", "variant", "backend", "heads", "M", unit, "ratio", "eager ms"]]
    for row in sorted(select(rows, task), key=lambda r: (int(r["length"]), shape_of(r), r["pass"])):
        heads = row["heads"] if row["heads"] == row["kv_heads"] else f"{row['heads']}:{row['kv_heads']}"
        kind = [row["variant"], row["backend"], heads, row["components"]]
        lines.append([shape_of(row), row["pass"], *kind, row["value"], row["ratio"] or "–", row["step_ms"] or "–"])
    return markdown_table(lines)


TITLES = {
    "memory": (
        "Memory in MB beyond inputs, outputs and gradients; ratio to SDPA-flash with the same heads",
        "extra MB",
    ),
    "decoding": ("One query against a long cache; ratio to the best SDPA with H heads", "device ms"),
    "linear": ("Causal linear attention with mixture keys; ratio to the best SDPA with H heads", "device ms"),
    "whole": ("Linear attention of whole sequences; ratio to the best SDPA with H heads", "device ms"),
    "em": ("A layer in training, priors from EM over learned ones", "device ms"),
}


def report(rows: list[Record]) -> str:
    last = rows[-1]
    commits, dates = (", ".join(sorted({row[name] for row in rows})) for name in ("commit", "date"))
    reached = [
        [goal.what, f"{goal.got:.3f}", f"{goal.wanted:.2f}", "yes" if goal.reached else "**no**"]
        for goal in speed_goals.goals(rows)
    ]
    text = [
        "# Ours with H/2 heads against SDPA with H\n",
        f"{last['gpu']}, {last['dtype']}, torch {last['torch']}, triton {last['triton']}, {dates}, commits "
        f"{commits}. Device time of the whole operator, medians of CUDA graph replays on both sides; below 1 ours is "
        "faster. Forward + backward includes every gradient. M = 2. Made by `python benchmarks/report.py` from "
        "`attention.csv`, which `mgk bench` writes.\n",
        "## Time over the best SDPA with H heads\n",
        speed_table(rows),
        "\nThe peers by the same measure, geometric means of the same shapes:\n",
        peers_table(rows),
        "\n## Goals\n",
        markdown_table([["what", "measured", "goal, at most", "reached"], *reached]),
    ]
    for task, (title, unit) in TITLES.items():
        if select(rows, task):
            text += [f"\n## {title}\n", part_table(rows, task, unit)]
    return "\n".join(text) + "\n"


def draw_speed(axis: Axes, rows: list[Record], which: str) -> None:
    width = 0.2
    for n, name in enumerate(NAMES):
        found = ratios(rows, name, which)
        places = [i + (n - 1.5) * width for i, shape in enumerate(SHAPES) if shape in found]
        axis.bar(places, [found[shape] for shape in SHAPES if shape in found], width, label=f"{NAMES[name]}, H/2 heads")
    axis.axhline(1, color="black", linewidth=1)
    labels = [shape.replace("xcausal", "\ncausal").replace("x", "·") for shape in SHAPES]
    axis.set_xticks(range(len(SHAPES)), labels, fontsize=7, rotation=35, ha="right", rotation_mode="anchor")
    axis.set_xlabel("batch · H · length · head width", fontsize=8)
    axis.set_title(which.replace("+", " + "), fontsize=10)
    axis.grid(axis="y", alpha=0.3)


def draw_linear(axis: Axes, rows: list[Record]) -> None:
    found = select(rows, "linear")
    for variant, name in (("mlk", "MLK, H/2 heads"), ("softmax", "best SDPA, H heads")):
        for which, style in zip(PASSES, ("-", "--"), strict=True):
            times: dict[int, float] = {}
            for row in (r for r in found if r["variant"] == variant and r["pass"] == which):
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
    axis.set_ylim(bottom=axis.get_ylim()[0] / 4)  # room for the legend
    axis.legend(fontsize=7, loc="lower right", handlelength=4)


def picture(rows: list[Record], path: Path) -> None:
    # One length is no curve: the table has its number.
    linear = len({row["length"] for row in select(rows, "linear")}) > 1
    figure, axes = pyplot.subplots(1, 2 + linear, figsize=(11 + 4 * linear, 4.2), constrained_layout=True)
    for axis, which in zip(axes, PASSES, strict=False):
        draw_speed(axis, rows, which)
    top = max(axis.get_ylim()[1] for axis in axes[:2])
    for axis in axes[:2]:
        axis.set_ylim(0, top)
    axes[0].set_ylabel("device time over the best SDPA with H heads")
    axes[0].legend(fontsize=8)
    if linear:
        draw_linear(axes[2], rows)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"))
    folder = parser.parse_args().results
    rows = speed_goals.on_gpu(results.read([folder / "attention.csv"]))
    if not rows:
        raise SystemExit(f"{folder / 'attention.csv'} has no measurements on a GPU: run `mgk bench` on one first")
    write_atomically(folder / "attention.md", report(rows))
    picture(rows, folder / "attention.png")
    print(f"{folder / 'attention.md'}  {folder / 'attention.png'}")


if __name__ == "__main__":
    main()
