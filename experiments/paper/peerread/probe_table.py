"""Baselines of the retrieval task and the measurements of experiments/paper/peerread/probe.py."""

from __future__ import annotations

from experiments.paper import verdicts
from experiments.result_rows import Rows
from mgk._core.markdown import format_number, markdown_table

PROBE, RECIPE, BASELINE = "retrieval-probe", "retrieval-peerread", "baseline: "


def text(rows: Rows) -> str:
    """Format the latest accuracy of each method, in per cent."""
    accuracies: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["recipe"] == RECIPE and row["metric"].startswith(BASELINE):
            accuracies.setdefault(row["metric"].removeprefix(BASELINE), {})[row["split"]] = 100 * float(row["value"])
        if row["recipe"] == PROBE:
            accuracies.setdefault(row["metric"], {})[row["split"]] = float(row["value"])
    if not accuracies:
        return f"Probes of the task: {verdicts.MISSING}."
    tested = {name: splits for name, splits in accuracies.items() if "test" in splits}
    lines = [["method", "dev, %", "test, %"]]
    lines += [
        [name, format_number(splits.get("dev")), format_number(splits["test"])] for name, splits in tested.items()
    ]
    untested = [
        f"{name}: {format_number(value)} % of {split}."
        for name, splits in accuracies.items()
        if name not in tested
        for split, value in splits.items()
    ]
    return "\n\n".join([markdown_table(lines), *untested])
