"""Image: CIFAR-10 in greyscale, as pixels in reading order (Long Range Arena) or as pictures for a patch transformer.

Layouts: the binary version of CIFAR-10 (cifar-10-batches-bin, or its archive), or cifar10-grey/cifar10-grey.npz with
train_images, train_labels, test_images and test_labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mgk._core.io import DataError
from mgk._core.progress import Progress
from mgk.tasks.archives import read_npz, read_tar
from mgk.tasks.base import Array, Example, Task, write_split

GREY_FILE = "cifar10-grey/cifar10-grey.npz"
DIRECTORY, ARCHIVE = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
REMEDY = f"download {URL} again and put it there"
TRAIN_FILES = tuple(f"data_batch_{n}.bin" for n in range(1, 6))
TEST_FILE = "test_batch.bin"
SIZE, CLASSES = 32, 10
RECORD = 1 + 3 * SIZE * SIZE  # bytes: label, red, green and blue
# Bytes of the largest batch, and of the largest array: four times that of the training pictures.
MAX_BATCH, MAX_ARRAY = 10_000 * RECORD, 4 * 50_000 * SIZE * SIZE
LUMA = (299, 587, 114)  # ITU-R BT.601, in thousandths


@dataclass(frozen=True)
class Image(Task):
    """Class of a greyscale picture. Tokens are pixel values 0 to 255.

    The development set is the last tenth of a fixed permutation of the training pictures.
    """

    name: str = "image"
    dataset: str = "CIFAR-10, greyscale"
    vocab_size: int = 256
    num_classes: int = CLASSES
    max_length: int = SIZE * SIZE
    documents: int = 1
    pictures: int = 50_000  # of the training set
    test_pictures: int = 10_000
    version: int = 1

    def files(self, data_dir: Path) -> list[str]:
        if (data_dir / GREY_FILE).is_file():
            return [GREY_FILE]
        if (data_dir / DIRECTORY).is_dir():
            files = [f"{DIRECTORY}/{name}" for name in (*TRAIN_FILES, TEST_FILE)]
            for file in files:
                if not (data_dir / file).is_file():
                    raise DataError(f"{data_dir / file} is missing: {REMEDY}")
            return files
        if (data_dir / ARCHIVE).is_file():
            return [ARCHIVE]
        raise DataError(f"{data_dir} has no {DIRECTORY}, {ARCHIVE} or {GREY_FILE}: download {URL} and put it there")

    def build(self, data_dir: Path, folder: Path, workers: int, progress: Progress) -> dict[str, Any]:
        files = self.files(data_dir)
        progress("read", 0, 1)
        if files == [GREY_FILE]:
            train, test = read_grey(data_dir / GREY_FILE)
        else:
            train, test = read_binary(data_dir, files)
        progress("read", 1, 1)
        check_counts(data_dir / files[0], "train", train, self.pictures)
        check_counts(data_dir / files[-1], "test", test, self.test_pictures)
        order = np.random.default_rng(0).permutation(self.pictures)
        dev = self.pictures // 10
        examples = {
            "train": make_examples(train, order[:-dev]),
            "dev": make_examples(train, order[-dev:]),
            "test": make_examples(test, np.arange(self.test_pictures)),
        }
        counts = {split: write_split(folder, split, examples[split]) for split in examples}
        return {"source": files[0], "examples": counts}


@dataclass(frozen=True)
class ImagePatches(Image):
    """The pictures of `Image` for `VisionTransformer`."""

    objective: ClassVar[str] = "image-classification"
    name: str = "image-patches"


IMAGE, IMAGE_PATCHES = Image(), ImagePatches()


class Pictures(NamedTuple):
    """Greyscale pictures and their classes."""

    pixels: Array  # uint8 [n, 1024]
    labels: Array  # int64 [n]


def check_counts(path: Path, split: str, pictures: Pictures, expected: int) -> None:
    """Raise a DataError unless there are `expected` pictures, equally many of each class."""
    counts = np.bincount(pictures.labels, minlength=CLASSES)
    if len(pictures.labels) != expected or (counts != expected // CLASSES).any():
        raise DataError(
            f"{path}: the {split} pictures per class are {counts.tolist()} instead of {expected // CLASSES} each: "
            f"{REMEDY}"
        )


def make_examples(pictures: Pictures, indices: Array) -> Iterator[Example]:
    """Yield the pixels and the class of each picture at these indices."""
    for index in indices.tolist():
        yield (pictures.pixels[index],), int(pictures.labels[index])


def read_grey(path: Path) -> tuple[Pictures, Pictures]:
    """Read the training and test pictures of cifar10-grey.npz."""
    names = [f"{part}_{kind}" for part in ("train", "test") for kind in ("images", "labels")]
    train_images, train_labels, test_images, test_labels = read_npz(path, names, MAX_ARRAY, REMEDY)
    for images, labels in ((train_images, train_labels), (test_images, test_labels)):
        if images.dtype != np.uint8 or images.shape[1:] != (SIZE, SIZE) or labels.shape != images.shape[:1]:
            raise DataError(f"{path} is damaged: images must be uint8 [n, {SIZE}, {SIZE}], with n labels")
        if labels.dtype.kind not in "iu" or labels.min(initial=0) < 0 or labels.max(initial=0) >= CLASSES:
            raise DataError(f"{path} is damaged: labels must be integers from 0 to {CLASSES - 1}")
    return _flatten(train_images, train_labels), _flatten(test_images, test_labels)


def _flatten(images: Array, labels: Array) -> Pictures:
    return Pictures(np.ascontiguousarray(images.reshape(len(images), -1)), labels.astype(np.int64))


def read_binary(data_dir: Path, files: list[str]) -> tuple[Pictures, Pictures]:
    """Read the training and test pictures of the binary version of CIFAR-10."""
    batches: dict[str, bytes] = {}
    if files == [ARCHIVE]:
        paths = dict.fromkeys((*TRAIN_FILES, TEST_FILE), data_dir / ARCHIVE)
        batches = dict(read_tar(data_dir / ARCHIVE, _batch_name, MAX_BATCH, REMEDY))
    else:
        paths = {Path(file).name: data_dir / file for file in files}
        for name, path in paths.items():
            if path.stat().st_size > MAX_BATCH:
                raise DataError(f"{path} has {path.stat().st_size:,} bytes, more than {MAX_BATCH:,}: {REMEDY}")
            batches[name] = path.read_bytes()
    pictures = {}
    for name, path in paths.items():
        if name not in batches:
            raise DataError(f"{path} has no {name}: {REMEDY}")
        pictures[name] = _parse_batch(batches[name], name, path)
    train = [pictures[name] for name in TRAIN_FILES]
    pixels = np.concatenate([batch.pixels for batch in train])
    labels = np.concatenate([batch.labels for batch in train])
    return Pictures(pixels, labels), pictures[TEST_FILE]


def _parse_batch(batch: bytes, name: str, path: Path) -> Pictures:
    """Return the pictures of a batch; `name` and `path` are for error messages."""
    if not batch or len(batch) % RECORD:
        raise DataError(f"{path} is damaged: records must have {RECORD} bytes, in {name}: {REMEDY}")
    records = np.frombuffer(batch, dtype=np.uint8).reshape(-1, RECORD)
    labels = records[:, 0].astype(np.int64)
    if labels.max() >= CLASSES:
        raise DataError(f"{path} is damaged: a label is {labels.max()}, in {name}: {REMEDY}")
    return Pictures(to_grey(records[:, 1:].reshape(len(records), 3, -1)), labels)


def _batch_name(member: str) -> str | None:
    name = Path(member).name
    return name if name in (*TRAIN_FILES, TEST_FILE) else None


def to_grey(pixels: Array) -> Array:
    """Return the luma of pixels [n, 3, pixels], uint8."""
    # Integers, so that rounding does not depend on the machine.
    luma = np.tensordot(pixels.astype(np.int64), np.array(LUMA), axes=(1, 0))
    grey: Array = ((luma + 500) // 1000).astype(np.uint8)
    return grey
