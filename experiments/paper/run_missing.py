"""Run the planned experiments without results: training runs, then analyses, then timings."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from experiments import commands
from experiments.paper import plan
from experiments.paper.recipe_results import PRESET
from experiments.result_rows import Rows, read_results
from mgk import tasks
from mgk._core.progress import Progress
from mgk.training import config
from mgk.training.cluster import ClusterOptions, execute_jobs
from mgk.training.config import ModelSpec
from mgk.training.evaluate import count_parameters
from mgk.training.job_queue import Job, resolve_max_running
from mgk.training.sweep import filter_rows, train_job
from mgk.training.trainer import Run

# No command is started if fewer seconds remain.
MIN_SECONDS = 1.0


def train_jobs(seeds: dict[str, list[tuple[ModelSpec, int]]], out: Path, runs: Path, data: Path) -> list[Job]:
    """Make a job per model and seed of each recipe, large models first, so that the last jobs to start are short."""
    jobs: list[tuple[int, Job]] = []
    for name, models in seeds.items():
        recipe = config.load_recipe(name)
        first = Run(recipe, models[0][0], PRESET, 0, data, Path())
        size = count_parameters(first.model_config(tasks.get_task(recipe.task)))
        jobs += [
            (size, train_job(recipe, row, seed, preset=PRESET, data_dir=data, out=out, runs=runs))
            for row, seed in models
        ]
    return [job for _, job in sorted(jobs, key=lambda sized: -sized[0])]


def preflight_error(name: str, rows: Rows, data: Path, progress: Progress) -> str | None:
    """Return the reason why results cannot be added to a recipe (missing or different data), or None."""
    recipe = config.load_recipe(name)
    task = tasks.get_task(recipe.task)
    try:
        task.prepare(data, os.cpu_count() or 1, progress)
    except ValueError as error:
        return f"{name}: {error}"
    for row in dict.fromkeys(row for item in plan.EXPERIMENTS if item.recipe == name for row in item.seeds):
        setups = {line["setup"] for line in filter_rows(rows, recipe, row, PRESET, None) if line.get("setup")}
        if setups - {Run(recipe, row, PRESET, 0, data, Path()).setup(task)}:
            return f"{name}: the results of {row} were computed with data or settings other than {data} and the recipe"
    return None


def seeds_to_train(rows: Rows, out: Path, runs: Path) -> dict[str, list[tuple[ModelSpec, int]]]:
    """Return models and seeds to train by recipe.

    These are the missing seeds of the experiments, and one additional seed of each model to be analysed whose run
    directory does not exist: the repository stores results but not weights.
    """
    seeds: dict[str, list[tuple[ModelSpec, int]]] = {}
    for experiment in plan.EXPERIMENTS:
        for row, missing in plan.missing_seeds(rows, experiment).items():
            seeds.setdefault(experiment.recipe, []).extend((row, seed) for seed in missing)
    for analysis in plan.ANALYSES:
        if not analysis.is_done(out):
            models = seeds.setdefault(analysis.recipe, [])
            planned = {row for row, _ in models}
            lost = [row for row, directories in analysis.models(runs).items() if not directories]
            models += [(row, plan.next_seed(rows, analysis.recipe, row)) for row in lost if row not in planned]
    return {recipe: models for recipe, models in seeds.items() if models}


def followup_commands(out: Path, runs: Path, updated: set[str], skipped: set[str]) -> Iterator[list[str]]:
    """Yield the `mgk` commands that follow the training runs: analyses, then timings and tables.

    Args:
        out: Results directory.
        runs: Parent directory of the run directories; analyses need the weights in it.
        updated: Recipes with new runs, whose tables are written again.
        skipped: Recipes to skip.
    """
    for analysis in plan.ANALYSES:
        if analysis.is_done(out):
            continue
        command = analysis.command(out, runs)
        if command is not None:
            yield command
        else:
            names = ", ".join(map(str, analysis.rows))
            print(f"{analysis.folder}: needs trained models of {names} in {runs / analysis.recipe}", file=sys.stderr)
    for experiment in plan.EXPERIMENTS:
        rows = read_results(out)
        models = plan.trained_models(rows, experiment)
        untimed = any(row in models for row in plan.untimed_models(rows, experiment))
        if models and (untimed or experiment.recipe in updated) and experiment.recipe not in skipped:
            command = ["compare", experiment.recipe, "--rows", ",".join(map(str, models))]
            yield [*command, "--alone" if untimed else "--redraw", "--out", str(out), "--runs", str(runs)]


def run(
    out: Path,
    runs: Path,
    data: Path,
    jobs: int | None,
    minutes: float | None,
    progress: Progress,
    cluster: ClusterOptions | None = None,
) -> list[str]:
    """Run the remaining experiments and return descriptions of the failures.

    The runs of all experiments share one queue, so that `jobs` runs are in progress until the queue is empty.

    Args:
        out: Results directory.
        runs: Parent directory of the run directories.
        data: Data directory.
        jobs: Number of concurrent runs; None for the default.
        minutes: Time limit; None for no limit.
        progress: Callback for the preparation of data.
        cluster: Resources of jobs on a SLURM cluster, which also runs analyses and timings; None for this machine.
    """
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    max_running = resolve_max_running(jobs)
    rows = read_results(out)
    seeds = seeds_to_train(rows, out, runs)
    recipes = [*seeds, *(item.recipe for item in plan.EXPERIMENTS if plan.untimed_models(rows, item))]
    errors = {name: preflight_error(name, rows, data, progress) for name in dict.fromkeys(recipes)}
    failed = [error for error in errors.values() if error is not None]
    seeds = {name: models for name, models in seeds.items() if errors[name] is None}
    # The time limit includes the preparation of data.
    remaining = None if minutes is None else max(0.0, end - time.monotonic()) / 60
    pending = train_jobs(seeds, out, runs, data)
    queue = execute_jobs(pending, max_running, remaining, cluster)
    failed += [f"{job.name} (see {job.log})" for job in queue.failed]
    if not queue.unfinished:
        skipped = {name for name, error in errors.items() if error}
        for followup in followup_commands(out, runs, set(seeds), skipped):
            if time.monotonic() + MIN_SECONDS >= end:
                break
            command = [*followup, "--data-dir", str(data)]
            if followup[0] == "compare":
                command += ["--jobs", str(max_running)]
                command += [] if minutes is None else ["--minutes", f"{(end - time.monotonic()) / 60:.2f}"]
            print(f"mgk {' '.join(command)}", file=sys.stderr, flush=True)
            # Drawing a table again needs no node.
            if commands.run_mgk(command, None if "--redraw" in command else cluster):
                failed.append(f"mgk {' '.join(followup)}")
    if time.monotonic() + MIN_SECONDS >= end:
        print(f"Stopped after {minutes:g} minutes. Run the same command again to continue.", file=sys.stderr)
    return failed
