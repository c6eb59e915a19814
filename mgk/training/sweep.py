"""Rows × seeds of a recipe: which of them results already have, and what trains the others."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from mgk import tasks
from mgk.training.config import ModelSpec, Recipe
from mgk.training.job_queue import Job
from mgk.training.objectives import OBJECTIVES, MetricFormat
from mgk.training.run_dir import run_path

# Costs of a row timed by itself (`mgk.training.profiling`); the table takes step time and memory from it if present.
COSTS = ("step_ms_alone", "predict_ms_alone", "peak_mem_mb_alone")
# Of it, what a training that has the machine to itself measures too.
ALONE = ("step_ms_alone", "peak_mem_mb_alone")


def metric_format(recipe: Recipe) -> MetricFormat:
    """Return the format of the recipe's metric in tables and plots."""
    return OBJECTIVES[tasks.task(recipe.task).objective].table_format(recipe.training)


def filter_rows(
    rows: list[dict[str, str]], recipe: Recipe, row: ModelSpec, preset: str, seed: int | None, setup: str | None = None
) -> list[dict[str, str]]:
    """The rows of results that belong to this recipe, model and schedule; setup: of `Run`, settings and data too."""
    settings = recipe.training
    wanted = {
        "recipe": recipe.name,
        "variant": row.variant,
        "preset": preset,
        "heads": str(row.heads),
        "kv_heads": str(row.kv_heads or row.heads),
        "steps": str(settings.steps),
        "lr": str(settings.lr),
        "batch": str(settings.batch_size),
    }
    wanted |= {} if seed is None else {"seed": str(seed)}
    wanted |= {} if setup is None else {"setup": setup}
    return [each for each in rows if all(each.get(key) == value for key, value in wanted.items())]


def is_trained(
    rows: list[dict[str, str]], recipe: Recipe, row: ModelSpec, preset: str, seed: int, setup: str | None = None
) -> bool:
    """Whether the results already have this training."""
    own = filter_rows(rows, recipe, row, preset, seed, setup)
    return any(each["metric"] == metric_format(recipe).metric for each in own)


def is_timed(
    rows: list[dict[str, str]],
    recipe: Recipe,
    row: ModelSpec,
    preset: str,
    setup: str | None = None,
    metrics: Iterable[str] = ALONE,
) -> bool:
    """Whether the results already have what the row costs by itself."""
    return set(metrics) <= {each["metric"] for each in filter_rows(rows, recipe, row, preset, None, setup)}


def setups_of(rows: list[dict[str, str]], recipe: Recipe, models: list[ModelSpec], preset: str) -> dict[ModelSpec, str]:
    """The setup that each model's results have, where they have one: without the data it cannot be worked out."""
    setups: dict[ModelSpec, str] = {}
    for row in models:
        found = {each.get("setup", "") for each in filter_rows(rows, recipe, row, preset, None)}
        if len(found) > 1:
            raise ValueError(f"{row} has results of {len(found)} settings or versions of the data: leave out --redraw")
        if found:
            setups[row] = found.pop()
    return setups


def to_solo_rows(own: list[dict[str, str]]) -> list[dict[str, str]]:
    """What a training that had the machine to itself has measured, under the names that say so; own: its results."""
    known = next((each for each in own if each["step_ms"] not in ("", "nan")), None)
    if known is None:
        return []
    values = zip(ALONE, (known["step_ms"], known["peak_mem_mb"]), strict=True)
    return [{**known, "split": "train", "metric": metric, "value": value} for metric, value in values]


def train_job(
    recipe: Recipe,
    row: ModelSpec,
    seed: int,
    *,
    preset: str,
    data_dir: Path,
    out: Path,
    runs: Path,
    given: str | None = None,
    overrides: Sequence[str] = (),
) -> Job:
    """What trains this model. out: the folder of its results. given: what the recipe was asked for by, where that is
    not its name; overrides: settings other than the recipe's, which `recipe` has."""
    directory = run_path(runs, recipe.name, row, preset, seed)
    command = [sys.executable, "-m", "mgk", "train", given or recipe.name, "--preset", preset]
    command += ["--data-dir", str(data_dir)] + [part for override in overrides for part in ("--set", override)]
    command += ["--results", str(out / f"{recipe.name}.csv"), "--variant", row.variant, "--heads", str(row.heads)]
    command += ["--kv-heads", str(row.kv_heads)] if row.kv_heads else []
    command += ["--seed", str(seed), "--out", str(directory), "--resume", "auto"]
    return Job(recipe.name, row, seed, directory, command)
