"""Claim about cost: counted parameters and FLOPs, measured times and memory."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.paper import kernel_targets, verdicts
from experiments.paper.claims.quality import BASELINES, ExperimentResults
from experiments.paper.recipe_results import PRESET
from experiments.result_rows import Rows
from mgk._core.markdown import format_number, markdown_table
from mgk.bench.timing import PASSES
from mgk.training.config import ModelSpec
from mgk.training.results import latest, latest_value
from mgk.training.sweep import SOLO_METRICS, filter_rows

COUNTS = ("parameters", "FLOPs")
UNITS = {"parameters": (1e3, "k"), "FLOPs": (1e9, "G")}
TIMES = ("training step", "inference")
MEASURED = dict(zip(SOLO_METRICS, (*TIMES, "memory of the step"), strict=True))


@dataclass(frozen=True)
class RowCost:
    """Costs of a model by name; costs that were not measured are absent."""

    row: ModelSpec
    values: dict[str, float]


def experiment_costs(item: ExperimentResults, rows: Rows) -> list[RowCost]:
    """Read parameters and FLOPs from the runs, and times and memory from models timed in isolation."""
    costs = []
    for row in item.results.rows:
        run = item.results.runs_of(row)[0]
        values = {"parameters": float(run.params), "FLOPs": float(run.flops)}
        model_rows = filter_rows(rows, item.results.recipe, row, PRESET, None, run.setup)
        measured = {name: latest_value(model_rows, metric) for metric, name in MEASURED.items()}
        values |= {name: value for name, value in measured.items() if value is not None}
        costs.append(RowCost(row, values))
    return costs


def step_rows(rows: Rows) -> Rows:
    """Select the training steps at the length and batch size of the claim."""
    size = {"recipe": "training-step", "length": "4096", "batch": "32"}
    return [row for row in rows if size.items() <= row.items() and not row["gpu"].startswith("cpu")]


def step_costs(rows: Rows) -> list[RowCost]:
    """Return the latest measurement of each model by benchmarks/training_step.py on a GPU."""
    steps = [row for row in step_rows(rows) if row["metric"] == "step_ms"]
    return [
        RowCost(
            ModelSpec(row["variant"], int(row["heads"])),
            {"training step": float(row["value"]), "memory of the step": float(row["peak_mem_mb"])},
        )
        for row in latest(steps, ("variant", "heads"))
    ]


def pairs(costs: list[RowCost]) -> list[tuple[RowCost, RowCost]]:
    """Pair each mixture with its baseline of twice the heads."""
    by_row = {cost.row: cost for cost in costs}
    baselines = ((cost, ModelSpec(BASELINES.get(cost.row.variant, ""), 2 * cost.row.heads)) for cost in costs)
    return [(cost, by_row[baseline]) for cost, baseline in baselines if baseline in by_row]


def ratios(mixture: RowCost, baseline: RowCost) -> dict[str, float]:
    """Return mixture / baseline of each cost that both models have."""
    names = [name for name in mixture.values if name in baseline.values]
    return {name: mixture.values[name] / baseline.values[name] for name in names}


def judge(name: str, mixture: float, baseline: float) -> str:
    """Judge whether a mixture has less of a cost than its baseline."""
    return verdicts.cheaper(mixture / baseline, _tolerance(name, min(mixture, baseline)))


def judge_all(mixture: RowCost, baseline: RowCost) -> dict[str, str]:
    """Judge each cost that both models have."""
    names = ratios(mixture, baseline)
    return {name: judge(name, mixture.values[name], baseline.values[name]) for name in names}


def _tolerance(name: str, smaller: float) -> float:
    if name in COUNTS:
        return 0.0
    if name == MEASURED["peak_mem_mb_alone"]:
        return verdicts.MEMORY
    return verdicts.SHORT_STEPS if smaller < verdicts.SHORT else verdicts.STEPS


def table(costs: list[RowCost]) -> str:
    """Format the costs of each mixture and its baseline, with verdicts."""
    used = [name for name in (*COUNTS, *MEASURED.values()) if any(name in cost.values for cost in costs)]
    lines = [["models", *used]]
    for mixture, baseline in pairs(costs):
        measured = ratios(mixture, baseline)
        cells = [
            _cell(name, mixture.values[name], baseline.values[name]) if name in measured else verdicts.MISSING
            for name in used
        ]
        lines.append([f"{mixture.row} / {baseline.row}", *cells])
    return markdown_table(lines)


def _cell(name: str, mixture: float, baseline: float) -> str:
    size, unit = UNITS.get(name, (1.0, "MB" if "memory" in name else "ms"))
    digits = 0 if max(mixture, baseline) / size >= 100 else 1
    values = " / ".join(f"{value / size:,.{digits}f}" for value in (mixture, baseline))
    return f"{format_number(mixture / baseline)} ({values} {unit}), {judge(name, mixture, baseline)}"


def machine(rows: Rows) -> str:
    """Describe the machine and the dates of the measurements."""
    dates: dict[str, set[str]] = {}
    for row in rows:
        dates.setdefault(f"{row['gpu']}, torch {row['torch']}", set()).add(row["date"])
    return "; ".join(f"{name}, {' and '.join(sorted(days))}" for name, days in dates.items())


def operator_table(rows: Rows) -> str:
    """Format the geometric means of the operator's time with H/2 heads relative to the best SDPA with H."""
    measured = [
        row
        for row in kernel_targets.select(kernel_targets.on_gpu(rows), "speed", backend="triton")
        if row["components"] == "2"
    ]
    lines = [["operator, H/2 heads, over SDPA with H", *PASSES]]
    for variant, name in kernel_targets.NAMES.items():
        cells = []
        for pass_ in PASSES:
            ratio = kernel_targets.mean(kernel_targets.ratios(measured, variant, pass_))
            cells.append(f"{format_number(ratio)}, {verdicts.cheaper(ratio, verdicts.TIMING)}")
        lines.append([name, *cells])
    return f"**The operator alone** ({machine(measured)})\n\n{markdown_table(lines)}"
