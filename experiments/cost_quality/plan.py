"""The plan of the study: arms, seeds and questions, read from plan.yaml, and the runs that results lack."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mgk._core.validation import fail
from mgk.training.config import ModelSpec, Recipe, load_recipe
from mgk.training.results import latest_value
from mgk.training.sweep import filter_rows

PRESET = "paper"
PLAN = Path(__file__).parent / "plan.yaml"
STEP_TIME = "step_ms_alone"

Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Arm:
    """A model of the study.

    Attributes:
        recipe: Name of the recipe.
        model: Variant and heads.
        time_of: Model whose training time the arm is given, or None for the recipe's steps.
        overrides: Changed settings, in the format of --set.
    """

    recipe: str
    model: ModelSpec
    time_of: ModelSpec | None = None
    overrides: tuple[str, ...] = ()

    @classmethod
    def parse(cls, recipe: str, text: str, overrides: tuple[str, ...] = ()) -> Arm:
        """Parse "smgk:8" or "softmax:8@time=smgk:8"."""
        model, separator, reference = text.partition("@")
        if separator and not reference.startswith("time="):
            fail("arm", f"must read MODEL or MODEL@time=MODEL, got {text!r}")
        time_of = ModelSpec.parse(reference.removeprefix("time="), "arm") if separator else None
        return cls(recipe, ModelSpec.parse(model, "arm"), time_of, overrides)

    def __str__(self) -> str:
        return str(self.model) + (f"@time={self.time_of}" if self.time_of else "")

    def resolve(self, rows: Rows) -> Recipe | None:
        """Return the recipe with the arm's settings; None if the step times that it needs were not measured."""
        recipe = load_recipe(self.recipe).with_settings(list(self.overrides))
        if self.time_of is None:
            return recipe
        steps = time_matched_steps(rows, recipe, self.model, self.time_of)
        if steps is None:
            return None
        return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, steps=steps))

    def command_overrides(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the overrides for the command that trains the resolved recipe."""
        return self.overrides + ((f"steps={recipe.training.steps}",) if self.time_of else ())

    def runs_folder(self, runs: Path) -> Path:
        """Return the parent of the arm's run directories; changed settings have separate ones."""
        suffix = ("equal-time",) if self.time_of else self.overrides
        return runs.joinpath(*(part.replace("=", "-") for part in suffix))


def time_matched_steps(rows: Rows, recipe: Recipe, model: ModelSpec, reference: ModelSpec) -> int | None:
    """Return the number of steps of a model that take the training time of another; None if one is not timed."""
    times = [latest_value(filter_rows(rows, recipe, spec, PRESET, None), STEP_TIME) for spec in (reference, model)]
    if times[0] is None or times[1] is None:
        return None
    return round(recipe.training.steps * times[0] / times[1])


@dataclass(frozen=True)
class Question:
    """A comparison of two arms."""

    title: str
    first: Arm
    second: Arm


@dataclass(frozen=True)
class Plan:
    """Arms with their number of seeds in the order of running, questions, and the split that is judged."""

    arms: dict[Arm, int]
    questions: tuple[Question, ...]
    judged_split: str


def load_plan(path: Path = PLAN) -> Plan:
    """Read and check a plan."""
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    arms: dict[Arm, int] = {}
    for stage in content["stages"]:
        for overrides in stage.get("sets", [[]]):
            # Settings with the recipe's values are no overrides: the runs serve two stages.
            original = load_recipe(stage["recipe"])
            changed = () if original.with_settings(overrides) == original else tuple(overrides)
            for text, seeds in stage["arms"].items():
                arm = Arm.parse(stage["recipe"], text, changed)
                arms[arm] = max(seeds, arms.get(arm, 0))
    questions = []
    for entry in content["questions"]:
        first = Arm.parse(entry["recipe"], entry["first"])
        second = Arm.parse(entry.get("second_recipe", entry["recipe"]), entry["second"])
        for arm in (first, second):
            if arm not in arms:
                fail("question", f"{entry['title']!r}: no stage of {path} trains {arm} of {arm.recipe}")
        questions.append(Question(entry["title"], first, second))
    return Plan(arms, tuple(questions), content["judged_split"])


def runs_of(rows: Rows, arm: Arm, recipe: Recipe) -> Rows:
    """Return the result rows of an arm under its resolved recipe."""
    return filter_rows(rows, recipe, arm.model, PRESET, None)
