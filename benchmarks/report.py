"""Tables and picture of results/attention.csv: ours with H/2 heads against the best SDPA with H.

    python benchmarks/report.py        writes results/attention.md and results/attention.png

Of several measurements of the same thing the last counts.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from mgk.models.storage import write_atomically

# The shapes of the goal (B, H, N, D, causal), and the paper's language model behind them.
GOAL_SHAPES = 7
NAMES = {"smgk": "sMGK", "smgk-hard": "sMGK hard", "mgk": "MGK", "mgk-hard": "MGK hard"}
PASSES = ("forward", "forward+backward")
GOALS = {"smgk": (0.68, 0.78), "smgk-hard": (0.65, 0.75), "mgk": (0.95, 1.10), "mgk-hard": (0.85, 1.00)}
ORDER = ("4096,64", "16384,64", "4096,128", "16384,128", "2048,32", "4096,32", "256,16")

Shape = tuple[str, ...]


def read(path: Path) -> tuple[dict[tuple[Shape, str, str], dict[str, str]], list[Shape]]:
    """(shape, contender, pass) -> row, and the shapes in the order of the table."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found: dict[tuple[Shape, str, str], dict[str, str]] = {}
    for row in rows:
        shape: Shape = (row["B"], row["H"], row["N"], row["D"], "yes" if row["causal"] == "True" else "no")
        found[shape, row["contender"], row["pass"]] = row
    shapes = sorted({key[0] for key in found}, key=lambda s: (ORDER.index(f"{s[2]},{s[3]}"), s[4]))
    return found, shapes


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.mean(map(math.log, values)))


def table(found: dict[tuple[Shape, str, str], dict[str, str]], shapes: list[Shape]) -> str:
    header = ["B, H, N, D, causal", *(f"{NAMES[name]} {p}" for name in NAMES for p in PASSES)]
    lines = [header, ["---"] * len(header)]
    for shape in shapes:
        ratios = [found[shape, name, p]["ratio"] for name in NAMES for p in PASSES]
        lines.append([", ".join(shape), *(f"{float(ratio):.2f}" for ratio in ratios)])
    goal = shapes[:GOAL_SHAPES]
    columns = {(n, p): [float(found[shape, n, p]["ratio"]) for shape in goal] for n in NAMES for p in PASSES}
    lines.append(["**geometric mean of the first seven**", *(f"**{geometric_mean(c):.2f}**" for c in columns.values())])
    lines.append(["largest of the first seven", *(f"{max(c):.2f}" for c in columns.values())])
    lines.append(["goal", *(f"{GOALS[n][PASSES.index(p)]:.2f}" for n in NAMES for p in PASSES)])
    peers = [f"{k}{s}" for s in ("", " gqa", " half") for k in ("sdpa-cudnn", "sdpa-flash")]
    names = {"": "H heads", " gqa": "H heads, H/2 key heads", " half": "H/2 heads"}
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    sides = [["SDPA", *(p for p in PASSES)], ["---"] * 3]
    for peer in peers:
        kind = peer.removeprefix("sdpa-").split(" ")[0]
        suffix = peer.removeprefix(f"sdpa-{kind}")
        means = [
            geometric_mean([float(found[s, peer, p]["ratio"]) for s in goal if (s, peer, p) in found]) for p in PASSES
        ]
        sides.append([f"{kind}, {names[suffix]}", *(f"{mean:.2f}" for mean in means)])
    peers_text = "\n".join("| " + " | ".join(line) + " |" for line in sides)
    some = next(iter(found.values()))
    return (
        "# The whole operator with H/2 heads over the best SDPA with H\n\n"
        f"{some['gpu']}, {some['dtype']}, M = 2, torch {some['torch']}, triton {some['triton']}, {some['date']}. "
        "Device time, medians of "
        "CUDA graph replays on both sides; below 1 ours is faster. Forward + backward includes every gradient.\n"
        "Made by `python benchmarks/report.py` from `attention.csv`.\n\n"
        f"{text}\n\nThe same for SDPA's own variants, geometric means of the seven shapes:\n\n{peers_text}\n"
    )


def picture(found: dict[tuple[Shape, str, str], dict[str, str]], shapes: list[Shape], path: Path) -> None:
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, constrained_layout=True)
    width = 0.2
    for axis, p in zip(axes, PASSES, strict=True):
        for n, name in enumerate(NAMES):
            heights = [float(found[shape, name, p]["ratio"]) for shape in shapes]
            places = [i + (n - 1.5) * width for i in range(len(shapes))]
            axis.bar(places, heights, width, label=f"{NAMES[name]}, H/2 heads")
        axis.axhline(1, color="black", linewidth=1)
        labels = [f"N {int(s[2]) // 1024 or s[2]}{'k' if int(s[2]) >= 1024 else ''}\nD {s[3]}" for s in shapes]
        labels = [f"{text}\n{'causal' if s[4] == 'yes' else 'full'}" for text, s in zip(labels, shapes, strict=True)]
        axis.set_xticks(range(len(shapes)), labels, fontsize=8)
        axis.set_title(p.replace("+", " + "), fontsize=10)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("time over the best SDPA with H heads")
    axes[1].legend(fontsize=8)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, dpi=150, format="png")
    pyplot.close(figure)
    temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"))
    folder = parser.parse_args().results
    found, shapes = read(folder / "attention.csv")
    write_atomically(folder / "attention.md", table(found, shapes))
    picture(found, shapes, folder / "attention.png")
    print(f"{folder / 'attention.md'}  {folder / 'attention.png'}")


if __name__ == "__main__":
    main()
