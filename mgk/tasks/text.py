"""Text: is an IMDb review positive? Byte by byte, from the aclImdb folder or archive.

The official test set is the test set, whole; LRA selects on it, here a fixed tenth of train is dev.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgk._core.io import DataError
from mgk.tasks.base import Example, Progress, Task, byte_tokens, check_utf8, write_split

URL = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
GET_IT = f"get {URL} again and leave it there as it is, or unpacked"
FOLDER = "aclImdb"
ARCHIVES = ("aclImdb*.tar.gz", "aclImdb*.tgz", "aclImdb*.tar.xz", "aclImdb*.tar")
KINDS = ("train/neg", "train/pos", "test/neg", "test/pos")
REVIEW = re.compile(r"(train|test)/(pos|neg)/(\d+)_(\d+)\.txt")
# Reviews of one film have numbers that follow each other and agree more often than others do: dev takes whole runs of
# numbers, so that few of its films are in train. Train and test share no film.
RUN = 50

Name = str  # of a review, as in "train/pos/127_7.txt"


def review_name(path: str) -> Name | None:
    """The part of a path that names a labelled review, None if it is anything else."""
    root, _, name = path.removeprefix("./").partition("/")
    return name if root == FOLDER and REVIEW.fullmatch(name) else None


def order(name: Name) -> bytes:
    """A random but fixed order."""
    return hashlib.sha256(name.encode()).digest()


def run_of(name: Name) -> str:
    split, label, number, _ = parts_of(name)
    return f"{split}/{label}/{int(number) // RUN}"


def parts_of(name: Name) -> tuple[str, ...]:
    match = REVIEW.fullmatch(name)
    assert match is not None
    return match.groups()


def dev_names(names: list[Name], count: int) -> list[Name]:
    """Whole runs in a fixed order, until there are enough; the last run is cut."""
    return sorted(names, key=lambda name: (order(run_of(name)), order(name)))[:count]


@dataclass(frozen=True)
class Text(Task):
    name: str = "text"
    dataset: str = "imdb"
    vocab_size: int = 512
    num_classes: int = 2
    max_length: int = 4000
    documents: int = 1
    reviews: int = 12_500  # of each split and label
    dev: int = 1_250  # of each label, taken out of train
    version: int = 1  # of the way in which the examples are made

    def files(self, data_dir: Path) -> list[str]:
        if (data_dir / FOLDER).is_dir():
            found = [f"{FOLDER}/{kind}/{file}" for kind in KINDS for file in list_folder(data_dir / FOLDER / kind)]
            names = [path for path in found if review_name(path)]
            self._check_counts(data_dir / FOLDER, [path.removeprefix(f"{FOLDER}/") for path in names])
            return names
        archives = sorted(path.name for pattern in ARCHIVES for path in data_dir.glob(pattern) if path.is_file())
        if not archives:
            raise DataError(f"{data_dir} has no {FOLDER} folder or archive: get {URL} and put it there")
        return archives[:1]

    def build(self, data_dir: Path, folder: Path, workers: int, progress: Progress) -> dict[str, Any]:
        files = self.files(data_dir)
        unpacked = (data_dir / FOLDER).is_dir()
        source = data_dir / (FOLDER if unpacked else files[0])
        reviews: dict[Name, bytes] = {}
        for name, text in read_folder(data_dir, files) if unpacked else read_archive(source):
            if len(reviews) % 1000 == 0:
                progress("read", len(reviews), 4 * self.reviews)
            reviews[name] = check_utf8(text, f"{source}: {name}", GET_IT)
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
            write_split(folder, split, examples(reviews, names))
        progress("write", len(splits), len(splits))
        return {"source": source.name, "examples": {split: len(names) for split, names in splits.items()}}

    def _check_counts(self, source: Path, names: Iterable[Name]) -> None:
        counts = Counter(name.rpartition("/")[0] for name in names)
        for kind in KINDS:
            if counts[kind] != self.reviews:
                raise DataError(f"{source}: {kind} has {counts[kind]} reviews instead of {self.reviews}: {GET_IT}")


def list_folder(path: Path) -> list[str]:
    return sorted(os.listdir(path)) if path.is_dir() else []


def examples(reviews: Mapping[Name, bytes], names: list[Name]) -> Iterator[Example]:
    for name in sorted(names, key=order):
        yield (byte_tokens(reviews[name]),), int(parts_of(name)[1] == "pos")


def read_folder(data_dir: Path, files: list[str]) -> Iterator[tuple[Name, bytes]]:
    for file in files:
        yield file.removeprefix(f"{FOLDER}/"), (data_dir / file).read_bytes()


def read_archive(path: Path) -> Iterator[tuple[Name, bytes]]:
    """The labelled reviews of the archive, nothing unpacked to disk."""
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                name = review_name(member.name)
                if name and member.isfile():
                    content = archive.extractfile(member)
                    assert content is not None
                    yield name, content.read()
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        raise DataError(f"{path} is damaged or not complete ({error}): {GET_IT}") from error
