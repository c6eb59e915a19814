"""Train and time the planned arms that results lack."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from experiments import commands
from experiments.cost_quality.plan import PRESET, Arm, Plan
from experiments.result_rows import Rows, read_results
from mgk import tasks
from mgk.tasks.data_cache import Progress
from mgk.training.cluster import ClusterOptions, execute_jobs
from mgk.training.config import ModelSpec, Recipe, load_recipe
from mgk.training.equal_time import record_steps
from mgk.training.job_queue import Job, resolve_max_running
from mgk.training.sweep import is_timed, is_trained, train_job
from mgk.training.trainer import Run

TIMING = "experiments.cost_quality.timing"  # the command that times models


def setup_of(arm: Arm, recipe: Recipe, data: Path) -> str:
    """Return the setup hash of an arm's runs."""
    return Run(recipe, arm.model, PRESET, 0, data, Path()).setup(tasks.get_task(recipe.task))


def timed_models(arm: Arm) -> tuple[ModelSpec, ...]:
    """Return the models whose step times an arm needs: its own for the page, and both for a number of steps."""
    if arm.equal_time is not None:
        return arm.equal_time.timed_models
    return () if arm.overrides else (arm.model,)


def resolve(arm: Arm, rows: Rows, data: Path) -> Recipe | None:
    """Return the recipe with the arm's settings, from step times with the recipe's current settings."""
    base = load_recipe(arm.recipe)
    models = timed_models(arm) if arm.equal_time is not None else ()
    return arm.resolve(rows, {model: setup_of(Arm(arm.recipe, model), base, data) for model in models})


def missing_jobs(
    arms: dict[Arm, int], rows: Rows, out: Path, runs: Path, data: Path
) -> tuple[dict[Arm, list[Job]], list[Arm]]:
    """Return the jobs of the runs that results lack, and the arms that wait for the step times of others."""
    jobs: dict[Arm, list[Job]] = {}
    waiting = []
    for arm, seeds in arms.items():
        recipe = resolve(arm, rows, data)
        if recipe is None:
            waiting.append(arm)
            continue
        if arm.equal_time is not None:
            # Recorded once, so that a later timing does not change the number of steps.
            base = load_recipe(arm.recipe).with_settings(list(arm.overrides))
            record_steps(out / f"{base.name}.csv", rows, base, arm.equal_time, PRESET, recipe.training.steps)
        setup = setup_of(arm, recipe, data)
        jobs[arm] = [
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


def by_seed(jobs: Iterable[Job]) -> list[Job]:
    """Sort jobs by seed; those of a seed keep the order of the arms."""
    return sorted(jobs, key=lambda job: job.seed)


@dataclass
class StudyRunner:
    """Runs the missing part of stages.

    Attributes:
        plan: The plan.
        out: Results directory.
        runs: Parent directory of the run directories.
        data: Data directory.
        max_running: Number of concurrent runs.
        end: Time limit on the monotonic clock.
        progress: Callback for the preparation of data.
        cluster: Resources of jobs on a SLURM cluster, which also times the models; None for this machine.
        failed: Descriptions of the failures.
    """

    plan: Plan
    out: Path
    runs: Path
    data: Path
    max_running: int
    end: float
    progress: Progress
    cluster: ClusterOptions | None
    failed: list[str] = field(default_factory=list)

    @property
    def minutes(self) -> float | None:
        """The remaining time, None without a limit."""
        return None if math.isinf(self.end) else max(0.0, self.end - time.monotonic()) / 60

    def run_arms(self, arms: dict[Arm, int]) -> bool:
        """Time the arms that were not timed, then train their missing runs; return whether none is left unfinished.

        The arms are timed first, so that the runs of equal time can start with the others, and a time limit during the
        training leaves no arm without a step time.
        """
        for task in dict.fromkeys(load_recipe(arm.recipe).task for arm in arms):
            tasks.get_task(task).prepare(self.data, os.cpu_count() or 1, self.progress)
        self._time_arms(arms)
        jobs, waiting = missing_jobs(arms, read_results(self.out), self.out, self.runs, self.data)
        if time.monotonic() >= self.end:
            return not any(jobs.values()) and not waiting
        self.failed += [f"{arm} of {arm.recipe} (the step time of {arm.time_of} is missing)" for arm in waiting]
        pending = by_seed(job for jobs_of_arm in jobs.values() for job in jobs_of_arm)
        queue = execute_jobs(pending, self.max_running, self.minutes, self.cluster)
        self.failed += [f"{job.name} (see {job.log})" for job in queue.failed]
        return not queue.unfinished

    def _time_arms(self, arms: Iterable[Arm]) -> None:
        """Time the models of arms that have no step time with the recipe's current settings."""
        rows = read_results(self.out)
        untimed: dict[str, dict[str, None]] = {}
        for arm in arms:
            recipe = load_recipe(arm.recipe)
            for model in timed_models(arm):
                setup = setup_of(Arm(arm.recipe, model), recipe, self.data)
                if not is_timed(rows, recipe, model, PRESET, setup):
                    untimed.setdefault(arm.recipe, {})[str(model)] = None
        for recipe_name, models in untimed.items():
            if time.monotonic() >= self.end:
                return
            command = [recipe_name, "--rows", ",".join(models), "--results", str(self.out)]
            command += ["--data-dir", str(self.data), "--jobs", str(self.max_running)]
            command += [] if self.minutes is None else ["--minutes", f"{self.minutes:.2f}"]
            if commands.run_module(TIMING, command, self.cluster):
                self.failed.append(f"python -m {TIMING} {' '.join(command)}")


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

    The stages run one after another, each seed by seed. On a cluster the jobs of all stages are submitted together.

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
    runner = StudyRunner(plan, out, runs, data, resolve_max_running(jobs), end, progress, cluster)
    groups = [stage.arms for stage in plan.stages] if cluster is None else [plan.arms]
    for arms in groups:
        if time.monotonic() >= end or not runner.run_arms(arms):
            break
    return runner.failed
