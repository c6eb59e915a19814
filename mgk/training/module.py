"""LightningModule of a run: batches, training step, optimizer and learning-rate schedule.

A step is a pure function of the weights, the seed and the step number: they determine the examples (see `data`) and
the dropout masks, because the random generators are reseeded before each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from mgk.training.config import TrainConfig
from mgk.training.data import DevelopmentSampler, EpochPermutation, TrainSampler, seed_of
from mgk.training.objectives import Objective
from mgk.training.process_group import is_distributed


def one_cycle(optimizer: torch.optim.Optimizer, settings: TrainConfig) -> LRScheduler:
    """Return a schedule with linear warm-up and linear decay."""
    return OneCycleLR(
        optimizer,
        settings.lr,
        total_steps=settings.steps + 1,
        pct_start=settings.warmup / settings.steps,
        anneal_strategy="linear",
    )


def constant(optimizer: torch.optim.Optimizer, settings: TrainConfig) -> LRScheduler:
    """Return a schedule with a constant learning rate."""
    return LambdaLR(optimizer, lambda step: 1.0)


def cosine(optimizer: torch.optim.Optimizer, settings: TrainConfig) -> LRScheduler:
    """Return a schedule with linear warm-up and cosine decay to `final_lr`."""
    warmup, final_lr = settings.warmup, settings.final_lr

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, settings.steps - warmup))
        return final_lr + (1 - final_lr) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer, TrainConfig], LRScheduler]] = {
    "one-cycle": one_cycle,
    "constant": constant,
    "cosine": cosine,
}


def parameter_groups(model: nn.Module, settings: TrainConfig) -> Any:
    """Return the parameters for AdamW, in two groups if only matrices have weight decay.

    The second group has no weight decay: embeddings, norms, biases and the parameters of the mixture.
    """
    if settings.decay == "all":
        return model.parameters()
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if id(p) in matrices]},
        {"params": [p for p in parameters if id(p) not in matrices], "weight_decay": 0.0},
    ]


class TrainingModule(pl.LightningModule):
    """Train the model of an objective.

    Attributes:
        train_means: Loss and metrics of the last training step, on the device.
        dev_means: Loss and metrics of the last evaluation on the development set, over all processes.
        best: Best metric on the development set and its step.
        graphed_step: Forward and backward as a CUDA graph, or None.
    """

    def __init__(self, objective: Objective, seed: int, graphs: bool = False) -> None:
        super().__init__()
        self.objective, self.settings, self.seed, self.graphs = objective, objective.settings, seed, graphs
        self.model, self.splits = objective.model, objective.splits
        self._sharded = False
        self.graphed_step: Callable[[Tensor], dict[str, Tensor]] | None = None
        self.train_means: dict[str, Tensor] = {}
        self.dev_means: dict[str, float] = {}
        self._dev_batches: list[tuple[int, dict[str, Tensor]]] = []  # number of examples, and their means
        self.best: dict[str, float] = {objective.metric: objective.worst_value(), "step": -1}

    def setup(self, stage: str) -> None:
        self.objective.to_device(self.device)
        if self.graphs and not is_distributed() and self.settings.accumulate == 1:
            self.graphed_step = self.objective.graphed_step()

    def configure_model(self) -> None:
        """Shard the weights of each layer over the processes, if the strategy is FSDP."""
        mesh = self.device_mesh
        if mesh is not None and not self._sharded:
            from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

            for submodule in (*self.model.layers, self.model):
                fully_shard(submodule, mesh=mesh["data_parallel"])
            for method in self.objective.fsdp_entry_points:
                register_fsdp_forward_method(self.model, method)
            self._sharded = True

    def train_dataloader(self) -> TrainSampler:
        order = EpochPermutation(len(self.splits["train"]), seed_of(self.seed, 1))
        batch_size, accumulate, world_size = self.settings.batch_size, self.settings.accumulate, self.trainer.world_size
        if batch_size % (accumulate * world_size):
            raise ValueError(
                f"batch_size must be a multiple of processes × accumulate = {world_size} × {accumulate}, "
                f"got {batch_size}"
            )
        return TrainSampler(
            order, batch_size, accumulate, self.global_rank, world_size, lambda: self.trainer.global_step * accumulate
        )

    def val_dataloader(self) -> DevelopmentSampler:
        """Return this process's batches of the development set."""
        examples, batch_size = len(self.splits["dev"]), self.settings.eval_batch_size
        return DevelopmentSampler(examples, batch_size, self.global_rank, self.trainer.world_size)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        # torch.manual_seed also queues a call, with its traceback, for each device type that is not initialized.
        seed = seed_of(self.seed, 2, batch_idx, self.global_rank)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Keep the indices on the host, where the lengths of the examples are."""
        return batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        # No self.log here: Lightning spends a millisecond per step on it.
        means = self.graphed_step(batch) if self.graphed_step else self.objective.measure(batch, "train")
        self.train_means = {name: value.detach() for name, value in means.items()}
        return means["loss"]

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass, unless the CUDA graph has already done so."""
        if not self.graphed_step:
            loss.backward()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        if not self.graphed_step:
            optimizer.zero_grad()

    def on_validation_epoch_start(self) -> None:
        self._dev_batches = []

    def validation_step(self, batch: tuple[Tensor, int], batch_idx: int) -> None:
        indices, count = batch
        self._dev_batches.append((count, self.objective.measure(indices, "dev")))

    def on_validation_epoch_end(self) -> None:
        """Average over the examples of all processes.

        Lightning's average over processes divides by a mean of integer counts, which is rounded.
        """
        if self._dev_batches:
            self.dev_means = self._average_over_processes()
            dev_means = {f"dev_{name}": value for name, value in self.dev_means.items()}
            self.log_dict(dev_means, prog_bar=True, batch_size=1, sync_dist=True)

    def evaluate(self) -> dict[str, float]:
        """Return the development metrics outside Lightning's loop; all processes must call this together."""
        self.eval()
        self.on_validation_epoch_start()
        with torch.no_grad(), self.objective.autocast():
            for number, batch in enumerate(self.val_dataloader()):
                self.validation_step(batch, number)
        return self._average_over_processes()

    def _average_over_processes(self) -> dict[str, float]:
        names = list(self._dev_batches[0][1])
        counts = torch.tensor([count for count, _ in self._dev_batches], dtype=torch.float64)
        means = torch.stack([torch.stack([values[name] for name in names]) for _, values in self._dev_batches])
        means = means.cpu().double()[counts > 0]
        counts = counts[counts > 0]
        totals = torch.cat([counts @ means, counts.sum()[None]])
        if is_distributed():
            totals = totals.to(self.device)
            torch.distributed.all_reduce(totals)
        *sums, examples = totals.tolist()
        return {name: total / examples for name, total in zip(names, sums, strict=True)}

    def configure_optimizers(self) -> Any:
        s = self.settings
        optimizer = torch.optim.AdamW(
            parameter_groups(self.model, s),
            s.lr,
            betas=(0.9, s.beta2),
            eps=s.eps,
            weight_decay=s.weight_decay,
            fused=self.device.type == "cuda",
        )
        schedule = SCHEDULERS[s.schedule](optimizer, s)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip gradients. Lightning rejects fused optimizers under any mixed precision, though only fp16 needs that."""
        if gradient_clip_val:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), gradient_clip_val)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["best"] = dict(self.best)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.best = dict(checkpoint["best"])
