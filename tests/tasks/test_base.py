"""Splits on disk: batches, and a cache that is whole or not there."""

import io
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from mgk.tasks import PAD, DataError, Split
from mgk.tasks.base import write_split
from mgk.tasks.listops import ListOps
from tests.support.task_data import GENERATED, PAIRS, TRAIN_PAIRS, documents, made, make_aan


@pytest.mark.parametrize("per_example", [1, 2])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("length", [None, 3, 50])
def test_batch(tmp_path, per_example, dtype, length):
    random = np.random.default_rng(0)
    examples = [
        ([random.integers(1, 200, random.integers(1, 9)).astype(dtype) for _ in range(per_example)], n % 3)
        for n in range(7)
    ]
    assert write_split(tmp_path, "train", iter(examples), per_example) == 7
    arrays = (np.load(tmp_path / f"train.{name}.npy", allow_pickle=False) for name in ("tokens", "offsets", "labels"))
    split = Split(*arrays, documents=per_example)
    assert split.tokens.dtype == dtype
    assert len(split) == 7
    chosen = [5, 0, 5, 2]
    tokens, lengths, labels = split.batch(chosen, length)
    assert tokens.dtype == lengths.dtype == labels.dtype == torch.int64
    assert labels.tolist() == [n % 3 for n in chosen]
    width = length or max(len(part) for n in chosen for part in examples[n][0])
    assert tokens.shape == ((4, width) if per_example == 1 else (4, 2, width))
    for row, size, part in zip(
        tokens.reshape(-1, width), lengths.reshape(-1), [p for n in chosen for p in examples[n][0]], strict=True
    ):
        kept = part[:width].tolist()
        assert row.tolist() == kept + [PAD] * (width - len(kept))
        assert size == len(kept)


def test_batch_takes_what_a_sampler_gives(tmp_path):
    split = GENERATED.split(tmp_path, "train")
    for indices in (range(3), torch.arange(3), np.arange(3), [0, 1, 2]):
        assert torch.equal(split.batch(indices)[0], split.batch([0, 1, 2])[0])
    assert split.batch([])[0].shape == (0, 0)
    for wrong in ([-1], [50], [0, 99]):
        with pytest.raises(ValueError, match="indices must be at least 0 and below 50"):
            split.batch(wrong)
    with pytest.raises(ValueError, match="length"):
        split.batch([0], 0)
    assert split.class_shares(10).sum() == pytest.approx(1)
    assert split.class_shares(10)[3] == np.mean(split.labels == 3)


def test_tokens_of_the_wrong_kind_are_refused(tmp_path):
    for examples in ([([np.ones(3)], 0)], [([np.ones(3, np.uint8)] * 2, 0)]):
        with pytest.raises(ValueError, match="must"):
            write_split(tmp_path, "x", examples)


class Counting(ListOps):
    """A task that counts how often it was made."""

    times = 0

    def build(self, *args):
        Counting.times += 1
        return super().build(*args)


def test_made_once_and_again_when_settings_change(tmp_path):
    Counting.times = 0
    ours = Counting(rules=GENERATED.rules, counts=GENERATED.counts, reads_tsv=False)
    for _ in range(2):
        ours.prepare(tmp_path)
        ours.split(tmp_path, "dev")
    assert Counting.times == 1
    other = replace(ours, seed=1)
    assert rows(other.split(tmp_path, "dev")) != rows(ours.split(tmp_path, "dev"))
    assert Counting.times == 2
    assert len(made(tmp_path, ours)) == 2


def rows(split):
    return [split.tokens[a:b].tobytes() for a, b in itertools.pairwise(split.offsets.tolist())]


def test_a_changed_source_is_read_again(tmp_path):
    make_aan(tmp_path)
    before = documents(PAIRS.split(tmp_path, "train"), 0)
    path = tmp_path / TRAIN_PAIRS
    path.write_bytes(path.read_bytes().replace(b"one", b"new text"))
    after = documents(PAIRS.split(tmp_path, "train"), 0)
    assert (before[0], after[0]) == (b"one train 0", b"new text train 0")
    # Of the same size and the same time: only prepare, which reads it, can tell.
    stamp = path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes().replace(b"new", b"old"))
    os.utime(path, ns=(stamp, stamp))
    PAIRS.prepare(tmp_path)
    assert documents(PAIRS.split(tmp_path, "train"), 0)[0] == b"old text train 0"


def test_a_touched_or_moved_source_is_not_read_again(tmp_path):
    make_aan(tmp_path / "here")
    PAIRS.prepare(tmp_path / "here")
    before = made(tmp_path / "here", PAIRS)
    os.utime(tmp_path / "here" / TRAIN_PAIRS, (1, 1))
    PAIRS.prepare(tmp_path / "here")
    assert made(tmp_path / "here", PAIRS) == before
    (tmp_path / "here").rename(tmp_path / "there")
    PAIRS.prepare(tmp_path / "there")
    assert [path.name for path in made(tmp_path / "there", PAIRS)] == [path.name for path in before]


@pytest.mark.parametrize("file", ["train.tokens.npy", "dev.offsets.npy", "test.labels.npy", "cache.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "changed"])
def test_a_damaged_cache_is_made_again(tmp_path, file, damage):
    expected = {name: rows(GENERATED.split(tmp_path, name)) for name in GENERATED.splits}
    path = made(tmp_path, GENERATED)[0] / file
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        # The labels' last byte is the highest of an int64.
        path.write_bytes(content[:-8] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 64]))
    if damage == "changed":
        GENERATED.prepare(tmp_path)
    assert {name: rows(GENERATED.split(tmp_path, name)) for name in GENERATED.splits} == expected
    GENERATED.prepare(tmp_path)
    assert path.read_bytes() == content
    assert len(made(tmp_path, GENERATED)) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_cache_is_never_seen(tmp_path, error):
    def stop(stage, done, total):
        if stage == "train":
            raise error

    with pytest.raises(error):
        GENERATED.prepare(tmp_path, 1, stop)
    assert made(tmp_path, GENERATED) == []
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


def test_several_processes_at_once_and_one_that_is_killed(tmp_path):
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
    (left,) = made(tmp_path, GENERATED)
    assert left.name.startswith(".making-")
    for process in living:
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0] for process in living]
    assert answers == [f"{GENERATED.split(tmp_path, 'train').labels.sum()}\n"] * 2
    # What the killed one left is not touched as long as it might be at work.
    assert len(made(tmp_path, GENERATED)) == 2
    os.utime(left, (0, 0))
    replace(GENERATED, seed=1).prepare(tmp_path)
    assert left not in made(tmp_path, GENERATED)


def test_prepared_data_of_earlier_versions_stays_valid(tmp_path):
    """The directory's name is a checksum of the settings, and `checksum` one of the examples; both were in use."""
    GENERATED.prepare(tmp_path)
    assert [path.name for path in made(tmp_path, GENERATED)] == ["d42db98127cda250"]
    assert GENERATED.checksum(tmp_path) == "4c0f23058408"


def test_nothing_is_unpickled(tmp_path):
    GENERATED.prepare(tmp_path)
    folder = made(tmp_path, GENERATED)[0]
    stream = io.BytesIO()
    np.save(stream, np.array([{}], dtype=object), allow_pickle=True)
    path = folder / "train.labels.npy"
    path.write_bytes(stream.getvalue())
    manifest = json.loads((folder / "cache.json").read_text())
    manifest["files"][path.name]["bytes"] = len(stream.getvalue())
    (folder / "cache.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="cannot be read: remove"):
        GENERATED.split(tmp_path, "train")
