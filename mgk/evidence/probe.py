"""What is known of the task of retrieval without a transformer: its baselines and benchmarks/retrieval_probe.py."""

from __future__ import annotations

from mgk.evidence import verdicts
from mgk.evidence.tables import markdown, number

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
    splits = list(dict.fromkeys(split for each in found.values() for split in sorted(each)))
    lines = [["without a transformer", *(f"{split}, %" for split in splits)]]
    lines += [[name, *(number(each.get(split)) for split in splits)] for name, each in found.items()]
    return markdown(lines)
