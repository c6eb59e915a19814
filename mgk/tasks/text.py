"""Text: predict whether an IMDb review is positive, from its bytes; read from the aclImdb directory or archive.

The test split is the official test set. LRA selects models on it; here the dev split is a fixed tenth of train.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgk._core.io import DataError
from mgk._core.progress import Progress
from mgk.tasks.archives import read_tar
from mgk.tasks.base import Example, Task, byte_tokens, check_utf8, write_split

URL = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
REMEDY = f"download {URL} again and put it there, packed or unpacked"
DIRECTORY = "aclImdb"
ARCHIVES = ("aclImdb*.tar.gz", "aclImdb*.tgz", "aclImdb*.tar.xz", "aclImdb*.tar")
FOLDERS = ("train/neg", "train/pos", "test/neg", "test/pos")
REVIEW = re.compile(r"(train|test)/(pos|neg)/(\d+)_(\d+)\.txt")
# Reviews of one film have consecutive numbers and similar labels. The dev split consists of runs of this many
# consecutive numbers, so that few of its films are in train. Train and test share no film.
RUN_LENGTH = 50
# Bytes of the longest review in an archive; IMDb's longest review has 14 kB.
MAX_MEMBER = 1 << 20

Name = str  # name of a review: "train/pos/127_7.txt"


def review_name(path: str) -> Name | None:
    """Return the part of a path that names a labelled review, or None for other files."""
    root, _, name = path.removeprefix("./").partition("/")
    return name if root == DIRECTORY and REVIEW.fullmatch(name) else None


def shuffle_key(name: Name) -> bytes:
    """Return a sort key for a fixed pseudo-random order."""
    return hashlib.sha256(name.encode()).digest()


def run_key(name: Name) -> str:
    """Return the key of the run of consecutive reviews that a review belongs to."""
    split, label, number, _ = parse_name(name)
    return f"{split}/{label}/{int(number) // RUN_LENGTH}"


def parse_name(name: Name) -> tuple[str, ...]:
    """Return split, label, number and rating of a review."""
    match = REVIEW.fullmatch(name)
    assert match is not None
    return match.groups()


def dev_names(names: list[Name], count: int) -> list[Name]:
    """Return `count` names: whole runs in a fixed order, the last run truncated."""
    return sorted(names, key=lambda name: (shuffle_key(run_key(name)), shuffle_key(name)))[:count]


@dataclass(frozen=True)
class Text(Task):
    """Sentiment of IMDb reviews."""

    name: str = "text"
    dataset: str = "imdb"
    vocab_size: int = 512
    num_classes: int = 2
    max_length: int = 4000
    documents: int = 1
    reviews: int = 12_500  # per split and label
    dev: int = 1_250  # per label, taken from train
    version: int = 1  # version of the conversion to examples

    def files(self, data_dir: Path) -> list[str]:
        if (data_dir / DIRECTORY).is_dir():
            paths = [
                f"{DIRECTORY}/{folder}/{file}"
                for folder in FOLDERS
                for file in list_folder(data_dir / DIRECTORY / folder)
            ]
            reviews = [path for path in paths if review_name(path)]
            self._check_counts(data_dir / DIRECTORY, [path.removeprefix(f"{DIRECTORY}/") for path in reviews])
            return reviews
        archives = sorted(path.name for pattern in ARCHIVES for path in data_dir.glob(pattern) if path.is_file())
        if not archives:
            raise DataError(f"{data_dir} has no {DIRECTORY} directory or archive: download {URL} and put it there")
        return archives[:1]

    def build(self, data_dir: Path, folder: Path, workers: int, progress: Progress) -> dict[str, Any]:
        files = self.files(data_dir)
        is_unpacked = (data_dir / DIRECTORY).is_dir()
        source = data_dir / (DIRECTORY if is_unpacked else files[0])
        reviews: dict[Name, bytes] = {}
        for name, text in read_folder(data_dir, files) if is_unpacked else read_archive(source):
            if len(reviews) % 1000 == 0:
                progress("read", len(reviews), 4 * self.reviews)
            reviews[name] = check_utf8(text, f"{source}: {name}", REMEDY)
        self._check_counts(source, reviews)
        train = [name for name in reviews if name.startswith("train/")]
        dev = {
            name
            for label in ("neg", "pos")
            for name in dev_names([name for name in train if name.startswith(f"train/{label}/")], self.dev)
        }
        splits = {
            "train": [name for name in train if name not in dev],
            "dev": list(dev),
            "test": [name for name in reviews if name.startswith("test/")],
        }
        for done, (split, names) in enumerate(splits.items()):
            progress("write", done, len(splits))
            write_split(folder, split, make_examples(reviews, names))
        progress("write", len(splits), len(splits))
        return {"source": source.name, "examples": {split: len(names) for split, names in splits.items()}}

    def _check_counts(self, source: Path, names: Iterable[Name]) -> None:
        counts = Counter(name.rpartition("/")[0] for name in names)
        for folder in FOLDERS:
            if counts[folder] != self.reviews:
                raise DataError(f"{source}: {folder} has {counts[folder]} reviews instead of {self.reviews}: {REMEDY}")


def list_folder(path: Path) -> list[str]:
    """Return the sorted names of the files in a folder; empty if it does not exist."""
    return sorted(os.listdir(path)) if path.is_dir() else []


def make_examples(reviews: Mapping[Name, bytes], names: list[Name]) -> Iterator[Example]:
    """Yield the bytes and the label of each review, in a fixed pseudo-random order."""
    for name in sorted(names, key=shuffle_key):
        yield (byte_tokens(reviews[name]),), int(parse_name(name)[1] == "pos")


def read_folder(data_dir: Path, files: list[str]) -> Iterator[tuple[Name, bytes]]:
    """Yield name and text of the reviews in the unpacked directory."""
    for file in files:
        yield file.removeprefix(f"{DIRECTORY}/"), (data_dir / file).read_bytes()


def read_archive(path: Path) -> Iterator[tuple[Name, bytes]]:
    """Yield the labelled reviews of an archive without unpacking it to disk."""
    return read_tar(path, review_name, MAX_MEMBER, REMEDY)
