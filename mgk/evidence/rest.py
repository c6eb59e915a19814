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

Progress = Callable[[str, int, int], None]


def known(found: Path) -> list[dict[str, str]]:
    return results.read(sorted(found.glob("*.csv")))


def trainings(found: Path, runs: Path, data: Path, progress: Progress) -> tuple[list[Job], list[str]]:
    """What is still to be trained, and the reasons why some of it cannot be: data that is not there."""
    rows = known(found)
    jobs: list[Job] = []
    reasons = []
    for experiment in plan.EXPERIMENTS:
        missing = plan.left(rows, experiment)
        recipe = recipes.load(experiment.recipe)
        try:
            if missing:
                tasks.task(recipe.task).prepare(data, os.cpu_count() or 1, progress)
        except ValueError as error:
            reasons.append(f"{recipe.name}: {error}")
            continue
        jobs += [
            training(recipe, row, seed, preset=PRESET, data_dir=data, out=found, runs=runs)
            for row, seeds in missing.items()
            for seed in seeds
        ]
    return jobs, reasons


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
        if (found / analysis.folder / "ranks.csv").exists():
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
