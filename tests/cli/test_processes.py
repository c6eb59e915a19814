"""Several processes of `mgk` that use the same directory, and processes that are killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mgk.models.run_directory import RunDirectory
from mgk.training import results

ROOT = Path(__file__).parents[2]
TINY = "batch_size=4 warmup=1 model.embed_dim=8 model.ffn_dim=8 model.hidden_dim=8 model.head_dim=4".split()
SETTINGS = [part for setting in TINY for part in ("--set", setting)]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def start(*arguments, directory, **environment):
    command = [sys.executable, "-m", "mgk", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=directory, env={**ENVIRONMENT, **environment}, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )


def wait_for(condition, seconds=300):
    """Wait until a condition holds; raise after a generous time limit."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.2)


def train(seed, steps, *, directory):
    options = ["--variant", "smgk", "--heads", "2", "--seed", seed, "--steps", steps, "--set", f"eval_every={steps}"]
    return start("train", "demo", *options, *SETTINGS, "--out", "run", directory=directory)


@pytest.mark.slow
def test_second_training_in_a_run_directory_is_refused(tmp_path):
    first = train(0, 10**7, directory=tmp_path)
    try:
        wait_for(RunDirectory(tmp_path / "run").metrics.exists)
        description = RunDirectory(tmp_path / "run").description.read_bytes()
        second = train(1, 4, directory=tmp_path)
        errors = second.communicate(timeout=300)[1].decode()
        assert second.returncode == 2, errors
        assert f"mgk: run is in use by process {first.pid} on " in errors.splitlines()[-1]
        assert RunDirectory(tmp_path / "run").description.read_bytes() == description
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    # The lock has ended with its process.
    third = train(1, 4, directory=tmp_path)
    errors = third.communicate(timeout=300)[1].decode()
    assert third.returncode == 0, errors


@pytest.mark.slow
def test_second_comparison_in_a_folder_is_refused(tmp_path):
    """Both would train and append the same results, even with different run directories."""
    options = ["compare", "demo", "--rows", "smgk:2", "--steps", "300", "--no-alone", *SETTINGS, "--out", "mine"]
    first = start(*options, "--runs", "a", directory=tmp_path)
    try:
        wait_for((tmp_path / "a" / "demo" / "smgk-2-paper-s0" / "log.txt").exists)
        second = start(*options, "--runs", "b", directory=tmp_path)
        errors = second.communicate(timeout=300)[1].decode()
        output = first.communicate(timeout=300)
        assert first.returncode == 0, output
        metrics = [row["metric"] + row["split"] for row in results.read([tmp_path / "mine" / "demo.csv"])]
        assert len(metrics) == len(set(metrics))
        # On a slow machine the first comparison may end before the second one gives up.
        assert second.returncode in (0, 2), errors
        if second.returncode == 2:
            assert f"mgk: mine (mgk compare demo) is in use by process {first.pid} on " in errors.splitlines()[-1]
        assert not (tmp_path / "b").exists()
    finally:
        first.send_signal(signal.SIGTERM)
        first.communicate()


@pytest.mark.slow
def test_trainings_of_a_killed_comparison_save_and_end(tmp_path):
    run = RunDirectory(tmp_path / "runs" / "demo" / "smgk-2-paper-s0")
    options = ["compare", "demo", "--rows", "smgk:2", "--steps", 10**6, "--set", f"eval_every={10**6}", *SETTINGS]
    comparison = start(*options, directory=tmp_path)
    try:
        wait_for(run.metrics.exists)
        training = int(run.lock.read_text().split()[1])
        comparison.kill()
        comparison.communicate()
        wait_for(lambda: run.checkpoint.exists() and not is_running(training), 120)
    finally:
        comparison.kill()
        if is_running(training):
            os.kill(training, signal.SIGKILL)
    assert "Stopped at step" in run.log.read_text()


def is_running(process):
    """Return whether a process exists and is not a zombie."""
    try:
        os.kill(process, 0)
        stat = Path("/proc", str(process), "stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
