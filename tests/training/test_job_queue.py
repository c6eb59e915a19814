"""Trainings side by side: what fails, what wants memory, what is interrupted, what must wait."""

import json
import os
import subprocess
import sys

import pytest

from mgk.training.config import ModelSpec
from mgk.training.job_queue import Job, Queue, run_jobs


def job(directory, seed, script="", process=None):
    arguments = ["--seed", str(seed), "--out", str(directory)]
    return Job("listops", ModelSpec("smgk", 4), seed, directory, [sys.executable, "-c", script, *arguments], process)


def test_a_crash_of_one_is_survived_and_said(tmp_path, capsys):
    script = "import sys; sys.exit('--seed' in sys.argv and sys.argv[sys.argv.index('--seed') + 1] == '1')"
    jobs = [job(tmp_path / str(seed), seed, script) for seed in range(3)]
    queue = run_jobs(jobs, at_once=2)
    assert [each.seed for each in queue.failed] == [1]
    assert not queue.waiting
    assert not queue.running
    assert all(each.process.returncode is not None for each in jobs)
    said = capsys.readouterr().err
    assert (said.count("done"), said.count("FAILED")) == (2, 1)


# Out of memory the first time: seed 1 once, seed 3 always. Alone is who finds that all others have ended.
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


def test_what_fails_for_want_of_memory_beside_others_is_tried_again_alone(tmp_path, capsys):
    jobs = [job(tmp_path / str(seed), seed, OUT_OF_MEMORY) for seed in range(4)]
    queue = run_jobs(jobs, at_once=4)
    assert [each.seed for each in queue.failed] == [3]
    assert not queue.left
    said = capsys.readouterr().err
    assert said.count("out of memory beside the others: it is tried again alone") == 2
    assert "seed 3: FAILED: Exception raised" in said
    assert said.count(": done") == 3
    assert "[4/4]" in said.splitlines()[-1]
    # By itself, there is nothing to wait for.
    (tmp_path / "1" / "tried").unlink()
    queue = run_jobs(jobs[1:2], at_once=4)
    assert [each.seed for each in queue.failed] == [1]


def test_an_earlier_want_of_memory_is_not_this_one(tmp_path, capsys):
    """The log of a run that is gone on with has both."""
    (tmp_path / "log.txt").write_text("CUDA out of memory")
    script = "raise SystemExit(1)"
    jobs = [job(tmp_path, 0, script), job(tmp_path / "other", 1, script)]
    queue = run_jobs(jobs, at_once=2)
    assert len(queue.failed) == 2
    assert "tried again" not in capsys.readouterr().err


def test_a_signal_to_the_terminal_s_processes_does_not_reach_the_trainings(tmp_path):
    """They are asked to leave by `compare` itself: a second signal would end them before they have saved."""
    script = "import os, sys; sys.exit(os.getsid(0) != os.getpid())"
    jobs = [job(tmp_path, 0, script)]
    assert not run_jobs(jobs, at_once=1).failed


def test_when_the_time_is_up_what_runs_is_asked_to_leave_and_the_rest_waits(tmp_path):
    script = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); time.sleep(60)"
    jobs = [job(tmp_path / str(seed), seed, script) for seed in range(3)]
    queue = run_jobs(jobs, at_once=2, minutes=2 / 60)
    assert [each.seed for each in queue.running] == [0, 1]
    assert [each.seed for each in queue.waiting] == [2]
    assert [each.process.returncode for each in queue.running] == [143, 143]
    assert not queue.failed


class Stubborn:
    """A process that waits on: an interrupt comes while it is waited for, and it leaves after so many signals."""

    def __init__(self, signals):
        self.left, self.killed, self.interrupted = signals, False, False

    def terminate(self):
        self.left -= 1

    def kill(self):
        self.left, self.killed = 0, True

    def wait(self, timeout=None):
        if self.left > 0 and timeout is not None:
            raise subprocess.TimeoutExpired("train", timeout)
        if self.left > 0 and not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        assert self.left <= 0, "waited for ever"


@pytest.mark.parametrize(("signals", "killed"), [(1, False), (2, False), (3, True)])
def test_a_second_interrupt_is_passed_on_and_nothing_is_waited_for_for_ever(tmp_path, signals, killed):
    jobs = [job(tmp_path, seed, process=Stubborn(signals)) for seed in (0, 1)]
    queue = Queue([], running=jobs)
    if signals == 1:
        queue.stop()
    else:
        with pytest.raises(KeyboardInterrupt):
            queue.stop()
    assert [each.process.left for each in jobs] == [0, 0]
    assert [each.process.killed for each in jobs] == [killed, killed]


@pytest.mark.parametrize(
    ("given", "at_once", "wanted"),
    [
        ({}, 1, ["1000", None, None]),
        ({}, 2, ["1000", None, str(max(1, os.cpu_count() // 2))]),
        ({}, 1000, ["1000", None, "1"]),
        ({"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "7"}, 2, [None, "ACTIVE", "7"]),
        ({"GOMP_SPINCOUNT": "5"}, 1, ["5", None, None]),
    ],
)
def test_threads_are_shared_out_and_wait_asleep_unless_told_otherwise(tmp_path, monkeypatch, given, at_once, wanted):
    names = ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    script = f"import json, os; print(json.dumps([os.environ.get(name) for name in {names}]))"
    asked = job(tmp_path, 0, script)
    run_jobs([asked], at_once)
    assert json.loads(asked.log.read_text()) == wanted
