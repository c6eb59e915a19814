"""Files that several processes write, and that nobody ever sees half of."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


class DataError(ValueError):
    """Damaged, truncated or missing data. The message is one line that names the file and a remedy."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to, which then takes the place of the file; nothing is left of it after an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits for the other processes that hold this lock; where there are no locks (Windows, some network file systems)
    it does not wait."""
    with open(path, "wb") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass
        yield
