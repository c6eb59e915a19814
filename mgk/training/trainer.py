"""Training of a recipe's model with Lightning: run directory, resume checks and trainer."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shlex
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import ModelParallelStrategy

from mgk._core.checksums import write_verified
from mgk._core.io import exclusive, make_directory, remove_stale_temporaries, write_atomically
from mgk._core.validation import one_of, positive_integer
from mgk.models.run_directory import RunDirectory
from mgk.training import results, trackers
from mgk.training.callbacks import LOG_EVERY, CheckpointCallback
from mgk.training.checkpoints import CheckpointFile, CheckpointStore, set_aside_damaged_manifest
from mgk.training.config import KEEP_CHECKPOINTS, ModelSpec, Recipe, TrainConfig
from mgk.training.data import seed_of
from mgk.training.module import TrainingModule
from mgk.training.objectives import OBJECTIVES, Objective
from mgk.training.process_group import is_first_rank
from mgk.training.progress import ProgressBar
from mgk.training.runs import run_path

STRATEGIES = ("auto", "ddp", "fsdp")
# Settings added later, with the value that earlier runs used implicitly. At this value they are left out of the hash,
# so that the hashes of earlier runs stay the same.
ADDED_SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"token_std": 0.02, "num_key_heads": None},
    "training": {"beta2": 0.999, "final_lr": 0.0, "decay": "all"},
}
# Sequence length and number of parameters above which training on a CPU is impractical.
LONG, LARGE = 1000, 10_000_000
# Packages besides torch whose versions are listed in environment.json.
PACKAGES = ("triton", "pytorch-lightning", "mgk")
# Warnings that need no action: two of the compiler, and Lightning's for a training without srun where srun exists.
IGNORED_WARNINGS = ("Online softmax is disabled", "TensorFloat32 tensor cores", "The `srun` command is available")


@dataclass(frozen=True)
class Run:
    """One training run: a recipe, one of its models, a seed, a data directory and a run directory."""

    recipe: Recipe
    row: ModelSpec
    preset: str
    seed: int
    data_dir: Path
    directory: Path

    @property
    def files(self) -> RunDirectory:
        """The paths of the run's files."""
        return RunDirectory(self.directory)

    def model_config(self, task: Any) -> Any:
        """Return the resolved configuration of the model."""
        if self.recipe.plateau is not None and OBJECTIVES[task.objective].metric != "accuracy":
            raise ValueError(f"recipe {self.recipe.name}: plateau applies only to tasks measured by accuracy")
        return OBJECTIVES[task.objective].make_config(self.recipe, self.row, self.preset, task, self.data_dir)

    def describe(self, task: Any) -> dict[str, Any]:
        """Return the content of run.json: all settings that determine the run."""
        config = self.model_config(task)
        return {
            "recipe": self.recipe.name,
            "task": self.recipe.task,
            "row": str(self.row),
            "preset": self.preset,
            "seed": self.seed,
            "data": task.checksum(self.data_dir),
            "layers": list(config.layer_variants),
            "model": asdict(config),
            "training": asdict(self.recipe.training),
        }

    def setup(self, task: Any) -> str:
        """Return a short hash of all settings that determine the run, except the seed."""
        description = {key: value for key, value in self.describe(task).items() if key != "seed"}
        for section, added in ADDED_SETTINGS.items():
            settings = description[section].items()
            description[section] = {key: value for key, value in settings if key not in added or value != added[key]}
        return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:12]


def warn_if_gpu_recommended(recipe: Recipe, length: int, parameters: int) -> None:
    """Print a warning if a model is too large to train on a CPU."""
    if length >= LONG or parameters > LARGE:
        size = f"{parameters:,} parameters, sequences of {length:,}"
        print(f"{recipe.name} ({size}) is meant for a GPU; on a CPU try `mgk compare demo`", file=sys.stderr)


@contextmanager
def lock_run(run: Run) -> Iterator[None]:
    """Lock the run directory and remove temporary files of killed processes; only rank 0 does.

    Raises:
        ValueError: Another process trains in the directory.
    """
    if not is_first_rank():
        yield
        return
    remedy = "wait until it ends, or pass another directory (train --out, compare --runs)"
    with exclusive(run.files.lock, str(run.directory), remedy):
        for directory in (run.directory, run.files.best_model):
            remove_stale_temporaries(directory)
        run.files.unfinished_checkpoint.unlink(missing_ok=True)
        set_aside_damaged_manifest(run.files)
        yield


def fit(
    run: Run,
    task: Any,
    *,
    resume: bool,
    accelerator: str = "auto",
    strategy: str = "auto",
    graphs: bool = False,
    keep_checkpoints: int = KEEP_CHECKPOINTS,
    loggers: Sequence[str] = (trackers.DEFAULT,),
) -> tuple[TrainingModule, CheckpointCallback]:
    """Train a model, or resume its training, and write the run directory.

    Args:
        run: The run.
        task: Task of the run, with prepared data.
        resume: Whether to continue from the newest intact checkpoint, if there is one.
        accelerator: Lightning's accelerator.
        strategy: One of STRATEGIES.
        graphs: Whether to run steps as CUDA graphs where possible.
        keep_checkpoints: Number of checkpoints to keep.
        loggers: Names of experiment trackers, see `mgk.training.trackers`. They are not part of the run's settings.

    Returns:
        The module with the model of the last step, and the callback with step times and the stop signal.
    """
    with lock_run(run):
        _silence_libraries()
        checkpoints = CheckpointStore(run.files, positive_integer("keep_checkpoints", keep_checkpoints))
        _write_description(run, task, resume, checkpoints)
        module = _make_module(run, task, graphs)
        callback = CheckpointCallback(run.directory, module.settings, checkpoints)
        run_name = run_path(Path(), run.recipe.name, run.row, run.preset, run.seed).as_posix()
        trainer_loggers = trackers.make_loggers(loggers, run.files, run_name)
        trainer = _make_trainer(trainer_loggers, module.settings, [callback], accelerator, strategy)
        for logger in trainer.loggers:
            logger.log_hyperparams(run.describe(task))
        if trainer.is_global_zero:
            write_environment(run.files.environment, trainer.strategy.root_device)
        _train(trainer, module, checkpoints.selected)
        return module, callback


def _make_module(run: Run, task: Any, graphs: bool) -> TrainingModule:
    """Build the module of a run with seeded weights, and save the assets of its model to the run directory."""
    config, objective_class = run.model_config(task), OBJECTIVES[task.objective]
    if is_first_rank():
        objective_class.save_assets(task, run.data_dir, run.directory)
    splits = {name: task.split(run.data_dir, name) for name in ("train", "dev")}
    torch.manual_seed(seed_of(run.seed, 0))
    model = objective_class.model_class(config)
    return TrainingModule(objective_class(model, run.recipe.training, task, splits), run.seed, graphs)


def _train(trainer: pl.Trainer, module: TrainingModule, checkpoint: Path | None) -> None:
    """Train from a checkpoint, or from the beginning; raise a ValueError if the checkpoint does not fit the model."""
    try:
        with _tensorboard_errors_once():
            trainer.fit(module, ckpt_path=None if checkpoint is None else str(checkpoint), weights_only=True)
    except RuntimeError as error:
        if checkpoint is None or "loading state_dict" not in str(error):
            raise
        raise ValueError(f"{checkpoint} is damaged: its weights do not fit the model of this run") from error


def continue_training(objective: Objective, seed: int, accelerator: str = "auto") -> None:
    """Train the model of an objective in place, without a run directory, evaluations and checkpoints.

    Args:
        objective: The objective, with the split "train".
        seed: Seed of the order of the examples and of dropout, as that of a run.
        accelerator: Lightning's accelerator.
    """
    _silence_libraries()
    trainer = _make_trainer([], objective.settings, [], accelerator, "auto")
    trainer.limit_val_batches = 0
    trainer.fit(TrainingModule(objective, seed))
    # Older versions of Lightning return after Ctrl-C as if the training had ended.
    if trainer.global_step != objective.settings.steps:
        raise RuntimeError(f"the training stopped at step {trainer.global_step} of {objective.settings.steps}")


@contextmanager
def _tensorboard_errors_once() -> Iterator[None]:
    """Do not print OSErrors of TensorBoard's thread, for example about a full disk: the main thread raises them too."""
    previous_hook = threading.excepthook

    def print_others(arguments: threading.ExceptHookArgs) -> None:
        is_tensorboard = type(arguments.thread).__module__.startswith("tensorboard")
        if not (is_tensorboard and isinstance(arguments.exc_value, OSError)):
            previous_hook(arguments)

    threading.excepthook = print_others
    try:
        yield
    finally:
        threading.excepthook = previous_hook


def _silence_libraries() -> None:
    # Lightning prints a banner on every run, and torch deprecates a class that Lightning uses.
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=rf"\s*{message}")


def _write_description(run: Run, task: Any, resume: bool, checkpoints: CheckpointStore) -> None:
    """Write run.json, after selecting a checkpoint and checking that it belongs to the same run."""
    description = json.loads(json.dumps(run.describe(task)))
    make_directory(run.directory)
    has_checkpoint = bool(run.files.checkpoints())
    if has_checkpoint and not resume:
        raise ValueError(f"{run.directory} already holds a run: pass --resume auto to continue it, or another --out")
    if has_checkpoint:
        check_same_settings(run.directory, run.files.read_description(), description)
        checkpoints.select()
    # Read by later commands. Added after the comparison, because the data may be moved between starts.
    description["data_dir"] = str(run.data_dir.resolve())
    if is_first_rank():
        write_verified(run.files.description, json.dumps(description, indent=2))


def check_same_settings(directory: Path, stored: dict[str, Any], requested: dict[str, Any]) -> None:
    """Raise unless the stored run has the requested settings and data."""
    differing = _differing_keys(stored, requested) - {"data_dir"}
    for section in differing & ADDED_SETTINGS.keys():
        settings = requested[section]
        added = {name: value for name, value in ADDED_SETTINGS[section].items() if name in settings}
        differing = (differing - {section}) | _differing_keys({**added, **stored.get(section, {})}, settings)
    if differing:
        raise ValueError(
            f"{directory} holds a run with different settings ({', '.join(sorted(differing))}): "
            "pass another directory (train --out, compare --runs)"
        )


def _differing_keys(first: dict[str, Any], second: dict[str, Any]) -> set[str]:
    """Return the keys whose values differ, or that only one of two dicts has."""
    missing = object()
    return {key for key in first.keys() | second.keys() if first.get(key, missing) != second.get(key, missing)}


def _make_trainer(
    loggers: list[Logger], settings: TrainConfig, callbacks: Sequence[pl.Callback], accelerator: str, strategy: str
) -> pl.Trainer:
    """Build the Lightning trainer; the number of processes is read from torchrun's environment variables."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # Without torchrun, a job of SLURM is one process. Lightning's SLURM environment would requeue it on signals, and
    # warns on every machine that has srun.
    environment = [] if "WORLD_SIZE" in os.environ else [LightningEnvironment()]
    return pl.Trainer(
        accelerator=accelerator,
        devices=local_world_size,
        num_nodes=max(1, world_size // local_world_size),
        strategy=_select_strategy(strategy, world_size),
        precision="bf16-mixed" if settings.precision == "bf16" else "32-true",
        max_steps=settings.steps,
        max_epochs=-1,
        val_check_interval=settings.eval_every * settings.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        accumulate_grad_batches=settings.accumulate,
        gradient_clip_val=settings.clip or None,
        logger=loggers,
        log_every_n_steps=LOG_EVERY,
        callbacks=[*callbacks, ProgressBar(settings.steps)],
        enable_checkpointing=False,
        plugins=[CheckpointFile(), *environment],
        enable_model_summary=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
        # Under inference_mode, the network compiled for the development set would be recompiled for the test set.
        inference_mode=False,
    )


def _select_strategy(name: str, world_size: int) -> Any:
    one_of("--strategy", name, STRATEGIES)
    if name == "fsdp":
        # One checkpoint file that any number of processes can load, as with the other strategies.
        return ModelParallelStrategy(
            data_parallel_size=world_size, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    return "ddp" if world_size > 1 and name == "auto" else name


def write_environment(path: Path, device: torch.device) -> None:
    """Append the machine, versions and command of this start to environment.json, which lists every start."""
    try:
        starts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        if not isinstance(starts, list):
            raise ValueError("it does not hold a list")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}; remove it") from None
    start = {
        **results.environment(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": str(device),
        "python": platform.python_version(),
        "command": shlex.join(["mgk", *sys.argv[1:]]),
        **{name: results.version_of(name) for name in PACKAGES},
    }
    write_atomically(path, json.dumps([*starts, start], indent=2))
