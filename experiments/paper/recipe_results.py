"""The finished trainings that results/ has, on scales on which more is better."""

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

from mgk import tasks
from mgk.training import config as recipes
from mgk.training import predictions
from mgk.training.config import ModelSpec, Recipe
from mgk.training.objectives import OBJECTIVES
from mgk.training.report import binomial_half_width
from mgk.training.sweep import filter_rows, metric_format
from mgk.variants import VARIANTS

PRESET = "paper"
# Stand-ins have no numbers of the paper; these recipes have those of the task they stand for.
STANDS_FOR = {
    "retrieval-peerread": "retrieval-aan",
    "retrieval-peerread-30k": "retrieval-aan",
    "retrieval-peerread-random": "retrieval-aan",
    "enwiki-lm": "wikitext-103",
    "enwiki-lm-2": "wikitext-103",
}


@dataclass(frozen=True)
class Scale:
    """How a metric becomes worth: differences of worth are in `unit`, and below `margin` they are taken as none."""

    unit: str
    margin: float
    shown_digits: int
    sign: float  # of a mean of kept answers

    def worth(self, value: float) -> float:
        """Of a value as shown: an accuracy in per cent, a perplexity."""
        return value if self.sign > 0 else -100 * math.log(value)


# One margin in each unit. Points: about the standard error of LRA's own 2,000 test examples of ListOps, so that a
# smaller loss could not be seen on the benchmark itself. Per cent of perplexity: what separates the paper's models.
SCALES = {
    "classification": Scale("points", 1.0, 2, 1.0),
    "language-model": Scale("100 × nats a token", 1.0, 2, -1.0),
}


@dataclass
class TrainedRun:
    """One finished training."""

    row: ModelSpec
    seed: int
    values: dict[str, float] = field(default_factory=dict)  # by split, as shown
    examples: dict[str, int] = field(default_factory=dict)
    majority: dict[str, float] = field(default_factory=dict)  # per cent of the most frequent class, by split
    left_at: int | None = None  # the step at which it left the task's plateau, 0: never, None: there is none
    late: bool = False  # in the last tenth of its steps
    setup: str = ""
    params: int = 0
    flops: int = 0

    @property
    def learnt(self) -> bool:
        """It left the plateau, and beats the most frequent class by more than the test set leaves open."""
        if self.left_at == 0:
            return False
        for split, share in self.majority.items():
            value = self.values.get(split)
            if value is not None and value - binomial_half_width(value, self.examples[split]) <= share:
                return False
        return True


@dataclass
class RecipeResults:
    """All that results/ has of one recipe."""

    recipe: Recipe
    scale: Scale
    runs: list[TrainedRun]
    results: Path

    def of(self, row: ModelSpec) -> list[TrainedRun]:
        return [run for run in self.runs if run.row == row]

    @property
    def rows(self) -> list[ModelSpec]:
        return list(dict.fromkeys(run.row for run in self.runs))

    def mean(self, row: ModelSpec) -> float | None:
        """As shown, over the seeds that have learnt the task if any has, on the largest test set; None: not run."""
        runs = [run for run in self.of(row) if run.learnt] or self.of(row)
        if not runs:
            return None
        split = max(runs[0].examples, key=lambda name: runs[0].examples[name])
        return statistics.mean(run.values[split] for run in runs if split in run.values)

    def kept(self, runs: list[TrainedRun], split: str) -> list[np.ndarray]:
        """The runs' answers, where they were kept."""
        places = (predictions.PredictionsKey(self.recipe.name, r.row, PRESET, r.seed, split, r.setup) for r in runs)
        return [found for place in places if (found := predictions.read(self.results, place)) is not None]

    def paper(self, row: ModelSpec) -> float | None:
        """As shown; for a stand-in the number of the task it stands for."""
        name = STANDS_FOR.get(self.recipe.name)
        known = recipes.load_recipe(name).paper if name else self.recipe.paper
        return known.get(str(row))


def departs(line: dict[str, str], recipe: Recipe) -> str:
    """In words what settings a line of results has that are not the recipe's; "" if it has none."""
    try:
        words = shlex.split(line.get("command") or "")
    except ValueError:
        return f"the command {line['command']}, which nobody can read"
    settings = [word.removeprefix("--set=") for word in words if word.startswith("--set=")]
    settings += [value for option, value in pairwise(words) if option == "--set"]
    try:
        same = recipe.with_settings(settings) == recipe
    except ValueError:
        same = False
    if not same:
        return " ".join(f"--set {setting}" for setting in settings)
    config: Any = OBJECTIVES[tasks.get_task(recipe.task).objective].config_class
    wanted = VARIANTS[line["variant"]].components or recipe.model.get("num_components", config.num_components)
    return "" if line.get("components") in (None, "", str(wanted)) else f"{line['components']} components"


def own_settings(rows: list[dict[str, str]], names: Iterable[str]) -> tuple[list[dict[str, str]], list[str]]:
    """The rows without those of these recipes that have other settings, and the names of what was left out."""
    known = {name: recipes.load_recipe(name) for name in names}
    kept, left = [], dict[str, None]()
    for each in rows:
        recipe = known.get(each["recipe"])
        other = "" if recipe is None else departs(each, recipe)
        if not other:
            kept.append(each)
        else:
            left[f"{each['recipe']} {each['variant']}:{each['heads']} seed {each['seed']} ({other})"] = None
    return kept, list(left)


def find(rows: list[dict[str, str]], name: str, results: Path) -> RecipeResults:
    """rows: of all files of results, none of them with other settings than the recipe's."""
    recipe = recipes.load_recipe(name)
    how = metric_format(recipe)
    runs: dict[tuple[ModelSpec, int], TrainedRun] = {}
    own = [each for each in rows if each.get("recipe") == name and each.get("seed", "").isdigit()]
    models = {
        ModelSpec(
            each["variant"], int(each["heads"]), None if each["kv_heads"] == each["heads"] else int(each["kv_heads"])
        )
        for each in own
    }
    order = {row: number for number, row in enumerate(recipe.rows)}
    for row in sorted(models, key=lambda row: (order.get(row, len(order)), str(row))):
        mine = filter_rows(own, recipe, row, PRESET, None)
        judged = [each for each in mine if each["metric"] == how.metric]
        setups = {each["setup"] for each in judged}
        if len(setups) > 1:
            raise ValueError(
                f"{name} has results of {row} from {len(setups)} versions of the recipe or of its data "
                f"(setups {', '.join(sorted(setups))}): keep one of them in {results}"
            )
        for each in judged:
            key = row, int(each["seed"])
            run = runs.setdefault(key, TrainedRun(*key))
            run.values[each["split"]] = how.factor * float(each["value"])
            run.examples[each["split"]] = int(each["n_examples"])
            run.setup, run.params, run.flops = each["setup"], int(each["params"]), int(each["flops"])
        for each in mine:
            found = runs.get((row, int(each["seed"])))
            if found is not None and each["metric"] == "plateau_left_at_step":
                found.left_at = int(float(each["value"]))
                found.late = found.left_at > 0.9 * recipe.training.steps
            if found is not None and each["metric"] == "majority_share":
                found.majority[each["split"]] = 100 * float(each["value"])
    scale = SCALES[tasks.get_task(recipe.task).objective]
    return RecipeResults(
        recipe, scale, sorted(runs.values(), key=lambda run: (order.get(run.row, 99), run.seed)), results
    )
