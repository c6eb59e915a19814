"""File helpers: durable atomic writes, and locks between processes."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Seconds that `exclusive` retries before it raises: a process that received a stop signal may not have noted it yet.
LOCK_TIMEOUT = 10.0
# Last words of the text of a lock whose holder is about to end.
STOPPING = "which is saving and stopping"
# Seconds after which unfinished files and directories are taken for those of a killed process.
ABANDONED = 24 * 3600
_held: dict[Path, TextIO] = {}  # locks that this process holds through `exclusive`


class DataError(ValueError):
    """Damaged, truncated or missing data. The message is one line that names the file and a remedy."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` on success and is removed after an error.

    The new file is on the disk before the rename, and the rename before the function returns: after a power failure
    `path` is the old or the new file.

    Raises:
        OSError: The file cannot be written, also where a library reports this as another error. Names `path`.
    """
    temporary = temporary_of(path)
    try:
        with system_errors_of(path):
            yield temporary
            sync_file(temporary)
            temporary.replace(path)
            sync_directory(path.parent)
    finally:
        # Without this, a failed removal would hide the error that caused it.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def system_errors_of(path: Path) -> Iterator[None]:
    """Raise errors of the system as OSError with the name of a file.

    torch.save and safetensors report a full disk as RuntimeError and SafetensorError.
    """
    try:
        yield
    except Exception as error:
        number = _error_number(error)
        if number is None or (isinstance(error, OSError) and error.filename is not None):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def _error_number(error: BaseException) -> int | None:
    """Return the error number of an OSError, of an OSError in the context of an error, or in a Rust message."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause.errno
        cause = cause.__cause__ or cause.__context__
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


def sync_file(path: Path) -> None:
    """Write the cached contents of a file to the disk."""
    # Windows flushes only files that are open for writing.
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Write the names in a directory to the disk. Has no effect on Windows, which cannot open directories."""
    if os.name == "nt":
        return
    with contextlib.suppress(PermissionError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems cannot flush directories.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
                raise
        finally:
            os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create a directory and its parents durably, if they are missing."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        sync_directory(path.parent)


def append_durably(path: Path, text: str) -> None:
    """Append text to a file and write it to the disk."""
    with system_errors_of(path), path.open("a", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def temporary_of(path: Path) -> Path:
    """Return the path of a temporary file beside `path`, which `remove_stale_temporaries` recognizes."""
    return path.with_name(f".{path.name}.mgk-{_host()}-{os.getpid()}.tmp")


def check_writable(directory: Path) -> None:
    """Raise an OSError if no file can be created in a directory."""
    remove_stale_temporaries(directory)
    # os.access is not an alternative: it grants root everything, also in /proc.
    probe = temporary_of(directory / "probe")
    probe.touch()
    probe.unlink()


def remove_stale_temporaries(directory: Path) -> None:
    """Remove the temporary files that killed processes left in a directory.

    Files of running processes stay. On other hosts a process cannot be checked: its files stay for a day.
    """
    for path in directory.glob(".*.tmp"):
        match = re.fullmatch(r"\..+\.mgk-(\w+)-(\d+)\.tmp", path.name)
        if match is None:
            continue
        with contextlib.suppress(OSError):
            if match[1] == _host():
                is_abandoned = not _is_running(int(match[2]))
            else:
                is_abandoned = time.time() - path.stat().st_mtime > ABANDONED
            if is_abandoned:
                path.unlink()


def _host() -> str:
    return re.sub(r"\W", "_", platform.node()) or "_"


def _is_running(process: int) -> bool:
    if os.name == "nt":
        # On Windows, signal 0 would end the process.
        with contextlib.suppress(ImportError):
            import psutil

            return bool(psutil.pid_exists(process))
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
        temporary.write_text(text, encoding="utf-8", newline="\n")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; has no effect on network mounts without locks.

    The file is created if it is missing. An existing one keeps its contents, and a symbolic link is an error.
    """
    descriptor = _open_lock(path)
    try:
        release = _lock(path, descriptor, blocking=True)
        try:
            yield
        finally:
            if release is not None:
                release()
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive(path: Path, subject: str, remedy: str) -> Iterator[None]:
    """Hold a lock for as long as a process uses a directory; nested calls of one process share it.

    The system releases the lock when the process ends, also by SIGKILL. A holder that has called `mark_stopping` is
    waited for, with a message. Has no effect on network mounts without locks.

    Args:
        path: Lock file. Its text is the process that holds the lock.
        subject: What the lock protects, for the messages.
        remedy: What to do if another process holds the lock.

    Raises:
        ValueError: Another process, which is not about to end, holds the lock for longer than LOCK_TIMEOUT seconds.
    """
    path = _resolve(path)
    if path in _held:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(_open_lock(path), "r+", encoding="utf-8") as file:
        deadline = time.monotonic() + LOCK_TIMEOUT
        is_reported = False
        while (release := _lock(path, file.fileno(), blocking=False)) is None:
            file.seek(0)
            holder = file.read().strip() or "another process"
            if holder.endswith(STOPPING):
                if not is_reported:
                    print(f"Waiting: {subject} is in use by {holder}.", file=sys.stderr, flush=True)
                is_reported = True
            elif time.monotonic() > deadline:
                raise ValueError(f"{subject} is in use by {holder}: {remedy}")
            time.sleep(0.1)
        _write_holder(file)
        _held[path] = file
        try:
            yield
        finally:
            del _held[path]
            release()


def mark_stopping(path: Path) -> None:
    """Note in a lock of this process that the process is about to end, if it holds the lock."""
    if (file := _held.get(_resolve(path))) is not None:
        _write_holder(file, f", {STOPPING}")


def _write_holder(file: TextIO, state: str = "") -> None:
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} on {platform.node()}{state}\n")
    file.flush()


def _resolve(path: Path) -> Path:
    return path.parent.resolve() / path.name


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        if path.is_symlink():
            raise DataError(f"{path} is a symbolic link, not a lock file: remove it") from error
        raise


def _lock(path: Path, descriptor: int, blocking: bool) -> Callable[[], None] | None:
    """Lock a file.

    Args:
        path: The file.
        descriptor: Its descriptor. Closing it releases a lock of flock.
        blocking: Whether to wait for the lock.

    Returns:
        A function that releases the lock, or None if another process holds it.
    """
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
        except BlockingIOError:
            return None
        except OSError:
            pass
        return lambda: None
    import filelock

    # A separate file: on Windows a locked file cannot be read, and this one names the holder.
    lock = filelock.FileLock(path.with_name(f"{path.name}.held"))
    try:
        lock.acquire(timeout=-1 if blocking else 0)
    except filelock.Timeout:
        return None
    return lock.release
