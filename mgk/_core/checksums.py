"""Checksums of files, in a manifest per directory.

A manifest lists the accepted SHA-256 checksums of each file. The checksum of a new file is added before the file
replaces the old one, so that a process may be killed at any time: both are accepted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from mgk._core.io import DataError, replacing, write_atomically

MANIFEST = "checksums.json"


def file_checksum(path: str | Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: BinaryIO) -> str:
    """Compute the digest without hashlib.file_digest, which Python 3.10 does not have."""
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def read_checksums(directory: Path) -> dict[str, list[str]]:
    """Return the accepted checksums by file name; empty if the directory has no manifest.

    Raises:
        DataError: The manifest is damaged.
    """
    path = directory / MANIFEST
    try:
        checksums = json.loads(path.read_text(encoding="utf-8"))["sha256"]
        return {str(name): [str(checksum) for checksum in values] for name, values in checksums.items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise DataError(f"{path} is damaged ({reason}): remove it to use the files without verification") from error


def verify(path: Path, listed_as: str | None = None) -> bool:
    """Compare a file with the manifest of its directory.

    Args:
        path: The file.
        listed_as: Name in the manifest. Default: that of the file.

    Returns:
        Whether the manifest lists the file.

    Raises:
        DataError: The file is not one of those that were written, or the manifest is damaged.
        OSError: The file is listed and cannot be read.
    """
    name = listed_as or path.name
    accepted = read_checksums(path.parent).get(name)
    if accepted is None:
        return False
    while (checksum := file_checksum(path)) not in accepted:
        before, accepted = accepted, read_checksums(path.parent).get(name, [])
        if accepted != before or checksum in accepted:
            # A run in progress has replaced the file since the manifest was read.
            continue
        raise DataError(
            f"{path} is damaged: its checksum differs from the one in {MANIFEST}; "
            f"restore the file, or remove {MANIFEST} if you changed the file yourself"
        )
    return True


def add_checksum(path: Path, checksum: str, *, count: int = 2, current: Iterable[Path] = ()) -> None:
    """Add a checksum to the manifest of a directory, before the file is replaced.

    Args:
        path: File that will have the checksum.
        checksum: The checksum.
        count: Number of accepted checksums, the latest ones.
        current: Existing files. Their checksums are accepted too if the manifest has none for `path`.
    """
    try:
        checksums = read_checksums(path.parent)
    except DataError:
        checksums = {}
    accepted = checksums.get(path.name)
    if accepted is None:
        accepted = [file_checksum(file) for file in current]
    checksums[path.name] = list(dict.fromkeys([checksum, *accepted]))[:count]
    text = json.dumps({"sha256": dict(sorted(checksums.items()))}, indent=1)
    manifest = path.parent / MANIFEST
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if manifest.read_text(encoding="utf-8") == text:
            return
    write_atomically(manifest, text)


@contextlib.contextmanager
def replacing_verified(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` on success, as `replacing`, and add its checksum to the manifest."""
    with replacing(path) as temporary:
        yield temporary
        add_checksum(path, file_checksum(temporary), current=[path] if path.exists() else [])


def write_verified(path: Path, text: str) -> None:
    """Write a text file atomically and add its checksum to the manifest."""
    with replacing_verified(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")
