"""What a training step is: the examples of a step, its gradients, the schedule of its rate.

A step is a pure function of the weights, the seed and the step's number: the examples are (see `batches`), and the
random numbers of dropout are, because the generator is seeded anew at each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from mgk.training.config import TrainConfig
from mgk.training.data import EpochPermutation, SequentialSampler, TrainSampler, seed_of
from mgk.training.objectives import Objective


def one_cycle(optimizer: torch.optim.Optimizer, s: TrainConfig) -> LRScheduler:
    return OneCycleLR(optimizer, s.lr, total_steps=s.steps + 1, pct_start=s.warmup / s.steps, anneal_strategy="linear")


def cosine(optimizer: torch.optim.Optimizer, s: TrainConfig) -> LRScheduler:
    """Up in a line, then down to 0 along a cosine."""

    def factor(step: int) -> float:
        done = (step - s.warmup) / max(1, s.steps - s.warmup)
        return (step + 1) / s.warmup if step < s.warmup else 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return LambdaLR(optimizer, factor)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer, TrainConfig], LRScheduler]] = {
    "one-cycle": one_cycle,
    "constant": lambda optimizer, s: LambdaLR(optimizer, lambda step: 1.0),
    "cosine": cosine,
}


def is_distributed() -> bool:
    """Whether this process is one of several of a run."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class TrainingModule(pl.LightningModule):
    """Trains the model of an objective."""

    def __init__(self, objective: Objective, seed: int, graphs: bool = False) -> None:
        super().__init__()
        self.objective, self.settings, self.seed, self.graphs = objective, objective.settings, seed, graphs
        self.model, self.splits = objective.model, objective.splits
        self._sharded = False
        self.graphed_step: Callable[[Tensor], dict[str, Tensor]] | None = None
        self.latest: dict[str, Tensor] = {}  # of the last training step, on the device
        self.best: dict[str, float] = {objective.metric: objective.worst_value(), "step": -1}

    def setup(self, stage: str) -> None:
        self.objective.to_device(self.device)
        if self.graphs and not is_distributed() and self.settings.accumulate == 1:
            self.graphed_step = self.objective.graphed_step()

    def configure_model(self) -> None:
        """FSDP: every layer's weights are shared out among the processes, and gathered where they are used."""
        mesh = self.device_mesh
        if mesh is not None and not self._sharded:
            from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

            for part in (*self.model.layers, self.model):
                fully_shard(part, mesh=mesh["data_parallel"])
            for method in self.objective.fsdp_entry_points:
                register_fsdp_forward_method(self.model, method)
            self._sharded = True

    def train_dataloader(self) -> TrainSampler:
        order = EpochPermutation(len(self.splits["train"]), seed_of(self.seed, 1))
        world, parts = self.trainer.world_size, self.settings.accumulate
        if self.settings.batch_size % (parts * world):
            raise ValueError(f"batch_size {self.settings.batch_size} does not divide into {world} processes × {parts}")
        return TrainSampler(
            order, self.settings.batch_size, parts, self.global_rank, world, lambda: self.trainer.global_step * parts
        )

    def val_dataloader(self) -> SequentialSampler:
        """The development set, every process its share."""
        examples, batch = len(self.splits["dev"]), self.settings.eval_batch_size
        return SequentialSampler(examples, batch, self.global_rank, self.trainer.world_size)

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
        means = self.graphed_step(batch) if self.graphed_step else self.objective.measure(batch, "train")
        self.latest = {name: value.detach() for name, value in means.items()}
        return means["loss"]

    def backward(self, loss: Tensor) -> None:
        """A recorded step has left its gradients already."""
        if not self.graphed_step:
            loss.backward()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        if not self.graphed_step:
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
