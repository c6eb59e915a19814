"""A run's directory, read back: its description, and its model with what turns text into tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mgk import tasks
from mgk.models import LanguageModel, load_model
from mgk.models.checkpoint import REMEDY
from mgk.tasks.corpus import Corpus
from mgk.tasks.vocabulary import Vocabulary

# In the directory of a run: what it goes on from.
CHECKPOINT = "last.ckpt"


def read_run(directory: Path, *needed: str) -> dict[str, Any]:
    """The description of a run, from its directory. needed: what it must tell beside its task."""
    path = directory / "run.json"
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{directory} is no run: it has no run.json; `mgk train` tells the folder of a run in its last line"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; {REMEDY}") from None
    missing = [name for name in ("task", *needed) if not isinstance(description, dict) or name not in description]
    if missing:
        raise ValueError(f"{path} is damaged: it has no {', '.join(missing)}; {REMEDY}")
    return dict(description)


def best_of(directory: Path) -> Path:
    """Where a run keeps its best model."""
    best = directory / "best"
    if not best.exists() and (directory / CHECKPOINT).exists():
        raise ValueError(
            f"{directory} has no model yet: it was stopped before it was first evaluated. "
            "Go on with the command that began it and --resume auto"
        )
    return best


def load_language_model(directory: Path, device: torch.device) -> tuple[LanguageModel, Vocabulary]:
    """The best model of a run and its vocabulary; the data it was trained on is not needed."""
    task = tasks.task(read_run(directory)["task"])
    if not isinstance(task, Corpus):
        raise ValueError(f"{directory} is a run of {task.name}: it holds no language model")
    model = load_model(best_of(directory), device)
    if not isinstance(model, LanguageModel):
        raise ValueError(f"{directory / 'best'} holds a {type(model).__name__}, not a language model")
    return model, task.vocabulary_in(directory)
