"""What the files of results know of each row of a comparison, seed by seed."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mgk.training import predictions
from mgk.training.config import ModelSpec, Recipe
from mgk.training.results import latest
from mgk.training.sweep import MetricFormat, filter_rows, metric_format


@dataclass
class Summary:
    """A row of the table."""

    row: ModelSpec
    values: dict[str, dict[int, float]] = field(default_factory=dict)  # split -> seed -> as shown
    examples: dict[str, int] = field(default_factory=dict)
    params: int = 0
    flops: int = 0
    step_ms: float | None = None  # with the machine to itself: others are not comparable
    memory_mb: float = math.nan
    left_plateau: dict[int, int] = field(default_factory=dict)  # seed -> step, 0: never
    # Minus the first row on the same examples, as shown, or in words why there is none.
    difference: predictions.Difference | str = ""

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for values in self.values.values() for seed in values})

    @property
    def stuck(self) -> bool:
        """Every seed stayed on the plateau that the task begins with."""
        return all(self.left_plateau.get(seed) == 0 for seed in self.seeds)

    @property
    def counted(self) -> list[int]:
        """The seeds that the row's numbers are of: a mean over runs that learned and runs that did not says nothing."""
        return [seed for seed in self.seeds if self.stuck or self.left_plateau.get(seed) != 0]

    def of(self, split: str) -> list[float]:
        values = self.values.get(split, {})
        return [values[seed] for seed in self.counted if seed in values]

    def spread(self, split: str, how: MetricFormat) -> float | None:
        """Over seeds; with one, what the size of the test set leaves open, where that is known."""
        values = self.of(split)
        if len(values) > 1:
            return statistics.stdev(values)
        return interval(values[0], self.examples[split]) if values and how.metric == "accuracy" else None


def interval(percent: float, examples: int) -> float:
    """Half the width of the 95 % interval of an accuracy measured on so many examples."""
    share = percent / 100
    return float(196 * (share * (1 - share) / examples) ** 0.5)


def summarise(rows: list[dict[str, str]], recipe: Recipe, models: list[ModelSpec], preset: str) -> list[Summary]:
    """Of the models that there are results of."""
    how = metric_format(recipe)
    summaries = []
    for row in models:
        measured = filter_rows(rows, recipe, row, preset, None)
        found = [each for each in measured if each["metric"] == how.metric]
        if not found:
            continue

        summary = Summary(row, params=int(found[0]["params"]), flops=int(found[0]["flops"]))
        for each in found:
            summary.values.setdefault(each["split"], {})[int(each["seed"])] = how.factor * float(each["value"])
            summary.examples[each["split"]] = int(each["n_examples"])
        summary.left_plateau = {
            int(each["seed"]): int(each["value"]) for each in measured if each["metric"] == "plateau_left_at_step"
        }
        summary.step_ms = latest(measured, "step_ms_alone")
        alone = latest(measured, "peak_mem_mb_alone")
        together = statistics.median(float(each["peak_mem_mb"]) for each in found)
        summary.memory_mb = together if alone is None else alone
        summaries.append(summary)
    return summaries


def all_splits(summaries: list[Summary]) -> list[str]:
    """The one that decides first."""
    names = {split for summary in summaries for split in summary.values}
    return sorted(names, key=lambda name: (name != "test", name != "dev", name))


def compare_answers(
    summaries: list[Summary], recipe: Recipe, preset: str, out: Path, setups: dict[ModelSpec, str]
) -> str:
    """Fills in the differences to the first row; returns the split they are of, "" if there are none.

    It is the largest of the splits, of equal ones the one that the table leads with. A row that never left
    the plateau stands against one that never did either.
    """
    first, *others = summaries
    factor = metric_format(recipe).factor
    split = max(all_splits([first]), key=lambda name: first.examples[name])

    def kept(summary: Summary) -> list[np.ndarray]:
        setup = setups.get(summary.row, "")
        places = (
            predictions.PredictionsKey(recipe.name, summary.row, preset, seed, split, setup) for seed in summary.counted
        )
        return [found for place in places if (found := predictions.read(out, place)) is not None]

    for summary in others:
        found = predictions.paired(kept(summary), kept(first))
        if found is not None and summary.stuck != first.stuck:
            summary.difference = f"n/a: {summary.row if summary.stuck else first.row} stayed on the plateau"
        elif found is not None:
            summary.difference = predictions.Difference(factor * found.mean, factor * found.half_width)
    return split if any(summary.difference for summary in others) else ""
