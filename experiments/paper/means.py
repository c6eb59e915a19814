"""The average over the three tasks of the Long Range Arena, the last column of the paper's Tables 1, 2 and 4."""

from __future__ import annotations

import statistics

from experiments.paper.claims import ExperimentResults
from experiments.paper.plan import LRA
from mgk._core.io import format_number, markdown_table

MISSING = "No model has been run on all three tasks yet, so that there is no average."


def average(values: list[float | None]) -> float | None:
    """None where a task is missing: an average over fewer tasks is another number."""
    known = [value for value in values if value is not None]
    return statistics.mean(known) if len(known) == len(values) else None


def table(parts: list[ExperimentResults]) -> str:
    """Of the models that are planned on, or were run on, all three tasks."""
    own = [next(part for part in parts if part.experiment.recipe == name) for name in LRA]
    lines = [["model", *(part.title for part in own), "average", "paper's average"]]
    some = False
    for row in (row for row in own[0].rows if all(row in part.rows for part in own)):
        values = [part.found.mean(row) for part in own]
        averages = average(values), average([part.found.paper(row) for part in own])
        lines.append([str(row), *map(format_number, (*values, *averages))])
        some = some or averages[0] is not None
    return markdown_table(lines) if some else f"{markdown_table(lines)}\n\n{MISSING}"
