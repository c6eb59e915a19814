"""Base class of tasks, and storage of their examples as memory-mapped arrays."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from mgk._core.io import DataError
from mgk._core.progress import Progress, no_progress
from mgk._core.validation import one_of, positive_integer
from mgk.tasks.data_cache import (
    find_prepared,
    json_checksum,
    prepare_directory,
    read_manifest,
)

PAD = 0  # token id of padding in every task
ARRAYS = ("tokens", "offsets", "labels")

Array = NDArray[Any]
Example = tuple[Sequence[Array], int]  # token ids of each document, label


@dataclass(frozen=True)
class Split:
    """Labelled examples of one or two documents each.

    Attributes:
        tokens: Token ids of all documents in sequence, uint8 or uint16.
        offsets: Start of each document in `tokens`, and the end of the last, int64 [documents * n + 1].
        labels: Classes, int64 [n].
        documents: Documents per example, 2 for retrieval.

    Examples:
        >>> import numpy as np
        >>> from mgk.tasks import Split
        >>> tokens = np.array([1, 2, 3, 4, 5], dtype=np.uint8)  # documents [1, 2, 3] and [4, 5]
        >>> split = Split(tokens, offsets=np.array([0, 3, 5]), labels=np.array([0, 1]))
        >>> len(split)
        2
    """

    tokens: Array
    offsets: Array
    labels: Array
    documents: int = 1

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> Array:
        """Lengths of the documents, int64 [n], or [n, 2] for two documents.

        Examples:
            >>> import numpy as np
            >>> from mgk.tasks import Split
            >>> tokens = np.array([1, 2, 3, 4, 5], dtype=np.uint8)  # documents [1, 2, 3] and [4, 5]
            >>> split = Split(tokens, offsets=np.array([0, 3, 5]), labels=np.array([0, 1]))
            >>> split.lengths.tolist()
            [3, 2]
        """
        lengths = np.diff(self.offsets)
        return lengths if self.documents == 1 else lengths.reshape(-1, self.documents)

    def class_shares(self, num_classes: int) -> Array:
        """Return the share of each class, [num_classes]. The largest is the accuracy of a constant prediction.

        Examples:
            >>> import numpy as np
            >>> from mgk.tasks import Split
            >>> tokens = np.array([1, 2, 3, 4, 5], dtype=np.uint8)  # documents [1, 2, 3] and [4, 5]
            >>> split = Split(tokens, offsets=np.array([0, 3, 5]), labels=np.array([0, 1]))
            >>> split.class_shares(num_classes=4).tolist()
            [0.5, 0.5, 0.0, 0.0]
        """
        return np.bincount(self.labels, minlength=num_classes) / max(len(self), 1)

    def batch(self, indices: Any, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a padded batch of examples.

        Args:
            indices: Indices of the examples, [n].
            length: Length to which documents are truncated and padded; None pads to the longest of the batch.

        Returns:
            Tokens, int64 [n, L] or [n, 2, L], padded with PAD; lengths, int64 [n] or [n, 2]; labels, int64 [n].

        Examples:
            >>> import numpy as np
            >>> from mgk.tasks import Split
            >>> tokens = np.array([1, 2, 3, 4, 5], dtype=np.uint8)  # documents [1, 2, 3] and [4, 5]
            >>> split = Split(tokens, offsets=np.array([0, 3, 5]), labels=np.array([0, 1]))
            >>> tokens, lengths, labels = split.batch([1, 0])
            >>> tokens
            tensor([[4, 5, 0],
                    [1, 2, 3]])
        """
        rows = np.asarray(indices, dtype=np.int64).reshape(-1)
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self):
            raise ValueError(f"indices must be at least 0 and below {len(self)}, got {rows.min()} to {rows.max()}")
        if length is not None:
            positive_integer("length", length)
        parts = (rows[:, None] * self.documents + np.arange(self.documents)).reshape(-1)
        starts = self.offsets[parts]
        lengths = self.offsets[parts + 1] - starts
        if length is not None:
            lengths = np.minimum(lengths, length)
        width = length if length is not None else int(lengths.max(initial=0))
        tokens = np.full((len(parts), width), PAD, dtype=np.int64)
        for row, start, size in zip(tokens, starts.tolist(), lengths.tolist(), strict=True):
            row[:size] = self.tokens[start : start + size]
        shape = (len(rows),) if self.documents == 1 else (len(rows), self.documents)
        return (
            torch.from_numpy(tokens.reshape(*shape, width)),
            torch.from_numpy(lengths.reshape(shape)),
            torch.from_numpy(np.array(self.labels[rows])),
        )


class Task(ABC):
    """A data source and its conversion to examples.

    A subclass is a frozen dataclass. Its fields are settings that enter the checksum of the prepared data.

    Attributes:
        name: Name of the task in recipes.
        objective: Key of `mgk.training.objectives.OBJECTIVES`.
        dataset: Name of the data set in results.
        vocab_size: Number of token ids.
        num_classes: Number of labels.
        max_length: Maximum length of a document in tokens.
        documents: Documents per example.

    Examples:
        >>> from mgk.tasks import get_task
        >>> task = get_task("listops")
        >>> task.num_classes, task.splits
        (10, ('test', 'dev', 'train', 'fresh'))
    """

    name: str
    objective: ClassVar[str] = "classification"
    dataset: str
    vocab_size: int
    num_classes: int
    max_length: int
    documents: int

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "dev", "test")

    @abstractmethod
    def files(self, data_dir: Path) -> list[str]:
        """Return the source files relative to `data_dir`; empty if the data is generated.

        Raises:
            DataError: If a file is missing.

        Examples:
            >>> from pathlib import Path
            >>> from mgk.tasks import get_task
            >>> get_task("listops").files(Path("data"))  # generated
            []
        """

    @abstractmethod
    def build(self, data_dir: Path, folder: Path, workers: int, progress: Progress) -> dict[str, Any]:
        """Write all splits to `folder` and return the metadata to store with them.

        Examples:
            >>> from pathlib import Path
            >>> from mgk.tasks.listops import LISTOPS_SHORT, ListOps
            >>> task = ListOps(name="tiny", counts={"train": 8, "dev": 4}, rules=LISTOPS_SHORT.rules, reads_tsv=False)
            >>> Path("folder").mkdir()
            >>> task.build(Path("data"), Path("folder"), workers=1, progress=lambda stage, done, total: None)
            {'source': 'generated, seed 0', 'examples': {'train': 8, 'dev': 4}}
        """

    def prepare(self, data_dir: Path, workers: int = 1, progress: Progress = no_progress) -> None:
        """Prepare the data if necessary, and verify source and prepared data by checksum.

        Args:
            data_dir: Data directory.
            workers: Number of processes.
            progress: Called with stage, done and total.

        Examples:
            >>> from pathlib import Path
            >>> from mgk.tasks.listops import LISTOPS_SHORT, ListOps
            >>> task = ListOps(name="tiny", counts={"train": 8, "dev": 4}, rules=LISTOPS_SHORT.rules, reads_tsv=False)
            >>> task.prepare(Path("data"))
        """
        self._prepared_folder(Path(data_dir), positive_integer("workers", workers), progress, verify=True)

    def split(self, data_dir: Path, name: str) -> Any:
        """Return one of `splits`, prepared first if necessary, as returned by `read`.

        Examples:
            >>> from pathlib import Path
            >>> from mgk.tasks.listops import LISTOPS_SHORT, ListOps
            >>> task = ListOps(name="tiny", counts={"train": 8, "dev": 4}, rules=LISTOPS_SHORT.rules, reads_tsv=False)
            >>> len(task.split(Path("data"), "train"))
            8
        """
        one_of("split", name, self.splits)
        return self.read(self._prepared_folder(Path(data_dir)), name)

    def read(self, folder: Path, name: str) -> Any:
        """Read a split from prepared data."""
        return read_split(folder, name, self.documents)

    def metadata(self, data_dir: Path) -> dict[str, Any]:
        """Return the metadata of `build`: origin, number of examples and further counts.

        Examples:
            >>> from pathlib import Path
            >>> from mgk.tasks.listops import LISTOPS_SHORT, ListOps
            >>> task = ListOps(name="tiny", counts={"train": 8, "dev": 4}, rules=LISTOPS_SHORT.rules, reads_tsv=False)
            >>> task.metadata(Path("data"))
            {'source': 'generated, seed 0', 'examples': {'train': 8, 'dev': 4}}
        """
        return dict(read_manifest(self._prepared_folder(Path(data_dir)))["facts"])

    def checksum(self, data_dir: Path) -> str:
        """Return a checksum of the prepared examples, independent of how the source was packaged.

        Examples:
            >>> from pathlib import Path
            >>> from mgk.tasks.listops import LISTOPS_SHORT, ListOps
            >>> task = ListOps(name="tiny", counts={"train": 8, "dev": 4}, rules=LISTOPS_SHORT.rules, reads_tsv=False)
            >>> len(task.checksum(Path("data")))
            12
        """
        return json_checksum(read_manifest(self._prepared_folder(Path(data_dir)))["files"])[:12]

    def baselines(self, data_dir: Path) -> dict[str, dict[str, float]]:
        """Return the dev and test accuracy of simple methods; empty if the task has none.

        Examples:
            >>> from pathlib import Path
            >>> from mgk.tasks.listops import LISTOPS_SHORT, ListOps
            >>> task = ListOps(name="tiny", counts={"train": 8, "dev": 4}, rules=LISTOPS_SHORT.rules, reads_tsv=False)
            >>> task.baselines(Path("data"))
            {}
        """
        return dict(self.metadata(data_dir).get("baselines", {}))

    def _prepared_folder(
        self, data_dir: Path, workers: int | None = None, progress: Progress = no_progress, verify: bool = False
    ) -> Path:
        """Return the directory of the prepared data, which is built first if it is missing or outdated."""
        assert is_dataclass(self)
        # Download instructions do not affect the data.
        settings = {name: value for name, value in asdict(self).items() if name != "source"}
        try:
            files = self.files(data_dir)
        except DataError as error:
            if not data_dir.is_dir():
                raise DataError(f"{error} (the directory {data_dir} does not exist)") from None
            prepared = find_prepared(data_dir, self.name, settings, verify)
            if prepared is None:
                raise
            return prepared
        try:
            return prepare_directory(
                data_dir,
                self.name,
                settings=settings,
                files=files,
                build=lambda folder: self.build(data_dir, folder, workers or os.cpu_count() or 1, progress),
                progress=progress,
                verify=verify,
            )
        except OSError as error:
            path, reason = error.filename or data_dir, error.strerror or error
            raise DataError(f"{path}: {reason}; the data must be readable and {data_dir / '.mgk'} writable") from error


def write_array(path: Path, parts: Iterable[Array]) -> int:
    """Write the concatenation of 1-d arrays of one dtype as a .npy file, and return its length.

    The parts are a stream, which need not fit in memory. Without parts, the file has dtype uint8.
    """
    dtype: np.dtype[Any] | None = None
    size = 0
    with path.open("wb") as file:
        file.write(_npy_header(np.dtype(np.uint8), 0))
        for part in parts:
            dtype = dtype or part.dtype
            if part.dtype != dtype:
                raise ValueError(f"arrays must have one dtype, got {dtype} and {part.dtype}")
            file.write(part.tobytes())
            size += len(part)
        file.seek(0)
        file.write(_npy_header(dtype or np.dtype(np.uint8), size))
    return size


def _npy_header(dtype: np.dtype[Any], size: int) -> bytes:
    """Return the header of a 1-d .npy file: always 128 bytes, so that it can be overwritten later."""
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': ({size},), }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode() + b"\n"


def write_split(folder: Path, name: str, examples: Iterable[Example], documents: int = 1) -> int:
    """Write examples as a stream, which need not fit in memory, and return their number.

    Args:
        folder: Directory of the files.
        name: Name of the split.
        examples: Token ids of each document, and the label.
        documents: Documents per example.
    """
    offsets = [0]
    labels: list[int] = []

    def documents_of_examples() -> Iterator[Array]:
        for parts, label in examples:
            if len(parts) != documents:
                raise ValueError(f"an example must have {documents} documents, got {len(parts)}")
            for part in parts:
                if part.dtype not in (np.uint8, np.uint16):
                    raise ValueError(f"tokens must be uint8 or uint16, got {part.dtype}")
                offsets.append(offsets[-1] + len(part))
                yield part
            labels.append(label)

    write_array(folder / f"{name}.tokens.npy", documents_of_examples())
    np.save(folder / f"{name}.offsets.npy", np.asarray(offsets, dtype=np.int64))
    np.save(folder / f"{name}.labels.npy", np.asarray(labels, dtype=np.int64))
    return len(labels)


def read_split(folder: Path, name: str, documents: int = 1) -> Split:
    """Read a split that `write_split` has written, memory-mapped."""
    try:
        arrays = [np.load(folder / f"{name}.{array}.npy", mmap_mode="r", allow_pickle=False) for array in ARRAYS]
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / name}.*.npy cannot be read: remove {folder} to prepare it again") from error
    # Views as ndarray, because slicing np.memmap is slow.
    tokens, offsets, labels = (array.view(np.ndarray) for array in arrays)
    if len(offsets) != documents * len(labels) + 1 or offsets[-1] != len(tokens):
        raise DataError(f"{folder / name}.*.npy do not match each other: remove {folder} to prepare it again")
    return Split(tokens, offsets, labels, documents)


def byte_tokens(text: bytes) -> Array:
    """Return byte + 1 as uint8; valid UTF-8 has no byte above 0xF4."""
    return np.frombuffer(text, dtype=np.uint8) + np.uint8(1)


def check_utf8(text: bytes, location: str, remedy: str) -> bytes:
    """Return the text, or raise a DataError if it is empty or not UTF-8.

    Args:
        text: Text to check.
        location: Source of the text, for the message.
        remedy: Suggested fix, for the message.
    """
    if not text.strip():
        raise DataError(f"{location} is empty: {remedy}")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{location} is not UTF-8 (byte {error.start}): {remedy}") from error
    return text
