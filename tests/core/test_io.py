"""Locks between processes, and temporary files of killed ones."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

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
                assert io._lock(lock, file.fileno(), blocking=False) is None


WITHOUT_FCNTL = "import sys; sys.modules['fcntl'] = None; import mgk._core.io; del sys.modules['fcntl']\n"


def test_locks_are_real_without_fcntl(tmp_path, monkeypatch):
    """On Windows, the locks are those of filelock."""
    monkeypatch.setattr(io, "LOCK_TIMEOUT", 0)
    monkeypatch.setattr(io, "fcntl", None)
    lock = tmp_path / ".run.lock"
    command = [sys.executable, "-c", WITHOUT_FCNTL + HOLD, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with (
            pytest.raises(ValueError, match=rf"^a run is in use by process {holder.pid} on "),
            io.exclusive(lock, "a run", "wait"),
        ):
            pass
        holder.kill()
        holder.wait()
    for _ in range(2):
        with io.exclusive(lock, "a run", "wait"), io.locked(tmp_path / "results.lock"):
            pass


def test_stopping_process_is_waited_for_with_a_message(tmp_path, monkeypatch, capsys):
    """A run that has received a signal may save for longer than LOCK_TIMEOUT."""
    monkeypatch.setattr(io, "LOCK_TIMEOUT", 0)
    lock = tmp_path / ".run.lock"
    script = HOLD.replace("print(", "mark_stopping(Path(sys.argv[1])); print(").replace("sleep(600)", "sleep(1)")
    script = script.replace("import exclusive", "import exclusive, mark_stopping")
    with subprocess.Popen([sys.executable, "-c", script, str(lock)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with io.exclusive(lock, "a run", "wait"):
            assert lock.read_text().startswith(f"process {os.getpid()} on ")
            assert "saving" not in lock.read_text()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"Waiting: a run is in use by process {holder.pid} on ")
    assert line.endswith("which is saving and stopping.")


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


def test_temporary_file_of_a_killed_process_is_recognized(tmp_path):
    script = (
        "import os, signal, sys; from pathlib import Path; from mgk._core.io import replacing\n"
        "with replacing(Path(sys.argv[1]) / 'run.json') as temporary:\n"
        "    temporary.touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)])
    assert len(list(tmp_path.iterdir())) == 1
    io.remove_stale_temporaries(tmp_path)
    assert not list(tmp_path.iterdir())


def test_probe_of_a_killed_check_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
    io.check_writable(tmp_path)
    monkeypatch.undo()
    (probe,) = tmp_path.iterdir()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    probe.rename(probe.with_name(probe.name.replace(f"-{os.getpid()}.", f"-{ended.pid}.")))
    io.check_writable(tmp_path)
    assert not list(tmp_path.iterdir())


def test_replaced_file_is_on_the_disk_before_and_after_the_rename(tmp_path, monkeypatch):
    """Flush the file, rename it, flush its folder: the order that survives a power failure."""
    events = []
    fsync, replace = os.fsync, Path.replace

    def record_fsync(descriptor):
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        events.append("folder" if is_directory else f"file of {os.fstat(descriptor).st_size}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "replace", lambda path, target: (events.append("rename"), replace(path, target))[1])
    io.write_atomically(tmp_path / "a.txt", "four")
    assert events == ["file of 4", "rename", "folder"]
    events.clear()
    io.append_durably(tmp_path / "a.txt", "more")
    io.make_directory(tmp_path / "b" / "c")
    assert events == ["file of 8", "folder"]
    monkeypatch.setattr(os, "name", "nt")
    io.sync_directory(tmp_path)
    assert len(events) == 2


def test_full_disk_is_an_error_of_the_system_with_the_path(tmp_path):
    """torch and safetensors raise errors of other classes, which are not reported in one line."""
    script = """
import resource, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from mgk._core.io import replacing

def save(weights, path):
    with open(path, "wb") as file:
        torch.save(weights, file)

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for write, path in zip((save, save_file), map(Path, sys.argv[1:])):
    try:
        with replacing(path) as temporary:
            write({"a": torch.ones(100_000)}, temporary)
    except OSError as error:
        print(error.filename, error.strerror)
"""
    paths = [tmp_path / "checkpoint", tmp_path / "weights"]
    for path in paths:
        path.write_text("before")
    output = subprocess.run([sys.executable, "-c", script, *map(str, paths)], capture_output=True, text=True)
    assert output.stdout.splitlines() == [f"{path} File too large" for path in paths], output.stderr
    assert sorted(tmp_path.iterdir()) == paths
    assert [path.read_text() for path in paths] == ["before", "before"]
