"""Prepared data: complete or absent, and built once per source and settings."""

import builtins
import errno
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mgk.tasks import DataError, data_cache
from mgk.tasks.listops import ListOps
from tests.support.task_data import GENERATED, PAIRS, TRAIN_PAIRS, documents, make_aan, prepared_directories


class CountingTask(ListOps):
    """A task that counts how often it is built."""

    builds = 0

    def build(self, *args):
        CountingTask.builds += 1
        return super().build(*args)


def test_data_is_prepared_once_per_settings(tmp_path):
    CountingTask.builds = 0
    task = CountingTask(rules=GENERATED.rules, counts=GENERATED.counts, reads_tsv=False)
    for _ in range(2):
        task.prepare(tmp_path)
        task.split(tmp_path, "dev")
    assert CountingTask.builds == 1
    other = replace(task, seed=1)
    assert token_rows(other.split(tmp_path, "dev")) != token_rows(task.split(tmp_path, "dev"))
    assert CountingTask.builds == 2
    assert len(prepared_directories(tmp_path, task)) == 2


def token_rows(split):
    return [split.tokens[a:b].tobytes() for a, b in itertools.pairwise(split.offsets.tolist())]


def test_changed_source_is_prepared_again(tmp_path):
    make_aan(tmp_path)
    before = documents(PAIRS.split(tmp_path, "train"), 0)
    path = tmp_path / TRAIN_PAIRS
    path.write_bytes(path.read_bytes().replace(b"one", b"new text"))
    after = documents(PAIRS.split(tmp_path, "train"), 0)
    assert (before[0], after[0]) == (b"one train 0", b"new text train 0")
    # With size and time unchanged, only `prepare` detects it, which reads the file.
    stamp = path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes().replace(b"new", b"old"))
    os.utime(path, ns=(stamp, stamp))
    PAIRS.prepare(tmp_path)
    assert documents(PAIRS.split(tmp_path, "train"), 0)[0] == b"old text train 0"


def test_touched_or_moved_source_is_not_prepared_again(tmp_path):
    make_aan(tmp_path / "here")
    PAIRS.prepare(tmp_path / "here")
    before = prepared_directories(tmp_path / "here", PAIRS)
    os.utime(tmp_path / "here" / TRAIN_PAIRS, (1, 1))
    PAIRS.prepare(tmp_path / "here")
    assert prepared_directories(tmp_path / "here", PAIRS) == before
    (tmp_path / "here").rename(tmp_path / "there")
    PAIRS.prepare(tmp_path / "there")
    assert [path.name for path in prepared_directories(tmp_path / "there", PAIRS)] == [path.name for path in before]


@pytest.mark.parametrize("file", ["train.tokens.npy", "dev.offsets.npy", "test.labels.npy", "cache.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "changed"])
def test_damaged_data_is_prepared_again(tmp_path, file, damage):
    expected = {name: token_rows(GENERATED.split(tmp_path, name)) for name in GENERATED.splits}
    path = prepared_directories(tmp_path, GENERATED)[0] / file
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        # For the labels, this is the highest byte of an int64.
        path.write_bytes(content[:-8] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 64]))
    if damage == "changed":
        GENERATED.prepare(tmp_path)
    assert {name: token_rows(GENERATED.split(tmp_path, name)) for name in GENERATED.splits} == expected
    GENERATED.prepare(tmp_path)
    assert path.read_bytes() == content
    assert len(prepared_directories(tmp_path, GENERATED)) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_interrupted_preparation_leaves_no_data(tmp_path, error):
    def stop(stage, done, total):
        if stage == "train":
            raise error

    with pytest.raises(error):
        GENERATED.prepare(tmp_path, 1, stop)
    assert prepared_directories(tmp_path, GENERATED) == []
    assert len(GENERATED.split(tmp_path, "train")) == 50


PREPARE = """
import os, signal, sys, time
from pathlib import Path
from mgk.tasks.listops import ListOps, Rules
task = ListOps(rules=Rules(3, 3, 4, 30), counts={"test": 20, "dev": 10, "train": 50}, reads_tsv=False)
def progress(stage, done, total):
    if sys.argv[2] == "killed" and stage == "train":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
print("ready", flush=True)
sys.stdin.readline()
task.prepare(Path(sys.argv[1]), 1, progress)
print(task.split(Path(sys.argv[1]), "train").labels.sum())
"""


def test_concurrent_preparation_survives_a_killed_process(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PREPARE, str(tmp_path), fate],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for fate in ("killed", "lives", "lives")
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    killed, *living = processes
    killed.communicate("\n", timeout=60)
    assert killed.returncode < 0
    (unfinished,) = prepared_directories(tmp_path, GENERATED)
    assert unfinished.name.startswith(".making-")
    for process in living:
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0] for process in living]
    assert outputs == [f"{GENERATED.split(tmp_path, 'train').labels.sum()}\n"] * 2
    # An unfinished directory is deleted only after ABANDONED seconds.
    assert len(prepared_directories(tmp_path, GENERATED)) == 2
    os.utime(unfinished, (0, 0))
    replace(GENERATED, seed=1).prepare(tmp_path)
    assert unfinished not in prepared_directories(tmp_path, GENERATED)


def test_prepared_data_of_earlier_versions_stays_valid(tmp_path):
    """The directory's name is a checksum of the settings, and `checksum` one of the examples; both were in use."""
    GENERATED.prepare(tmp_path)
    assert [path.name for path in prepared_directories(tmp_path, GENERATED)] == ["d42db98127cda250"]
    assert GENERATED.checksum(tmp_path) == "4c0f23058408"


def test_pickled_arrays_are_rejected(tmp_path):
    GENERATED.prepare(tmp_path)
    folder = prepared_directories(tmp_path, GENERATED)[0]
    stream = io.BytesIO()
    np.save(stream, np.array([{}], dtype=object), allow_pickle=True)
    path = folder / "train.labels.npy"
    path.write_bytes(stream.getvalue())
    manifest = json.loads((folder / "cache.json").read_text())
    manifest["files"][path.name] = {"bytes": len(stream.getvalue()), "sha256": data_cache.file_checksum(path)}
    (folder / "cache.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="cannot be read: remove"):
        GENERATED.split(tmp_path, "train")


def change_labels(data_dir):
    """Change a label of the prepared test split, with the same size; return the file and its contents."""
    path = prepared_directories(data_dir, GENERATED)[0] / "test.labels.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-8] + bytes([content[-8] ^ 1]) + content[-7:])
    os.utime(path, ns=(1, 1))
    return path, content


def test_changed_labels_are_detected_without_prepare(tmp_path):
    GENERATED.prepare(tmp_path)
    path, content = change_labels(tmp_path)
    GENERATED.split(tmp_path, "test")
    assert path.read_bytes() == content


def test_changed_labels_without_a_source_are_an_error(tmp_path):
    make_aan(tmp_path)
    PAIRS.prepare(tmp_path)
    source = [path for path in tmp_path.iterdir() if path.name != ".mgk"]
    for path in source:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    PAIRS.split(tmp_path, "test")
    labels = prepared_directories(tmp_path, PAIRS)[0] / "test.labels.npy"
    labels.write_bytes(labels.read_bytes()[:-8] + (7).to_bytes(8, "little"))
    os.utime(labels, ns=(1, 1))
    with pytest.raises(DataError):
        PAIRS.split(tmp_path, "test")


@pytest.fixture
def read_files(monkeypatch):
    """Record the files whose checksums are computed."""
    files = []
    file_checksum = data_cache.file_checksum
    monkeypatch.setattr(data_cache, "file_checksum", lambda path: files.append(path) or file_checksum(path))
    return files


def test_unchanged_data_is_read_once(tmp_path, read_files):
    GENERATED.prepare(tmp_path)
    (folder,) = prepared_directories(tmp_path, GENERATED)
    # Data of an earlier version, which has no record of a verification, or a copy with other times.
    (folder / "verified.json").unlink(missing_ok=True)
    read_files.clear()
    for _ in range(3):
        GENERATED.split(tmp_path, "test")
        GENERATED.checksum(tmp_path)
    assert len(read_files) == len(set(read_files)) == 9
    os.utime(folder / "test.labels.npy", ns=(1, 1))
    GENERATED.split(tmp_path, "test")
    GENERATED.split(tmp_path, "test")
    assert len(read_files) == 18
    GENERATED.prepare(tmp_path)
    assert len(read_files) == 27


@pytest.fixture
def read_only(monkeypatch):
    """Return a function that makes a directory a read-only mount, for root too."""

    def guard(function, writes):
        def guarded(path, *arguments, **options):
            is_inside = isinstance(path, str | os.PathLike) and Path(path).is_relative_to(guarded_root[0])
            if is_inside and writes(*arguments, **options):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return function(path, *arguments, **options)

        return guarded

    def mount(root):
        guarded_root[0] = root
        for module in (io, builtins):
            monkeypatch.setattr(module, "open", guard(open, lambda mode="r", *rest, **options: set(mode) & set("wax+")))
        monkeypatch.setattr(
            os, "open", guard(os.open, lambda flags, *rest, **options: flags & (os.O_RDWR | os.O_WRONLY))
        )
        for name in ("mkdir", "replace", "rename"):
            monkeypatch.setattr(os, name, guard(getattr(os, name), lambda *rest, **options: True))

    guarded_root = [Path("nowhere")]
    return mount


@pytest.mark.parametrize("stamps", ["current", "old"])
def test_prepared_data_on_a_read_only_mount_is_used(tmp_path, read_only, read_files, stamps):
    make_aan(tmp_path)
    for task in (GENERATED, PAIRS):
        task.prepare(tmp_path)
        if stamps == "old":
            for path in (tmp_path / ".mgk" / task.name).rglob("*"):
                os.utime(path, ns=(1, 1))
            os.utime(tmp_path / TRAIN_PAIRS, ns=(1, 1))
    expected = [documents(PAIRS.split(tmp_path, "train"), 0)] if stamps == "current" else None
    read_only(tmp_path)
    for task in (GENERATED, PAIRS):
        task.prepare(tmp_path)
        read_files.clear()
        for name in task.splits:
            assert len(task.split(tmp_path, name))
        assert task.checksum(tmp_path)
        assert read_files == []
    assert expected in (None, [documents(PAIRS.split(tmp_path, "train"), 0)])


def test_missing_data_on_a_read_only_mount_is_one_error(tmp_path, read_only):
    GENERATED.prepare(tmp_path)
    change_labels(tmp_path)
    read_only(tmp_path)
    for task in (GENERATED, replace(GENERATED, seed=1)):
        with pytest.raises(DataError, match="Read-only file system; the data must be readable"):
            task.split(tmp_path, "test")
