"""Queue of training jobs that run in parallel, each in its own process."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from mgk.models.run_directory import RunDirectory
from mgk.training.config import ModelSpec
from mgk.training.signals import STOP_AT_END_OF_INPUT, TERMINATED

# Seconds between two status messages if stderr is not a terminal.
STATUS_INTERVAL = 30
# Exit statuses of a job that was stopped: it has saved a checkpoint, or SIGTERM ended it before.
STOPPED = (TERMINATED, -signal.SIGTERM)
# Seconds between a second interrupt and SIGKILL.
KILL_TIMEOUT = 5.0
# Options of Popen that keep a Ctrl-C in the terminal from a process.
NEW_SESSION: dict[str, Any] = (
    {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
    if os.name == "nt"
    else {"start_new_session": True}
)
# PyTorch's error messages for a failed allocation, on the GPU or the host.
OUT_OF_MEMORY = re.compile(rb"out of memory|OutOfMemoryError|ALLOC_FAILED|can't allocate memory", re.IGNORECASE)


@dataclass
class Job:
    """A training run and the process that executes it."""

    recipe: str
    row: ModelSpec
    seed: int
    directory: Path
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    shared: bool = False  # whether another job ran at the same time
    log_start: int = 0  # size of the log in bytes when the job was last started

    @property
    def name(self) -> str:
        return f"{self.recipe} {self.row} seed {self.seed}"

    @property
    def log(self) -> Path:
        return RunDirectory(self.directory).log

    @property
    def last_line(self) -> str:
        """Last line of the log."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            text = ""
        return text.rpartition("\n")[2] or "no output yet"

    @property
    def has_failed(self) -> bool:
        return self.process is not None and self.process.returncode not in (None, 0)

    @property
    def ran_out_of_memory(self) -> bool:
        """True if the job ran out of memory while sharing the machine (OOM in the log, or SIGKILL)."""
        if not self.has_failed or not self.shared or self.process is None:
            return False
        # Windows has no SIGKILL, and no system that sends it to a process for lack of memory.
        is_killed = self.process.returncode == -getattr(signal, "SIGKILL", 9)
        return is_killed or OUT_OF_MEMORY.search(self.log.read_bytes()[self.log_start :]) is not None


@dataclass
class JobQueue:
    """Waiting, running and failed jobs.

    A job that ran out of memory while sharing the machine is retried alone after all others have ended.
    """

    waiting: list[Job]
    environment: dict[str, str] | None = None  # environment variables of the processes
    running: list[Job] = field(default_factory=list)
    failed: list[Job] = field(default_factory=list)
    retries: list[Job] = field(default_factory=list)

    @property
    def unfinished(self) -> list[Job]:
        """Jobs that have neither succeeded nor failed."""
        return [*self.running, *self.waiting, *self.retries]

    def start_jobs(self, max_running: int) -> None:
        """Start waiting jobs until `max_running` are running."""
        while self.waiting and len(self.running) < max_running:
            self.start(self.waiting.pop(0))
        if self.retries and not self.running:
            self.start(self.retries.pop(0))

    def start(self, job: Job) -> None:
        """Start the process of a job; its output is appended to the job's log."""
        job.directory.mkdir(parents=True, exist_ok=True)
        with job.log.open("ab") as log:
            job.log_start = log.tell()
            # New session: Ctrl-C in the terminal must not reach the process. Otherwise the signal sent by `stop`
            # would be the second one, which ends a run without saving.
            # The pipe to the process closes when this process ends in any way; the training then saves and stops.
            environment = {**(self.environment or os.environ), STOP_AT_END_OF_INPUT: "1"}
            job.process = subprocess.Popen(
                job.command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, **NEW_SESSION
            )
        self.running.append(job)
        job.shared = False
        for running_job in self.running:
            running_job.shared |= len(self.running) > 1

    def collect_ended(self) -> list[Job]:
        """Return the jobs that have ended since the last call and move the failed ones to `failed` or `retries`."""
        ended = [job for job in self.running if job.process is not None and job.process.poll() is not None]
        self.running = [job for job in self.running if job not in ended]
        for job in ended:
            _end_watch(job.process)
        self.retries += [job for job in ended if job.ran_out_of_memory]
        self.failed += [job for job in ended if job.has_failed and not job.ran_out_of_memory]
        return ended

    def sort_stopped(self) -> None:
        """After `stop`, keep the stopped jobs in `running`; others have ended by themselves meanwhile."""
        stopped = [job for job in self.running if job.process is not None and job.process.returncode in STOPPED]
        self.running = [job for job in self.running if job not in stopped]
        self.collect_ended()
        self.running += stopped

    def stop(self) -> None:
        """Terminate the running jobs, which save a checkpoint first, and wait for them.

        An interrupt while waiting ends them without saving.
        """
        processes = [job.process for job in self.running if job.process is not None]
        try:
            for process in processes:
                _request_stop(process)
            for process in processes:
                process.wait()
        except (KeyboardInterrupt, SystemExit):
            for process in processes:
                # A second signal ends a run without saving.
                process.terminate()
            _wait_or_kill(processes)
            raise


def _request_stop(process: subprocess.Popen[bytes]) -> None:
    """Let a job save a checkpoint and end."""
    if os.name == "nt":
        # On Windows, `terminate` ends a process at once. The end of its input is the stop signal.
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
    else:
        process.terminate()
        # The end of this process must not send a second signal, which ends a run without saving.
        _end_watch(process)


def _end_watch(process: subprocess.Popen[bytes] | None) -> None:
    """End the watch of `stop_with_parent` in a process."""
    if process is not None and process.stdin is not None and not process.stdin.closed:
        with suppress(OSError):
            process.stdin.write(b".")
            process.stdin.close()


def _wait_or_kill(processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + KILL_TIMEOUT
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit):
            process.kill()
            process.wait()


def _job_environment(max_running: int) -> dict[str, str]:
    """Limit the OpenMP spinning and the threads of each job; existing settings take precedence.

    With the default spin count, a thread at a barrier occupies the core of the thread that it waits for: a small
    model trains ten times slower beside any other process.
    """
    environment = dict(os.environ)
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environment.keys():
        environment["GOMP_SPINCOUNT"] = "1000"
    if max_running > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // max_running)))
    return environment


def resolve_max_running(option: int | None) -> int:
    """Return --jobs, or its default: 4 with a GPU, otherwise 1."""
    return option or (4 if torch.cuda.is_available() else 1)


def run_jobs(jobs: list[Job], max_running: int, minutes: float | None = None) -> JobQueue:
    """Run jobs in parallel and print their status on stderr.

    Args:
        jobs: Jobs in the order in which to start them.
        max_running: Maximum number of jobs that run at the same time.
        minutes: Time after which the running jobs are stopped; None means no limit.

    Returns:
        The queue with the failed and the unfinished jobs.
    """
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    queue = JobQueue(list(jobs), _job_environment(max_running))
    started = last_status = time.monotonic()
    deadline = math.inf if minutes is None else started + 60 * minutes
    with console.status("") if console.is_terminal else nullcontext() as status:
        try:
            while queue.unfinished and time.monotonic() < deadline:
                queue.start_jobs(max_running)
                time.sleep(0.5)
                if status is not None:
                    counts = f"{len(queue.waiting) + len(queue.retries)} waiting, {len(queue.running)} training"
                    status.update(Text(f"{counts}\n{_format_status(queue.running)}"))
                elif time.monotonic() - last_status > STATUS_INTERVAL:
                    last_status = time.monotonic()
                    console.print(_format_status(queue.running))
                for job in queue.collect_ended():
                    done, seconds = len(jobs) - len(queue.unfinished), time.monotonic() - started
                    console.print(f"[{done}/{len(jobs)}] {job.name}: {_format_outcome(job)} ({seconds:.0f} s in total)")
        except BaseException:
            try:
                _stop(queue, console)
            finally:
                console.print("Stopped. Run the same command again to continue from the saved checkpoints.")
            raise
        _stop(queue, console)
        queue.sort_stopped()
    return queue


def _stop(queue: JobQueue, console: Console) -> None:
    try:
        if queue.running:
            console.print("Stopping after the current step and saving. Press Ctrl-C again to quit now.")
    finally:
        queue.stop()


def _format_outcome(job: Job) -> str:
    if job.ran_out_of_memory:
        return "out of memory while sharing the machine; will be retried alone at the end (or use fewer --jobs)"
    return f"FAILED: {job.last_line.removeprefix('mgk: ')} (see {job.log})" if job.has_failed else "done"


def _format_status(jobs: list[Job]) -> str:
    return "\n".join(f"  {job.name}: {job.last_line}" for job in jobs)
