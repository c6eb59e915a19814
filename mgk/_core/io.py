"""File helpers: atomic writes, locks between processes, Markdown tables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


class DataError(ValueError):
    """Damaged, truncated or missing data. The message is one line that names the file and a remedy."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` on success and is removed after an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that readers see the old or the new text, never a part."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; has no effect on systems without locks (Windows, some network mounts).

    The file is created if it is missing. An existing one keeps its contents, and a symbolic link is an error.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        if path.is_symlink():
            raise DataError(f"{path} is a symbolic link, not a lock file: remove it") from error
        raise
    try:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def markdown_table(lines: list[list[str]]) -> str:
    """Format a Markdown table; the first line is the header."""
    header, *rows = lines
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def format_number(value: float | None, digits: int = 2) -> str:
    """Format a number with a minus sign (not a hyphen), and None as a dash."""
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−")


def format_signed(value: float | None, digits: int = 2) -> str:
    """Format a number with its sign, a rounded zero without one, and None as a dash."""
    if value is None:
        return "–"
    text = f"{value:+.{digits}f}"
    return text.replace("-", "−") if float(text) else text[1:]
