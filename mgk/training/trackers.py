"""Experiment trackers: Lightning loggers selected by name. A resumed run appends to its run in the tracker."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from pytorch_lightning.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.loggers.csv_logs import ExperimentWriter
from pytorch_lightning.loggers.logger import rank_zero_experiment

from mgk._core.io import write_atomically
from mgk._core.validation import fail, one_of
from mgk.models.run_directory import RunDirectory
from mgk.training.process_group import is_first_rank

DEFAULT = "tensorboard"
# Value of --logger that selects no tracker.
NONE = "none"
# Project of wandb and experiment of mlflow, unless their environment variables name another.
PROJECT = "mgk"


@dataclass(frozen=True)
class Tracker:
    """A tracker that --logger selects.

    Attributes:
        make: Function of the run directory and the run's name that returns the Lightning logger. All ranks call it;
            Lightning logs on rank 0 only.
        package: Package that the logger imports.
    """

    make: Callable[[RunDirectory, str], Logger]
    package: str


def drop_rows_after(path: Path, step: int) -> None:
    """Drop the rows of a CSV file after a step, which will be written again, and an incomplete last row."""
    try:
        text = path.read_text(encoding="utf-8")
        header, *rows = csv.reader(text[: text.rfind("\n") + 1].splitlines())
        column = header.index("step")
        rows = [row for row in rows if int(row[column]) <= step]
        if any(len(row) != len(header) for row in rows):
            raise ValueError("a row has too few or too many columns")
    except (ValueError, IndexError, csv.Error) as error:
        raise ValueError(
            f"{path} is damaged ({error}): restore it, or move it to another place to continue without earlier metrics"
        ) from None
    write_atomically(path, "".join(",".join(row) + "\n" for row in (header, *rows)))


class _AppendingWriter(ExperimentWriter):
    """Writer of Lightning's CSVLogger that continues an existing file."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        path = Path(self.metrics_file_path)
        if path.exists():
            with path.open(encoding="utf-8", newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])

    def _check_log_dir_exists(self) -> None:
        """Keep the existing file, which Lightning's writer removes."""


class AppendingCSVLogger(CSVLogger):
    """Lightning's CSVLogger, except that a second start continues the existing file."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            self._experiment = _AppendingWriter(self.log_dir)
        return self._experiment

    def rewind(self, step: int) -> None:
        """Drop the rows after a step, from which the run continues."""
        path = Path(self.log_dir) / _AppendingWriter.NAME_METRICS_FILE
        if path.exists():
            drop_rows_after(path, step)


def _tensorboard(files: RunDirectory, name: str) -> Logger:
    # Lightning would log the hyper-parameters with a metric hp_metric = -1.
    return TensorBoardLogger(files.path, name="", version=files.tensorboard.name, default_hp_metric=False)


def _csv(files: RunDirectory, name: str) -> Logger:
    return AppendingCSVLogger(files.path, name="", version=files.csv.name)


def _wandb(files: RunDirectory, name: str) -> Logger:
    """Return wandb's logger; WANDB_MODE=offline, WANDB_PROJECT and the other variables of wandb take effect."""
    run_id = None
    if is_first_rank():
        run_id = _read_ids(files).get("wandb") or uuid.uuid4().hex[:12]
        _write_id(files, "wandb", run_id)
    project = os.environ.get("WANDB_PROJECT") or PROJECT
    # With resume="allow", Lightning's default, a run with a known id is continued.
    return WandbLogger(name=name, save_dir=files.path, id=run_id, project=project)


def _mlflow(files: RunDirectory, name: str) -> Logger:
    """Return mlflow's logger; without MLFLOW_TRACKING_URI it writes to the file store ./mlruns."""
    store = Path("mlruns").absolute()
    uri = os.environ.get("MLFLOW_TRACKING_URI") or store.as_uri()
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
    if uri.startswith("file:"):
        # mlflow 3 raises an error for file stores, which need no server, unless this is set.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    entry = _read_ids(files).get("mlflow", {})
    run_id = entry.get("run") if entry.get("uri") == uri else None
    logger = MLFlowLogger(experiment, name, uri, run_id=run_id)
    if not is_first_rank():
        return logger
    is_local = uri == store.as_uri()
    if is_local:
        store.mkdir(exist_ok=True)
    try:
        # A lock, because the file store accepts two experiments of one name from concurrent jobs of a sweep.
        with FileLock(store / ".mgk.lock") if is_local else nullcontext():
            run_id = logger.run_id
    except Exception as error:
        # Besides errors of mlflow, those of the connection to its server.
        detail = str(error).partition("\n")[0]
        remedy = f" (remove {files.trackers} to start another run there)" if entry else ""
        raise ValueError(f"--logger mlflow: {uri}: {detail}{remedy}") from error
    _write_id(files, "mlflow", {"uri": uri, "run": run_id})
    return logger


TRACKERS: dict[str, Tracker] = {
    "tensorboard": Tracker(_tensorboard, "tensorboard"),
    "csv": Tracker(_csv, "pytorch_lightning"),
    "wandb": Tracker(_wandb, "wandb"),
    "mlflow": Tracker(_mlflow, "mlflow"),
}


def register_tracker(name: str, tracker: Tracker) -> None:
    """Add a tracker for --logger, for example from a module of MGK_PLUGINS."""
    TRACKERS[name] = tracker


def parse_loggers(text: str) -> tuple[str, ...]:
    """Return the names of --logger without duplicates.

    Args:
        text: Names separated by commas, or "none".

    Raises:
        ValueError: A name is unknown, or its package is missing; the message has the command that installs it.
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if names == (NONE,):
        return ()
    for name in names:
        if name == NONE:
            fail("--logger", f"{NONE} cannot be combined with other names, got {text!r}")
        package = TRACKERS[one_of("--logger", name, (*TRACKERS, NONE))].package
        if importlib.util.find_spec(package) is None:
            fail("--logger", f"{name} needs the package {package}: pip install {package}")
    return names


def make_loggers(names: Sequence[str], files: RunDirectory, run_name: str) -> list[Logger]:
    """Return the Lightning loggers of a run.

    Args:
        names: Names of trackers; see `parse_loggers`.
        files: Run directory, which holds files of the trackers and the ids of the run there.
        run_name: Name of the run in the trackers.
    """
    loggers = []
    for name in names:
        try:
            loggers.append(TRACKERS[name].make(files, run_name))
        except ModuleNotFoundError as error:
            # Lightning raises it also if the package is too old.
            package, reason = TRACKERS[name].package, str(error).partition("\n")[0]
            raise ValueError(f"--logger {name}: {reason}: pip install --upgrade {package}") from error
    return loggers


def _read_ids(files: RunDirectory) -> dict[str, Any]:
    try:
        return dict(json.loads(files.trackers.read_text(encoding="utf-8"))) if files.trackers.exists() else {}
    except (ValueError, TypeError) as error:
        remedy = "remove it to start another run in the tracker"
        raise ValueError(f"{files.trackers} is damaged: {error}; {remedy}") from None


def _write_id(files: RunDirectory, name: str, value: Any) -> None:
    write_atomically(files.trackers, json.dumps({**_read_ids(files), name: value}, indent=2))
