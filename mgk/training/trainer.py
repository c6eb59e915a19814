"""A recipe becomes a Lightning run: exact resume, progress, logs, the best model on the development set."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shlex
import sys
import warnings
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy

from mgk._core.io import write_atomically
from mgk._core.validation import one_of
from mgk.models.run_directory import RunDirectory
from mgk.training import results
from mgk.training.callbacks import LOG_EVERY, CheckpointCallback
from mgk.training.config import ModelSpec, Recipe
from mgk.training.data import seed_of
from mgk.training.module import TrainingModule, is_distributed
from mgk.training.objectives import OBJECTIVES
from mgk.training.progress import ProgressBar

STRATEGIES = ("auto", "ddp", "fsdp")
# Settings of models that came later, at the values that all had before: they change no setup's name.
LATER = {"token_std": 0.02}


@dataclass(frozen=True)
class Run:
    """One training: a recipe, a model of it, a seed, and where it lies."""

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
        """The resolved configuration."""
        return OBJECTIVES[task.objective].make_config(self.recipe, self.row, self.preset, task, self.data_dir)

    def describe(self, task: Any) -> dict[str, Any]:
        """What goes into run.json: everything that determines the run."""
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
        """A short name for everything that determines the run but its seed."""
        described = {key: value for key, value in self.describe(task).items() if key != "seed"}
        model = described["model"]
        described["model"] = {k: v for k, v in model.items() if k not in LATER or v != LATER[k]}
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]


def shutdown_distributed() -> None:
    """Ends the connection between the processes of a run in order: otherwise the first to go may abort another."""
    if is_distributed():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def chosen_strategy(name: str, world: int) -> Any:
    one_of("--strategy", name, STRATEGIES)
    if name == "fsdp":
        # One file that any number of processes can go on from, as with the other strategies.
        return ModelParallelStrategy(
            data_parallel_size=world, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    return "ddp" if world > 1 and name == "auto" else name


def _check_same(directory: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """A run goes on with the settings and the data it was begun with, or not at all."""
    found.pop("data_dir", None)
    other = [name for name in wanted if found.get(name) != wanted[name]]
    for section in ("model", "training"):
        if section in other:
            inside = [name for name in wanted[section] if found.get(section, {}).get(name) != wanted[section][name]]
            other = [name for name in other if name != section] + inside
    if other or found.keys() != wanted.keys():
        raise ValueError(
            f"{directory} holds a run with other settings ({', '.join(other)}): "
            "remove it, or take another directory (train --out, compare and study --runs)"
        )


def _check_whole(checkpoint: Path) -> None:
    try:
        torch.load(checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:
        # The first sentence: torch goes on with what else one might try.
        sentence = str(error).partition("\n")[0].partition(". ")[0]
        reason = ": ".join(part for part in (type(error).__name__, sentence) if part)
        raise ValueError(f"{checkpoint} is damaged ({reason}): remove {checkpoint.parent} and train again") from error


# Beside torch: what decides how a training runs, and what it came out of.
PACKAGES = ("triton", "pytorch-lightning", "mgk")


def write_environment(path: Path, device: torch.device) -> None:
    """Adds to environment.json, a list of the run's starts, where and with what it starts now."""
    try:
        starts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; remove it") from None
    now = {
        **results.environment(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": str(device),
        "python": platform.python_version(),
        "command": shlex.join(["mgk", *sys.argv[1:]]),
        **{name: results.version_of(name) for name in PACKAGES},
    }
    write_atomically(path, json.dumps([*starts, now], indent=2))


def fit(
    run: Run, task: Any, *, resume: bool, accelerator: str = "auto", strategy: str = "auto", graphs: bool = False
) -> tuple[TrainingModule, CheckpointCallback]:
    """Trains, or goes on from the last checkpoint, and leaves everything in the run's directory.

    graphs: steps are recorded as CUDA graphs, where that is possible.
    """
    settings = run.recipe.training
    config = run.model_config(task)
    # Lightning greets on every run, and torch warns of what Lightning does with its trees.
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    # The compiler tells of what it does not do; TF32 is the user's own choice.
    for words in ("Online softmax is disabled", "TensorFloat32 tensor cores"):
        warnings.filterwarnings("ignore", message=rf"\s*{words}")
    description = json.loads(json.dumps(run.describe(task)))
    run.directory.mkdir(parents=True, exist_ok=True)
    checkpoint = run.files.checkpoint
    if checkpoint.exists() and not resume:
        raise ValueError(f"{run.directory} already holds a run: pass --resume auto to go on, or another --out")
    if checkpoint.exists():
        _check_same(run.directory, json.loads(run.files.description.read_text()), description)
        _check_whole(checkpoint)
    # Where the data lay is kept for later commands, and may change.
    located = {**description, "data_dir": str(run.data_dir.resolve())}
    write_atomically(run.files.description, json.dumps(located, indent=2))
    objective = OBJECTIVES[task.objective]
    objective.save_assets(task, run.data_dir, run.directory)
    splits = {name: task.split(run.data_dir, name) for name in ("train", "dev")}
    torch.manual_seed(seed_of(run.seed, 0))
    module = TrainingModule(objective(objective.model_class(config), settings, task, splits), run.seed, graphs)
    record = CheckpointCallback(run.directory, settings)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=local,
        num_nodes=max(1, world // local),
        strategy=chosen_strategy(strategy, world),
        precision="bf16-mixed" if settings.precision == "bf16" else "32-true",
        max_steps=settings.steps,
        max_epochs=-1,
        val_check_interval=settings.eval_every * settings.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        accumulate_grad_batches=settings.accumulate,
        gradient_clip_val=settings.clip or None,
        logger=pl.loggers.TensorBoardLogger(run.directory, name="", version=run.files.tensorboard.name),
        log_every_n_steps=LOG_EVERY,
        callbacks=[record, ProgressBar(settings.steps)],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
        # Under inference_mode what is compiled for the development set would be compiled again for the test set.
        inference_mode=False,
    )
    if trainer.is_global_zero:
        write_environment(run.files.environment, trainer.strategy.root_device)
    trainer.fit(module, ckpt_path=str(checkpoint) if checkpoint.exists() else None, weights_only=True)
    return module, record
