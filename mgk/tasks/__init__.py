"""Tasks: where the data comes from and how an example is made. A new task is a file and a row."""

from __future__ import annotations

from mgk._core.io import DataError
from mgk._core.validation import one_of
from mgk.tasks.base import PAD, Split, Task
from mgk.tasks.corpus import CORPORA
from mgk.tasks.listops import LISTOPS, LISTOPS_SHORT
from mgk.tasks.retrieval import AAN
from mgk.tasks.text import Text

ALL = (LISTOPS, LISTOPS_SHORT, Text(), AAN(), *CORPORA)
TASKS: dict[str, Task] = {row.name: row for row in ALL}


def register_task(task: Task) -> None:
    """Make a task known by its name, for recipes outside the package."""
    TASKS[task.name] = task


def task(name: str) -> Task:
    """The task of that name; ValueError that lists the known ones otherwise."""
    return TASKS[one_of("task", name, TASKS)]


__all__ = ["PAD", "TASKS", "DataError", "Split", "Task", "register_task", "task"]
