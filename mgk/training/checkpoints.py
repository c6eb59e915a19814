"""Checkpoints of a run: saving with checksums and rotation, and the choice of an intact one on resume.

`models.checkpoint` loads the best model of a run.
"""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.plugins import TorchCheckpointIO

from mgk._core.checksums import MANIFEST, add_checksum, file_checksum, read_checksums, verify
from mgk._core.io import DataError, sync_directory, sync_file, system_errors_of
from mgk.models import load_model
from mgk.models.run_directory import RunDirectory
from mgk.training.config import KEEP_CHECKPOINTS
from mgk.training.process_group import is_first_rank


class CheckpointFile(TorchCheckpointIO):
    """Writes checkpoints directly to their path.

    Lightning writes to a file in $TMPDIR first, which stays there if the process is killed.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        # A file object of Python: its errors name the reason, for example a full disk; those of torch do not.
        with system_errors_of(Path(path)), open(path, "wb") as file:
            torch.save(checkpoint, file)


class CheckpointStore:
    """The checkpoints of a run directory: last.ckpt, and the `keep` - 1 before it as last-1.ckpt, last-2.ckpt, …

    Attributes:
        selected: Checkpoint that the run resumes from, or None for a new run.
    """

    def __init__(self, files: RunDirectory, keep: int = KEEP_CHECKPOINTS) -> None:
        self.files, self.keep = files, keep
        self.selected: Path | None = None
        self._damaged: set[Path] = set()

    def select(self) -> None:
        """Select the newest intact checkpoint; print a warning for each newer one.

        Raises:
            ValueError: There are checkpoints, but none is intact, or the best model of the selected one is not.
        """
        reasons = []
        for path in self.files.checkpoints():
            reason = self._unusable_reason(path)
            if reason is None:
                self.selected = path
                break
            self._damaged.add(path)
            reasons.append((path, reason))
        if reasons and self.selected is None:
            raise ValueError(self._none_is_intact(reasons))
        if self.selected is not None:
            self._check_best_model(self.selected)
        if is_first_rank():
            for path, reason in reasons:
                print(
                    f"mgk: warning: {path} is damaged ({reason}): resuming from the older {self.selected}",
                    file=sys.stderr,
                    flush=True,
                )

    def _unusable_reason(self, path: Path) -> str | None:
        """Return why a checkpoint cannot be used, or None if it can."""
        try:
            if verify(path, listed_as=self.files.checkpoint.name):
                return None
        except OSError as error:
            return f"it cannot be read: {error.strerror or error}"
        except DataError:
            if self._has_manifest():
                return f"its checksum differs from those in {MANIFEST}"
        return unreadable_reason(path)

    def _has_manifest(self) -> bool:
        try:
            return bool(read_checksums(self.files.path))
        except DataError:
            return False

    def _none_is_intact(self, reasons: list[tuple[Path, str]]) -> str:
        details = "; ".join(f"{path.name}: {reason}" for path, reason in reasons)
        message = f"every checkpoint in {self.files.path} is damaged ({details}). "
        try:
            load_model(self.files.best_model)
        except (ValueError, OSError):
            return f"{message}Restore one from a copy, or pass another --out to train again"
        return (
            f"{message}The best model in {self.files.best_model} is intact: `mgk eval {self.files.path}` works. "
            "Keep the directory, and pass another --out to train again"
        )

    def _check_best_model(self, path: Path) -> None:
        """Raise if the run has a best model that cannot be loaded: the final evaluation needs it."""
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if checkpoint.get("best", {}).get("step", -1) < 0:
            return
        try:
            load_model(self.files.best_model)
        except ValueError as error:
            raise ValueError(
                f"{error}. The checkpoint {path} is intact, but the run needs its best model: "
                "restore it from a copy, or pass another --out to train again"
            ) from error

    def save(self, write: Callable[[Path], None]) -> None:
        """Save a checkpoint as the newest one.

        All ranks call this together. The first one writes: the new file is on the disk, and its checksum in the
        manifest, before the existing checkpoints are renamed. A process killed at any time leaves an intact checkpoint.

        Args:
            write: Function that all ranks call with the path of the new file; the first one writes it.
        """
        temporary, newest = self.files.unfinished_checkpoint, self.files.checkpoint
        try:
            write(temporary)
            if not is_first_rank():
                return
            sync_file(temporary)
            add_checksum(newest, file_checksum(temporary), count=self.keep + 1, current=self._readable_checkpoints())
            self._shift_older()
            temporary.replace(newest)
            sync_directory(self.files.path)
        finally:
            if is_first_rank():
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
        for path in self.files.checkpoints()[self.keep :]:
            path.unlink(missing_ok=True)

    def _readable_checkpoints(self) -> Iterator[Path]:
        """Yield the checkpoints of a run without checksums that can be read."""
        for path in self.files.checkpoints():
            if path not in self._damaged and (path == self.selected or unreadable_reason(path) is None):
                yield path

    def _shift_older(self) -> None:
        """Rename checkpoints to the next older name, up to the first name that is free, damaged or the oldest."""
        paths = [self.files.checkpoint_of_age(age) for age in range(self.keep)]
        is_usable = [path.exists() and path not in self._damaged for path in paths]
        replaced = is_usable.index(False) if False in is_usable else self.keep - 1
        for path, older in reversed(list(pairwise(paths[: replaced + 1]))):
            os.replace(path, older)
        self._damaged.discard(paths[replaced])


# Entries of a checkpoint that Lightning and the training module read.
REQUIRED = ("pytorch-lightning_version", "global_step", "loops", "state_dict", "optimizer_states")


def unreadable_reason(path: Path) -> str | None:
    """Return why a checkpoint without a checksum cannot be read, or None if it can.

    torch.load does not verify the CRC-32 of the file's parts.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if (part := archive.testzip()) is not None:
                return f"the CRC-32 of its part {part} differs"
        content = torch.load(path, map_location="cpu", weights_only=True)
        if missing := [key for key in REQUIRED if not isinstance(content, dict) or key not in content]:
            return f"it has no {missing[0]}"
    except Exception as error:
        # Keep only the first sentence: torch appends paragraphs of advice.
        sentence = str(error).partition("\n")[0].partition(". ")[0]
        return ": ".join(part for part in (type(error).__name__, sentence) if part)
    return None


def set_aside_damaged_manifest(files: RunDirectory) -> None:
    """Rename a manifest that cannot be read, with a warning. The checkpoints are then verified by their CRC-32."""
    try:
        read_checksums(files.path)
    except DataError as error:
        damaged = files.checksums.with_name(f"{files.checksums.name}.damaged")
        os.replace(files.checksums, damaged)
        reason = str(error).partition("): ")[0]
        print(
            f"mgk: warning: {reason}): renamed to {damaged.name}, files are used without it",
            file=sys.stderr,
            flush=True,
        )
