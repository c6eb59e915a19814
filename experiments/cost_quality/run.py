"""Train and time the planned arms that results lack."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from experiments.cost_quality.plan import PRESET, Arm, Plan, Rows
from mgk import tasks
from mgk.training import results
from mgk.training.cluster import ClusterOptions, execute_jobs, srun_command
from mgk.training.config import Recipe, load_recipe
from mgk.training.equal_time import record_steps
from mgk.training.job_queue import Job, resolve_max_running
from mgk.training.sweep import is_timed, is_trained, train_job
from mgk.training.trainer import Run

Progress = Callable[[str, int, int], None]


def read_results(out: Path) -> Rows:
    return results.read(sorted(out.glob("*.csv")))


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
        if arm.time_of is None and not arm.overrides:
            recipe = arm.resolve(rows)
            assert recipe is not None
            setup = setup_of(arm, recipe, data)
            if is_trained(rows, recipe, arm.model, PRESET, 0, setup) and not is_timed(
                rows, recipe, arm.model, PRESET, setup
            ):
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
    for name in dict.fromkeys(arm.recipe for arm in plan.arms):
        recipe = next(arm for arm in plan.arms if arm.recipe == name).resolve([])
        if recipe is not None:
            tasks.get_task(recipe.task).prepare(data, os.cpu_count() or 1, progress)
    failed: list[str] = []
    previous: list[str] = []
    while time.monotonic() < end:
        pending, waiting = missing_jobs(plan, read_results(out), out, runs, data)
        names = [f"{job.name} {job.seed} {job.directory}" for job in pending]
        if names == previous and names:
            break  # every remaining run failed
        previous = names
        remaining = None if minutes is None else max(0.0, end - time.monotonic()) / 60
        queue = execute_jobs(pending, resolve_max_running(jobs), remaining, cluster)
        failed += [f"{job.name} (see {job.log})" for job in queue.failed]
        if queue.unfinished:
            break
        for command in timing_commands(plan, read_results(out), out, runs, data):
            local = [sys.executable, "-m", "mgk", *command]
            full = local if cluster is None else srun_command(local, cluster)
            if time.monotonic() < end and subprocess.call(full):
                failed.append(f"mgk {' '.join(command)}")
        if not waiting or failed:
            break
    return failed
