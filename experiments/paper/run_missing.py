"""Runs what the evidence still lacks: trainings, then analyses, then times."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from experiments.paper import plan
from experiments.paper.recipe_results import PRESET
from mgk import tasks
from mgk.training import config, results
from mgk.training.config import ModelSpec
from mgk.training.evaluate import count_parameters
from mgk.training.job_queue import Job, resolve_max_running, run_jobs
from mgk.training.sweep import filter_rows, train_job
from mgk.training.trainer import Run

Progress = Callable[[str, int, int], None]
# Seconds under which nothing is begun.
LEAST = 1.0


def known(found: Path) -> list[dict[str, str]]:
    return results.read(sorted(found.glob("*.csv")))


def trainings(wanted: dict[str, list[tuple[ModelSpec, int]]], found: Path, runs: Path, data: Path) -> list[Job]:
    """What trains these rows and seeds of recipes, large models first, so that what begins last is soon done."""
    jobs: list[tuple[int, Job]] = []
    for name, seeds in wanted.items():
        recipe = config.load_recipe(name)
        first = Run(recipe, seeds[0][0], PRESET, 0, data, Path())
        size = count_parameters(first.model_config(tasks.get_task(recipe.task)))
        jobs += [
            (size, train_job(recipe, row, seed, preset=PRESET, data_dir=data, out=found, runs=runs))
            for row, seed in seeds
        ]
    return [job for _, job in sorted(jobs, key=lambda sized: -sized[0])]


def trouble(name: str, rows: list[dict[str, str]], data: Path, progress: Progress) -> str | None:
    """Why nothing can be added to the results of a recipe: there is no data, or other data than theirs."""
    recipe = config.load_recipe(name)
    task = tasks.get_task(recipe.task)
    try:
        task.prepare(data, os.cpu_count() or 1, progress)
    except ValueError as error:
        return f"{name}: {error}"
    for row in dict.fromkeys(row for each in plan.EXPERIMENTS if each.recipe == name for row in each.seeds):
        setups = {each["setup"] for each in filter_rows(rows, recipe, row, PRESET, None) if each.get("setup")}
        if setups - {Run(recipe, row, PRESET, 0, data, Path()).setup(task)}:
            return f"{name}: results have {row} of other data or settings than {data} and the recipe"
    return None


def seeds_to_train(rows: list[dict[str, str]], found: Path, runs: Path) -> dict[str, list[tuple[ModelSpec, int]]]:
    """Rows and seeds by recipe: what the experiments lack, and a further seed of each row that is to be analysed and
    whose trained models are not here: results are kept, weights are not."""
    wanted: dict[str, list[tuple[ModelSpec, int]]] = {}
    for experiment in plan.EXPERIMENTS:
        for row, seeds in plan.left(rows, experiment).items():
            wanted.setdefault(experiment.recipe, []).extend((row, seed) for seed in seeds)
    for analysis in plan.ANALYSES:
        if not analysis.done(found):
            own = wanted.setdefault(analysis.recipe, [])
            gone = [row for row, models in analysis.models(runs).items() if not models]
            trained = {row for row, _ in own}
            own += [(row, plan.next_seed(rows, analysis.recipe, row)) for row in gone if row not in trained]
    return {recipe: each for recipe, each in wanted.items() if each}


def commands(found: Path, runs: Path, new: set[str], without: set[str]) -> Iterator[list[str]]:
    """What follows the trainings, as arguments of `mgk`: analyses first, which need the weights of what was trained
    here, then times and tables of the recipes that lack times or are `new`, but for those in `without`."""
    for analysis in plan.ANALYSES:
        if analysis.done(found):
            continue
        looking = analysis.command(found, runs)
        if looking is not None:
            yield looking
        else:
            names = ", ".join(map(str, analysis.rows))
            print(f"{analysis.folder}: needs trained models of {names} in {runs / analysis.recipe}", file=sys.stderr)
    for experiment in plan.EXPERIMENTS:
        rows = known(found)
        models = plan.trained(rows, experiment)
        untimed = any(row in models for row in plan.untimed(rows, experiment))
        if models and (untimed or experiment.recipe in new) and experiment.recipe not in without:
            asked = ["compare", experiment.recipe, "--rows", ",".join(map(str, models))]
            yield [*asked, "--alone" if untimed else "--redraw", "--out", str(found), "--runs", str(runs)]


def run(found: Path, runs: Path, data: Path, jobs: int | None, minutes: float | None, progress: Progress) -> list[str]:
    """Everything that is left, for as many minutes; returns what failed. The trainings of all experiments share one
    queue, so that the machine has work for all `jobs` until the last."""
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    at_once = resolve_max_running(jobs)
    rows = known(found)
    wanted = seeds_to_train(rows, found, runs)
    needed = [*wanted, *(each.recipe for each in plan.EXPERIMENTS if plan.untimed(rows, each))]
    troubles = {name: trouble(name, rows, data, progress) for name in dict.fromkeys(needed)}
    failed = [reason for reason in troubles.values() if reason is not None]
    wanted = {name: seeds for name, seeds in wanted.items() if troubles[name] is None}
    # What it took to make data ready counts too.
    left = None if minutes is None else max(0.0, end - time.monotonic()) / 60
    queue = run_jobs(trainings(wanted, found, runs, data), at_once, left)
    failed += [f"{job.name} (see {job.log})" for job in queue.failed]
    if not queue.unfinished:
        for asked in commands(found, runs, set(wanted), {name for name, reason in troubles.items() if reason}):
            if time.monotonic() + LEAST >= end:
                break
            command = [*asked, "--data-dir", str(data)]
            if asked[0] == "compare":
                command += ["--jobs", str(at_once)]
                command += [] if minutes is None else ["--minutes", f"{(end - time.monotonic()) / 60:.2f}"]
            print(f"mgk {' '.join(command)}", file=sys.stderr, flush=True)
            if _status([sys.executable, "-m", "mgk", *command]):
                failed.append(f"mgk {' '.join(asked)}")
    if time.monotonic() + LEAST >= end:
        print(f"{minutes:g} minutes are over; the same command goes on with the rest", file=sys.stderr)
    return failed


def _status(command: list[str]) -> int:
    """What a command ends with. Who leaves before its end asks it to leave too, with what it has started."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
