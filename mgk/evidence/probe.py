"""What is known about the task of retrieval without training a transformer on it: benchmarks/retrieval_probe.py."""

from __future__ import annotations

from mgk.evidence import verdicts
from mgk.evidence.tables import markdown, number

RECIPE = "retrieval-probe"


def text(rows: list[dict[str, str]]) -> str:
    own = [row for row in rows if row.get("recipe") == RECIPE]
    if not own:
        return f"{verdicts.MISSING}."
    lines = [["probe", "on", "value"]]
    lines += [[row["metric"], row["split"], number(float(row["value"]))] for row in own]
    return markdown(lines)
