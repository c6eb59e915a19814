"""Training jobs on a SLURM cluster.

submitit writes and submits the batch scripts. The jobs are the commands of the local queue, which continue from their
checkpoints, so that a job can be preempted, requeued or submitted again at any time.
"""

from __future__ import annotations

import getpass
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mgk._core.io import write_atomically
from mgk._core.validation import fail, positive_integer
from mgk.training.job_queue import STATUS_INTERVAL, Job, JobQueue, run_jobs
from mgk.training.signals import TERMINATED

CLUSTER = "slurm"
COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol")
# Time limit of a job. A job that reaches it saves a checkpoint and requeues itself.
DEFAULT_TIME = "04:00:00"
# Seconds between the signal that stops a run and the time limit.
SIGNAL_SECONDS = 120
# Requeues of one job after its time limit.
MAX_REQUEUES = 1000
# Submissions of a job that ends without an exit status, because it was killed or its node failed.
MAX_SUBMISSIONS = 4
# Seconds between calls of squeue.
POLL_SECONDS = 5.0
# Seconds that a job must be absent from the queue; the shared disk may show its exit status late.
ABSENT_SECONDS = 10.0
# Formats of sbatch --time.
TIME_FORMAT = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d\d(:\d\d){0,2}")


@dataclass(frozen=True)
class ClusterOptions:
    """Resources of each job.

    Attributes:
        partition: Partition; None means the cluster's default.
        gpus_per_node: GPUs of a job; with more than one, torchrun starts a process for each. None means none.
        time: Time limit, in a format of sbatch --time.
        max_parallel: Maximum number of jobs that run at the same time; None means no limit.
    """

    partition: str | None = None
    gpus_per_node: int | None = None
    time: str = DEFAULT_TIME
    max_parallel: int | None = None


def check_cluster(name: str, options: ClusterOptions) -> None:
    """Raise a ValueError unless jobs can be submitted."""
    if name != CLUSTER:
        fail("--cluster", f"must be {CLUSTER}, got {name!r}")
    for option, value in (("--gpus-per-node", options.gpus_per_node), ("--max-parallel", options.max_parallel)):
        if value is not None:
            positive_integer(option, value)
    if not TIME_FORMAT.fullmatch(options.time):
        fail("--time", f"must be minutes, HH:MM:SS or D-HH:MM:SS, got {options.time!r}")
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if missing:
        fail("--cluster", f"slurm needs {', '.join(missing)} on PATH: run this command on a login node of the cluster")
    try:
        import submitit  # noqa: F401
    except ModuleNotFoundError:
        fail("--cluster", "slurm needs the package submitit: pip install 'mgk[cluster]', or '.[cluster]' in a clone")


@dataclass
class Submission:
    """A job of the queue on the cluster.

    Attributes:
        job: The job.
        job_name: Name on the cluster; jobs of one name run one after another.
        job_id: Id on the cluster; None before the submission.
        state: State in squeue's words.
        count: Number of submissions.
        absent_since: Time of the first poll in which the job was not in the queue.
    """

    job: Job
    job_name: str
    job_id: str | None = None
    state: str = "PENDING"
    count: int = 0
    absent_since: float | None = None

    @property
    def folder(self) -> Path:
        """Directory of the batch script and the exit status, in the run directory."""
        return self.job.directory / "slurm"

    @property
    def status_file(self) -> Path:
        return self.folder / "status"

    @property
    def record(self) -> Path:
        return self.folder / "job.json"

    def read_status(self) -> int | None:
        """Return the exit status of the ended job, or None if it was killed."""
        try:
            return int(self.status_file.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None


def job_script(submission: Submission, options: ClusterOptions) -> tuple[str, list[str]]:
    """Return the command of a batch script and the lines after it, which requeue the job or store its exit status."""
    command = list(submission.job.command)
    if (options.gpus_per_node or 1) > 1:
        python, *arguments = command
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.gpus_per_node)]
        command = [python, *launcher, *arguments]
    status = shlex.quote(str(submission.status_file.absolute()))
    lines = [
        "status=$?",
        # At the time limit, SIGTERM reaches the training, which saves. scancel also ends this script: no requeue.
        f'if [ "$status" = {TERMINATED} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {MAX_REQUEUES} ]; then',
        '  scontrol requeue "$SLURM_JOB_ID" && exit',
        "fi",
        f'echo "$status" > {status}.tmp && mv {status}.tmp {status}',
        'exit "$status"',
    ]
    return f"srun --unbuffered --ntasks=1 {shlex.join(command)}", lines


def srun_command(command: list[str], options: ClusterOptions) -> list[str]:
    """Return the command that runs another one on a node, with at most one GPU, and waits for it.

    For commands that train nothing: a job of SLURM ends with this process, and is not started again.
    """
    resources = {
        "partition": options.partition,
        "gpus-per-node": None if options.gpus_per_node is None else 1,
        "time": options.time,
    }
    flags = [f"--{name}={value}" for name, value in resources.items() if value is not None]
    return ["srun", "--ntasks=1", *flags, *command]


def submit(submission: Submission, options: ClusterOptions) -> None:
    """Submit a job with sbatch; its output is appended to the log of the run directory."""
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError

    submission.folder.mkdir(parents=True, exist_ok=True)
    submission.status_file.unlink(missing_ok=True)
    command, lines = job_script(submission, options)
    executor = SlurmExecutor(submission.folder.absolute())
    extra: dict[str, object] = {
        "time": options.time,
        "signal": f"TERM@{SIGNAL_SECONDS}",
        "output": str(submission.job.log.absolute()).replace("%", "%%"),
        "requeue": True,
        "dependency": "singleton",
    }
    resources = {"partition": options.partition, "gpus_per_node": options.gpus_per_node}
    executor.update_parameters(
        job_name=submission.job_name,
        nodes=1,
        ntasks_per_node=1,
        use_srun=False,
        stderr_to_stdout=True,
        teardown=lines,
        wckey=None,
        additional_parameters=extra,
        **{name: value for name, value in resources.items() if value is not None},
    )
    try:
        # Unlike `submit`, which pickles a function, this submits a plain command; no pickle is written or read.
        submission.job_id = executor._submit_command(command).job_id
    except FailedJobError as error:
        detail = " ".join(str(error).split())
        raise ValueError(f"--cluster slurm: sbatch failed for {submission.job.name}: {detail[-300:]}") from None
    submission.count += 1
    submission.state, submission.absent_since = "PENDING", None
    write_atomically(submission.record, json.dumps({"id": submission.job_id, "name": submission.job_name}))


def read_queue() -> dict[str, tuple[str, str]] | None:
    """Return state and name of the user's jobs by id, or None if the controller does not reply."""
    command = ["squeue", "--noheader", "--user", getpass.getuser(), "--format", "%i|%T|%j"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    entries = (line.strip().split("|", 2) for line in output.splitlines() if line.count("|") >= 2)
    return {job_id: (state, name) for job_id, state, name in entries}


def cancel(job_ids: list[str]) -> None:
    """Cancel jobs; their runs save a checkpoint."""
    if job_ids:
        subprocess.run(["scancel", *job_ids], check=False)


@dataclass
class ClusterQueue:
    """Jobs on the cluster.

    Attributes:
        options: Resources of the jobs.
        active: Jobs that have neither succeeded nor failed.
        failed: Jobs that failed.
    """

    options: ClusterOptions
    active: list[Submission]
    failed: list[Submission] = field(default_factory=list)

    def start(self, report: Callable[[str], None]) -> None:
        """Submit all jobs, except those that an earlier command has submitted and that are still in the queue."""
        queue = read_queue()
        if queue is None:
            raise ValueError("--cluster slurm: squeue does not reply; is the controller running?")
        for submission in self.active:
            known = _read_record(submission.record)
            if known is not None and queue.get(known[0], ("", ""))[1] == known[1]:
                (submission.job_id, submission.job_name), submission.count = known, 1
                verb = "is already in the queue as"
            else:
                submit(submission, self.options)
                verb = "submitted as"
            report(f"{submission.job.name}: {verb} job {submission.job_id}, log {submission.job.log}")

    def poll(self) -> list[tuple[Submission, str]]:
        """Update the states, submit killed jobs again, and return the jobs with news."""
        queue = read_queue()
        news: list[tuple[Submission, str]] = []
        if queue is None:
            return news
        for submission in list(self.active):
            entry = queue.get(submission.job_id or "")
            if entry is not None:
                submission.state, submission.absent_since = entry[0], None
                continue
            status = submission.read_status()
            submission.absent_since = submission.absent_since or time.monotonic()
            if status is None and time.monotonic() < submission.absent_since + ABSENT_SECONDS:
                continue
            if status == 0:
                self.active.remove(submission)
                news.append((submission, "done"))
            elif status in (None, 128 + 9, TERMINATED) and submission.count < MAX_SUBMISSIONS:
                last_id = submission.job_id
                submit(submission, self.options)
                news.append((submission, f"job {last_id} was killed; submitted again as job {submission.job_id}"))
            else:
                self.active.remove(submission)
                self.failed.append(submission)
                reason = "killed" if status is None else f"exit status {status}"
                news.append((submission, f"FAILED ({reason}): {submission.job.last_line} (see {submission.job.log})"))
        return news


def run_on_slurm(jobs: list[Job], options: ClusterOptions, minutes: float | None = None) -> JobQueue:
    """Run jobs on a SLURM cluster and print their status on stderr until all have ended.

    An interrupt asks whether to leave the jobs in the queue; without a terminal they are left.

    Args:
        jobs: Jobs in the order in which to submit them.
        options: Resources of each job.
        minutes: Time after which the jobs are cancelled; None means no limit.

    Returns:
        The queue with the failed and the unfinished jobs.
    """
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    # Jobs of one name run one after another (--dependency=singleton), which limits their number also after this
    # command has ended. The time distinguishes the names of sweeps.
    sweep = f"{time.time_ns():x}"
    slots = options.max_parallel or len(jobs)
    recipes = {job.recipe for job in jobs}
    prefix = f"mgk-{recipes.pop()}" if len(recipes) == 1 else "mgk"
    names = [f"{prefix}-{sweep}-{index % slots}" for index in range(len(jobs))]
    queue = ClusterQueue(options, [Submission(job, name) for job, name in zip(jobs, names, strict=True)])
    started = last_status = time.time()
    deadline = math.inf if minutes is None else started + 60 * minutes
    try:
        queue.start(console.print)
        with console.status("") if console.is_terminal else nullcontext() as status:
            while queue.active and time.time() < deadline:
                time.sleep(POLL_SECONDS)
                for submission, news in queue.poll():
                    done, seconds = len(jobs) - len(queue.active), time.time() - started
                    console.print(f"[{done}/{len(jobs)}] {submission.job.name}: {news} ({seconds:.0f} s in total)")
                if status is not None:
                    status.update(Text(_format_states(queue.active)))
                elif time.time() - last_status > STATUS_INTERVAL:
                    last_status = time.time()
                    console.print(_format_states(queue.active))
    except (KeyboardInterrupt, SystemExit):
        _leave_or_cancel([entry.job_id for entry in queue.active if entry.job_id], console)
        raise
    if queue.active:
        cancel([entry.job_id for entry in queue.active if entry.job_id])
    return JobQueue([entry.job for entry in queue.active], failed=[entry.job for entry in queue.failed])


def execute_jobs(
    jobs: list[Job], max_running: int, minutes: float | None = None, cluster: ClusterOptions | None = None
) -> JobQueue:
    """Run jobs on this machine, or on a SLURM cluster.

    Args:
        jobs: Jobs in the order in which to start them.
        max_running: Number of concurrent jobs on this machine; on a cluster `cluster.max_parallel` limits them.
        minutes: Time limit; None means no limit.
        cluster: Resources of each job on the cluster; None for this machine.

    Returns:
        The queue with the failed and the unfinished jobs.
    """
    return run_jobs(jobs, max_running, minutes) if cluster is None else run_on_slurm(jobs, cluster, minutes)


def _leave_or_cancel(job_ids: list[str], console: Console) -> None:
    """Ask whether to leave jobs in the queue; leave them if there is no terminal or no answer."""
    if not job_ids:
        return
    answer = ""
    if sys.stdin.isatty() and console.is_terminal:
        with suppress(EOFError, KeyboardInterrupt):
            answer = console.input(f"Leave {len(job_ids)} jobs in the queue? [Y/n] ")
    if answer.strip().lower() in ("n", "no"):
        cancel(job_ids)
        console.print("Cancelled. Run the same command again to continue from the saved checkpoints.")
    else:
        ids = " ".join(job_ids)
        console.print(f"{len(job_ids)} jobs stay in the queue; the same command follows them. To cancel: scancel {ids}")


def _read_record(path: Path) -> tuple[str, str] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return str(record["id"]), str(record["name"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def _format_states(submissions: list[Submission]) -> str:
    return "\n".join(f"  {entry.job.name}: {entry.state.lower()}, {entry.job.last_line}" for entry in submissions)
