"""Rows of a sweep that are given the training time of another model: softmax:8@time=smgk:8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mgk._core.validation import fail
from mgk.training import results
from mgk.training.config import ModelSpec, Recipe
from mgk.training.sweep import filter_rows

STEP_TIME = "step_ms_alone"
# Metric of the rows that record the number of steps, so that a later timing does not change it.
STEPS = "equal_time_steps"

Rows = list[dict[str, str]]


@dataclass(frozen=True)
class EqualTimeSpec(ModelSpec):
    """A model that trains as many steps as fit into the training time of another: "softmax:8@time=smgk:8".

    Attributes:
        time_of: Model whose training time, with the recipe's steps, is given.
    """

    time_of: ModelSpec | None = None

    @classmethod
    def parse(cls, text: str, name: str = "row") -> ModelSpec:
        """Parse "variant:heads", with or without "@time=variant:heads".

        Args:
            text: The model.
            name: Start of the error messages.
        """
        model, separator, reference = text.partition("@")
        parsed = ModelSpec.parse(model, name)
        if not separator:
            return parsed
        if not reference.startswith("time="):
            fail(
                name, f"must have the form MODEL or MODEL@time=MODEL, as in softmax:8@time=smgk:8, got {text.strip()!r}"
            )
        time_of = ModelSpec.parse(reference.removeprefix("time="), name)
        return cls(parsed.variant, parsed.heads, parsed.kv_heads, parsed.key_heads, time_of)

    @property
    def model(self) -> ModelSpec:
        """The model without the reference."""
        return ModelSpec(self.variant, self.heads, self.kv_heads, self.key_heads)

    @property
    def file_name(self) -> str:
        return self.model.file_name

    def __str__(self) -> str:
        return f"{self.model}@time={self.time_of}"

    @property
    def timed_models(self) -> tuple[ModelSpec, ...]:
        """The models whose step times give the number of steps."""
        return self.model, self.time_of or self.model

    def runs_folder(self, runs: Path) -> Path:
        """Return the parent of the row's run directories, apart from those with the recipe's steps."""
        return runs / f"equal-time-{(self.time_of or self).file_name}"


def steps_of(
    rows: Rows, recipe: Recipe, spec: EqualTimeSpec, preset: str, setups: Mapping[ModelSpec, str]
) -> int | None:
    """Return the steps of a row: the recorded number, otherwise from the step times.

    The step times are the latest that were measured for both models with the same commit, on the same device. The
    result is None without such a pair.

    Args:
        rows: Rows of results files.
        recipe: Recipe with its own number of steps.
        spec: The row.
        preset: Preset of the models.
        setups: Setup hashes of the two models with the recipe's steps; results of a model without one are all used.
    """
    model, reference = (
        filter_rows(rows, recipe, timed, preset, None, setups.get(timed)) for timed in spec.timed_models
    )
    recorded = [row for row in model if row["metric"] == STEPS and row["split"] == f"time={spec.time_of}"]
    if recorded:
        return int(recorded[0]["value"])
    timed = [row for row in model if row["metric"] == STEP_TIME]
    common = {_origin(row) for row in reference if row["metric"] == STEP_TIME} & set(map(_origin, timed))
    pairs = [row for row in timed if _origin(row) in common]
    if not pairs:
        return None
    origin = _origin(max(reversed(pairs), key=lambda row: row["date"]))  # of a day, the last
    reference_ms, model_ms = (
        results.latest_value([row for row in rows_of_model if _origin(row) == origin], STEP_TIME)
        for rows_of_model in (reference, model)
    )
    if reference_ms is None or model_ms is None:
        return None
    return max(1, round(recipe.training.steps * reference_ms / model_ms))


def _origin(row: Mapping[str, str]) -> tuple[str | None, ...]:
    """Return the device and the versions with which a row was measured."""
    return row.get("gpu"), row.get("torch"), row.get("commit")


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    """Return the recipe with another number of steps."""
    return recipe.with_settings([f"steps={steps}"])


def record_steps(
    file: Path, rows: Rows, recipe: Recipe, spec: EqualTimeSpec, preset: str, setup: str, steps: int
) -> None:
    """Append the number of steps of a row to a results file, unless it is recorded.

    Args:
        file: Results file.
        rows: Rows of all results files.
        recipe: Recipe with its own number of steps.
        spec: The row.
        preset: Preset of the models.
        setup: Setup hash of the row's model with the recipe's steps.
        steps: The number of steps.
    """
    own_rows = filter_rows(rows, recipe, spec.model, preset, None, setup)
    timed = [row for row in own_rows if row["metric"] in (STEP_TIME, STEPS)]
    split = f"time={spec.time_of}"
    if timed and not any(row["metric"] == STEPS and row["split"] == split for row in timed):
        results.append(file, [{**timed[-1], "split": split, "metric": STEPS, "value": steps}])
