"""The plan of a study: arms, seeds and questions, read from plan.yaml."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from experiments.result_rows import Rows
from mgk import tasks
from mgk._core.validation import fail
from mgk.training.config import ModelSpec, Recipe, load_recipe
from mgk.training.equal_time import EqualTimeSpec, steps_of, with_steps
from mgk.training.objectives import OBJECTIVES, LanguageModelling
from mgk.training.sweep import filter_rows

PRESET = "paper"
PLAN = Path(__file__).parent / "plan.yaml"
REQUIRED = ("stages", "questions", "judged_split")  # keys of a plan


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
        spec = EqualTimeSpec.parse(text, "arm")
        if isinstance(spec, EqualTimeSpec):
            return cls(recipe, spec.model, spec.time_of, overrides)
        return cls(recipe, spec, None, overrides)

    @property
    def equal_time(self) -> EqualTimeSpec | None:
        """The row of a sweep for an arm with the training time of another model; None for the others."""
        model = self.model
        if self.time_of is None:
            return None
        return EqualTimeSpec(model.variant, model.heads, model.kv_heads, model.key_heads, self.time_of)

    def __str__(self) -> str:
        return str(self.model) + (f"@time={self.time_of}" if self.time_of else "")

    def resolve(self, rows: Rows, setups: Mapping[ModelSpec, str] | None = None) -> Recipe | None:
        """Return the recipe with the arm's settings; None if the step times that it needs were not measured.

        Args:
            rows: Rows of results files.
            setups: Setup hashes of the timed models; step times of a model without one are all used.
        """
        recipe = load_recipe(self.recipe).with_settings(list(self.overrides))
        if self.equal_time is None:
            return recipe
        steps = steps_of(rows, recipe, self.equal_time, PRESET, setups or {})
        return None if steps is None else with_steps(recipe, steps)

    def command_overrides(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the overrides for the command that trains the resolved recipe."""
        return self.overrides + ((f"steps={recipe.training.steps}",) if self.time_of else ())

    def runs_folder(self, runs: Path) -> Path:
        """Return the parent of the arm's run directories; changed settings have separate ones."""
        if self.equal_time is not None:
            return self.equal_time.runs_folder(runs)
        return runs.joinpath(*(part.replace("=", "-") for part in self.overrides))


@dataclass(frozen=True)
class Question:
    """A comparison of two arms."""

    title: str
    first: Arm
    second: Arm
    is_primary: bool = False


@dataclass(frozen=True)
class Stage:
    """Arms that are run together, seed by seed.

    Attributes:
        name: Name of the stage, for --stage.
        arms: Arms with their number of seeds.
        selection_split: Split that judges the arms instead of the plan's, if they select settings; else None.
        until_half_width: The arms get one more seed at a time, up to their numbers of seeds, until the half-width of
            every primary question is at most this, in per cent; None for a stage with fixed numbers of seeds.
    """

    name: str
    arms: dict[Arm, int]
    selection_split: str | None = None
    until_half_width: float | None = None


@dataclass(frozen=True)
class Plan:
    """The runs of a study and the questions that they answer.

    Attributes:
        stages: Stages in the order of running.
        questions: Comparisons of arms.
        judged_split: Split that is judged.
        families: Recipes whose deviations over seeds are pooled; other recipes have one each.
        title: Title of the page.
        scope: Sentences about the models and what their results can show, for the page.
        option: The option of the command that selects the plan, "" for the plan of the study.
    """

    stages: tuple[Stage, ...]
    questions: tuple[Question, ...]
    judged_split: str
    families: tuple[frozenset[str], ...] = ()
    title: str = "Cost and quality of mixture keys"
    scope: str = ""
    option: str = ""

    @cached_property
    def arms(self) -> dict[Arm, int]:
        """Arms of all stages with their fixed numbers of seeds, in the order of running."""
        return merge_arms(stage for stage in self.stages if stage.until_half_width is None)

    @property
    def primary_questions(self) -> list[Question]:
        """The questions that decide the study; the others explain the answers."""
        return [question for question in self.questions if question.is_primary]

    def family(self, recipe: str) -> frozenset[str]:
        """Return the recipes whose deviations over seeds are pooled with those of a recipe."""
        return next((family for family in self.families if recipe in family), frozenset({recipe}))

    def selection_split(self, arm: Arm) -> str | None:
        """Return the split that judges an arm that selects settings; None for the others."""
        return next((stage.selection_split for stage in self.stages if arm in stage.arms), None)


def merge_arms(stages: Iterable[Stage]) -> dict[Arm, int]:
    """Return the arms of stages with their largest numbers of seeds."""
    arms: dict[Arm, int] = {}
    for stage in stages:
        for arm, seeds in stage.arms.items():
            arms[arm] = max(seeds, arms.get(arm, 0))
    return arms


def load_plan(path: Path = PLAN) -> Plan:
    """Read and check a plan."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"plan: {path} is not valid YAML: {next(iter(str(error).splitlines()), '')}") from error
    if not isinstance(content, dict) or not content.keys() >= set(REQUIRED):
        fail("plan", f"{path} must have the keys {', '.join(REQUIRED)}")
    stages = tuple(_read_stage(entry) for entry in content["stages"])
    arms = _check_arms(stages, path)
    questions = _read_questions(content["questions"], arms, path)
    if any(stage.until_half_width for stage in stages) and not any(question.is_primary for question in questions):
        fail("plan", f"{path} has a stage with until_half_width, but no question with primary: true")
    families = tuple(map(frozenset, content.get("families", [])))
    texts = {name: content[name].strip() for name in ("title", "scope") if name in content}
    return Plan(stages, questions, content["judged_split"], families, **texts, option=_plan_option(path))


def _read_stage(entry: dict[str, Any]) -> Stage:
    arms = {}
    for overrides in entry.get("sets", [[]]):
        # Settings with the recipe's values are no overrides: the runs serve two stages.
        original = load_recipe(entry["recipe"])
        changed = () if original.with_settings(overrides) == original else tuple(overrides)
        for text, seeds in entry["arms"].items():
            arms[Arm.parse(entry["recipe"], text, changed)] = seeds
    return Stage(entry["name"], arms, entry.get("judged_split"), entry.get("until_half_width"))


def _check_arms(stages: tuple[Stage, ...], path: Path) -> set[Arm]:
    """Return the arms of all stages, after checking those of equal time and those that select settings."""
    selecting = {arm for stage in stages if stage.selection_split is not None for arm in stage.arms}
    others = [stage for stage in stages if stage.selection_split is None]
    judged = {arm for stage in others if stage.until_half_width is None for arm in stage.arms}
    for arm in {arm for stage in others for arm in stage.arms} - judged:
        fail("arm", f"{arm} of {arm.recipe} gets more seeds, but no stage of {path} has its first ones")
    for arm in selecting & judged:
        fail("arm", f"{arm} of {arm.recipe} selects settings in one stage of {path} and is judged in another")
    for arm in selecting | judged:
        if arm.time_of is not None and arm.overrides:
            fail("arm", f"{arm} of {arm.recipe} has the training time of another arm, which excludes `sets`")
        # The number of steps of a time-matched arm follows from the step times of both models.
        for model in () if arm.time_of is None else (arm.model, arm.time_of):
            if Arm(arm.recipe, model) not in judged:
                fail("arm", f"{arm} of {arm.recipe} needs the step time of {model}: no stage of {path} trains {model}")
    return judged


def _read_questions(entries: list[dict[str, Any]], arms: set[Arm], path: Path) -> tuple[Question, ...]:
    questions = []
    for entry in entries:
        first = Arm.parse(entry["recipe"], entry["first"])
        second = Arm.parse(entry.get("second_recipe", entry["recipe"]), entry["second"])
        for arm in (first, second):
            if arm not in arms:
                fail("question", f"{entry['title']!r}: no stage of {path} trains {arm} of {arm.recipe}")
        questions.append(Question(entry["title"], first, second, entry.get("primary", False)))
    return tuple(questions)


def _plan_option(path: Path) -> str:
    """Return the option of the command that selects a plan, with the path from the root of the repository."""
    root, absolute = PLAN.parents[2], path.resolve()
    if absolute == PLAN.resolve():
        return ""
    return f" --plan {absolute.relative_to(root).as_posix() if absolute.is_relative_to(root) else path.name}"


def is_language_model(recipe: Recipe) -> bool:
    return OBJECTIVES[tasks.get_task(recipe.task).objective] is LanguageModelling


def runs_of(rows: Rows, arm: Arm, recipe: Recipe) -> Rows:
    """Return the result rows of an arm under its resolved recipe."""
    return filter_rows(rows, recipe, arm.model, PRESET, None)
