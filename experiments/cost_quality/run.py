"""Train and time the planned arms that results lack."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from experiments import commands
from experiments.cost_quality.plan import PRESET, Arm, Plan
from experiments.result_rows import Rows, read_results
from mgk import tasks
from mgk.tasks.data_cache import Progress
from mgk.training.cluster import ClusterOptions, execute_jobs
from mgk.training.config import Recipe, load_recipe
from mgk.training.equal_time import record_steps
from mgk.training.job_queue import Job, resolve_max_running
from mgk.training.sweep import is_timed, is_trained, train_job
from mgk.training.trainer import Run


def setup_of(arm: Arm, recipe: Recipe, data: Path) -> str:
    """Return the setup hash of an arm's runs."""
    return Run(recipe, arm.model, PRESET, 0, data, Path()).setup(tasks.get_task(recipe.task))


def missing_jobs(plan: Plan, rows: Rows, out: Path, runs: Path, data: Path) -> tuple[list[Job], list[Arm]]:
    """Return the jobs of the runs that results lack, and the arms that wait for the step times of others."""
    jobs, waiting = [], []
    for arm, seeds in plan.arms.items():
        recipe = arm.resolve(rows)
        if recipe is None:
            waiting.append(arm)
            continue
        if arm.equal_time is not None:
            # Recorded once, so that a later timing does not change the number of steps.
            base = load_recipe(arm.recipe).with_settings(list(arm.overrides))
            record_steps(out / f"{base.name}.csv", rows, base, arm.equal_time, PRESET, recipe.training.steps)
        setup = setup_of(arm, recipe, data)
        jobs += [
            train_job(
                recipe,
                arm.model,
                seed,
                preset=PRESET,
                data_dir=data,
                out=out,
                runs=arm.runs_folder(runs),
                recipe_argument=arm.recipe,
                overrides=arm.command_overrides(recipe),
            )
            for seed in range(seeds)
            if not is_trained(rows, recipe, arm.model, PRESET, seed, setup)
        ]
    return jobs, waiting


def timing_commands(plan: Plan, rows: Rows, out: Path, runs: Path, data: Path) -> list[list[str]]:
    """Return the `mgk compare` commands that time trained arms in isolation."""
    untimed: dict[str, list[str]] = {}
    for arm in plan.arms:
        if arm.time_of is not None or arm.overrides:
            continue
        recipe = load_recipe(arm.recipe)
        setup = setup_of(arm, recipe, data)
        trained = is_trained(rows, recipe, arm.model, PRESET, 0, setup)
        if trained and not is_timed(rows, recipe, arm.model, PRESET, setup):
            untimed.setdefault(arm.recipe, []).append(str(arm.model))
    options = ["--alone", "--out", str(out), "--runs", str(runs), "--data-dir", str(data)]
    return [["compare", recipe, "--rows", ",".join(models), *options] for recipe, models in untimed.items()]


def run(
    plan: Plan,
    out: Path,
    runs: Path,
    data: Path,
    jobs: int | None,
    minutes: float | None,
    progress: Progress,
    cluster: ClusterOptions | None = None,
) -> list[str]:
    """Run the missing part of the plan and return descriptions of the failures.

    Time-matched arms start after the models that they refer to have been timed.

    Args:
        plan: The plan.
        out: Results directory.
        runs: Parent directory of the run directories.
        data: Data directory.
        jobs: Number of concurrent runs; None for the default.
        minutes: Time limit; None for no limit. The same call continues later from the checkpoints.
        progress: Callback for the preparation of data.
        cluster: Resources of jobs on a SLURM cluster, which also times the models; None for this machine.
    """
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    for task in dict.fromkeys(load_recipe(arm.recipe).task for arm in plan.arms):
        tasks.get_task(task).prepare(data, os.cpu_count() or 1, progress)
    failed: list[str] = []
    previous: tuple[list[Path], list[Arm]] | None = None
    while time.monotonic() < end:
        pending, waiting = missing_jobs(plan, read_results(out), out, runs, data)
        missing = [job.directory for job in pending], waiting
        if missing == previous:  # the last pass has added no results
            failed += [f"{arm} of {arm.recipe} (the step time of {arm.time_of} is missing)" for arm in waiting]
            break
        previous = missing
        remaining = None if minutes is None else max(0.0, end - time.monotonic()) / 60
        queue = execute_jobs(pending, resolve_max_running(jobs), remaining, cluster)
        failed += [f"{job.name} (see {job.log})" for job in queue.failed]
        if queue.unfinished:
            break
        for command in timing_commands(plan, read_results(out), out, runs, data):
            if time.monotonic() < end and commands.run_mgk(command, cluster):
                failed.append(f"mgk {' '.join(command)}")
        if not waiting or failed:
            break
    return failed
