"""Image: both layouts of CIFAR-10 give the same pictures, and damaged files are refused."""

import tarfile

import numpy as np
import pytest

from mgk.tasks import DataError
from mgk.tasks.image import ARCHIVE, DIRECTORY, GREY_FILE, RECORD, TRAIN_FILES, Image

TASK = Image(pictures=100, test_pictures=20)


@pytest.fixture
def colours():
    generator = np.random.default_rng(1)
    records = generator.integers(0, 256, (120, RECORD), dtype=np.uint8)
    records[:, 0] = np.arange(120) % 10
    return records


def write_binary(data, records):
    (data / DIRECTORY).mkdir(parents=True, exist_ok=True)
    for n, name in enumerate(TRAIN_FILES):
        (data / DIRECTORY / name).write_bytes(records[20 * n : 20 * n + 20].tobytes())
    (data / DIRECTORY / "test_batch.bin").write_bytes(records[100:].tobytes())


def grey(records):
    red, green, blue = records[:, 1:].reshape(-1, 3, 32, 32).astype(np.int64).transpose(1, 0, 2, 3)
    return ((299 * red + 587 * green + 114 * blue + 500) // 1000).astype(np.uint8)


def write_grey(data, records, **changes):
    (data / GREY_FILE).parent.mkdir(parents=True, exist_ok=True)
    images, labels = grey(records), records[:, 0].astype(np.int64)
    arrays = {"train_images": images[:100], "train_labels": labels[:100]}
    arrays |= {"test_images": images[100:], "test_labels": labels[100:]}
    np.savez(data / GREY_FILE, **{**arrays, **changes})


def test_layouts_agree(tmp_path, colours):
    folders = {name: tmp_path / name for name in ("binary", "archive", "grey")}
    write_binary(folders["binary"], colours)
    folders["archive"].mkdir()
    with tarfile.open(folders["archive"] / ARCHIVE, "w:gz") as archive:
        archive.add(folders["binary"] / DIRECTORY, DIRECTORY)
    write_grey(folders["grey"], colours)
    assert len({TASK.checksum(folder) for folder in folders.values()}) == 1
    splits = {name: TASK.split(folders["grey"], name) for name in TASK.splits}
    assert {name: len(split) for name, split in splits.items()} == {"train": 90, "dev": 10, "test": 20}
    images = grey(colours)
    tokens, lengths, labels = splits["test"].batch(np.arange(20))
    assert np.array_equal(tokens.numpy(), images[100:].reshape(20, -1))
    assert lengths.tolist() == [1024] * 20
    assert labels.tolist() == colours[100:, 0].tolist()
    # Every training picture is in train or in dev, once.
    pictures = np.concatenate([splits[name].tokens.reshape(-1, 1024) for name in ("train", "dev")])
    assert sorted(map(bytes, pictures)) == sorted(map(bytes, images[:100].reshape(100, -1)))


def test_wrong_files(tmp_path, colours):
    with pytest.raises(DataError, match="download https"):
        TASK.prepare(tmp_path)
    (tmp_path / ARCHIVE).write_bytes(b"x" * 600)
    with pytest.raises(DataError, match="damaged or incomplete"):
        TASK.prepare(tmp_path)
    write_binary(tmp_path, colours)
    (tmp_path / DIRECTORY / "test_batch.bin").write_bytes(b"\0" * (RECORD + 1))
    with pytest.raises(DataError, match=f"records must have {RECORD} bytes"):
        TASK.prepare(tmp_path)
    changed = colours.copy()
    changed[3, 0] = 10
    write_binary(tmp_path, changed)
    with pytest.raises(DataError, match="a label is 10"):
        TASK.prepare(tmp_path)
    changed[3, 0] = 4
    write_binary(tmp_path, changed)
    with pytest.raises(DataError, match=r"train pictures per class are \[10, 10, 10, 9, 11.*instead of 10 each"):
        TASK.prepare(tmp_path)
    (tmp_path / DIRECTORY / "data_batch_2.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_2.bin is missing"):
        TASK.prepare(tmp_path)


def write_archive(path, name, kind, size):
    """Write an archive of one member, whose contents are missing."""
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, size
    path.write_bytes(member.tobuf())


def test_damaged_file_of_a_directory_is_named(tmp_path, colours):
    write_binary(tmp_path, colours)
    for content in (b"", colours[100:119].tobytes()):
        (tmp_path / DIRECTORY / "test_batch.bin").write_bytes(content)
        with pytest.raises(DataError, match=r"test_batch\.bin"):
            TASK.prepare(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("././@PaxHeader", tarfile.XHDTYPE, "a header of 2,000,000 bytes"),
        ("././@LongLink", tarfile.GNUTYPE_LONGNAME, "a header of 2,000,000 bytes"),
        (f"{DIRECTORY}/test_batch.bin", tarfile.REGTYPE, "test_batch.bin has 2,000,000 bytes"),
    ],
)
def test_large_members_of_an_archive_are_not_read(tmp_path, monkeypatch, name, kind, message):
    """The limits are checked before the contents are read, which are missing here."""
    monkeypatch.setattr("mgk.tasks.image.MAX_BATCH", 1_000_000)
    write_archive(tmp_path / ARCHIVE, name, kind, 2_000_000)
    with pytest.raises(DataError, match=message):
        TASK.prepare(tmp_path)


def test_damaged_arrays_are_one_error(tmp_path, colours, monkeypatch):
    write_grey(tmp_path, colours)
    content = (tmp_path / GREY_FILE).read_bytes()
    # Flags and compression method of a member follow the version, 2.0 or 4.5, in both of its headers.
    version = next(version for version in (b"\x14\x00", b"\x2d\x00") if version + bytes(4) in content)
    array = b"{'descr': '|u1', 'fortran_order': False, 'shape': (100, 32, 32), }"
    assert array in content
    damages = {
        "encrypted": content.replace(version + bytes(4), version + b"\x01\0\0\0"),
        "method is not supported": content.replace(version + bytes(4), version + b"\0\0\x63\0"),
        "not a zip file": content[:100],
        "magic string": content.replace(b"\x93NUMPY", b"\x93NUMPX"),
        "": content.replace(array, array.replace(b"(100, 32, 32)", b"(9" + b"9" * 9 + b",2)")),
    }
    for message, damaged in damages.items():
        (tmp_path / GREY_FILE).write_bytes(damaged)
        with pytest.raises(DataError, match=f"{GREY_FILE} is damaged .*{message}"):
            TASK.prepare(tmp_path)
    (tmp_path / GREY_FILE).write_bytes(content)
    monkeypatch.setattr("mgk.tasks.image.MAX_ARRAY", 1000)
    with pytest.raises(DataError, match="train_images has 102,528 bytes"):
        TASK.prepare(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_images": np.zeros((20, 32, 31), np.uint8)}, "images must be uint8"),
        ({"test_images": np.zeros((20, 32, 32), np.float32)}, "images must be uint8"),
        ({"train_labels": np.zeros(99, np.int64)}, "with n labels"),
        ({"train_labels": np.full(100, 10)}, "labels must be integers from 0 to 9"),
        ({"train_labels": np.zeros(100)}, "labels must be integers from 0 to 9"),
        ({"train_labels": np.array([object()] * 100)}, "damaged"),
    ],
)
def test_wrong_arrays(tmp_path, colours, changes, message):
    write_grey(tmp_path, colours, **changes)
    with pytest.raises(DataError, match=message):
        TASK.prepare(tmp_path)
