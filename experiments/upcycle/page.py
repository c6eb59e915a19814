"""Tables and figure of docs/upcycling.md, from results/upcycle.csv."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.pictures import Picture
from experiments.result_rows import Rows
from experiments.upcycle import decoder_page
from experiments.upcycle.arms import BUDGETS, HEAD_DIM, HEADS, LAYERS, NUMBERS, STEPS, Arm, plan
from experiments.upcycle.decoder_page import cell
from mgk._core.io import write_atomically
from mgk._core.markdown import fill_marked_parts, markdown_table
from mgk._core.palette import colour_of
from mgk.analysis.report.drawing import End, label_ends
from mgk.training import results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEY = ("method", "variant", "key_heads", "kv_heads", "steps", "seed", "metric")
# Column of the tables -> fields of its arms.
COLUMNS: dict[str, dict[str, Any]] = {
    "SVD": {"method": "svd"},
    "SVD without refit": {"method": "svd without refit"},
    "mean": {"method": "mean"},
    "SVD, trained": {"method": "svd", "steps": STEPS},
    "mean, trained": {"method": "mean", "steps": STEPS},
    "SVD + mixture, trained": {"method": "svd", "steps": STEPS, "mixture": True},
}
PER_LAYER = "SVD, numbers per layer"
# Label of the line, variant whose colour it has (none: another colour), marker, colour inside of the
# marker (None: the same) and line style, in the order of drawing.
STYLES = {
    "mean": ("mean", "", "s", "white", ":"),
    "mean, trained": ("mean, trained", "", "s", None, "-"),
    "SVD": ("SVD", "softmax", "o", "white", ":"),
    "SVD, trained": ("SVD, trained", "softmax", "o", None, "-"),
    "SVD + mixture, trained": ("SVD + mixture, trained", "smgk", "x", None, "none"),
    PER_LAYER: ("SVD, numbers per layer", "softmax", "D", "white", "--"),
}


def read_results(path: Path) -> Rows:
    """Return the latest measurement of every arm and metric."""
    return results.latest(results.read([path]), KEY)


def values(rows: Rows, arm: Arm, metric: str) -> list[float]:
    """Return the values of an arm, one per seed."""
    key = {name: value for name, value in arm.key().items() if name != "seed"}
    return [float(row["value"]) for row in rows if row["metric"] == metric and key.items() <= row.items()]


def arm_of(column: str, numbers: tuple[int, int]) -> Arm:
    """Return the arm of a column of the tables."""
    key_heads, value_heads = numbers
    return Arm(key_heads=key_heads, value_heads=value_heads, **COLUMNS[column])


def table(rows: Rows, metric: str) -> str:
    """Return a table of one metric: numbers of heads by way of merging."""
    original = values(rows, Arm("none", HEADS, HEADS), metric)
    lines = [["key / value heads", "cache", *COLUMNS], [f"{HEADS} / {HEADS}", "1.00", cell(original), *["–"] * 5]]
    for numbers in NUMBERS:
        cells = [cell(values(rows, arm_of(column, numbers), metric)) for column in COLUMNS]
        lines.append([f"{numbers[0]} / {numbers[1]}", f"{Arm('svd', *numbers).cache:.2f}", *cells])
    return markdown_table(lines)


def budget_table(rows: Rows) -> str:
    """Return a table of the models whose numbers of heads are chosen per layer."""
    lines = [["cache at most", "cache", "parameters", "cosine", "Spearman"]]
    for budget in BUDGETS:
        arm = Arm("svd", 0, 0, budget=budget)
        measured = [row for row in rows if arm.is_of(row)]
        size = f"{float(measured[0]['cache']):.3f}" if measured else "–"
        parameters = f"{int(measured[0]['params']):,}" if measured else "–"
        metrics = [cell(values(rows, arm, metric)) for metric in ("cosine", "spearman")]
        lines.append([f"{budget:g}", size, parameters, *metrics])
    return markdown_table(lines)


def sizes(rows: Rows) -> str:
    """Return a table of parameters, cache and latency."""
    lines = [["key / value heads", "parameters", "cache, bytes per token", "latency, ms"]]
    for arm in [Arm("none", HEADS, HEADS), *(Arm("svd", *numbers) for numbers in NUMBERS)]:
        measured = [row for row in rows if arm.is_of(row)]
        parameters = f"{int(measured[0]['params']):,}" if measured else "–"
        width = (arm.key_heads + arm.value_heads) * HEAD_DIM * LAYERS * 4
        latency = cell(values(rows, arm, "latency_ms"), 0)
        lines.append([f"{arm.key_heads} / {arm.value_heads}", parameters, f"{width:,}", latency])
    return markdown_table(lines)


def source(rows: Rows) -> str:
    """Return a sentence about the origin of the numbers."""
    if not rows:
        return "No measurements."
    last = rows[-1]
    missing = sum(not values_of_seed(rows, arm) for arm in plan())
    parts = f"torch {last['torch']}, Transformers {last['transformers']}, {last['gpu']}, commit {last['commit']}"
    text = f"Measured on {last['date']} with {parts}; `results/upcycle.csv`."
    return text if not missing else f"{text} {missing} of {len(plan())} planned measurements are missing."


def values_of_seed(rows: Rows, arm: Arm) -> list[float]:
    """Return the cosine of an arm with its seed."""
    return values([row for row in rows if row["seed"] == str(arm.seed)], arm, "cosine")


def picture(rows: Rows) -> Picture:
    """Plot the cosine against the cache."""
    data = {
        column: [
            [Arm("svd", *numbers).cache, f"{numbers[0]}/{numbers[1]}", statistics.mean(cosines)]
            for numbers in NUMBERS
            if (cosines := values(rows, arm_of(column, numbers), "cosine"))
        ]
        for column in STYLES
        if column in COLUMNS
    }
    data[PER_LAYER] = [
        [float(row["cache"]), "", float(row["value"])]
        for budget in BUDGETS
        for row in rows
        if row["metric"] == "cosine" and row["method"] == Arm("svd", 0, 0, budget=budget).key()["method"]
    ]
    return Picture("upcycling", data, _draw)


def _draw(data: dict[str, list[Any]]) -> Figure:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.8, 4.6), layout="constrained")
    ends = []
    for column, (name, variant, marker, face, line) in STYLES.items():
        points, colour = sorted(data[column]), colour_of(variant)
        # A line connects models of which only the keys are merged, another those with merged values too.
        keys_only = [point for point in points if point[1].endswith(f"/{HEADS}")]
        for part in (keys_only, [point for point in points if point not in keys_only]):
            caches, cosines = [point[0] for point in part], [point[2] for point in part]
            axes.plot(
                caches, cosines, marker=marker, linestyle=line, color=colour, linewidth=1.2,
                # Crosses lie on dots.
                markersize=9 if marker == "x" else 6, markeredgewidth=1.8 if marker == "x" else 1.2,
                markerfacecolor=face or colour,
            )  # fmt: skip
        if points and line != "none":
            ends.append(End(points[-1][0], points[-1][2], name, colour))
        elif points:
            axes.annotate(
                name, (points[0][0], points[0][2]), textcoords="offset points", xytext=(10, -14), fontsize=9,
                color=colour,
            )  # fmt: skip
    for cache, label, _ in data["SVD"]:
        axes.annotate(
            label, (cache, 0), xycoords=("data", "axes fraction"), textcoords="offset points", xytext=(0, 4),
            ha="center", fontsize=8, color="#59636e",
        )  # fmt: skip
        axes.axvline(cache, color="#000000", alpha=0.08, linewidth=0.8)
    axes.set_xlabel("cache relative to the original model; above the axis: key heads / value heads", fontsize=10)
    axes.set_ylabel("cosine to the original embeddings", fontsize=10)
    axes.set_title("all-MiniLM-L6-v2 with fewer key and value heads (12 / 12 originally)", fontsize=11)
    axes.set_ylim(bottom=axes.get_ylim()[0] - 0.03)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    label_ends(axes, ends)
    return figure


def write_page(path: Path, page: Path) -> list[Path]:
    """Write the marked parts of the page, and its figure in figures/ beside it."""
    rows = read_results(path)
    texts = {
        "fidelity": table(rows, "cosine"),
        "budget": budget_table(rows),
        "similarity": table(rows, "spearman"),
        "sizes": sizes(rows),
        "source": source(rows),
        "decoder": decoder_page.section(path.parent),
    }
    write_atomically(page, fill_marked_parts(page.read_text(encoding="utf-8"), texts))
    return [page, picture(rows).write(page.parent / "figures")]
