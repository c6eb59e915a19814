"""Runs what the evidence still lacks: trainings, then times, then analyses."""

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
from mgk.compare import training
from mgk.evidence import plan
from mgk.evidence.runs import PRESET
from mgk.jobs import Job, run_jobs
from mgk.recipes import Row

Progress = Callable[[str, int, int], None]


def known(found: Path) -> list[dict[str, str]]:
    return results.read(sorted(found.glob("*.csv")))


def trainings(found: Path, runs: Path, data: Path, progress: Progress) -> tuple[list[Job], list[str]]:
    """What is still to be trained, and the reasons why some of it cannot be: data that is not there."""
    jobs: list[Job] = []
    reasons = []
    for name, wanted in seeds_to_train(known(found), found, runs).items():
        recipe = recipes.load(name)
        try:
            tasks.task(recipe.task).prepare(data, os.cpu_count() or 1, progress)
        except ValueError as error:
            reasons.append(f"{name}: {error}")
            continue
        jobs += [
            training(recipe, row, seed, preset=PRESET, data_dir=data, out=found, runs=runs) for row, seed in wanted
        ]
    return jobs, reasons


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


def commands(found: Path, runs: Path, new: set[str]) -> Iterator[list[str]]:
    """What follows the trainings, as arguments of `mgk`: times and tables of the recipes that lack times or are `new`,
    and analyses of models that were trained here."""
    for experiment in plan.EXPERIMENTS:
        rows = known(found)
        models = plan.trained(rows, experiment)
        untimed = any(row in models for row in plan.untimed(rows, experiment))
        if models and (untimed or experiment.recipe in new):
            asked = ["compare", experiment.recipe, "--rows", ",".join(map(str, models))]
            yield [*asked, "--alone" if untimed else "--redraw", "--out", str(found), "--runs", str(runs)]
    for analysis in plan.ANALYSES:
        if analysis.done(found):
            continue
        looking = analysis.command(found, runs)
        if looking is not None:
            yield looking
        else:
            names = ", ".join(map(str, analysis.rows))
            print(f"{analysis.folder}: needs trained models of {names} in {runs / analysis.recipe}", file=sys.stderr)


def run(found: Path, runs: Path, data: Path, jobs: int | None, minutes: float | None, progress: Progress) -> list[str]:
    """Everything that is left, for as many minutes; returns what failed. The trainings of all experiments share one
    queue, so that the machine has work for all `jobs` until the last."""
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    at_once = jobs or (4 if torch.cuda.is_available() else 1)
    wanted, failed = trainings(found, runs, data, progress)
    queue = run_jobs(wanted, at_once, minutes)
    failed += [f"{job.name} (see {job.log})" for job in queue.failed]
    if not queue.left:
        for asked in commands(found, runs, {job.recipe for job in wanted}):
            if time.monotonic() >= end:
                break
            command = [*asked, "--data-dir", str(data)]
            if asked[0] == "compare":
                command += ["--jobs", str(at_once)]
                command += [] if minutes is None else ["--minutes", f"{(end - time.monotonic()) / 60:.2f}"]
            print(f"mgk {' '.join(command)}", file=sys.stderr, flush=True)
            if subprocess.run([sys.executable, "-m", "mgk", *command]).returncode:
                failed.append(f"mgk {' '.join(asked)}")
    if time.monotonic() >= end:
        print(f"{minutes:g} minutes are over; the same command goes on with the rest", file=sys.stderr)
    return failed
