"""Training curves, as runs leave them in metrics.csv and as they are kept beside the results."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from mgk._core.validation import fail
from mgk.models.run_directory import RunDirectory
from mgk.training.config import ModelSpec

# Columns of metrics.csv that are no metric; `seconds` is what unix_time was called at first.
OTHERS = ("step", "split", "lr", "unix_time", "seconds")


@dataclass(frozen=True)
class Curve:
    run: str
    split: str
    metric: str
    steps: list[int]
    values: list[float]


def kept(results: Path, recipe: str, row: ModelSpec, preset: str, seed: int, setup: str | None = None) -> Path:
    """Where a run's curve is kept. setup: of a run with other settings than its recipe's."""
    named = "-".join(part for part in (recipe, row.file_name, preset, f"s{seed}", setup) if part)
    return results / "curves" / f"{named}.csv"


def kept_of(results: Path, recipe: str, row: ModelSpec, preset: str) -> dict[int, Path]:
    """By seed, those of the recipe's own settings."""
    first = kept(results, recipe, row, preset, 0)
    found = (re.fullmatch(rf"{re.escape(first.stem[:-1])}(\d+)\.csv", path.name) for path in first.parent.glob("*.csv"))
    return {seed: kept(results, recipe, row, preset, seed) for seed in sorted(int(each[1]) for each in found if each)}


def read_curves(run: Path, name: str) -> list[Curve]:
    """Every metric of every split over the steps; none where a run has no metrics.csv."""
    path = RunDirectory(run).metrics
    return read_metrics(path, name) if path.exists() else []


def read_metrics(path: Path, name: str) -> list[Curve]:
    """The same from a metrics.csv wherever it lies."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found: dict[tuple[str, str], Curve] = {}
    for number, row in enumerate(rows):
        try:
            step = int(row["step"])
            values = {metric: float(text) for metric, text in row.items() if metric not in OTHERS}
        except (KeyError, TypeError, ValueError):
            fail(str(path), f"is damaged: line {number + 2} is not numbers under the names of the first line")
        for metric, value in values.items():
            curve = found.setdefault((row["split"], metric), Curve(name, row["split"], metric, [], []))
            # A last step that was evaluated without its loss leaves NaN there.
            if value == value:
                curve.steps.append(step)
                curve.values.append(value)
    return [curve for curve in found.values() if curve.steps]
