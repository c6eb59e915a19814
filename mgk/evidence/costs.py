"""The claim about cost: parameters and FLOPs counted, times and memory measured alone on the machine."""

from __future__ import annotations

from dataclasses import dataclass

from mgk.benchmark import goals
from mgk.benchmark.timing import PASSES
from mgk.compare import matching
from mgk.cost import METRICS
from mgk.evidence import verdicts
from mgk.evidence.claims import BASELINES, Part
from mgk.evidence.runs import PRESET
from mgk.evidence.tables import markdown, number
from mgk.recipes import Row

# What each column holds, and the share by which two measurements of the same may differ.
COUNTS = {"parameters": 0.0, "FLOPs": 0.0}
MEASURED = dict(zip(METRICS, ("training step", "forward", "memory of the step"), strict=True))


@dataclass(frozen=True)
class Cost:
    """What a model costs, by name; what was not measured is not in it."""

    row: Row
    of: dict[str, float]


def of_part(part: Part, rows: list[dict[str, str]]) -> list[Cost]:
    """Counts from the trainings, times from those that were timed alone."""
    found = []
    for row in part.found.rows:
        run = part.found.of(row)[0]
        values = {"parameters": float(run.params), "FLOPs": float(run.flops)}
        for each in matching(rows, part.found.recipe, row, PRESET, None):
            if each["metric"] in MEASURED:
                values[MEASURED[each["metric"]]] = float(each["value"])
        found.append(Cost(row, values))
    return found


def of_steps(rows: list[dict[str, str]]) -> list[Cost]:
    """The last measurement of each model by benchmarks/training_step.py on a GPU, where the length is the same."""
    last: dict[Row, Cost] = {}
    for each in rows:
        if each.get("recipe") == "training-step" and each["metric"] == "step_ms" and not each["gpu"].startswith("cpu"):
            row = Row(each["variant"], int(each["heads"]))
            last[row] = Cost(
                row, {"training step": float(each["value"]), "memory of the step": float(each["peak_mem_mb"])}
            )
    return list(last.values())


def ratios(costs: list[Cost]) -> list[tuple[Row, Row, dict[str, float]]]:
    """Each mixture over its baseline with twice the heads, what both have."""
    by_row = {cost.row: cost.of for cost in costs}
    found = []
    for ours, own in by_row.items():
        theirs = Row(BASELINES.get(ours.variant, ""), 2 * ours.heads)
        if theirs in by_row:
            base = by_row[theirs]
            found.append((ours, theirs, {name: own[name] / base[name] for name in own if name in base}))
    return found


def judge(name: str, ratio: float | None) -> str:
    return verdicts.cheaper(ratio, COUNTS.get(name, verdicts.TIMING))


def table(costs: list[Cost]) -> str:
    names = [*COUNTS, *MEASURED.values()]
    used = [name for name in names if any(name in cost.of for cost in costs)]
    lines = [["models", *used]]
    for ours, theirs, found in ratios(costs):
        cells = [f"{number(found[name])}, {judge(name, found[name])}" if name in found else "–" for name in used]
        lines.append([f"{ours} / {theirs}", *cells])
    return markdown(lines)


def operator_table(rows: list[dict[str, str]]) -> str:
    """Of results/attention.csv: the operator with H/2 heads over the best SDPA with H, geometric means."""
    measured = [row for row in goals.latest(row for row in rows if "pass" in row) if not row["gpu"].startswith("cpu")]
    lines = [["operator, H/2 heads, over SDPA with H", *PASSES]]
    for variant, name in goals.NAMES.items():
        cells = []
        for which in PASSES:
            by_shape = goals.ratios(measured, variant, which)
            values = [by_shape[shape] for shape in goals.GOAL_SHAPES if shape in by_shape]
            whole = len(values) == len(goals.GOAL_SHAPES)
            ratio = goals.geometric_mean(values) if whole else None
            cells.append(f"{number(ratio)}, {judge('training step', ratio)}")
        lines.append([name, *cells])
    return markdown(lines)
