"""Runs on disk: their directories under a common parent, their tasks, and loading language models from them.

`models.run_directory` names the files of one directory; it is below the tasks, because mgk.hf loads runs too.
"""

from __future__ import annotations

from pathlib import Path

import torch

from mgk import tasks
from mgk.models import LanguageModel
from mgk.models.run_directory import RunDirectory
from mgk.models.vocabulary import Vocabulary, check_size
from mgk.tasks.corpus import Corpus
from mgk.training.config import ModelSpec


def run_path(runs: Path, recipe: str, row: ModelSpec, preset: str, seed: int | str) -> Path:
    """Return the directory of a run under the parent directory `runs`."""
    return runs / recipe / f"{row.file_name}-{preset}-s{seed}"


def finished_runs(runs: Path, recipe: str, row: ModelSpec, preset: str) -> list[Path]:
    """Return the directories of all finished runs of a model, sorted."""
    pattern = RunDirectory(run_path(Path(), recipe, row, preset, "*")).result
    return sorted(result.parent for result in runs.glob(str(pattern)))


def load_language_model(directory: Path, device: torch.device) -> tuple[LanguageModel, Vocabulary]:
    """Load the best model of a run and its vocabulary; the training data is not needed.

    Args:
        directory: A run directory of a language model.
        device: Device of the model.

    Returns:
        The model in eval mode, and the vocabulary that encodes text for it.
    """
    run = RunDirectory(directory)
    task = task_of_run(run)
    if not isinstance(task, Corpus):
        raise ValueError(f"{directory} is a run of {task.name}, not of a language model")
    model, vocabulary = run.load_language_model(device), task.load_vocabulary(directory)
    check_size(vocabulary, directory, model.config.vocab_size)
    return model, vocabulary


def task_of_run(run: RunDirectory, *required: str) -> tasks.Task:
    """Return the task of a run; raise a ValueError that names run.json if it is unknown.

    Args:
        run: The run directory.
        *required: Keys that run.json must have, besides `task`.
    """
    try:
        return tasks.get_task(run.read_description(*required)["task"])
    except ValueError as error:
        if str(error).startswith("task "):
            raise ValueError(f"{run.description}: {error}") from None
        raise
