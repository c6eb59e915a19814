"""Rows × seeds of a recipe, trained side by side; `side_by_side` shows what came out."""

from __future__ import annotations

import math
import re
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from mgk import tasks
from mgk.objectives import OBJECTIVES
from mgk.recipes import Recipe, Row

# What a row costs by itself, which `mgk.cost` measures; of it the table takes step time and memory where they exist.
COSTS = ("step_ms_alone", "inference_ms_alone", "peak_mem_mb_alone")
# Of it, what a training that has the machine to itself measures too.
ALONE = ("step_ms_alone", "peak_mem_mb_alone")
# Off a terminal, seconds between two lines on how the running trainings stand.
TOLD_EVERY = 30
# Seconds that trainings have, after a second interrupt, until they are killed.
ENDING = 5.0
# What PyTorch says where memory does not suffice, of a GPU or of the machine.
NO_MEMORY = re.compile(rb"out of memory|OutOfMemoryError|ALLOC_FAILED|can't allocate memory", re.IGNORECASE)


@dataclass
class Job:
    """One training in a process of its own."""

    row: Row
    seed: int
    directory: Path
    process: subprocess.Popen[bytes] | None = None
    shared: bool = False  # the machine, with another training
    logged: int = 0  # bytes of the log before it was last started

    @property
    def log(self) -> Path:
        return self.directory / "log.txt"

    @property
    def failed(self) -> bool:
        return self.process is not None and self.process.returncode not in (None, 0)

    @property
    def wants_memory(self) -> bool:
        """Failed for want of it, while others had some too. Of the machine's, the system kills without a word."""
        if not self.failed or not self.shared or self.process is None:
            return False
        killed = self.process.returncode == -signal.SIGKILL
        return killed or NO_MEMORY.search(self.log.read_bytes()[self.logged :]) is not None


@dataclass(frozen=True)
class Shown:
    """How the metric of an objective is shown."""

    metric: str
    title: str
    factor: float
    paired: str  # what a difference on the same examples is in
    decimals: int  # of such a difference
    note: str  # on the metric
    flops: str  # what they are counted of


SHOWN = {
    "classification": Shown(
        "accuracy",
        "accuracy, %",
        100.0,
        "points on the same examples",
        2,
        "",
        "GFLOPs are one example's forward",
    ),
    "language-model": Shown(
        "perplexity",
        "perplexity",
        1.0,
        "nats a token on the same text",
        4,
        "Perplexity of the sliding window.",
        "GFLOPs are one segment's forward",
    ),
}


def shown(recipe: Recipe) -> Shown:
    objective, stride = tasks.task(recipe.task).objective, recipe.training.stride
    how = replace(SHOWN[objective], metric=OBJECTIVES[objective].judged_by(recipe.training))
    # How far the window moves belongs to the number.
    return how if how.metric == SHOWN[objective].metric else replace(how, title=f"{how.title} at stride {stride}")


def matching(
    rows: list[dict[str, str]], recipe: Recipe, row: Row, preset: str, seed: int | None, setup: str | None = None
) -> list[dict[str, str]]:
    """The rows of results that belong to this recipe, model and schedule; setup: of `Run`, settings and data too."""
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
    wanted |= {} if seed is None else {"seed": str(seed)}
    wanted |= {} if setup is None else {"setup": setup}
    return [each for each in rows if all(each.get(key) == value for key, value in wanted.items())]


def finished(
    rows: list[dict[str, str]], recipe: Recipe, row: Row, preset: str, seed: int, setup: str | None = None
) -> bool:
    """Whether the results already have this training."""
    own = matching(rows, recipe, row, preset, seed, setup)
    return any(each["metric"] == shown(recipe).metric for each in own)


def timed(
    rows: list[dict[str, str]],
    recipe: Recipe,
    row: Row,
    preset: str,
    setup: str | None = None,
    metrics: Iterable[str] = ALONE,
) -> bool:
    """Whether the results already have what the row costs by itself."""
    return set(metrics) <= {each["metric"] for each in matching(rows, recipe, row, preset, None, setup)}


def known_setups(rows: list[dict[str, str]], recipe: Recipe, models: list[Row], preset: str) -> dict[Row, str]:
    """The setup that each model's results have, where they have one: without the data it cannot be worked out."""
    setups: dict[Row, str] = {}
    for row in models:
        found = {each.get("setup", "") for each in matching(rows, recipe, row, preset, None)}
        if len(found) > 1:
            raise ValueError(f"{row} has results of {len(found)} settings or versions of the data: leave out --redraw")
        if found:
            setups[row] = found.pop()
    return setups


def as_alone(own: list[dict[str, str]]) -> list[dict[str, str]]:
    """What a training that had the machine to itself has measured, under the names that say so; own: its results."""
    known = next((each for each in own if each["step_ms"] not in ("", "nan")), None)
    if known is None:
        return []
    values = zip(ALONE, (known["step_ms"], known["peak_mem_mb"]), strict=True)
    return [{**known, "split": "train", "metric": metric, "value": value} for metric, value in values]


@dataclass
class Queue:
    """Jobs on their way: each waits, runs, and is then done, failed, or left for another time. Where memory did not
    suffice for several at once, the one that failed is tried again by itself when all others have ended."""

    waiting: list[Job]
    command: list[str]
    running: list[Job] = field(default_factory=list)
    failed: list[Job] = field(default_factory=list)
    again: list[Job] = field(default_factory=list)

    @property
    def left(self) -> list[Job]:
        """All that have not ended for good."""
        return [*self.running, *self.waiting, *self.again]

    def fill(self, at_once: int) -> None:
        """Starts what there is room for."""
        while self.waiting and len(self.running) < at_once:
            self.start(self.waiting.pop(0))
        if self.again and not self.running:
            self.start(self.again.pop(0))

    def start(self, job: Job) -> None:
        job.directory.mkdir(parents=True, exist_ok=True)
        arguments = ["--variant", job.row.variant, "--heads", str(job.row.heads), "--seed", str(job.seed)]
        arguments += ["--kv-heads", str(job.row.kv_heads)] if job.row.kv_heads else []
        arguments += ["--out", str(job.directory), "--resume", "auto"]
        with job.log.open("ab") as log:
            job.logged = log.tell()
            # Ctrl-C on a terminal would reach it too, and `stop` would then be a second signal, which ends it unsaved.
            job.process = subprocess.Popen([*self.command, *arguments], stdout=log, stderr=log, start_new_session=True)
        self.running.append(job)
        job.shared = False
        for each in self.running:
            each.shared |= len(self.running) > 1

    def ended(self) -> list[Job]:
        """Those that have ended since the last call."""
        ended = [job for job in self.running if job.process is not None and job.process.poll() is not None]
        self.running = [job for job in self.running if job not in ended]
        self.again += [job for job in ended if job.wants_memory]
        self.failed += [job for job in ended if job.failed and not job.wants_memory]
        return ended

    def stop(self) -> None:
        """What still trains is asked to save and leave, and is not left behind. An interrupt meanwhile ends it at
        once."""
        running = [job.process for job in self.running if job.process is not None]
        for process in running:
            process.terminate()
        try:
            for process in running:
                process.wait()
        except (KeyboardInterrupt, SystemExit):
            for process in running:
                # The second signal that it gets.
                process.terminate()
            _end(running)
            raise


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Those that do not leave by themselves are killed."""
    end = time.monotonic() + ENDING
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit):
            process.kill()
            process.wait()


def run_jobs(jobs: list[Job], command: list[str], at_once: int, minutes: float | None = None) -> Queue:
    """Runs each job as `command` with its row and seed, several at once, for as many minutes; what then still waits
    or runs, and what failed, is in the queue that comes back. On a terminal one sees how each stands."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    queue = Queue(list(jobs), command)
    started = told = time.time()
    end = math.inf if minutes is None else started + 60 * minutes
    with console.status("") if console.is_terminal else nullcontext() as status:
        try:
            while queue.left and time.time() < end:
                queue.fill(at_once)
                time.sleep(0.5)
                if status is not None:
                    said = f"{len(queue.waiting) + len(queue.again)} waiting, {len(queue.running)} training"
                    status.update(Text(f"{said}\n{_stand(queue.running)}"))
                elif time.time() - told > TOLD_EVERY:
                    told = time.time()
                    console.print(_stand(queue.running))
                for job in queue.ended():
                    done, seconds = len(jobs) - len(queue.left), time.time() - started
                    which = f"[{done}/{len(jobs)}] {job.row} seed {job.seed}"
                    console.print(f"{which}: {_outcome(job)} ({seconds:.0f} s in all)")
        finally:
            if queue.running:
                console.print("stopping: each training ends its step and saves; an interrupt now ends them at once")
            queue.stop()
    return queue


def _outcome(job: Job) -> str:
    if job.wants_memory:
        return "out of memory beside the others: it is tried again alone when they have ended (or take fewer --jobs)"
    return f"FAILED: {_last_line(job).removeprefix('mgk: ')} (see {job.log})" if job.failed else "done"


def _stand(jobs: list[Job]) -> str:
    return "\n".join(f"  {job.row} seed {job.seed}: {_last_line(job)}" for job in jobs)


def _last_line(job: Job) -> str:
    text = job.log.read_text(encoding="utf-8", errors="replace").strip()
    return text.rpartition("\n")[2] or "no output yet"
