"""Faults at the k-th operation of a process: a kill, or an error of the file system."""

import builtins
import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

# Operations of the file system that Python reports to audit hooks, and the ones that create or change something.
AUDITED = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Writes to a checkpoint between two points.
WRITES = 150


class Injection:
    """Count the operations of a process under a directory; cause a fault at one of them.

    Args:
        directory: Operations elsewhere are not counted.
        kind: "count" for none, "SIGKILL" or "SIGTERM" at the operation, "ENOSPC" or "EROFS" in every operation that
            writes from there on.
        point: Number of the operation, from 1.
    """

    def __init__(self, directory: Path, kind: str, point: int) -> None:
        self.directory, self.kind, self.point = str(directory.resolve()), kind, point
        self.operations: list[str] = []
        self._writes = 0

    def install(self) -> None:
        from mgk.training import callbacks, checkpoints
        from mgk.training.module import TrainingModule

        sys.addaudithook(self._audit)
        fsync = os.fsync

        def counted_fsync(descriptor: int) -> None:
            self.reach("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)

        os.fsync = counted_fsync
        for owner, name in ((callbacks.CheckpointCallback, "on_train_batch_end"), (TrainingModule, "validation_step")):
            setattr(owner, name, self._counted(getattr(owner, name), name))
        checkpoints.open = self._open  # type: ignore[attr-defined]

    def _counted(self, function: Any, name: str) -> Any:
        def counted(*arguments: Any) -> Any:
            self.reach(name)
            return function(*arguments)

        return counted

    def _open(self, path: Any, mode: str) -> Any:
        """Open a checkpoint; its writes are counted."""
        file = builtins.open(path, mode)  # noqa: SIM115
        write = file.write

        class Counted:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *arguments: Any) -> None:
                file.close()

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

            def write(_, data: Any) -> int:
                self._writes += 1
                if self._writes % WRITES == 0:
                    file.flush()
                    self.reach("write", str(path))
                return int(write(data))

        return Counted()

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in AUDITED and (event != "open" or (isinstance(arguments[2], int) and arguments[2] & WRITE_FLAGS)):
            path = arguments[0]
            if isinstance(path, str | bytes | os.PathLike):
                self.reach(event.removeprefix("os."), os.fsdecode(path))

    def reach(self, operation: str, path: str | None = None) -> None:
        """Count an operation; cause the fault if it is due."""
        if path is not None and not os.path.abspath(path).startswith(self.directory):
            return
        name = operation if path is None else f"{operation} {os.path.relpath(path, self.directory)}"
        self.operations.append(name)
        number = len(self.operations)
        if self.kind in ("SIGKILL", "SIGTERM"):
            if number == self.point:
                os.kill(os.getpid(), getattr(signal, self.kind))
        elif self.kind != "count" and number >= self.point and path is not None and operation != "remove":
            code = getattr(errno, self.kind)
            raise OSError(code, os.strerror(code), path)
