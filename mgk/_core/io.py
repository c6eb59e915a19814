"""File helpers: atomic writes, locks between processes, Markdown tables."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path

# Seconds that `exclusive` retries before it raises: a process that received a stop signal may still be saving.
LOCK_TIMEOUT = 10.0
# Seconds after which unfinished files and directories are taken for those of a killed process.
ABANDONED = 24 * 3600
_held: set[Path] = set()  # locks that this process holds through `exclusive`


class DataError(ValueError):
    """Damaged, truncated or missing data. The message is one line that names the file and a remedy."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` on success and is removed after an error."""
    temporary = path.with_name(f".{path.name}.mgk-{_host()}-{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_stale_temporaries(directory: Path) -> None:
    """Remove the temporary files that killed processes left in a directory.

    Files of running processes stay. On other hosts a process cannot be checked: its files stay for a day.
    """
    for path in directory.glob(".*.tmp"):
        match = re.fullmatch(r"\..+\.mgk-(\w+)-(\d+)\.tmp", path.name)
        if match is None:
            continue
        with contextlib.suppress(OSError):
            is_old = time.time() - path.stat().st_mtime > ABANDONED
            if is_old if match[1] != _host() else not _is_running(int(match[2])):
                path.unlink()


def _host() -> str:
    return re.sub(r"\W", "_", platform.node()) or "_"


def _is_running(process: int) -> bool:
    if os.name != "posix":
        # On Windows, signal 0 would end the process.
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that readers see the old or the new text, never a part."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; has no effect on systems without locks (Windows, some network mounts).

    The file is created if it is missing. An existing one keeps its contents, and a symbolic link is an error.
    """
    descriptor = _open_lock(path)
    try:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive(path: Path, subject: str, remedy: str) -> Iterator[None]:
    """Hold a lock for as long as a process uses a directory; nested calls of one process share it.

    The system releases the lock when the process ends, also by SIGKILL. Has no effect on systems without locks.

    Args:
        path: Lock file. Its text is the process that holds the lock.
        subject: What the lock protects, for the error message.
        remedy: What to do if another process holds the lock.

    Raises:
        ValueError: Another process holds the lock for longer than LOCK_TIMEOUT seconds.
    """
    path = path.parent.resolve() / path.name
    if path in _held:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(_open_lock(path), "r+", encoding="utf-8") as file:
        deadline = time.monotonic() + LOCK_TIMEOUT
        while not _try_lock(file.fileno()):
            if time.monotonic() > deadline:
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise ValueError(f"{subject} is in use by {holder}: {remedy}")
            time.sleep(0.1)
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        _held.add(path)
        try:
            yield
        finally:
            _held.remove(path)


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        if path.is_symlink():
            raise DataError(f"{path} is a symbolic link, not a lock file: remove it") from error
        raise


def _try_lock(file: int) -> bool:
    """Take the lock without blocking; return False if another process holds it. Succeeds on systems without locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        pass
    return True


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
