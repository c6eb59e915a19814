"""A run directory: the names of its files, and the best model in it.

`training.runs` has the directories of several runs and what needs their tasks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mgk._core.checksums import MANIFEST, verify
from mgk._core.io import DataError
from mgk.models.checkpoint import REMEDY, load_model
from mgk.models.decoder import LanguageModel

# Types of the entries of run.json.
DESCRIPTION_TYPES: dict[str, type] = {
    "task": str,
    "recipe": str,
    "row": str,
    "preset": str,
    "data": str,
    "data_dir": str,
    "model": dict,
    "training": dict,
    "seed": int,
    "layers": list,
}
# Names of the types in messages.
TYPE_NAMES = {str: "text", dict: "a mapping", int: "an integer", list: "a list"}


def _is_result(row: Any) -> bool:
    """Return whether an entry of result.json has the columns that commands read."""
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(name), str) for name in ("dataset", "split", "metric"))
        and isinstance(row.get("value"), int | float)
        and isinstance(row.get("n_examples"), int)
    )


class RunDirectory:
    """Paths of the files of one training run.

    Attributes:
        path: The directory.
        description: run.json, all settings that determine the run.
        environment: environment.json, machine and versions of each start.
        metrics: metrics.csv, metrics over the steps.
        checkpoint: last.ckpt, the newest checkpoint, which a resumed run loads; the one before it is last-1.ckpt.
        unfinished_checkpoint: .last.ckpt.tmp, becomes the newest checkpoint when it is complete.
        checksums: checksums.json, the checksums of the checkpoints, run.json, result.json and vocabulary.txt.
        best_model: best/, the weights with the best metric on the development set.
        result: result.json, the result rows of the finished run.
        log: log.txt, the output of a run that a sweep has started.
        lock: .run.lock, locked by the process that trains.
        tensorboard: tensorboard/, the curves that TensorBoard reads.
        csv: csv/, the curves that `--logger csv` writes.
        trackers: trackers.json, the ids of the run in wandb and mlflow.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.description = self.path / "run.json"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.csv"
        self.checkpoint = self.path / "last.ckpt"
        self.unfinished_checkpoint = self.path / ".last.ckpt.tmp"
        self.checksums = self.path / MANIFEST
        self.best_model = self.path / "best"
        self.result = self.path / "result.json"
        self.log = self.path / "log.txt"
        self.lock = self.path / ".run.lock"
        self.tensorboard = self.path / "tensorboard"
        self.csv = self.path / "csv"
        self.trackers = self.path / "trackers.json"

    def checkpoint_of_age(self, age: int) -> Path:
        """Return the path of the checkpoint that is `age` saves older than the newest; 0 is the newest."""
        return self.path / f"last-{age}.ckpt" if age else self.checkpoint

    def checkpoints(self) -> list[Path]:
        """Return the existing checkpoints, newest first. A process killed while saving may leave only older ones."""
        ages = (re.fullmatch(r"last-([1-9]\d*)\.ckpt", path.name) for path in self.path.glob("last-*.ckpt"))
        older = [self.checkpoint_of_age(age) for age in sorted(int(match[1]) for match in ages if match)]
        return [path for path in (self.checkpoint, *older) if path.is_file()]

    def predictions(self, name: str, split: str) -> Path:
        """Return the file with one prediction per example of a split; `name` is its kind."""
        return self.path / f"{name}-{split}.npy"

    def read_description(self, *required: str) -> dict[str, Any]:
        """Read run.json.

        Args:
            *required: Keys that the description must have, besides `task`.

        Raises:
            ValueError: run.json is missing, damaged, or lacks a required key.
        """
        try:
            verify(self.description)
            description = json.loads(self.description.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(
                f"{self.path} is not a run directory (no run.json). `mgk train` prints the directory in its last line"
            ) from None
        except DataError:
            raise
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.description} is damaged: {error}; {REMEDY}") from None
        missing = [key for key in ("task", *required) if not isinstance(description, dict) or key not in description]
        if missing:
            raise ValueError(f"{self.description} is damaged: it has no {', '.join(missing)}; {REMEDY}")
        for key, entry_type in DESCRIPTION_TYPES.items():
            if key in description and not isinstance(description[key], entry_type):
                raise ValueError(f"{self.description} is damaged: {key} must be {TYPE_NAMES[entry_type]}; {REMEDY}")
        return dict(description)

    def read_result(self) -> list[dict[str, Any]]:
        """Read the rows of result.json; raise a ValueError if it is damaged."""
        verify(self.result)
        try:
            rows = json.loads(self.result.read_text(encoding="utf-8"))
            if not isinstance(rows, list) or not all(_is_result(row) for row in rows):
                raise ValueError("it must list rows with dataset, split, n_examples, metric and value")
            return rows
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.result} is damaged: {error}; remove it to evaluate the model again") from None

    def existing_best_model(self) -> Path:
        """Return `best_model`, or raise a ValueError if the run stopped before its first evaluation."""
        if not self.best_model.exists() and self.checkpoints():
            raise ValueError(
                f"{self.path} has no model yet: the run stopped before its first evaluation. "
                "Repeat the command that started it with --resume auto"
            )
        return self.best_model

    def load_best_model(self, device: str | torch.device = "cpu") -> nn.Module:
        """Load the best model in eval mode; raise a ValueError if it is missing or damaged."""
        return load_model(self.existing_best_model(), device)

    def load_language_model(self, device: str | torch.device = "cpu") -> LanguageModel:
        """Load the best model in eval mode; raise a ValueError if it is not a language model."""
        model = self.load_best_model(device)
        if not isinstance(model, LanguageModel):
            raise ValueError(f"{self.best_model} holds a {type(model).__name__}, not a language model")
        return model
