"""Averages over the three tasks of the Long Range Arena: the last column of the paper's Tables 1, 2 and 4."""

from __future__ import annotations

import statistics

from experiments.paper.claims.quality import ExperimentResults
from experiments.paper.plan import LRA
from mgk._core.markdown import format_number, markdown_table

MISSING = "No model has been run on all three tasks yet, so there is no average."


def average(values: list[float | None]) -> float | None:
    """Return the mean, or None if a value is missing."""
    known = [value for value in values if value is not None]
    return statistics.mean(known) if len(known) == len(values) else None


def table(experiments: list[ExperimentResults]) -> str:
    """Format the averages of the models that are planned or run on all three tasks."""
    selected = [next(item for item in experiments if item.experiment.recipe == name) for name in LRA]
    lines = [["model", *(item.title for item in selected), "average", "paper's average"]]
    complete = False
    for row in (row for row in selected[0].rows if all(row in item.rows for item in selected)):
        values = [item.results.mean(row) for item in selected]
        averages = average(values), average([item.results.paper(row) for item in selected])
        lines.append([str(row), *map(format_number, (*values, *averages))])
        complete = complete or averages[0] is not None
    return markdown_table(lines) if complete else f"{markdown_table(lines)}\n\n{MISSING}"
