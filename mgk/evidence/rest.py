"""Runs what the evidence still lacks: trainings, times, analyses, each by a command of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mgk import results
from mgk.evidence import plan


def commands(found: Path, runs: Path) -> Iterator[list[str]]:
    """What is left, as arguments of `mgk`: asked for when all before it have ended, since a model is timed when it has
    been trained, and looked at when it is there. What failed does not come again."""
    tried: list[list[str]] = []
    for experiment in plan.EXPERIMENTS:
        while new := [
            each for each in plan.commands(results.read(sorted(found.glob("*.csv"))), experiment) if each not in tried
        ]:
            tried.append(new[0])
            yield [*new[0], "--out", str(found), "--runs", str(runs)]
    for analysis in plan.ANALYSES:
        if (found / analysis.folder / "ranks.csv").exists():
            continue
        asked = analysis.command(found, runs)
        if asked is not None:
            yield asked
        else:
            models = ", ".join(map(str, analysis.rows))
            print(f"{analysis.folder}: needs trained models of {models} in {runs / analysis.recipe}", file=sys.stderr)


def run(found: Path, runs: Path, data: Path | None, jobs: int | None, minutes: float | None) -> list[str]:
    """Everything that is left, for as many minutes; returns the commands that failed."""
    failed = []
    end = None if minutes is None else time.monotonic() + 60 * minutes
    for asked in commands(found, runs):
        if end is not None and time.monotonic() >= end:
            print(f"{minutes:g} minutes are over; the same command goes on with the rest", file=sys.stderr)
            break
        command = [*asked, *([] if data is None else ["--data-dir", str(data)])]
        if asked[0] == "compare":
            command += [] if jobs is None else ["--jobs", str(jobs)]
            command += [] if end is None else ["--minutes", f"{(end - time.monotonic()) / 60:.2f}"]
        print(f"mgk {' '.join(command)}", file=sys.stderr, flush=True)
        if subprocess.run([sys.executable, "-m", "mgk", *command]).returncode:
            failed.append(f"mgk {' '.join(asked)}")
    return failed
