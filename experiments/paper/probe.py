"""What is known of the task of retrieval beside its trainings: its baselines and benchmarks/retrieval_probe.py."""

from __future__ import annotations

from experiments.paper import verdicts
from mgk._core.io import format_number, markdown_table

PROBE, RECIPE, BASELINE = "retrieval-probe", "retrieval-peerread", "baseline: "


def text(rows: list[dict[str, str]]) -> str:
    """Accuracies in per cent, of the last time that each was measured."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["recipe"] == RECIPE and row["metric"].startswith(BASELINE):
            found.setdefault(row["metric"].removeprefix(BASELINE), {})[row["split"]] = 100 * float(row["value"])
        if row["recipe"] == PROBE:
            found.setdefault(row["metric"], {})[row["split"]] = float(row["value"])
    if not found:
        return f"Probes of the task: {verdicts.MISSING}."
    judged = {name: each for name, each in found.items() if "test" in each}
    lines = [["method", "dev, %", "test, %"]]
    lines += [[name, format_number(each.get("dev")), format_number(each["test"])] for name, each in judged.items()]
    others = [
        (name, split, value) for name, each in found.items() if name not in judged for split, value in each.items()
    ]
    return "\n\n".join(
        [markdown_table(lines), *(f"{name}: {format_number(value)} % of {split}." for name, split, value in others)]
    )
