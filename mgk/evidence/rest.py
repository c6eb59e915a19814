"""Runs what the evidence still lacks: trainings, then analyses, then times."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from mgk import recipes, results, tasks
from mgk.compare import matching, training
from mgk.evaluation import parameters
from mgk.evidence import plan
from mgk.evidence.runs import PRESET
from mgk.jobs import Job, run_jobs
from mgk.recipes import Row
from mgk.training import Run

Progress = Callable[[str, int, int], None]
# Seconds under which nothing is begun.
LEAST = 1.0


def known(found: Path) -> list[dict[str, str]]:
    return results.read(sorted(found.glob("*.csv")))


def trainings(found: Path, runs: Path, data: Path, progress: Progress) -> tuple[list[Job], list[str]]:
    """What is still to be trained, large models first, so that what begins last is soon done; and the reasons why some
    of it cannot be."""
    rows = known(found)
    jobs: list[Job] = []
    sizes: dict[str, int] = {}
    reasons = []
    for name, wanted in seeds_to_train(rows, found, runs).items():
        reason = trouble(name, rows, data, progress)
        if reason is None:
            recipe = recipes.load(name)
            first = Run(recipe, wanted[0][0], PRESET, 0, data, Path())
            sizes[name] = parameters(first.model_config(tasks.task(recipe.task)))
            jobs += [
                training(recipe, row, seed, preset=PRESET, data_dir=data, out=found, runs=runs) for row, seed in wanted
            ]
        else:
            reasons.append(reason)
    return sorted(jobs, key=lambda job: -sizes[job.recipe]), reasons


def trouble(name: str, rows: list[dict[str, str]], data: Path, progress: Progress) -> str | None:
    """Why nothing can be added to the results of a recipe: there is no data, or other data than theirs."""
    recipe = recipes.load(name)
    task = tasks.task(recipe.task)
    try:
        task.prepare(data, os.cpu_count() or 1, progress)
    except ValueError as error:
        return f"{name}: {error}"
    for row in dict.fromkeys(row for each in plan.EXPERIMENTS if each.recipe == name for row in each.seeds):
        setups = {each["setup"] for each in matching(rows, recipe, row, PRESET, None) if each.get("setup")}
        if setups - {Run(recipe, row, PRESET, 0, data, Path()).setup(task)}:
            return f"{name}: results have {row} of other data or settings than {data} and the recipe"
    return None


def seeds_to_train(rows: list[dict[str, str]], found: Path, runs: Path) -> dict[str, list[tuple[Row, int]]]:
    """Rows and seeds by recipe: what the experiments lack, and a further seed of each row that is to be analysed and
    whose trained models are not here: results are kept, weights are not."""
    wanted: dict[str, list[tuple[Row, int]]] = {}
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


def commands(found: Path, runs: Path, data: Path, new: set[str], failed: list[str]) -> Iterator[list[str]]:
    """What follows the trainings, as arguments of `mgk`: analyses first, which need the weights of what was trained
    here, then times and tables of the recipes that lack times or are `new`. What cannot be timed, and why, is added to
    `failed`."""
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
        reason = trouble(experiment.recipe, rows, data, lambda *_: None) if models and untimed else None
        if reason is not None:
            failed += [] if reason in failed else [reason]
        elif models and (untimed or experiment.recipe in new):
            asked = ["compare", experiment.recipe, "--rows", ",".join(map(str, models))]
            yield [*asked, "--alone" if untimed else "--redraw", "--out", str(found), "--runs", str(runs)]


def run(found: Path, runs: Path, data: Path, jobs: int | None, minutes: float | None, progress: Progress) -> list[str]:
    """Everything that is left, for as many minutes; returns what failed. The trainings of all experiments share one
    queue, so that the machine has work for all `jobs` until the last."""
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    at_once = jobs or (4 if torch.cuda.is_available() else 1)
    wanted, failed = trainings(found, runs, data, progress)
    queue = run_jobs(wanted, at_once, minutes)
    failed += [f"{job.name} (see {job.log})" for job in queue.failed]
    if not queue.left:
        for asked in commands(found, runs, data, {job.recipe for job in wanted}, failed):
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
