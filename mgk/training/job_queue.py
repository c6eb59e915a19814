"""Trainings in processes of their own, several at once."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from mgk.models.run_directory import RunDirectory
from mgk.training.config import ModelSpec

# Off a terminal, seconds between two lines on how the running trainings stand.
TOLD_EVERY = 30
# Seconds that trainings have, after a second interrupt, until they are killed.
ENDING = 5.0
# What PyTorch says where memory does not suffice, of a GPU or of the machine.
NO_MEMORY = re.compile(rb"out of memory|OutOfMemoryError|ALLOC_FAILED|can't allocate memory", re.IGNORECASE)


@dataclass
class Job:
    """One training in a process of its own."""

    recipe: str
    row: ModelSpec
    seed: int
    directory: Path
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    shared: bool = False  # the machine, with another training
    logged: int = 0  # bytes of the log before it was last started

    @property
    def name(self) -> str:
        return f"{self.recipe} {self.row} seed {self.seed}"

    @property
    def log(self) -> Path:
        return RunDirectory(self.directory).log

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


@dataclass
class Queue:
    """Jobs on their way: each waits, runs, and is then done, failed, or left for another time. Where memory did not
    suffice for several at once, the one that failed is tried again by itself when all others have ended."""

    waiting: list[Job]
    environment: dict[str, str] | None = None  # of their processes
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
        with job.log.open("ab") as log:
            job.logged = log.tell()
            # Ctrl-C on a terminal would reach it too, and `stop` would then be a second signal, which ends it unsaved.
            job.process = subprocess.Popen(
                job.command, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )
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
        try:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()
        except (KeyboardInterrupt, SystemExit):
            for process in running:
                # The second signal that it gets.
                process.terminate()
            _end(running)
            raise


def _environment(at_once: int) -> dict[str, str]:
    """Trainings on a CPU that share it: each has its part of the threads. A thread that waits for the others of its
    training soon sleeps: as it is set by default it takes the core from whoever it waits for, and a small model trains
    ten times slower beside any other process. Who has set one of these knows better."""
    given = dict(os.environ)
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & given.keys():
        given["GOMP_SPINCOUNT"] = "1000"
    if at_once > 1:
        given.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // at_once)))
    return given


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Those that do not leave by themselves are killed."""
    end = time.monotonic() + ENDING
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit):
            process.kill()
            process.wait()


def chosen_at_once(given: int | None) -> int:
    """--jobs, or its default."""
    return given or (4 if torch.cuda.is_available() else 1)


def run_jobs(jobs: list[Job], at_once: int, minutes: float | None = None) -> Queue:
    """Runs them, several at once, for as many minutes; what then still waits or runs, and what failed, is in the queue
    that comes back. On a terminal one sees how each stands."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    queue = Queue(list(jobs), _environment(at_once))
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
                    console.print(f"[{done}/{len(jobs)}] {job.name}: {_outcome(job)} ({seconds:.0f} s in all)")
        except BaseException:
            try:
                _stop(queue, console)
            finally:
                console.print("stopped; the same command goes on from what was saved")
            raise
        _stop(queue, console)
    return queue


def _stop(queue: Queue, console: Console) -> None:
    try:
        if queue.running:
            console.print("stopping: each training ends its step and saves; an interrupt now ends them at once")
    finally:
        queue.stop()


def _outcome(job: Job) -> str:
    if job.wants_memory:
        return "out of memory beside the others: it is tried again alone when they have ended (or take fewer --jobs)"
    return f"FAILED: {_last_line(job).removeprefix('mgk: ')} (see {job.log})" if job.failed else "done"


def _stand(jobs: list[Job]) -> str:
    return "\n".join(f"  {job.name}: {_last_line(job)}" for job in jobs)


def _last_line(job: Job) -> str:
    text = job.log.read_text(encoding="utf-8", errors="replace").strip()
    return text.rpartition("\n")[2] or "no output yet"
