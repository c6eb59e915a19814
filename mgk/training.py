"""A recipe becomes a Lightning run: exact resume, progress, logs, the best model on the development set.

A step is a pure function of the weights, the seed and the step's number: the examples are (see `batches`), and the
random numbers of dropout are, because the generator is seeded anew at each step.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import signal
import sys
import time
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn

from mgk.batches import Examples, InOrder, Order, Stream, seed_of
from mgk.checks import one_of
from mgk.models import Classifier, EncoderConfig, save_model
from mgk.models.storage import write_atomically
from mgk.recipes import Recipe, Row, Training

CHECKPOINT = "last.ckpt"


@dataclass(frozen=True)
class Run:
    """One training: a recipe, a model of it, a seed, and where it lies."""

    recipe: Recipe
    row: Row
    preset: str
    seed: int
    data_dir: Path
    directory: Path

    def model_config(self, task: Any) -> EncoderConfig:
        """The resolved configuration. Pooling over the padded length is what the authors' code does."""
        defaults = {"pooling": "mean-padded" if self.preset == "ref-lra" else "mean"}
        known = {field.name for field in fields(EncoderConfig)}
        for name in self.recipe.model:
            one_of("--set model.", name, sorted(known))
        return EncoderConfig(
            vocab_size=task.vocab_size,
            num_classes=task.num_classes,
            max_length=task.max_length,
            documents=task.documents,
            **{
                **defaults,
                **self.recipe.model,
                "variant": self.row.variant,
                "num_heads": self.row.heads,
                "num_kv_heads": self.row.kv_heads,
                "preset": self.preset,
            },
        )

    def describe(self, config: EncoderConfig) -> dict[str, Any]:
        """What goes into run.json: everything that determines the run."""
        return {
            "recipe": self.recipe.name,
            "task": self.recipe.task,
            "row": str(self.row),
            "preset": self.preset,
            "seed": self.seed,
            "layers": list(config.layer_variants),
            "model": asdict(config),
            "training": asdict(self.recipe.training),
        }


class Fit(pl.LightningModule):
    """Trains a classifier. `settings` is the recipe's training section."""

    def __init__(self, model: Classifier, settings: Training, seed: int, splits: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.settings, self.seed, self.splits = model, settings, seed, splits
        self.network: Any = model
        self.examples: dict[str, Examples] = {}
        self.packs = self.compiles = self._sharded = False
        self.best: dict[str, float] = {"accuracy": -1.0, "step": -1}

    def setup(self, stage: str) -> None:
        if not self.examples:
            length = self.model.config.max_length
            self.examples = {name: Examples(split, length, self.device) for name, split in self.splits.items()}
        self.packs = self.settings.padding == "packed" and self.model.config.packs and self.device.type == "cuda"
        self.compiles = self.settings.compile and self.device.type == "cuda"
        if self.compiles and self.network is self.model:
            self.network = torch.compile(self.model)

    def configure_model(self) -> None:
        """FSDP: every layer's weights are shared out among the processes, and gathered where they are used."""
        mesh = self.device_mesh
        if mesh is not None and not self._sharded:
            from torch.distributed.fsdp import fully_shard

            for part in (*self.model.layers, self.model):
                fully_shard(part, mesh=mesh["data_parallel"])
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
        torch.manual_seed(seed_of(self.seed, 2, batch_idx, self.global_rank))

    def transfer_batch_to_device(self, batch: Tensor, device: torch.device, dataloader_idx: int) -> Tensor:
        """Indices stay where the lengths of the examples are known."""
        return batch

    def logits(self, indices: Tensor, split: str) -> tuple[Tensor, Tensor]:
        examples, chosen, count = self.examples[split], indices.numpy(), len(indices)
        if self.compiles and split != "train":
            # One more shape would be compiled for the last batch.
            chosen = np.resize(chosen, self.settings.eval_batch_size)
        if self.packs:
            tokens, edges, labels = examples.packed(chosen)
            torch._dynamo.maybe_mark_dynamic(tokens, 0)
            return self.network(tokens, cu_seqlens=edges)[:count], labels[:count]
        width = examples.width(chosen) if self.settings.padding == "longest" else examples.max_length
        tokens, lengths, labels = examples.batch(torch.from_numpy(chosen).to(self.device), width)
        return self.network(tokens, lengths)[:count], labels[:count]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits, labels = self.logits(batch, "train")
        loss = nn.functional.cross_entropy(logits.float(), labels)
        accuracy = (logits.argmax(-1) == labels).float().mean()
        self.log_dict({"loss": loss.detach(), "accuracy": accuracy}, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        logits, labels = self.logits(batch, "dev")
        loss = nn.functional.cross_entropy(logits.float(), labels)
        accuracy = (logits.argmax(-1) == labels).float().mean()
        self.log_dict(
            {"dev_loss": loss, "dev_accuracy": accuracy}, prog_bar=True, batch_size=len(batch), sync_dist=True
        )

    def configure_optimizers(self) -> Any:
        s = self.settings
        optimizer = torch.optim.AdamW(
            self.model.parameters(), s.lr, eps=s.eps, weight_decay=s.weight_decay, fused=self.device.type == "cuda"
        )
        if s.schedule == "constant":
            return optimizer
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, s.lr, total_steps=s.steps + 1, pct_start=s.warmup / s.steps, anneal_strategy="linear"
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["best"] = dict(self.best)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.best = dict(checkpoint["best"])

    @torch.no_grad()
    def correct(self, split: str) -> np.ndarray:
        """For every example of a split, whether the prediction is right."""
        self.eval()
        parts = []
        precision = self.settings.precision == "bf16"
        for indices in InOrder(len(self.splits[split]), self.settings.eval_batch_size):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=precision):
                logits, labels = self.logits(indices, split)
            parts.append(logits.argmax(-1) == labels)
        return torch.cat(parts).cpu().numpy()


class Record(pl.Callback):
    """metrics.csv, step times, the best model, checkpoints, and a clean end on SIGTERM or Ctrl-C."""

    def __init__(self, directory: Path, settings: Training) -> None:
        self.directory, self.settings = directory, settings
        self.device = torch.device("cpu")
        self.stopped_by: int | None = None
        self.step_ms: list[float] = []
        self._mark: tuple[int, float] | None = None
        self._left = False
        self._old_handlers: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
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
            write_atomically(path, "step,split,loss,accuracy,lr,seconds\n")
        for number in (signal.SIGTERM, signal.SIGINT):
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
            self._record(trainer, module, {name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        # The last step is evaluated also where it is no multiple of eval_every.
        if not self._left and (self._mark is None or self._mark[0] != trainer.global_step):
            assert isinstance(module, Fit)
            values = {name: float(value) for name, value in trainer.callback_metrics.items()}
            values["dev_accuracy"] = float(module.correct("dev").mean())
            self._record(trainer, module, {**values, "dev_loss": float("nan")})

    def _record(self, trainer: pl.Trainer, module: pl.LightningModule, values: dict[str, float]) -> None:
        assert isinstance(module, Fit)
        if trainer.is_global_zero:
            lr = trainer.optimizers[0].param_groups[0]["lr"]
            with (self.directory / "metrics.csv").open("a") as file:
                for split, prefix in (("train", ""), ("dev", "dev_")):
                    row = [values.get(f"{prefix}{name}", float("nan")) for name in ("loss", "accuracy")]
                    file.write(f"{trainer.global_step},{split},{row[0]:.6g},{row[1]:.6g},{lr:.6g},{time.time():.1f}\n")
            if not sys.stderr.isatty():
                print(
                    f"step {trainer.global_step}/{self.settings.steps}  loss {values.get('loss', float('nan')):.3f}"
                    f"  dev accuracy {100 * values['dev_accuracy']:.1f} %",
                    file=sys.stderr,
                    flush=True,
                )
        if values["dev_accuracy"] > module.best["accuracy"]:
            module.best = {"accuracy": values["dev_accuracy"], "step": trainer.global_step}
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


def chosen_strategy(name: str, world: int) -> Any:
    one_of("--strategy", name, ("auto", "ddp", "fsdp"))
    if name == "fsdp":
        # One file that any number of processes can go on from, as with the other strategies.
        return ModelParallelStrategy(
            data_parallel_size=world, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    return "ddp" if world > 1 and name == "auto" else name


def fit(run: Run, task: Any, *, resume: bool, accelerator: str = "auto", strategy: str = "auto") -> tuple[Fit, Record]:
    """Trains, or goes on from the last checkpoint, and leaves everything in the run's directory."""
    settings = run.recipe.training
    config = run.model_config(task)
    # Lightning greets on every run, and torch warns of what Lightning does with its trees.
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    description = run.describe(config)
    run.directory.mkdir(parents=True, exist_ok=True)
    written = run.directory / "run.json"
    checkpoint = run.directory / CHECKPOINT
    if checkpoint.exists() and not resume:
        raise ValueError(f"{run.directory} already holds a run: pass --resume auto to go on, or another --out")
    if checkpoint.exists() and json.loads(written.read_text()) != json.loads(json.dumps(description)):
        raise ValueError(f"{run.directory} holds a run with other settings: take another --out")
    write_atomically(written, json.dumps(description, indent=2))
    splits = {name: task.split(run.data_dir, name) for name in ("train", "dev")}
    torch.manual_seed(seed_of(run.seed, 0))
    module = Fit(Classifier(config), settings, run.seed, splits)
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
        log_every_n_steps=50,
        callbacks=[record],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stderr.isatty(),
        use_distributed_sampler=False,
        # Under inference_mode what is compiled for the development set would be compiled again for the test set.
        inference_mode=False,
    )
    trainer.fit(module, ckpt_path=str(checkpoint) if checkpoint.exists() else None, weights_only=True)
    return module, record
