"""Retrieval: predict whether one paper cites another, from the bytes of both; LRA's pairs of the AAN corpus.

`experiments/paper/peerread` provides a substitute that does not need the AAN data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgk._core.io import DataError
from mgk._core.progress import Progress
from mgk.tasks.base import Example, Task, byte_tokens, check_utf8, write_split

FILES = {"train": "new_aan_pairs.train.tsv", "dev": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
REMEDY = "use the three files in tsv_data of LRA's release (github.com/google-research/long-range-arena)"
LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}


@dataclass(frozen=True)
class AAN(Task):
    """Citation between two papers of the ACL Anthology Network."""

    name: str = "retrieval-aan"
    dataset: str = "aan"
    vocab_size: int = 512
    num_classes: int = 2
    max_length: int = 4000
    documents: int = 2
    counts: dict[str, int] = field(default_factory=lambda: {"train": 147_086, "dev": 18_090, "test": 17_437})
    version: int = 1  # version of the conversion to examples

    def files(self, data_dir: Path) -> list[str]:
        for folder in ("aan/", "tsv_data/", ""):
            paths = [f"{folder}{name}" for name in FILES.values()]
            missing = [path for path in paths if not (data_dir / path).is_file()]
            if not missing:
                return paths
            if len(missing) < len(paths):
                raise DataError(f"{data_dir} has no {', '.join(missing)} beside the other AAN pairs: {REMEDY}")
        raise DataError(f"{data_dir / 'aan'} has no {', '.join(FILES.values())}: {REMEDY}")

    def build(self, data_dir: Path, folder: Path, workers: int, progress: Progress) -> dict[str, Any]:
        for split, file in zip(FILES, self.files(data_dir), strict=True):
            pairs = read_pairs(data_dir / file, self.counts[split], self.max_length, progress)
            write_split(folder, split, pairs, self.documents)
        return {"source": "LRA's AAN pairs", "examples": self.counts}


def read_pairs(path: Path, expected: int, max_length: int, progress: Progress) -> Iterator[Example]:
    """Yield the pairs of a file: each line has a label, two ids and two texts.

    Texts are truncated to save disk space, because the same papers occur in many pairs.
    """
    number = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            location = f"{path}, line {number}"
            columns = line.rstrip(b"\r\n").split(b"\t")
            if len(columns) != 5:
                raise DataError(f"{location} has {len(columns)} columns instead of label, two ids, two texts: {REMEDY}")
            if columns[0] not in LABELS:
                raise DataError(f"{location} has label {columns[0][:20]!r} instead of 0 or 1: {REMEDY}")
            texts = [check_utf8(text, f"{location}, text", REMEDY)[:max_length] for text in columns[3:]]
            if number % 1000 == 1:
                progress(path.name, number - 1, expected)
            yield [byte_tokens(text) for text in texts], LABELS[columns[0]]
    if number != expected:
        raise DataError(f"{path} has {number} pairs instead of {expected}: {REMEDY}")
    progress(path.name, expected, expected)
