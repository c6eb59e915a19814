"""Train and time the planned arms that results lack."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments import commands
from experiments.cost_quality.plan import PRESET, Arm, Plan, Stage, merge_arms
from experiments.cost_quality.summary import next_seeds
from experiments.result_rows import Rows, read_results
from mgk import tasks
from mgk._core.io import DataError
from mgk._core.progress import Progress
from mgk._core.validation import one_of
from mgk.cli.preparation import is_prepared
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


def has_results(rows: Rows, arm: Arm, seeds: int) -> bool:
    """Return whether the results have all runs of an arm, of any version of the data."""
    recipe = arm.resolve(rows)
    return recipe is not None and all(is_trained(rows, recipe, arm.model, PRESET, seed) for seed in range(seeds))


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
            base_setup = setup_of(Arm(arm.recipe, arm.model), base, data)
            file = out / f"{base.name}.csv"
            record_steps(file, rows, base, arm.equal_time, PRESET, base_setup, recipe.training.steps)
        setup = setup_of(arm, recipe, data)
        jobs[arm] = [
            train_job(
                recipe,
                arm.equal_time or arm.model,
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
    missing_data: dict[str, str] = field(default_factory=dict)  # error messages by task
    has_data: bool = False  # whether the data of a task was prepared

    @property
    def minutes(self) -> float | None:
        """The remaining time, None without a limit."""
        return None if math.isinf(self.end) else max(0.0, self.end - time.monotonic()) / 60

    def run_stage(self, stage: Stage) -> bool:
        """Run a stage; return whether none of its runs is left unfinished."""
        if stage.until_half_width is None:
            return self.run_arms(stage.arms)
        previous: dict[Arm, int] = {}
        while arms := next_seeds(self.plan, stage, read_results(self.out), self.out):
            if arms == previous:  # the last pass has added no results
                break
            if not self.run_arms(arms):
                return False
            previous = arms
        return True

    def run_arms(self, arms: dict[Arm, int]) -> bool:
        """Time the arms that were not timed, then train their missing runs; return whether none is left unfinished.

        The arms are timed first, so that the runs of equal time can start with the others, and a time limit during the
        training leaves no arm without a step time.
        """
        arms = self._with_data(arms)
        self._time_arms(arms)
        jobs, waiting = missing_jobs(arms, read_results(self.out), self.out, self.runs, self.data)
        if time.monotonic() >= self.end:
            return not any(jobs.values()) and not waiting
        self.failed += [f"{arm} of {arm.recipe} (the step time of {arm.time_of} is missing)" for arm in waiting]
        pending = by_seed(job for jobs_of_arm in jobs.values() for job in jobs_of_arm)
        queue = execute_jobs(pending, self.max_running, self.minutes, self.cluster)
        self.failed += [f"{job.name} (see {job.log})" for job in queue.failed]
        return not queue.unfinished

    def _with_data(self, arms: dict[Arm, int]) -> dict[Arm, int]:
        """Prepare the data of the arms; return those that have data.

        Data that were not prepared before are prepared only if the results lack a run of the task.
        """
        by_task: dict[str, dict[Arm, int]] = {}
        for arm, seeds in arms.items():
            by_task.setdefault(load_recipe(arm.recipe).task, {})[arm] = seeds
        rows = read_results(self.out)
        available: dict[Arm, int] = {}
        for name, arms_of_task in by_task.items():
            task = tasks.get_task(name)
            if not is_prepared(task, self.data) and all(
                has_results(rows, arm, seeds) for arm, seeds in arms_of_task.items()
            ):
                continue
            if name not in self.missing_data:
                try:
                    task.prepare(self.data, os.cpu_count() or 1, self.progress)
                except DataError as error:
                    self.missing_data[name] = str(error)
                    print(f"The arms of the task {name} are skipped: {error}", file=sys.stderr)
            if name not in self.missing_data:
                available |= arms_of_task
                self.has_data = True
        return {arm: seeds for arm, seeds in arms.items() if arm in available}

    def _time_arms(self, arms: Iterable[Arm]) -> None:
        """Time the models of arms that have no step time with the recipe's current settings.

        Both models of an arm of equal time are timed if their step times were not measured together.
        """
        rows = read_results(self.out)
        untimed: dict[str, dict[str, None]] = {}
        for arm in arms:
            recipe = load_recipe(arm.recipe)
            is_unmatched = arm.equal_time is not None and resolve(arm, rows, self.data) is None
            for model in timed_models(arm):
                setup = setup_of(Arm(arm.recipe, model), recipe, self.data)
                if is_unmatched or not is_timed(rows, recipe, model, PRESET, setup):
                    untimed.setdefault(arm.recipe, {})[str(model)] = None
        for recipe_name, models in untimed.items():
            if time.monotonic() >= self.end:
                return
            command = [recipe_name, "--rows", ",".join(models), "--results", str(self.out)]
            # Models to time mostly compile, so that more of them than runs can share the machine.
            command += ["--data-dir", str(self.data), "--jobs", str(max(self.max_running, resolve_max_running(None)))]
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
    stages: Sequence[str] = (),
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
        stages: Names of the stages to run; none for all.
    """
    for name in stages:
        one_of("--stage", name, [stage.name for stage in plan.stages])
    selected = [stage for stage in plan.stages if not stages or stage.name in stages]
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    runner = StudyRunner(plan, out, runs, data, resolve_max_running(jobs), end, progress, cluster)
    if cluster is not None:
        fixed = [stage for stage in selected if stage.until_half_width is None]
        added = [stage for stage in selected if stage.until_half_width is not None]
        selected = [Stage("all", merge_arms(fixed)), *added]
    for stage in selected:
        if time.monotonic() >= end or not runner.run_stage(stage):
            break
    if runner.missing_data and not runner.has_data:
        runner.failed += [f"the data of {name} are missing: {error}" for name, error in runner.missing_data.items()]
    return runner.failed
