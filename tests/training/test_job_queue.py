"""The job queue: failures, lack of memory, interrupts and the time limit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mgk.training.config import ModelSpec
from mgk.training.job_queue import Job, JobQueue, run_jobs


def make_job(directory, seed, script="", process=None):
    arguments = ["--seed", str(seed), "--out", str(directory)]
    return Job("listops", ModelSpec("smgk", 4), seed, directory, [sys.executable, "-c", script, *arguments], process)


def test_failed_job_is_reported_and_others_finish(tmp_path, capsys):
    script = "import sys; sys.exit('--seed' in sys.argv and sys.argv[sys.argv.index('--seed') + 1] == '1')"
    jobs = [make_job(tmp_path / str(seed), seed, script) for seed in range(3)]
    queue = run_jobs(jobs, max_running=2)
    assert [job.seed for job in queue.failed] == [1]
    assert not queue.waiting
    assert not queue.running
    assert all(job.process.returncode is not None for job in jobs)
    output = capsys.readouterr().err
    assert (output.count("done"), output.count("FAILED")) == (2, 1)


# Seed 1 runs out of memory once, seed 3 always. The second attempt of seed 1 fails unless seeds 0 and 2 have ended.
OUT_OF_MEMORY = """
import pathlib, sys, time
out, seed = pathlib.Path(sys.argv[sys.argv.index("--out") + 1]), sys.argv[sys.argv.index("--seed") + 1]
if seed in "13":
    if (out / "tried").exists() and seed == "1":
        sys.exit(0 if all((out.parent / other / "ended").exists() for other in "02") else "not alone")
    (out / "tried").touch()
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 MiB")
    sys.exit("Exception raised")
time.sleep(1)
(out / "ended").touch()
"""


def test_job_out_of_memory_beside_others_is_run_again_alone(tmp_path, capsys):
    jobs = [make_job(tmp_path / str(seed), seed, OUT_OF_MEMORY) for seed in range(4)]
    queue = run_jobs(jobs, max_running=4)
    assert [job.seed for job in queue.failed] == [3]
    assert not queue.unfinished
    output = capsys.readouterr().err
    assert output.count("out of memory while sharing the machine; will be retried alone") == 2
    assert "seed 3: FAILED: Exception raised" in output
    assert output.count(": done") == 3
    assert "[4/4]" in output.splitlines()[-1]
    # A job that ran alone is not repeated.
    (tmp_path / "1" / "tried").unlink()
    queue = run_jobs(jobs[1:2], max_running=4)
    assert [job.seed for job in queue.failed] == [1]


def test_out_of_memory_of_an_earlier_start_is_ignored(tmp_path, capsys):
    """The log of a resumed run holds the output of both starts."""
    (tmp_path / "log.txt").write_text("CUDA out of memory")
    script = "raise SystemExit(1)"
    jobs = [make_job(tmp_path, 0, script), make_job(tmp_path / "other", 1, script)]
    queue = run_jobs(jobs, max_running=2)
    assert len(queue.failed) == 2
    assert "run again" not in capsys.readouterr().err


def test_jobs_run_in_sessions_of_their_own(tmp_path):
    """Ctrl-C must not reach them: the signal of `stop` would be the second one, which ends a training unsaved."""
    script = "import os, sys; sys.exit(os.getsid(0) != os.getpid())"
    jobs = [make_job(tmp_path, 0, script)]
    assert not run_jobs(jobs, max_running=1).failed


# Ends by itself on SIGTERM: seed 0 succeeds, seed 1 fails, and seed 2 was stopped.
ENDS_AT_STOP = """
import signal, sys, time
seed = int(sys.argv[sys.argv.index("--seed") + 1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit((0, 3, 128 + signal.SIGTERM)[seed]))
print("ready", flush=True)
time.sleep(60)
"""


def test_jobs_that_end_while_others_are_stopped_are_finished_or_failed(tmp_path):
    jobs = [make_job(tmp_path / str(seed), seed, ENDS_AT_STOP) for seed in range(3)]
    queue = run_jobs(jobs, max_running=3, minutes=3 / 60)
    assert [job.seed for job in queue.failed] == [1]
    assert [job.seed for job in queue.unfinished] == [2]


def test_time_limit_terminates_running_jobs_and_leaves_others_waiting(tmp_path):
    script = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); time.sleep(60)"
    jobs = [make_job(tmp_path / str(seed), seed, script) for seed in range(3)]
    queue = run_jobs(jobs, max_running=2, minutes=2 / 60)
    assert [job.seed for job in queue.running] == [0, 1]
    assert [job.seed for job in queue.waiting] == [2]
    assert [job.process.returncode for job in queue.running] == [143, 143]
    assert not queue.failed


# A job that, on a signal, counts it in a file and saves for two seconds.
SAVING = """
import pathlib, signal, sys, time
from mgk.training.signals import stop_with_parent
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
signal.signal(signal.SIGTERM, lambda *_: (out / "signals").open("a").write("x"))
stop_with_parent()
(out / "started").touch()
while not (out / "signals").exists():
    time.sleep(0.1)
time.sleep(2)
(out / "saved").touch()
"""
QUEUE = """
import sys
from pathlib import Path
from tests.training.test_job_queue import SAVING, make_job, run_jobs
run_jobs([make_job(Path(sys.argv[1]), 0, SAVING)], max_running=1)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize("numbers", [[signal.SIGKILL], [signal.SIGTERM, signal.SIGKILL]], ids=["kill", "stop-kill"])
def test_jobs_of_a_killed_queue_save_and_end(tmp_path, numbers):
    """The jobs receive one signal, also if the queue was stopping them already."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    script = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(1))\n" + QUEUE
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=environment) as queue:
        try:
            for number, file in zip(numbers, ("started", "signals"), strict=False):
                wait_for_file(tmp_path / file)
                queue.send_signal(number)
        finally:
            queue.kill()
    wait_for_file(tmp_path / "saved")
    assert (tmp_path / "signals").read_text() == "x"


def wait_for_file(path):
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name}"
        time.sleep(0.05)


class StubbornProcess:
    """A process that ends after `signals` signals; the first wait without a timeout is interrupted."""

    stdin = None

    def __init__(self, signals):
        self.remaining, self.killed, self.interrupted = signals, False, False

    def terminate(self):
        self.remaining -= 1

    def kill(self):
        self.remaining, self.killed = 0, True

    def wait(self, timeout=None):
        if self.remaining > 0 and timeout is not None:
            raise subprocess.TimeoutExpired("train", timeout)
        if self.remaining > 0 and not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        assert self.remaining <= 0, "waits forever"


@pytest.mark.parametrize(("signals", "killed"), [(1, False), (2, False), (3, True)])
def test_second_interrupt_is_passed_on_then_jobs_are_killed(tmp_path, signals, killed):
    jobs = [make_job(tmp_path, seed, process=StubbornProcess(signals)) for seed in (0, 1)]
    queue = JobQueue([], running=jobs)
    if signals == 1:
        queue.stop()
    else:
        with pytest.raises(KeyboardInterrupt):
            queue.stop()
    assert [job.process.remaining for job in jobs] == [0, 0]
    assert [job.process.killed for job in jobs] == [killed, killed]


@pytest.mark.parametrize(
    ("environment", "max_running", "expected"),
    [
        ({}, 1, ["1000", None, None]),
        ({}, 2, ["1000", None, str(max(1, os.cpu_count() // 2))]),
        ({}, 1000, ["1000", None, "1"]),
        ({"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "7"}, 2, [None, "ACTIVE", "7"]),
        ({"GOMP_SPINCOUNT": "5"}, 1, ["5", None, None]),
    ],
)
def test_openmp_is_limited_unless_already_set(tmp_path, monkeypatch, environment, max_running, expected):
    names = ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    script = f"import json, os; print(json.dumps([os.environ.get(name) for name in {names}]))"
    job = make_job(tmp_path, 0, script)
    run_jobs([job], max_running)
    assert json.loads(job.log.read_text()) == expected
