"""Preparation of the data of a task before a command uses it, with an estimate of its time."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mgk._core.io import DataError
from mgk.cli.progress import print_progress

if TYPE_CHECKING:
    from mgk.tasks import Task

# Rough times of data preparation on one core: 100,000 examples of ListOps take about ten seconds, a corpus of words
# 0.1 s per MB with its checksum, and a small file about a millisecond.
SECONDS_PER_EXAMPLE, SECONDS_PER_MEGABYTE, SECONDS_PER_FILE = 1e-4, 0.1, 1e-3


def is_prepared(task: Task, data_dir: Path) -> bool:
    """Return whether the data of a task was prepared before; it may be damaged or outdated."""
    return any((data_dir / ".mgk" / task.name).glob("[0-9a-f]*"))


def describe_preparation(task: Task, data_dir: Path) -> str:
    """Describe the preparation of a task's data, with a rough estimate of the time."""
    if is_prepared(task, data_dir):
        return f"{task.name}: already prepared; will be verified"
    files = task.files(data_dir)
    if not files:
        examples = sum(getattr(task, "counts", {}).values())
        seconds = examples * SECONDS_PER_EXAMPLE
        return f"{task.name}: generates {examples:,} examples, about {_duration(seconds)} on one core"
    size = sum(os.path.getsize(data_dir / name) for name in files)
    seconds = size / 1e6 * SECONDS_PER_MEGABYTE + len(files) * SECONDS_PER_FILE
    count = "1 file" if len(files) == 1 else f"{len(files):,} files"
    return f"{task.name}: reads {count}, {_size(size)}, about {_duration(seconds)} on one core"


def _size(size: int) -> str:
    return f"{size / 1e6:,.0f} MB" if size >= 1e6 else f"{math.ceil(size / 1e3)} kB"


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{round(seconds / 60)} minutes"


def prepare_data(task: Task, data_dir: Path, workers: int | None = None) -> None:
    """Prepare the data of a task, after an estimate on stderr if it was not prepared before."""
    with contextlib.suppress(DataError, OSError):
        if not is_prepared(task, data_dir):
            print(describe_preparation(task, data_dir), file=sys.stderr)
    task.prepare(data_dir, workers or os.cpu_count() or 1, print_progress)
