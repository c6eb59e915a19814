"""Examples on disk: written once, memory-mapped, and cached under the data directory with checksums."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from mgk._core.io import DataError, locked, write_atomically
from mgk._core.validation import one_of, positive_integer

PAD = 0  # token id of padding in every task
FORMAT = 1  # of the files in a cache: another number, another cache
ARRAYS = ("tokens", "offsets", "labels")
MANIFEST = "cache.json"
ABANDONED = 24 * 3600  # seconds after which an unfinished cache counts as left behind by a killed process

Progress = Callable[[str, int, int], None]  # stage, done, total
Array = NDArray[Any]
Example = tuple[Sequence[Array], int]  # token ids of each document, label


def no_progress(stage: str, done: int, total: int) -> None:
    """The progress callback of those who do not watch."""


@dataclass(frozen=True)
class Split:
    """Examples on disk: all token ids one after another, where each document starts, and the labels.

    tokens: uint8 or uint16.  offsets: int64 [documents * n + 1].  labels: int64 [n].
    documents: token sequences per example: 1, or 2 for retrieval.
    """

    tokens: Array
    offsets: Array
    labels: Array
    documents: int = 1

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> Array:
        """int64 [n], or [n, 2] for two documents."""
        lengths = np.diff(self.offsets)
        return lengths if self.documents == 1 else lengths.reshape(-1, self.documents)

    def class_shares(self, num_classes: int) -> Array:
        """The share of each class, [num_classes]; the largest is what a constant answer gets right."""
        return np.bincount(self.labels, minlength=num_classes) / max(len(self), 1)

    def batch(self, indices: Any, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens int64 [n, L] or [n, 2, L], lengths int64 [n] or [n, 2], labels int64 [n].

        PAD follows the end of a document; longer ones are truncated to `length`; None pads to the longest of the batch.
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
    """Where the data comes from and how an example is made.

    A subclass is a frozen dataclass whose fields are its settings: other settings, another cache.
    """

    name: str
    objective: ClassVar[str] = "classification"  # what a model of it learns: a row of OBJECTIVES
    dataset: str  # the name to report
    vocab_size: int
    num_classes: int
    max_length: int
    documents: int

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "dev", "test")

    @abstractmethod
    def files(self, data_dir: Path) -> list[str]:
        """The files that it reads, relative to data_dir, none if it is generated; DataError if one is missing."""

    @abstractmethod
    def build(self, data_dir: Path, folder: Path, workers: int, progress: Progress) -> dict[str, Any]:
        """Writes every split to the folder; what it returns is kept for `facts`."""

    def prepare(self, data_dir: Path, workers: int = 1, progress: Progress = no_progress) -> None:
        """Makes what is missing, and checks source and cache by checksum."""
        self._folder(Path(data_dir), positive_integer("workers", workers), progress, verify=True)

    def split(self, data_dir: Path, name: str) -> Any:
        """One of `splits`, made first if need be: a Split, or what else `read` makes."""
        one_of("split", name, self.splits)
        return self.read(self._folder(Path(data_dir)), name)

    def read(self, folder: Path, name: str) -> Any:
        """A split from its cache."""
        return read_split(folder, name, self.documents)

    def metadata(self, data_dir: Path) -> dict[str, Any]:
        """What was counted when the examples were made: where they come from, how many, what was left out."""
        return dict(read_manifest(self._folder(Path(data_dir)))["facts"])

    def checksum(self, data_dir: Path) -> str:
        """Of the examples themselves, however their source was packed: other data, another key."""
        return checksum_of(read_manifest(self._folder(Path(data_dir)))["files"])[:12]

    def baselines(self, data_dir: Path) -> dict[str, dict[str, float]]:
        """Accuracy of simple methods on dev and test, where the task has some."""
        return dict(self.metadata(data_dir).get("baselines", {}))

    def _folder(
        self, data_dir: Path, workers: int | None = None, progress: Progress = no_progress, verify: bool = False
    ) -> Path:
        assert is_dataclass(self)
        # Words on where to get the data make no other data.
        settings = {name: value for name, value in asdict(self).items() if name != "source"}
        try:
            files = self.files(data_dir)
        except DataError as error:
            if not data_dir.is_dir():
                raise DataError(f"{error} (the folder {data_dir} does not exist)") from None
            prepared = find_prepared(data_dir, self.name, settings, verify)
            if prepared is None:
                raise
            return prepared
        try:
            return cached(
                data_dir,
                self.name,
                settings=settings,
                files=files,
                build=lambda folder: self.build(data_dir, folder, workers or os.cpu_count() or 1, progress),
                progress=progress,
                verify=verify,
            )
        except OSError as error:
            place, reason = error.filename or data_dir, error.strerror or error
            raise DataError(f"{place}: {reason}; the data must be readable and {data_dir / '.mgk'} writable") from error


def npy_header(dtype: np.dtype[Any], size: int) -> bytes:
    """NumPy's header of a vector, always 128 bytes: written again once the size is known."""
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': ({size},), }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode() + b"\n"


def write_split(folder: Path, name: str, examples: Iterable[Example], documents: int = 1) -> int:
    """Writes the examples as they come, whatever fits in memory or not, and returns how many there were."""
    ends, position = [0], 0
    labels: list[int] = []
    dtype: np.dtype[Any] = np.dtype(np.uint8)
    with open(folder / f"{name}.tokens.npy", "wb") as file:
        file.write(npy_header(dtype, 0))
        for parts, label in examples:
            if len(parts) != documents:
                raise ValueError(f"an example must have {documents} documents, got {len(parts)}")
            for part in parts:
                if not labels and len(ends) == 1:
                    dtype = part.dtype
                if part.dtype != dtype or dtype not in (np.uint8, np.uint16):
                    raise ValueError(f"tokens must be uint8 or uint16 throughout, got {part.dtype}")
                file.write(part.tobytes())
                position += len(part)
                ends.append(position)
            labels.append(label)
        file.seek(0)
        file.write(npy_header(dtype, position))
    np.save(folder / f"{name}.offsets.npy", np.asarray(ends, dtype=np.int64))
    np.save(folder / f"{name}.labels.npy", np.asarray(labels, dtype=np.int64))
    return len(labels)


def read_split(folder: Path, name: str, documents: int = 1) -> Split:
    try:
        arrays = [np.load(folder / f"{name}.{array}.npy", mmap_mode="r", allow_pickle=False) for array in ARRAYS]
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / name}.*.npy cannot be read: remove {folder} to have it made again") from error
    # A view: np.memmap itself is slow to slice.
    tokens, offsets, labels = (array.view(np.ndarray) for array in arrays)
    if len(offsets) != documents * len(labels) + 1 or offsets[-1] != len(tokens):
        raise DataError(f"{folder / name}.*.npy do not fit together: remove {folder} to have them made again")
    return Split(tokens, offsets, labels, documents)


def byte_tokens(text: bytes) -> Array:
    """Byte + 1 as uint8; valid UTF-8 has no byte above 0xF4."""
    return np.frombuffer(text, dtype=np.uint8) + np.uint8(1)


def check_utf8(text: bytes, where: str, what_to_do: str) -> bytes:
    """The text, if it is UTF-8 and not empty."""
    if not text.strip():
        raise DataError(f"{where} is empty: {what_to_do}")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 (byte {error.start}): {what_to_do}") from error
    return text


def file_checksum(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: BinaryIO) -> str:
    """hashlib.file_digest, which Python 3.10 does not have."""
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def cached(
    data_dir: Path,
    name: str,
    *,
    settings: dict[str, Any],
    files: Sequence[str],
    build: Callable[[Path], dict[str, Any]],
    progress: Progress = no_progress,
    verify: bool = False,
) -> Path:
    """The folder <data_dir>/.mgk/<name>/<key> with what `build` writes, made if it is not there.

    The key is a checksum of the settings and of the source, so a folder never changes once it has its name: a changed
    source gets another one. `verify` reads source and cache in full; otherwise sizes and times of change must do.
    """
    root = data_dir / ".mgk" / name
    root.mkdir(parents=True, exist_ok=True)
    source = source_checksum(root, data_dir, files, progress, verify)
    manifest = {"format": FORMAT, "settings": settings, "source": source}
    folder = root / checksum_of(manifest)[:16]
    if intact(folder, verify):
        return folder
    with locked(root / f".{folder.name}.lock"):
        # Another process may have made it while this one waited.
        if not intact(folder, verify=True):
            _make(root, folder, manifest, build)
    return folder


def find_prepared(data_dir: Path, name: str, settings: dict[str, Any], verify: bool) -> Path | None:
    """What was prepared with these settings, where its source is not, as on a machine that only .mgk was copied to.
    None unless there is exactly one."""
    wanted = json.loads(json.dumps(settings))
    found = []
    for folder in sorted((data_dir / ".mgk" / name).glob("[0-9a-f]*")):
        if intact(folder, verify):
            manifest = read_manifest(folder)
            # Earlier ones have the words on where to get the data among their settings.
            made_with = {key: value for key, value in manifest.get("settings", {}).items() if key != "source"}
            if manifest.get("format") == FORMAT and made_with == wanted:
                found.append(folder)
    return found[0] if len(found) == 1 else None


def _make(root: Path, folder: Path, manifest: dict[str, Any], build: Callable[[Path], dict[str, Any]]) -> None:
    for left_behind in root.glob(".making-*"):
        with contextlib.suppress(OSError):
            if time.time() - left_behind.stat().st_mtime > ABANDONED:
                shutil.rmtree(left_behind, ignore_errors=True)
    making = root / f".making-{uuid.uuid4().hex}"
    making.mkdir()
    try:
        metadata = build(making)
        written = {
            path.name: {"bytes": path.stat().st_size, "sha256": file_checksum(path)}
            for path in sorted(making.iterdir())
        }
        (making / MANIFEST).write_text(json.dumps({**manifest, "facts": metadata, "files": written}, indent=1))
        if folder.exists():
            # Damaged, or it would have been used. Moved away first: a folder is renamed onto nothing or not at all.
            damaged = root / f".making-{uuid.uuid4().hex}"
            folder.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        try:
            making.rename(folder)
        except OSError:
            # Without locks (some network file systems) another process may have been first: the same contents.
            if not intact(folder, verify=True):
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    manifest = json.loads((folder / MANIFEST).read_text())
    if not isinstance(manifest, dict):
        raise ValueError(f"{folder / MANIFEST} is not a manifest")
    return manifest


def intact(folder: Path, verify: bool) -> bool:
    """Whether the cache is there with all its files at their sizes, and at their checksums with `verify`."""
    try:
        for name, written in read_manifest(folder)["files"].items():
            if (folder / name).stat().st_size != written["bytes"]:
                return False
            if verify and file_checksum(folder / name) != written["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def checksum_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def source_checksum(root: Path, data_dir: Path, files: Sequence[str], progress: Progress, verify: bool) -> str:
    """A checksum of names and contents, remembered under sizes and times of change."""
    # os.path on purpose: pathlib takes seconds for IMDb's 50,000 files.
    paths = [os.path.join(data_dir, name) for name in files]
    stats = [os.stat(path) for path in paths]
    seen = checksum_of([[n, s.st_size, s.st_mtime_ns] for n, s in zip(files, stats, strict=True)])
    memory = root / "source.json"
    if not verify:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            remembered = json.loads(memory.read_text())
            if remembered["seen"] == seen:
                return str(remembered["checksum"])
    contents = []
    for done, path in enumerate(paths):
        if done % 1000 == 0:
            progress("checksum", done, len(paths))
        contents.append(file_checksum(path))
    if paths:
        progress("checksum", len(paths), len(paths))
    checksum = checksum_of([list(files), contents])
    write_atomically(memory, json.dumps({"seen": seen, "checksum": checksum}))
    return checksum
