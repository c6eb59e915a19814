"""A recipe becomes a Lightning run: exact resume, progress, logs, the best model on the development set.

A step is a pure function of the weights, the seed and the step's number: the examples are (see `batches`), and the
random numbers of dropout are, because the generator is seeded anew at each step.
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from mgk.batches import InOrder, Order, Stream, seed_of
from mgk.checks import one_of
from mgk.files import write_atomically
from mgk.models import save_model
from mgk.objectives import OBJECTIVES, Objective
from mgk.progress import Told
from mgk.recipes import Recipe, Row, Training

CHECKPOINT = "last.ckpt"
# Steps between two points of the curves that TensorBoard shows.
LOG_EVERY = 50


def one_cycle(optimizer: torch.optim.Optimizer, s: Training) -> LRScheduler:
    return OneCycleLR(optimizer, s.lr, total_steps=s.steps + 1, pct_start=s.warmup / s.steps, anneal_strategy="linear")


def cosine(optimizer: torch.optim.Optimizer, s: Training) -> LRScheduler:
    """Up in a line, then down to 0 along a cosine."""

    def factor(step: int) -> float:
        done = (step - s.warmup) / max(1, s.steps - s.warmup)
        return (step + 1) / s.warmup if step < s.warmup else 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return LambdaLR(optimizer, factor)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer, Training], LRScheduler]] = {
    "one-cycle": one_cycle,
    "constant": lambda optimizer, s: LambdaLR(optimizer, lambda step: 1.0),
    "cosine": cosine,
}


@dataclass(frozen=True)
class Run:
    """One training: a recipe, a model of it, a seed, and where it lies."""

    recipe: Recipe
    row: Row
    preset: str
    seed: int
    data_dir: Path
    directory: Path

    def model_config(self, task: Any) -> Any:
        """The resolved configuration."""
        return OBJECTIVES[task.objective].config(self.recipe, self.row, self.preset, task, self.data_dir)

    def describe(self, task: Any) -> dict[str, Any]:
        """What goes into run.json: everything that determines the run."""
        config = self.model_config(task)
        return {
            "recipe": self.recipe.name,
            "task": self.recipe.task,
            "row": str(self.row),
            "preset": self.preset,
            "seed": self.seed,
            "data": task.key(self.data_dir),
            "layers": list(config.layer_variants),
            "model": asdict(config),
            "training": asdict(self.recipe.training),
        }

    def setup(self, task: Any) -> str:
        """A short name for everything that determines the run but its seed."""
        described = {key: value for key, value in self.describe(task).items() if key != "seed"}
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]


class Fit(pl.LightningModule):
    """Trains the model of an objective."""

    def __init__(self, objective: Objective, seed: int, graphs: bool = False) -> None:
        super().__init__()
        self.objective, self.settings, self.seed, self.graphs = objective, objective.settings, seed, graphs
        self.model, self.splits = objective.model, objective.splits
        self._sharded = False
        self.recorded: Callable[[Tensor], dict[str, Tensor]] | None = None
        self.latest: dict[str, Tensor] = {}  # of the last training step, on the device
        self.best: dict[str, float] = {objective.metric: -objective.better * math.inf, "step": -1}

    def setup(self, stage: str) -> None:
        self.objective.place(self.device)
        if self.graphs and not in_company() and self.settings.accumulate == 1:
            self.recorded = self.objective.recorder()

    def configure_model(self) -> None:
        """FSDP: every layer's weights are shared out among the processes, and gathered where they are used."""
        mesh = self.device_mesh
        if mesh is not None and not self._sharded:
            from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

            for part in (*self.model.layers, self.model):
                fully_shard(part, mesh=mesh["data_parallel"])
            for method in self.objective.entries:
                register_fsdp_forward_method(self.model, method)
            self._sharded = True

    def train_dataloader(self) -> Stream:
        order = Order(len(self.splits["train"]), seed_of(self.seed, 1))
        world, parts = self.trainer.world_size, self.settings.accumulate
        if self.settings.batch_size % (parts * world):
            raise ValueError(f"batch_size {self.settings.batch_size} does not divide into {world} processes × {parts}")
        return Stream(
            order, self.settings.batch_size, parts, self.global_rank, world, lambda: self.trainer.global_step * parts
        )

    def val_dataloader(self) -> InOrder:
        """The development set, every process its share."""
        examples, batch = len(self.splits["dev"]), self.settings.eval_batch_size
        return InOrder(examples, batch, self.global_rank, self.trainer.world_size)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        # torch.manual_seed would also keep a call, with its traceback, for every kind of device that is not there.
        seed = seed_of(self.seed, 2, batch_idx, self.global_rank)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def transfer_batch_to_device(self, batch: Tensor, device: torch.device, dataloader_idx: int) -> Tensor:
        """Indices stay where what is known of the examples is."""
        return batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        # Nothing is logged here: Lightning would spend a millisecond a step on it.
        means = self.recorded(batch) if self.recorded else self.objective.measure(batch, "train")
        self.latest = {name: value.detach() for name, value in means.items()}
        return means["loss"]

    def backward(self, loss: Tensor) -> None:
        """A recorded step has left its gradients already."""
        if not self.recorded:
            loss.backward()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        if not self.recorded:
            optimizer.zero_grad()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        means = self.objective.measure(batch, "dev")
        named = {f"dev_{name}": value for name, value in means.items()}
        self.log_dict(named, prog_bar=True, batch_size=len(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        s = self.settings
        optimizer = torch.optim.AdamW(
            self.model.parameters(), s.lr, eps=s.eps, weight_decay=s.weight_decay, fused=self.device.type == "cuda"
        )
        schedule = SCHEDULERS[s.schedule](optimizer, s)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Lightning's own refuses fused optimizers under mixed precision, for the sake of fp16's scaled losses."""
        if gradient_clip_val:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), gradient_clip_val)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["best"] = dict(self.best)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.best = dict(checkpoint["best"])


class Record(pl.Callback):
    """metrics.csv, step times, the best model, checkpoints, and a clean end on SIGTERM or Ctrl-C."""

    def __init__(self, directory: Path, settings: Training) -> None:
        self.directory, self.settings = directory, settings
        self.device = torch.device("cpu")
        self.stopped_by: int | None = None
        self.step_ms: list[float] = []
        self.steps = 0  # taken by this process
        self._mark: tuple[int, float] | None = None
        self._left = False
        self._old_handlers: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, Fit)
        # Lightning leaves the model on the CPU when it is done.
        self.device = module.device
        # Rows after the checkpoint will be written again.
        done = trainer.global_step
        path = self.directory / "metrics.csv"
        if trainer.is_global_zero and path.exists():
            rows = list(csv.reader(path.read_text().splitlines()))
            kept = [rows[0], *(row for row in rows[1:] if int(row[0]) <= done)]
            write_atomically(path, "".join(",".join(row) + "\n" for row in kept))
        if trainer.is_global_zero and not path.exists():
            write_atomically(path, f"step,split,loss,{module.objective.metric},lr,seconds\n")
        # SIGHUP is what a terminal sends when it is closed. Windows has none, and under nohup it stays ignored.
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                self._old_handlers[number] = signal.signal(number, self._stop)

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: Any) -> None:
        if self.stopped_by is not None:
            raise KeyboardInterrupt
        self.stopped_by = number

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.steps += 1
        if trainer.logger is not None and trainer.global_step % LOG_EVERY == 0:
            assert isinstance(module, Fit)
            trainer.logger.log_metrics({name: float(x) for name, x in module.latest.items()}, trainer.global_step)
        if self.stopped_by is not None and not trainer.should_stop:
            trainer.should_stop = True
            self._left = True
            self._save(trainer)

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        now = self._clock(module)
        if self._mark is not None and trainer.global_step > self._mark[0]:
            self.step_ms.append(1000 * (now - self._mark[1]) / (trainer.global_step - self._mark[0]))

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        # Lightning validates once more on leaving early: the run that goes on will not have done so.
        if not self._left:
            assert isinstance(module, Fit)
            dev = {name.removeprefix("dev_"): float(value) for name, value in trainer.callback_metrics.items()}
            self._record(trainer, module, dev)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        # The last step is evaluated also where it is no multiple of eval_every.
        if not self._left and (self._mark is None or self._mark[0] != trainer.global_step):
            assert isinstance(module, Fit)
            module.eval()
            self._record(trainer, module, module.objective.means("dev"))

    def _record(self, trainer: pl.Trainer, module: Fit, dev: dict[str, float]) -> None:
        """The last training step, and the development set."""
        objective, step = module.objective, trainer.global_step
        means = {"train": {name: float(value) for name, value in module.latest.items()}, "dev": dev}
        found = {split: objective.value(each) if each else math.nan for split, each in means.items()}
        if not math.isfinite(means["dev"].get("loss", 0.0)):
            raise ValueError(f"the loss is not finite at step {step}: the training has diverged; lower lr, or set clip")
        if trainer.is_global_zero:
            lr = trainer.optimizers[0].param_groups[0]["lr"]
            with (self.directory / "metrics.csv").open("a") as file:
                for split, each in means.items():
                    loss = each.get("loss", math.nan)
                    file.write(f"{step},{split},{loss:.6g},{found[split]:.6g},{lr:.6g},{time.time():.1f}\n")
            loss = means["train"].get("loss", math.nan)
            told = f"step {step}/{self.settings.steps}  loss {loss:.3f}  dev {objective.told(found['dev'])}"
            print(told, file=sys.stderr, flush=True)
        if objective.better * (found["dev"] - module.best[objective.metric]) > 0:
            module.best = {objective.metric: found["dev"], "step": step}
            weights = whole_weights(module.model)
            if trainer.is_global_zero:
                save_model(module.model, self.directory / "best", weights)
        self._save(trainer)
        self._mark = (trainer.global_step, self._clock(module))

    def _save(self, trainer: pl.Trainer) -> None:
        temporary = self.directory / f".{CHECKPOINT}.tmp"
        trainer.save_checkpoint(temporary, weights_only=False)
        if trainer.is_global_zero:
            temporary.replace(self.directory / CHECKPOINT)

    def _clock(self, module: pl.LightningModule) -> float:
        if module.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model; of one that is shared out, gathered, which all processes must do together."""
    from torch.distributed.tensor import DTensor

    state = model.state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def in_company() -> bool:
    """Whether this process is one of several of a run."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def leave() -> None:
    """Ends the connection between the processes of a run in order: otherwise the first to go may abort another."""
    if in_company():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def chosen_strategy(name: str, world: int) -> Any:
    one_of("--strategy", name, ("auto", "ddp", "fsdp"))
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
            "remove it, or take another directory (train --out, compare --runs)"
        )


def _check_whole(checkpoint: Path) -> None:
    try:
        torch.load(checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{checkpoint} is damaged ({reason}): remove {checkpoint.parent} and train again") from error


def fit(
    run: Run, task: Any, *, resume: bool, accelerator: str = "auto", strategy: str = "auto", graphs: bool = False
) -> tuple[Fit, Record]:
    """Trains, or goes on from the last checkpoint, and leaves everything in the run's directory.

    graphs: steps are recorded as CUDA graphs, where that is possible.
    """
    settings = run.recipe.training
    config = run.model_config(task)
    # Lightning greets on every run, and torch warns of what Lightning does with its trees.
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    description = json.loads(json.dumps(run.describe(task)))
    run.directory.mkdir(parents=True, exist_ok=True)
    written = run.directory / "run.json"
    checkpoint = run.directory / CHECKPOINT
    if checkpoint.exists() and not resume:
        raise ValueError(f"{run.directory} already holds a run: pass --resume auto to go on, or another --out")
    if checkpoint.exists():
        _check_same(run.directory, json.loads(written.read_text()), description)
        _check_whole(checkpoint)
    # Where the data lay is kept for later commands, and may change.
    write_atomically(written, json.dumps({**description, "data_dir": str(run.data_dir.resolve())}, indent=2))
    kind = OBJECTIVES[task.objective]
    kind.keep(task, run.data_dir, run.directory)
    splits = {name: task.split(run.data_dir, name) for name in ("train", "dev")}
    torch.manual_seed(seed_of(run.seed, 0))
    module = Fit(kind(kind.model_class(config), settings, task, splits), run.seed, graphs)
    record = Record(run.directory, settings)
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
        logger=pl.loggers.TensorBoardLogger(run.directory, name="", version="tensorboard"),
        log_every_n_steps=LOG_EVERY,
        callbacks=[record, Told(settings.steps)],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
        # Under inference_mode what is compiled for the development set would be compiled again for the test set.
        inference_mode=False,
    )
    trainer.fit(module, ckpt_path=str(checkpoint) if checkpoint.exists() else None, weights_only=True)
    return module, record
