"""Training, timing and report of `mgk compare`, after its options are checked."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from mgk._core.validation import fail
from mgk.training import config, profiling, report, results, sweep, trackers
from mgk.training.cluster import ClusterOptions, execute_jobs
from mgk.training.config import ModelSpec, Recipe
from mgk.training.equal_time import EqualTimeSpec, record_steps, steps_of, with_steps
from mgk.training.evaluate import count_parameters
from mgk.training.job_queue import Job, JobQueue
from mgk.training.runs import run_path
from mgk.training.trainer import Run, warn_if_gpu_recommended

if TYPE_CHECKING:
    from mgk.tasks import Task


def equal_time_rows(models: Sequence[ModelSpec]) -> list[EqualTimeSpec]:
    """Return the rows that have the training time of another model."""
    return [model for model in models if isinstance(model, EqualTimeSpec)]


def own_time_rows(models: Sequence[ModelSpec]) -> list[ModelSpec]:
    """Return the rows that train for the recipe's number of steps."""
    return [model for model in models if not isinstance(model, EqualTimeSpec)]


def timed_models(models: Sequence[ModelSpec]) -> list[ModelSpec]:
    """Return the models whose step times give the number of steps of other rows."""
    return [timed for row in equal_time_rows(models) for timed in row.timed_models]


def base_models(models: Sequence[ModelSpec]) -> list[ModelSpec]:
    """Return the models with the recipe's number of steps: rows of the table, and models that are timed for others."""
    return list(dict.fromkeys([*own_time_rows(models), *timed_models(models)]))


@dataclass
class Comparison:
    """Models of a recipe to train and compare.

    Attributes:
        recipe: Recipe with the overrides applied.
        recipe_argument: Recipe on the command line: its name or a file.
        overrides: Changed settings, in the format of --set.
        models: Rows of the table.
        preset: Preset of the models.
        seeds: Number of seeds per row.
        task: Task of the recipe, with prepared data.
        data_dir: Data directory.
        out: Directory of results, table and plot.
        runs: Parent directory of the run directories.
        keep_checkpoints: Number of checkpoints that a run keeps.
        logger: Experiment trackers, in the format of --logger.
        alone: Whether to time each model in isolation; None times only the models that are not timed yet.
        max_running: Maximum number of jobs that run at the same time on this machine.
        minutes: Time limit, or None.
        cluster: Resources of each job on a cluster, or None for this machine.
        first_runs: The run with seed 0 of each model that has the recipe's number of steps.
        setups: Setup hash of each model; rows with the training time of another are added once their steps are known.
        jobs: Jobs that this command has started, or would have started with more time.
        failed: Jobs that have failed.
        unfinished: Jobs that have neither succeeded nor failed.
    """

    recipe: Recipe
    recipe_argument: str
    overrides: list[str]
    models: list[ModelSpec]
    preset: str
    seeds: int
    task: Task
    data_dir: Path
    out: Path
    runs: Path
    keep_checkpoints: int
    logger: str
    alone: bool | None
    max_running: int
    minutes: float | None
    cluster: ClusterOptions | None
    first_runs: dict[ModelSpec, Run] = field(init=False)
    setups: dict[ModelSpec, str] = field(init=False)
    jobs: list[Job] = field(default_factory=list)
    failed: list[Job] = field(default_factory=list)
    unfinished: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first_runs = {model: self._first_run(self.recipe, model) for model in base_models(self.models)}
        self.setups = {model: run.setup(self.task) for model, run in self.first_runs.items()}

    @property
    def result_file(self) -> Path:
        """File that new results are appended to; existing results are read from every CSV file in `out`."""
        return self.out / f"{self.recipe.name}.csv"

    def execute(self) -> None:
        """Train and time the models whose results are missing, and write the report."""
        deadline = math.inf if self.minutes is None else time.monotonic() + 60 * self.minutes
        self._train_models()
        if self.unfinished and not results.read([self.result_file]):
            return
        self._time_models(deadline)
        recipes: dict[EqualTimeSpec, Recipe] = {}
        if equal_time_rows(self.models) and not self.unfinished:
            recipes = self._train_equal_time_rows(deadline)
            if self.unfinished and not self._has_scores():
                return
        write_report(self.recipe, self.models, self.preset, self.out, self.setups, recipes)
        if self.failed:
            raise ValueError(
                f"{len(self.failed)} of {len(self.jobs)} runs failed; see log.txt in their run directories"
            )

    def _first_run(self, recipe: Recipe, model: ModelSpec) -> Run:
        directory = run_path(self.runs, recipe.name, model, self.preset, 0)
        return Run(recipe, model, self.preset, 0, self.data_dir, directory)

    def _train_models(self) -> None:
        """Train the rows that have the recipe's number of steps."""
        models = own_time_rows(self.models)
        jobs, total = self._missing_jobs(dict.fromkeys(models, self.recipe)), len(models) * self.seeds
        if len(jobs) < total:
            skipped = f"{total - len(jobs)} of {total} runs are already in {self.out} and are skipped"
            print(f"{skipped} (use another --out to repeat them)", file=sys.stderr)
        if jobs and self.cluster is None and not torch.cuda.is_available():
            parameters = count_parameters(self.first_runs[jobs[0].row].model_config(self.task))
            warn_if_gpu_recommended(self.recipe, self.task.max_length, parameters)
        self._execute_jobs(jobs, self.minutes)
        if self.failed and not results.read([self.result_file]):
            raise ValueError(f"all {len(self.failed)} runs failed; see log.txt in their run directories")
        if self.unfinished:
            progress = f"{len(self.unfinished)} of {len(jobs)} runs are not finished after {self.minutes:g} minutes"
            print(f"{progress}; the same command resumes them", file=sys.stderr)

    def _time_models(self, deadline: float) -> None:
        """Append the step times of the models, measured in isolation, to the results."""
        finished = [job for job in self.jobs if job not in self.failed and job not in self.unfinished]
        if self.max_running == 1 and self.alone is None:
            for job in finished:
                rows = results.read([self.result_file])
                setup = self.setups[job.row]
                rows_of_job = sweep.filter_rows(rows, self.recipe, job.row, self.preset, job.seed, setup)
                results.append(self.result_file, sweep.to_solo_rows(rows_of_job))
        if self.unfinished or self.alone is False:
            return
        # A run that trained alone has timed its model, unless it was too short or the command was interrupted; it never
        # times inference.
        candidates = list(dict.fromkeys([*base_models(self.models), *timed_models(self.models)]))
        metrics = sweep.SOLO_METRICS if self.alone else sweep.SOLO_TRAINING_METRICS
        rows = read_results(self.out, self.recipe)
        # The step times of a row of equal time and of its reference are compared, so they are measured together.
        unmatched = {
            model
            for spec in equal_time_rows(self.models)
            if steps_of(rows, self.recipe, spec, self.preset, self.setups) is None
            for model in spec.timed_models
        }
        untimed = [
            self.first_runs[model]
            for model in candidates
            if model in unmatched
            or not sweep.is_timed(rows, self.recipe, model, self.preset, self.setups[model], metrics)
        ]
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        for profile in profiling.profile_in_groups(untimed, self.task, device, self.max_running, deadline):
            results.append(self.result_file, profile)

    def _train_equal_time_rows(self, deadline: float) -> dict[EqualTimeSpec, Recipe]:
        """Train the rows that have the training time of another model; return the recipe of each."""
        rows, specs = read_results(self.out, self.recipe), equal_time_rows(self.models)
        recipes = equal_time_recipes(rows, self.recipe, specs, self.preset, self.setups)
        for spec, recipe in recipes.items():
            setup = self.setups[spec.model]
            record_steps(self.result_file, rows, self.recipe, spec, self.preset, setup, recipe.training.steps)
            self.setups[spec] = self._first_run(recipe, spec.model).setup(self.task)
            print(f"{spec}: {recipe.training.steps:,} steps in the training time of {spec.time_of}", file=sys.stderr)
        missing = ", ".join(str(spec) for spec in specs if spec not in recipes)
        if missing and self.alone is False:
            fail("--no-alone", f"leaves out the step times that {missing} needs: omit it")
        if missing and time.monotonic() < deadline:
            raise ValueError(f"the step times that {missing} needs could not be measured")
        minutes = None if self.minutes is None else max(0.0, deadline - time.monotonic()) / 60
        self._execute_jobs(self._missing_jobs(recipes), minutes)
        if self.unfinished:
            print(f"{len(self.unfinished)} runs are not finished; the same command resumes them", file=sys.stderr)
        return recipes

    def _missing_jobs(self, recipes: Mapping[Any, Recipe]) -> list[Job]:
        """Return the jobs whose results are missing, for the models and recipes of a mapping."""
        rows = read_results(self.out, self.recipe)
        return [
            self._train_job(recipe, model, seed)
            for seed in range(self.seeds)
            for model, recipe in recipes.items()
            if not sweep.is_trained(rows, recipe, model, self.preset, seed, self.setups[model])
        ]

    def _train_job(self, recipe: Recipe, model: ModelSpec, seed: int) -> Job:
        overrides, runs = self.overrides, self.runs
        if isinstance(model, EqualTimeSpec):
            overrides, runs = [*overrides, f"steps={recipe.training.steps}"], model.runs_folder(runs)
        return sweep.train_job(
            recipe,
            model,
            seed,
            preset=self.preset,
            data_dir=self.data_dir,
            out=self.out,
            runs=runs,
            recipe_argument=self.recipe_argument,
            overrides=overrides,
            keep_checkpoints=None if self.keep_checkpoints == config.KEEP_CHECKPOINTS else self.keep_checkpoints,
            logger=None if self.logger == trackers.DEFAULT else self.logger,
        )

    def _execute_jobs(self, jobs: list[Job], minutes: float | None) -> None:
        """Run jobs and record those that fail or do not finish."""
        queue: JobQueue = execute_jobs(jobs, self.max_running, minutes, self.cluster)
        self.jobs += jobs
        self.failed += queue.failed
        self.unfinished = queue.unfinished

    def _has_scores(self) -> bool:
        """Return whether the results have a score of a row of this comparison."""
        metric, setups = sweep.metric_format(self.recipe).metric, set(self.setups.values())
        rows = read_results(self.out, self.recipe)
        return any(row["metric"] == metric and row.get("setup") in setups for row in rows)


def read_results(out: Path, recipe: Recipe) -> list[dict[str, str]]:
    """Read all results files in a directory and check the scores of a recipe."""
    metric = sweep.metric_format(recipe).metric
    rows = []
    for path in sorted(out.glob("*.csv")):
        rows_of_file = results.read([path])
        results.check_numbers(path, rows_of_file, recipe.name, metric)
        rows += rows_of_file
    return rows


def equal_time_recipes(
    rows: list[dict[str, str]],
    recipe: Recipe,
    specs: list[EqualTimeSpec],
    preset: str,
    setups: Mapping[ModelSpec, str],
) -> dict[EqualTimeSpec, Recipe]:
    """Return the recipe of each row with the training time of another; rows without step times are omitted."""
    steps = {spec: steps_of(rows, recipe, spec, preset, setups) for spec in specs}
    return {spec: with_steps(recipe, count) for spec, count in steps.items() if count is not None}


def redraw_report(recipe: Recipe, models: list[ModelSpec], preset: str, out: Path) -> None:
    """Write the report from existing results, without the data."""
    rows = read_results(out, recipe)
    setups = sweep.setups_of(rows, recipe, base_models(models), preset)
    recipes = equal_time_recipes(rows, recipe, equal_time_rows(models), preset, setups)
    for spec, changed in recipes.items():
        setups |= sweep.setups_of(rows, changed, [spec], preset)
    write_report(recipe, models, preset, out, setups, recipes)


def write_report(
    recipe: Recipe,
    models: list[ModelSpec],
    preset: str,
    out: Path,
    setups: dict[ModelSpec, str],
    recipes: Mapping[EqualTimeSpec, Recipe],
) -> None:
    """Write the table and plot to `out`, and print the table."""
    lines = report.write_report(recipe, models, preset, sorted(out.glob("*.csv")), out, setups, recipes)
    table = Table(*lines[0], title=recipe.title)
    for line in lines[1:]:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    plot = out / f"{recipe.name}.png"
    drawn = f"plot: {plot}" if plot.exists() else f"no plot of fewer than {report.MIN_PLOTTED} models"
    print(f"table: {out / recipe.name}.md   {drawn}   results: {out / recipe.name}.csv")
