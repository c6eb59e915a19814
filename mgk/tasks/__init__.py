"""Tasks: data sources and their conversion to examples. A new task is one file and one entry of `TASKS`."""

from __future__ import annotations

from mgk._core.io import DataError
from mgk._core.validation import fail, one_of
from mgk.tasks.base import PAD, Split, Task
from mgk.tasks.corpus import CORPORA
from mgk.tasks.image import IMAGE, IMAGE_PATCHES
from mgk.tasks.listops import LISTOPS, LISTOPS_SHORT
from mgk.tasks.retrieval import AAN
from mgk.tasks.subword_corpus import SubwordCorpus
from mgk.tasks.text import Text

TASKS: dict[str, Task] = {
    task.name: task for task in (LISTOPS, LISTOPS_SHORT, Text(), AAN(), *CORPORA, SubwordCorpus(), IMAGE, IMAGE_PATCHES)
}
# Tasks of experiments/paper, which are not installed, and the advice in messages about them and its recipes.
PAPER_TASKS = ("retrieval-peerread", "retrieval-peerread-random")
PLUGIN_HINT = "set the environment variable MGK_PLUGINS=experiments.paper"


def register_task(task: Task) -> None:
    """Add a task to `TASKS`, for recipes outside the package.

    Examples:
        >>> from mgk.tasks import get_task, register_task
        >>> from mgk.tasks.listops import ListOps
        >>> register_task(ListOps(name="listops-seed-1", seed=1))
        >>> get_task("listops-seed-1").seed
        1
    """
    TASKS[task.name] = task


def get_task(name: str) -> Task:
    """Return the task with this name, or raise a ValueError that lists all names.

    Examples:
        >>> from mgk.tasks import get_task
        >>> get_task("listops").max_length
        2000
    """
    if name in PAPER_TASKS and name not in TASKS:
        fail("task", f"{name} is part of experiments.paper: in a clone of the repository, {PLUGIN_HINT}")
    return TASKS[one_of("task", name, TASKS)]


__all__ = ["PAD", "TASKS", "DataError", "Split", "Task", "get_task", "register_task"]
