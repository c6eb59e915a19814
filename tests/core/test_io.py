"""Locks between processes, and temporary files of killed ones."""

import os
import signal
import subprocess
import sys
import time

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


def test_temporary_files_of_ended_processes_are_removed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    temporaries = {}
    for process in (ended.pid, os.getppid()):
        for host, age in ((io._host(), 0), ("other", 0), ("other", 2 * io.ABANDONED)):
            path = tmp_path / f".run.json.{age}.mgk-{host}-{process}.tmp"
            path.touch()
            os.utime(path, (time.time() - age,) * 2)
            temporaries[path] = age > 0 or (host == io._host() and process == ended.pid)
    foreign = [
        tmp_path / name for name in ("run.json", ".notes.tmp", ".a.12.tmp", f"b.mgk-{io._host()}-{ended.pid}.tmp")
    ]
    for path in foreign:
        path.touch()
    io.remove_stale_temporaries(tmp_path)
    assert [not path.exists() for path in temporaries] == list(temporaries.values())
    assert all(path.exists() for path in foreign)
    io.remove_stale_temporaries(tmp_path / "missing")


def test_temporary_file_of_a_killed_process_is_recognised(tmp_path):
    script = (
        "import os, signal, sys; from pathlib import Path; from mgk._core.io import replacing\n"
        "with replacing(Path(sys.argv[1]) / 'run.json') as temporary:\n"
        "    temporary.touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)])
    assert len(list(tmp_path.iterdir())) == 1
    io.remove_stale_temporaries(tmp_path)
    assert not list(tmp_path.iterdir())
