"""Locks between processes."""

import signal
import subprocess
import sys

import pytest

from mgk._core import io

HOLD = """
import sys, time
from pathlib import Path
from mgk._core.io import exclusive
with exclusive(Path(sys.argv[1]), "", ""):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_lock_names_its_holder_and_ends_with_it(tmp_path, monkeypatch, number):
    monkeypatch.setattr(io, "LOCK_TIMEOUT", 0.3)
    lock = tmp_path / "run" / ".run.lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"held\n"
            with (
                pytest.raises(ValueError, match=rf"^a run is in use by process {holder.pid} on .*: wait$"),
                io.exclusive(lock, "a run", "wait"),
            ):
                pass
        finally:
            holder.send_signal(number)
            holder.wait()
    with io.exclusive(lock, "a run", "wait"):
        pass


def test_lock_waits_for_a_process_that_ends_soon(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "LOCK_TIMEOUT", 300)
    lock = tmp_path / ".run.lock"
    script = HOLD.replace("sleep(600)", "sleep(1)")
    with subprocess.Popen([sys.executable, "-c", script, str(lock)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with io.exclusive(lock, "a run", "wait"):
            pass


def test_nested_locks_of_one_process_are_one(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "LOCK_TIMEOUT", 0)
    lock = tmp_path / ".run.lock"
    for _ in range(2):
        with io.exclusive(lock, "a run", "wait"):
            with io.exclusive(tmp_path / "." / ".run.lock", "a run", "wait"):
                pass
            with lock.open("a") as file:
                assert not io._try_lock(file.fileno())


def test_lock_has_no_effect_without_file_locks(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with io.exclusive(tmp_path / ".run.lock", "a run", "wait"):
        assert io._try_lock(-1)
