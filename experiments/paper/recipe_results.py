"""Finished runs in results/, on scales where higher is better."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from experiments.result_rows import Row, Rows, model_of
from mgk import tasks
from mgk.training import config as recipes
from mgk.training import predictions
from mgk.training.config import ModelSpec, Recipe
from mgk.training.objectives import OBJECTIVES
from mgk.training.report import binomial_half_width
from mgk.training.sweep import filter_rows, metric_format
from mgk.variants import VARIANTS

PRESET = "paper"
# Stand-ins, and the recipes that hold the paper's numbers for the original task.
STANDS_FOR = {
    "retrieval-peerread": "retrieval-aan",
    "retrieval-peerread-30k": "retrieval-aan",
    "retrieval-peerread-random": "retrieval-aan",
    "enwiki-lm": "wikitext-103",
    "enwiki-lm-2": "wikitext-103",
}


@dataclass(frozen=True)
class Scale:
    """Scale of a metric: differences are in `unit`, and a loss below `margin` counts as no loss."""

    unit: str
    margin: float
    digits: int
    sign: float  # 1 if higher values are better, -1 if lower ones are

    def score(self, value: float) -> float:
        """Convert a displayed value, an accuracy in per cent or a perplexity, to the scale."""
        return value if self.sign > 0 else -100 * math.log(value)


# Margins. Points: about the standard error on LRA's own 2,000 test examples of ListOps, which cannot resolve a smaller
# loss. Per cent of perplexity: the difference between the paper's models.
SCALES = {
    "classification": Scale("points", 1.0, 2, 1.0),
    "language-model": Scale("100 × nats per token", 1.0, 2, -1.0),
}


@dataclass
class TrainedRun:
    """One finished run."""

    row: ModelSpec
    seed: int
    values: dict[str, float] = field(default_factory=dict)  # by split, as displayed
    examples: dict[str, int] = field(default_factory=dict)
    majority: dict[str, float] = field(default_factory=dict)  # per cent of the most frequent class, by split
    left_at: int | None = None  # the step at which it left the task's plateau; 0: never; None: no plateau
    late: bool = False  # whether it left the plateau in the last tenth of its steps
    setup: str = ""
    params: int = 0
    flops: int = 0

    @property
    def learnt(self) -> bool:
        """Whether the run left the plateau and beats the most frequent class by more than its interval."""
        if self.left_at == 0:
            return False
        for split, share in self.majority.items():
            value = self.values.get(split)
            if value is not None and value - binomial_half_width(value, self.examples[split]) <= share:
                return False
        return True


@dataclass
class RecipeResults:
    """Results of one recipe."""

    recipe: Recipe
    scale: Scale
    runs: list[TrainedRun]
    results: Path

    def runs_of(self, row: ModelSpec) -> list[TrainedRun]:
        return [run for run in self.runs if run.row == row]

    @property
    def rows(self) -> list[ModelSpec]:
        return list(dict.fromkeys(run.row for run in self.runs))

    def mean(self, row: ModelSpec) -> float | None:
        """Return the mean on the judged split, over the seeds that learnt the task if any did; None if not run."""
        runs = [run for run in self.runs_of(row) if run.learnt] or self.runs_of(row)
        if not runs:
            return None
        split = self.judged_split(runs[0].examples) or ""
        return statistics.mean(run.values[split] for run in runs if split in run.values)

    def judged_split(self, names: Iterable[str]) -> str | None:
        """Return the largest of the named splits that selected nothing; the development set only if there is no other.

        The development set selects the checkpoint that is tested.
        """
        examples = {name: max(run.examples.get(name, 0) for run in self.runs) for name in names}
        unselected = {name: count for name, count in examples.items() if name != "dev"} or examples
        return max(unselected, key=unselected.__getitem__) if unselected else None

    def predictions_of(self, runs: list[TrainedRun], split: str) -> list[np.ndarray]:
        """Return the stored predictions of the runs; runs without any are skipped."""
        keys = (predictions.PredictionsKey(self.recipe.name, r.row, PRESET, r.seed, split, r.setup) for r in runs)
        return [array for key in keys if (array := predictions.read(self.results, key)) is not None]

    def paper(self, row: ModelSpec) -> float | None:
        """Return the paper's number as displayed; for a stand-in, that of the original task."""
        name = STANDS_FOR.get(self.recipe.name)
        numbers = recipes.load_recipe(name).paper if name else self.recipe.paper
        return numbers.get(str(row))


def changed_settings(line: Row, recipe: Recipe) -> str:
    """Describe the settings of a line of results that differ from the recipe's; "" if none do."""
    try:
        words = shlex.split(line.get("command") or "")
    except ValueError:
        return f"the command {line['command']}, which is not valid shell syntax"
    settings = [word.removeprefix("--set=") for word in words if word.startswith("--set=")]
    settings += [value for option, value in pairwise(words) if option == "--set"]
    try:
        same = recipe.with_settings(settings) == recipe
    except ValueError:
        same = False
    if not same:
        return " ".join(f"--set {setting}" for setting in settings)
    config: Any = OBJECTIVES[tasks.get_task(recipe.task).objective].config_class
    expected = VARIANTS[line["variant"]].components or recipe.model.get("num_components", config.num_components)
    return "" if line.get("components") in (None, "", str(expected)) else f"{line['components']} components"


def split_by_settings(rows: Rows, names: Iterable[str]) -> tuple[Rows, list[str]]:
    """Drop rows whose settings differ from their recipe; return the other rows and the names of the dropped runs."""
    known = {name: recipes.load_recipe(name) for name in names}
    selected, dropped = [], []
    for row in rows:
        recipe = known.get(row["recipe"])
        changes = "" if recipe is None else changed_settings(row, recipe)
        if not changes:
            selected.append(row)
        else:
            dropped.append(f"{row['recipe']} {row['variant']}:{row['heads']} seed {row['seed']} ({changes})")
    return selected, list(dict.fromkeys(dropped))


def read_recipe(rows: Rows, name: str, results: Path) -> RecipeResults:
    """Collect the runs of a recipe.

    Args:
        rows: Rows of all results files, without those whose settings differ from their recipe.
        name: Name of the recipe.
        results: Results directory, for stored predictions.
    """
    recipe = recipes.load_recipe(name)
    recipe_rows = [row for row in rows if row.get("recipe") == name and row.get("seed", "").isdigit()]
    order = {model: number for number, model in enumerate(recipe.rows)}
    models = sorted(set(map(model_of, recipe_rows)), key=lambda model: (order.get(model, len(order)), str(model)))
    runs = [run for model in models for run in _read_runs(recipe_rows, recipe, model, results)]
    scale = SCALES[tasks.get_task(recipe.task).objective]
    return RecipeResults(recipe, scale, runs, results)


def _read_runs(rows: Rows, recipe: Recipe, model: ModelSpec, results: Path) -> list[TrainedRun]:
    """Return the runs of a model by seed; runs of several setups raise a ValueError."""
    metric = metric_format(recipe)
    model_rows = filter_rows(rows, recipe, model, PRESET, None)
    test_rows = [row for row in model_rows if row["metric"] == metric.metric]
    setups = {row["setup"] for row in test_rows}
    if len(setups) > 1:
        raise ValueError(
            f"{recipe.name} has results of {model} from {len(setups)} versions of the recipe or of its data "
            f"(setups {', '.join(sorted(setups))}): keep one of them in {results}"
        )
    runs: dict[int, TrainedRun] = {}
    for row in test_rows:
        seed = int(row["seed"])
        run = runs.setdefault(seed, TrainedRun(model, seed))
        run.values[row["split"]] = metric.factor * float(row["value"])
        run.examples[row["split"]] = int(row["n_examples"])
        run.setup, run.params, run.flops = row["setup"], int(row["params"]), int(row["flops"])
    for row in model_rows:
        tested = runs.get(int(row["seed"]))
        if tested is None:
            continue
        if row["metric"] == "plateau_left_at_step":
            tested.left_at = int(float(row["value"]))
            tested.late = tested.left_at > 0.9 * recipe.training.steps
        elif row["metric"] == "majority_share":
            tested.majority[row["split"]] = 100 * float(row["value"])
    return [runs[seed] for seed in sorted(runs)]
