"""Learning curves, read from the metrics.csv of runs."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from mgk._core.validation import fail
from mgk.models.run_directory import RunDirectory

# Columns of metrics.csv that are not metrics; older files have `seconds` instead of `unix_time`.
NON_METRICS = ("step", "split", "lr", "unix_time", "seconds")


@dataclass(frozen=True)
class Curve:
    """One metric of one split over the training steps."""

    run: str
    split: str
    metric: str
    steps: list[int]
    values: list[float]


def read_curves(run: Path, name: str) -> list[Curve]:
    """Read the curves of a run directory; an empty list if it has no metrics.csv."""
    path = RunDirectory(run).metrics
    return read_metrics(path, name) if path.exists() else []


def read_metrics(path: Path, name: str) -> list[Curve]:
    """Read every metric of every split from a metrics file.

    Args:
        path: A CSV file with the columns of metrics.csv.
        name: Name of the run, stored in the curves.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        fail(str(path), f"is damaged: {error}")
    curves: dict[tuple[str, str], Curve] = {}
    for number, row in enumerate(rows):
        try:
            step, split = int(row["step"]), row["split"]
            values = {metric: float(text) for metric, text in row.items() if metric not in NON_METRICS}
        except (KeyError, TypeError, ValueError):
            fail(str(path), f"is damaged: line {number + 2} does not hold numbers under the column names")
        for metric, value in values.items():
            curve = curves.setdefault((split, metric), Curve(name, split, metric, [], []))
            # NaN means that the metric was not evaluated at this step.
            if value == value:
                curve.steps.append(step)
                curve.values.append(value)
    return [curve for curve in curves.values() if curve.steps]
