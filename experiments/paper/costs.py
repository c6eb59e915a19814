"""The claim about cost: parameters and FLOPs counted, times and memory measured alone on the machine."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.paper import speed_goals, verdicts
from experiments.paper.claims import BASELINES, ExperimentResults
from experiments.paper.recipe_results import PRESET
from mgk._core.io import format_number, markdown_table
from mgk.bench.timing import PASSES
from mgk.training.config import ModelSpec
from mgk.training.results import latest_value
from mgk.training.sweep import SOLO_METRICS, filter_rows

COUNTS = ("parameters", "FLOPs")
UNITS = {"parameters": (1e3, "k"), "FLOPs": (1e9, "G")}
MEASURED = dict(zip(SOLO_METRICS, ("training step", "inference", "memory of the step"), strict=True))


@dataclass(frozen=True)
class RowCost:
    """What a model costs, by name; what was not measured is not in it."""

    row: ModelSpec
    of: dict[str, float]


def of_part(part: ExperimentResults, rows: list[dict[str, str]]) -> list[RowCost]:
    """Counts from the trainings, times from those that were timed alone."""
    found = []
    for row in part.found.rows:
        run = part.found.of(row)[0]
        values = {"parameters": float(run.params), "FLOPs": float(run.flops)}
        own = filter_rows(rows, part.found.recipe, row, PRESET, None, run.setup)
        measured = {name: latest_value(own, metric) for metric, name in MEASURED.items()}
        values |= {name: value for name, value in measured.items() if value is not None}
        found.append(RowCost(row, values))
    return found


def step_rows(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """At the length and batch that the claim is judged at."""
    size = {"recipe": "training-step", "length": "4096", "batch": "32"}
    return [row for row in rows if size.items() <= row.items() and not row["gpu"].startswith("cpu")]


def of_steps(rows: list[dict[str, str]]) -> list[RowCost]:
    """The last measurement of each model by benchmarks/training_step.py on a GPU."""
    last: dict[ModelSpec, RowCost] = {}
    for each in step_rows(rows):
        if each["metric"] == "step_ms":
            row = ModelSpec(each["variant"], int(each["heads"]))
            last[row] = RowCost(
                row, {"training step": float(each["value"]), "memory of the step": float(each["peak_mem_mb"])}
            )
    return list(last.values())


def pairs(costs: list[RowCost]) -> list[tuple[RowCost, RowCost]]:
    """Each mixture, and its baseline with twice the heads."""
    by_row = {cost.row: cost for cost in costs}
    wanted = ((cost, ModelSpec(BASELINES.get(cost.row.variant, ""), 2 * cost.row.heads)) for cost in costs)
    return [(ours, by_row[theirs]) for ours, theirs in wanted if theirs in by_row]


def ratios(ours: RowCost, theirs: RowCost) -> dict[str, float]:
    return {name: ours.of[name] / theirs.of[name] for name in ours.of if name in theirs.of}


def judge(name: str, ours: float, theirs: float) -> str:
    return verdicts.cheaper(ours / theirs, _noise(name, min(ours, theirs)))


def judged(ours: RowCost, theirs: RowCost) -> dict[str, str]:
    """The verdict on each quantity that both have."""
    return {name: judge(name, ours.of[name], theirs.of[name]) for name in ratios(ours, theirs)}


def _noise(name: str, smaller: float) -> float:
    if name in COUNTS:
        return 0.0
    if name == MEASURED["peak_mem_mb_alone"]:
        return verdicts.MEMORY
    return verdicts.SHORT_STEPS if smaller < verdicts.SHORT else verdicts.STEPS


def table(costs: list[RowCost]) -> str:
    used = [name for name in (*COUNTS, *MEASURED.values()) if any(name in cost.of for cost in costs)]
    lines = [["models", *used]]
    for ours, theirs in pairs(costs):
        found = ratios(ours, theirs)
        cells = [_cell(name, ours.of[name], theirs.of[name]) if name in found else verdicts.MISSING for name in used]
        lines.append([f"{ours.row} / {theirs.row}", *cells])
    return markdown_table(lines)


def _cell(name: str, ours: float, theirs: float) -> str:
    size, unit = UNITS.get(name, (1.0, "MB" if "memory" in name else "ms"))
    digits = 0 if max(ours, theirs) / size >= 100 else 1
    shown = " / ".join(f"{value / size:,.{digits}f}" for value in (ours, theirs))
    return f"{format_number(ours / theirs)} ({shown} {unit}), {judge(name, ours, theirs)}"


def machine(rows: list[dict[str, str]]) -> str:
    """Where and when these rows were measured."""
    dates: dict[str, set[str]] = {}
    for row in rows:
        dates.setdefault(f"{row['gpu']}, torch {row['torch']}", set()).add(row["date"])
    return "; ".join(f"{where}, {' and '.join(sorted(when))}" for where, when in dates.items())


def operator_table(rows: list[dict[str, str]]) -> str:
    """Of results/attention.csv: the operator with H/2 heads over the best SDPA with H, geometric means."""
    measured = [
        row
        for row in speed_goals.select(speed_goals.on_gpu(rows), "speed", backend="triton")
        if row["components"] == "2"
    ]
    lines = [["operator, H/2 heads, over SDPA with H", *PASSES]]
    for variant, name in speed_goals.NAMES.items():
        cells = []
        for which in PASSES:
            ratio = speed_goals.mean(speed_goals.ratios(measured, variant, which))
            cells.append(f"{format_number(ratio)}, {verdicts.cheaper(ratio, verdicts.TIMING)}")
        lines.append([name, *cells])
    return f"**The operator alone** ({machine(measured)})\n\n{markdown_table(lines)}"
