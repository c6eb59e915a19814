"""Checkpoints: rotation, checksums, damaged files, and resume from an older one."""

import errno
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mgk._core import checksums
from mgk._core.checksums import MANIFEST
from mgk.models import load_model, save_model
from mgk.models.run_directory import RunDirectory
from mgk.training import checkpoints, trainer
from mgk.training.checkpoints import CheckpointStore
from tests.support import tiny_training


def fit(out: Path, resume: bool = False, steps: int = 6, **options):
    settings = {"steps": steps, "eval_every": 2, "warmup": 1}
    run = tiny_training.run(str(out), **settings)
    return trainer.fit(run, tiny_training.TinyTask(), resume=resume, accelerator="cpu", **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Train for 6 steps: last.ckpt is of step 6, last-1.ckpt of step 4."""
    out = tmp_path_factory.mktemp("finished")
    fit(out)
    return out


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return RunDirectory(tmp_path / "run")


def read(path: Path):
    return torch.load(path, weights_only=True)


def assert_equal(one, other):
    """Compare two nested values bit by bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other


def assert_same_end(out: Path, expected: Path):
    a, b = RunDirectory(out), RunDirectory(expected)
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "best", "global_step"):
        assert_equal(read(a.checkpoint)[key], read(b.checkpoint)[key])
    assert_equal(load_file(a.best_model / "model.safetensors"), load_file(b.best_model / "model.safetensors"))
    columns = [[line.rsplit(",", 1)[0] for line in files.metrics.read_text().splitlines()] for files in (a, b)]
    assert columns[0] == columns[1]


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 64
    path.write_bytes(content)


def flip_a_weight(path: Path) -> None:
    """Flip a byte of the largest part of a file; most of a small checkpoint is padding between the parts."""
    if not zipfile.is_zipfile(path):
        return flip(path, path.stat().st_size // 2)
    with zipfile.ZipFile(path) as archive:
        part = archive.read(max(archive.infolist(), key=lambda info: info.file_size))
    return flip(path, path.read_bytes().index(part) + len(part) // 2)


DAMAGE = {
    "flipped byte": flip_a_weight,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "other file": lambda path: torch.save({"state": Path}, path),
}


def test_last_two_checkpoints_are_kept_with_checksums(finished):
    files = RunDirectory(finished)
    assert [path.name for path in files.checkpoints()] == ["last.ckpt", "last-1.ckpt"]
    assert [read(path)["global_step"] for path in files.checkpoints()] == [6, 4]
    listed = json.loads(files.checksums.read_text())["sha256"]
    assert [checksums.file_checksum(path) for path in files.checkpoints()] == listed["last.ckpt"][:2]
    assert listed["run.json"][0] == checksums.file_checksum(files.description)


@pytest.mark.parametrize("damage", ["flipped byte", "missing"])
def test_run_resumes_bit_for_bit_from_the_older_checkpoint(run, finished, capsys, damage):
    run.checkpoint.unlink() if damage == "missing" else DAMAGE[damage](run.checkpoint)
    _, callback = fit(run.path, resume=True)
    assert callback.steps == 2
    assert_same_end(run.path, finished)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    if damage == "missing":  # as after a kill between two renames
        assert warnings == []
    else:
        assert warnings == [
            f"mgk: warning: {run.checkpoint} is damaged (its checksum differs from those in {MANIFEST}): "
            f"resuming from the older {run.checkpoint_of_age(1)}"
        ]
    # The intact checkpoint of step 4 was not replaced by the damaged one.
    assert [read(path)["global_step"] for path in run.checkpoints()] == [6, 4]


@pytest.mark.parametrize("position", [0, 40, 0.1, 0.5, 0.9, -30, -1])
def test_flipped_byte_anywhere_is_detected(run, position):
    size = run.checkpoint.stat().st_size
    flip(run.checkpoint, position if isinstance(position, int) else int(position * size))
    store = CheckpointStore(run)
    store.select()
    assert store.selected == run.checkpoint_of_age(1)


@pytest.mark.parametrize("damage", DAMAGE)
def test_checkpoint_without_checksum_is_read_and_its_crc_compared(run, damage, capsys):
    """Runs of earlier versions have no checksums."""
    run.checksums.unlink()
    store = CheckpointStore(run)
    store.select()
    assert store.selected == run.checkpoint
    DAMAGE[damage](run.checkpoint)
    store = CheckpointStore(run)
    store.select()
    assert store.selected == run.checkpoint_of_age(1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mgk: warning: {run.checkpoint} is damaged (")


def test_advice_keeps_a_directory_with_a_good_model(run):
    for path in run.checkpoints():
        DAMAGE["truncated"](path)
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged \(last.ckpt: .*; last-1.ckpt: ") as error:
        fit(run.path, resume=True)
    message = str(error.value)
    assert "\n" not in message
    assert f"The best model in {run.best_model} is intact" in message
    assert "Keep the directory" in message
    assert not {"remove", "delete"} & set(message.split())
    load_model(run.best_model)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["flipped byte", "truncated", "missing"])
def test_damaged_best_model_is_named_before_training_continues(run, name, damage):
    path = run.best_model / name
    path.unlink() if damage == "missing" else DAMAGE[damage](path)
    with pytest.raises(ValueError, match=f"{name} is (damaged: its checksum differs|missing)"):
        load_model(run.best_model)
    with pytest.raises(ValueError, match=r"The checkpoint .*last.ckpt is intact, but the run needs its best model"):
        fit(run.path, resume=True)


def test_changed_digit_in_the_description_is_detected(run):
    """The description is valid JSON, and the settings differ from those that the run had."""
    run.description.write_text(run.description.read_text().replace('"steps": 6', '"steps": 8'))
    with pytest.raises(ValueError, match=r"run.json is damaged: its checksum differs from the one in checksums.json"):
        run.read_description()
    run.checksums.unlink()
    assert run.read_description()["training"]["steps"] == 8


@pytest.mark.parametrize("text", ["{", "[]", '{"sha256": 3}', '{"sha256": {"last.ckpt": 3}}'])
def test_damaged_manifest_is_set_aside(run, finished, capsys, text):
    run.checksums.write_text(text)
    with pytest.raises(ValueError, match=r"checksums.json is damaged \(.*\): remove it to use the files without"):
        run.read_description()
    fit(run.path, resume=True)
    warning = f"mgk: warning: {run.checksums} is damaged ("
    assert [line.startswith(warning) for line in capsys.readouterr().err.splitlines()].count(True) == 1
    assert run.checksums.with_name("checksums.json.damaged").read_text() == text
    assert_same_end(run.path, finished)


def test_full_disk_leaves_the_checkpoints_intact(run, monkeypatch):
    before = {path: path.read_bytes() for path in run.checkpoints()}
    store = CheckpointStore(run)

    def write(path):
        path.write_bytes(b"half a file")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with pytest.raises(OSError, match="No space left"):
        store.save(write)
    monkeypatch.setattr(checkpoints, "add_checksum", lambda *a, **k: write(run.checksums.with_name("x")))
    with pytest.raises(OSError, match="No space left"):
        store.save(lambda path: path.write_bytes(b"a whole file"))
    assert {path: path.read_bytes() for path in run.checkpoints()} == before
    assert not run.unfinished_checkpoint.exists()
    store.select()
    assert store.selected == run.checkpoint


def contents(files: RunDirectory) -> dict[str, str]:
    return {path.name: path.read_text() for path in files.checkpoints()}


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_rotation_keeps_the_newest(tmp_path, keep):
    files = RunDirectory(tmp_path)
    store = CheckpointStore(files, keep)
    for text in "abcd":
        store.save(lambda path, text=text: path.write_text(text))
    names = ["last.ckpt", "last-1.ckpt", "last-2.ckpt"]
    assert contents(files) == dict(zip(names, "dcb"[:keep], strict=False))
    # With a smaller number the superfluous ones are removed.
    CheckpointStore(files, 1).save(lambda path: path.write_text("e"))
    assert contents(files) == {"last.ckpt": "e"}


@pytest.mark.parametrize(("damaged", "expected"), [((0,), "ebc"), ((1,), "eac"), ((2,), "eab"), ((0, 1), "ebc")])
def test_rotation_replaces_damaged_checkpoints_first(tmp_path, damaged, expected):
    files = RunDirectory(tmp_path)
    store = CheckpointStore(files, 3)
    for text in "cba":
        store.save(lambda path, text=text: path.write_text(text))
    store._damaged = {files.checkpoint_of_age(age) for age in damaged}
    store.save(lambda path: path.write_text("e"))
    assert "".join(contents(files).values()) == expected


def test_only_the_first_rank_renames(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    calls = []
    CheckpointStore(RunDirectory(tmp_path)).save(calls.append)
    assert calls == [RunDirectory(tmp_path).unfinished_checkpoint]
    assert list(tmp_path.iterdir()) == []


def test_checksums_of_old_and_new_files_are_accepted_while_a_file_is_replaced(tmp_path):
    """A process may be killed after the manifest was written and before the rename."""
    path = tmp_path / "a.json"
    path.write_text("unlisted")
    for text in ("first", "second"):
        with checksums.replacing_verified(path) as temporary:
            temporary.write_text(text)
        saved = (tmp_path / MANIFEST).read_bytes()
        path.write_text("unlisted" if text == "first" else "first")
        assert checksums.verify(path)
        path.write_text(text)
        assert checksums.verify(path)
        assert (tmp_path / MANIFEST).read_bytes() == saved
    path.write_text("unlisted")
    with pytest.raises(ValueError, match=r"a.json is damaged: its checksum differs"):
        checksums.verify(path)
    os.remove(path)
    with pytest.raises(FileNotFoundError):
        checksums.verify(path)


def test_file_that_is_replaced_while_it_is_verified_is_accepted(tmp_path, monkeypatch):
    """`mgk eval` may read a run that is still trained."""
    path = tmp_path / "a.json"
    for text in "abcd":
        checksums.write_verified(path, text)
    file_checksum, texts = checksums.file_checksum, iter("fe")

    def replace_and_read(path):
        monkeypatch.setattr(checksums, "file_checksum", file_checksum)
        for text in texts:
            checksums.write_verified(path, text)
        return file_checksum(path)

    monkeypatch.setattr(checksums, "file_checksum", replace_and_read)
    assert checksums.verify(path)
    path.write_text("a")
    with pytest.raises(ValueError, match="is damaged"):
        checksums.verify(path)


def test_saved_model_is_verified_unless_it_has_no_manifest(run, tmp_path):
    save_model(load_model(run.best_model), tmp_path / "copy")
    (tmp_path / "copy" / MANIFEST).unlink()
    load_model(tmp_path / "copy")
    flip(tmp_path / "copy" / "model.safetensors", -1)
    load_model(tmp_path / "copy")
