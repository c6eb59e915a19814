"""Rows × seeds of a recipe, trained side by side; `side_by_side` shows what came out."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mgk import tasks
from mgk.recipes import Recipe, Row

# Of these results the table takes step time and memory where they exist; `mgk.cost` measures them.
ALONE = ("step_ms_alone", "peak_mem_mb_alone")
# Seconds between two lines on how the running trainings stand.
TOLD_EVERY = 60


@dataclass
class Job:
    """One training in a process of its own."""

    row: Row
    seed: int
    directory: Path
    process: subprocess.Popen[bytes] | None = None


@dataclass(frozen=True)
class Shown:
    """How the metric of an objective is shown."""

    metric: str
    title: str
    factor: float
    note: str


SHOWN = {
    "classification": Shown(
        "accuracy",
        "accuracy, %",
        100.0,
        "± is the standard deviation over seeds, or with one seed half the 95 % interval of the test set. "
        "GFLOPs are one example's forward.",
    ),
    "language-model": Shown(
        "perplexity",
        "perplexity",
        1.0,
        "Perplexity of the sliding window, every prediction with a full window before it. "
        "± is the standard deviation over seeds. GFLOPs are one segment's forward, all its targets frequent words.",
    ),
}


def shown(recipe: Recipe) -> Shown:
    return SHOWN[tasks.task(recipe.task).objective]


def matching(
    rows: list[dict[str, str]], recipe: Recipe, row: Row, preset: str, seed: int | None
) -> list[dict[str, str]]:
    """The rows of results that belong to this recipe, model and schedule."""
    settings = recipe.training
    wanted = {
        "recipe": recipe.name,
        "variant": row.variant,
        "preset": preset,
        "heads": str(row.heads),
        "kv_heads": str(row.kv_heads or row.heads),
        "steps": str(settings.steps),
        "lr": str(settings.lr),
        "batch": str(settings.batch_size),
    }
    if seed is not None:
        wanted["seed"] = str(seed)
    return [each for each in rows if all(each.get(key) == value for key, value in wanted.items())]


def finished(rows: list[dict[str, str]], recipe: Recipe, row: Row, preset: str, seed: int) -> bool:
    """Whether the results already have this training."""
    return any(each["metric"] == shown(recipe).metric for each in matching(rows, recipe, row, preset, seed))


def timed(rows: list[dict[str, str]], recipe: Recipe, row: Row, preset: str) -> bool:
    """Whether the results already have what the row costs by itself."""
    return any(each["metric"] in ALONE for each in matching(rows, recipe, row, preset, None))


def run_jobs(jobs: list[Job], command: list[str], at_once: int) -> list[Job]:
    """Runs each job as `command` with its row and seed, several at once; returns those that failed."""
    waiting, running, failed = list(jobs), [], []  # type: ignore[var-annotated]
    try:
        _run_all(waiting, running, failed, command, at_once)
    finally:
        # Interrupted: what still trains is asked to save and leave, and is not left behind.
        for job in running:
            assert job.process is not None
            job.process.terminate()
        for job in running:
            assert job.process is not None
            job.process.wait()
    return failed


def _run_all(waiting: list[Job], running: list[Job], failed: list[Job], command: list[str], at_once: int) -> None:
    total, started = len(waiting), time.time()
    told = started
    while waiting or running:
        while waiting and len(running) < at_once:
            job = waiting.pop(0)
            job.directory.mkdir(parents=True, exist_ok=True)
            arguments = ["--variant", job.row.variant, "--heads", str(job.row.heads), "--seed", str(job.seed)]
            arguments += ["--kv-heads", str(job.row.kv_heads)] if job.row.kv_heads else []
            arguments += ["--out", str(job.directory), "--resume", "auto"]
            with (job.directory / "log.txt").open("ab") as log:
                job.process = subprocess.Popen([*command, *arguments], stdout=log, stderr=log)
            running.append(job)
        time.sleep(0.5)
        if time.time() - told > TOLD_EVERY:
            told = time.time()
            for job in running:
                print(f"  {job.row} seed {job.seed}: {_last_line(job)}", file=sys.stderr)
        for job in list(running):
            assert job.process is not None
            if job.process.poll() is None:
                continue
            running.remove(job)
            outcome = "done"
            if job.process.returncode != 0:
                failed.append(job)
                outcome = f"FAILED: {_last_line(job)} (see {job.directory / 'log.txt'})"
            done = total - len(waiting) - len(running)
            print(
                f"[{done}/{total}] {job.row} seed {job.seed}: {outcome} ({time.time() - started:.0f} s)",
                file=sys.stderr,
            )


def _last_line(job: Job) -> str:
    text = (job.directory / "log.txt").read_text(encoding="utf-8", errors="replace").strip()
    return text.rpartition("\n")[2] or "no output yet"
