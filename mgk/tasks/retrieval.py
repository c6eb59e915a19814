"""Retrieval: does one paper cite the other? Two documents, byte by byte, from LRA's AAN pairs.

`peerread.py` has the stand-in for those who do not have AAN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgk._core.io import DataError
from mgk.tasks.base import Example, Progress, Task, byte_tokens, check_utf8, write_split

FILES = {"train": "new_aan_pairs.train.tsv", "dev": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
GET_IT = "take the three files from tsv_data in LRA's release (github.com/google-research/long-range-arena)"
LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}


@dataclass(frozen=True)
class AAN(Task):
    name: str = "retrieval-aan"
    dataset: str = "aan"
    vocab_size: int = 512
    num_classes: int = 2
    max_length: int = 4000
    documents: int = 2
    counts: dict[str, int] = field(default_factory=lambda: {"train": 147_086, "dev": 18_090, "test": 17_437})
    version: int = 1  # of the way in which the examples are made

    def files(self, data_dir: Path) -> list[str]:
        for folder in ("aan/", "tsv_data/", ""):
            paths = [f"{folder}{name}" for name in FILES.values()]
            missing = [path for path in paths if not (data_dir / path).is_file()]
            if not missing:
                return paths
            if len(missing) < len(paths):
                raise DataError(f"{data_dir} has no {', '.join(missing)} beside the other AAN pairs: {GET_IT}")
        raise DataError(f"{data_dir / 'aan'} has no {', '.join(FILES.values())}: {GET_IT}")

    def build(self, data_dir: Path, folder: Path, workers: int, progress: Progress) -> dict[str, Any]:
        for split, file in zip(FILES, self.files(data_dir), strict=True):
            pairs = read_pairs(data_dir / file, self.counts[split], self.max_length, progress)
            write_split(folder, split, pairs, self.documents)
        return {"source": "LRA's AAN pairs", "examples": self.counts}


def read_pairs(path: Path, expected: int, max_length: int, progress: Progress) -> Iterator[Example]:
    """Label, two ids and two texts a line; the texts are cut, or whole papers many times over would fill the disk."""
    number = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            columns = line.rstrip(b"\r\n").split(b"\t")
            if len(columns) != 5:
                raise DataError(f"{where} has {len(columns)} columns instead of label, two ids, two texts: {GET_IT}")
            if columns[0] not in LABELS:
                raise DataError(f"{where} has label {columns[0][:20]!r} instead of 0 or 1: {GET_IT}")
            texts = [check_utf8(text, f"{where}, text", GET_IT)[:max_length] for text in columns[3:]]
            if number % 1000 == 1:
                progress(path.name, number - 1, expected)
            yield [byte_tokens(text) for text in texts], LABELS[columns[0]]
    if number != expected:
        raise DataError(f"{path} has {number} pairs instead of {expected}: {GET_IT}")
    progress(path.name, expected, expected)
