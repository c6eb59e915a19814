"""Sweeps over the models and seeds of a recipe: existing results, and jobs for the missing ones."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from mgk import tasks
from mgk.training.config import ModelSpec, Recipe
from mgk.training.job_queue import Job
from mgk.training.objectives import OBJECTIVES, MetricFormat
from mgk.training.runs import run_path

# Metrics that `mgk.training.profiling` measures with the model in isolation.
SOLO_METRICS = ("step_ms_alone", "predict_ms_alone", "peak_mem_mb_alone")
# Those of them that a training run also measures if no other job is running.
SOLO_TRAINING_METRICS = ("step_ms_alone", "peak_mem_mb_alone")


def metric_format(recipe: Recipe) -> MetricFormat:
    """Return the format of the recipe's metric in tables and plots."""
    return OBJECTIVES[tasks.get_task(recipe.task).objective].table_format(recipe.training)


def filter_rows(
    rows: list[dict[str, str]],
    recipe: Recipe,
    model: ModelSpec,
    preset: str,
    seed: int | None,
    setup: str | None = None,
) -> list[dict[str, str]]:
    """Return the result rows of one model of a recipe.

    Args:
        rows: Rows of results files.
        recipe: Recipe whose name, steps, learning rate and batch size must match.
        model: Variant and heads that must match.
        preset: Preset that must match.
        seed: Seed that must match; None means any.
        setup: Setup hash that must match, which covers all settings and the data; None means any.
    """
    settings = recipe.training
    expected = {
        "recipe": recipe.name,
        "variant": model.variant,
        "preset": preset,
        "heads": str(model.heads),
        "kv_heads": str(model.kv_heads or model.heads),
        "key_heads": str(model.key_heads or ""),
        "steps": str(settings.steps),
        "lr": str(settings.lr),
        "batch": str(settings.batch_size),
    }
    expected |= {} if seed is None else {"seed": str(seed)}
    expected |= {} if setup is None else {"setup": setup}
    # Files of earlier versions lack the column key_heads.
    return [row for row in rows if all((row.get(column) or "") == value for column, value in expected.items())]


def is_trained(
    rows: list[dict[str, str]], recipe: Recipe, model: ModelSpec, preset: str, seed: int, setup: str | None = None
) -> bool:
    """Return whether the results contain this run; for the arguments see `filter_rows`."""
    metric = metric_format(recipe).metric
    return any(row["metric"] == metric for row in filter_rows(rows, recipe, model, preset, seed, setup))


def is_timed(
    rows: list[dict[str, str]],
    recipe: Recipe,
    model: ModelSpec,
    preset: str,
    setup: str | None = None,
    metrics: Iterable[str] = SOLO_TRAINING_METRICS,
) -> bool:
    """Return whether the results contain all of `metrics`; for the other arguments see `filter_rows`."""
    return set(metrics) <= {row["metric"] for row in filter_rows(rows, recipe, model, preset, None, setup)}


def setups_of(rows: list[dict[str, str]], recipe: Recipe, models: list[ModelSpec], preset: str) -> dict[ModelSpec, str]:
    """Return the setup hash of each model, read from its results because computing it requires the data.

    Raises:
        ValueError: If a model has results of more than one setup.
    """
    setups: dict[ModelSpec, str] = {}
    for model in models:
        hashes = {row.get("setup", "") for row in filter_rows(rows, recipe, model, preset, None)}
        if len(hashes) > 1:
            raise ValueError(
                f"{model} has results of {len(hashes)} different settings or versions of the data: omit --redraw"
            )
        if hashes:
            setups[model] = hashes.pop()
    return setups


def to_solo_rows(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the solo metrics of a run that was trained while no other job was running.

    Args:
        rows: All result rows of the run.

    Returns:
        One row for each of `SOLO_TRAINING_METRICS`; none if the run was too short to be timed.
    """
    timed_row = next((row for row in rows if row["step_ms"] not in ("", "nan")), None)
    if timed_row is None:
        return []
    values = zip(SOLO_TRAINING_METRICS, (timed_row["step_ms"], timed_row["peak_mem_mb"]), strict=True)
    return [{**timed_row, "split": "train", "metric": metric, "value": value} for metric, value in values]


def train_job(
    recipe: Recipe,
    model: ModelSpec,
    seed: int,
    *,
    preset: str,
    data_dir: Path,
    out: Path,
    runs: Path,
    recipe_argument: str | None = None,
    overrides: Sequence[str] = (),
    keep_checkpoints: int | None = None,
    logger: str | None = None,
) -> Job:
    """Return the job that trains a model with `mgk train`.

    Args:
        recipe: Recipe with the overrides applied.
        model: Model to train.
        seed: Seed of the run.
        preset: Preset of the model.
        data_dir: Data directory.
        out: Directory of the results file.
        runs: Parent directory of the run directories.
        recipe_argument: Recipe on the command line, if it is a file; by default the recipe's name.
        overrides: Changed settings, in the format of --set.
        keep_checkpoints: Number of checkpoints to keep; None means the default of `mgk train`.
        logger: Experiment trackers, in the format of --logger; None means the default of `mgk train`.
    """
    directory = run_path(runs, recipe.name, model, preset, seed)
    command = [sys.executable, "-m", "mgk", "train", recipe_argument or recipe.name]
    for override in overrides:
        command += ["--set", override]
    options = {
        "--preset": preset,
        "--data-dir": data_dir,
        "--results": out / f"{recipe.name}.csv",
        "--variant": model.variant,
        "--heads": model.heads,
        "--kv-heads": model.kv_heads,
        "--key-heads": model.key_heads,
        "--keep-checkpoints": keep_checkpoints,
        "--logger": logger,
        "--seed": seed,
        "--out": directory,
        "--resume": "auto",
    }
    for option, value in options.items():
        if value is not None:
            command += [option, str(value)]
    return Job(recipe.name, model, seed, directory, command)
