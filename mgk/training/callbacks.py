"""Lightning callback that writes metrics.csv, the best model and the checkpoint, and stops on signals."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
import torch

from mgk._core.io import append_durably, mark_stopping, write_atomically
from mgk.models import save_model
from mgk.models.run_directory import RunDirectory
from mgk.training.checkpoints import CheckpointStore
from mgk.training.config import TrainConfig
from mgk.training.module import TrainingModule
from mgk.training.process_group import is_distributed
from mgk.training.progress import StepTime
from mgk.training.signals import STOPPING, StopRequest
from mgk.training.trackers import AppendingCSVLogger, drop_rows_after

# Steps between points of the trackers' training curves.
LOG_EVERY = 50
# Steps between checks for a signal in any process of a distributed run; on a GPU, each check synchronizes.
SIGNAL_CHECK_EVERY = {"cpu": 1, "cuda": 10}


class CheckpointCallback(pl.Callback):
    """Write metrics, the best model and checkpoints to a run directory, and stop on SIGTERM, SIGINT or SIGHUP.

    Attributes:
        stopped_by: The signal that stopped the run, the same in all processes, or None.
        steps: Number of steps trained by this process.
        step_ms: Mean time of a step in ms, for each interval between two evaluations.
        device: Training device.
        is_resumed: Whether the run continues from a checkpoint.
    """

    def __init__(self, directory: Path, settings: TrainConfig, checkpoints: CheckpointStore | None = None) -> None:
        self.files, self.settings = RunDirectory(directory), settings
        self._checkpoints = checkpoints or CheckpointStore(self.files)
        self.is_resumed = self._checkpoints.selected is not None
        self.stopped_by: int | None = None
        self.step_ms: list[float] = []
        self.steps = 0
        self._last_evaluation: StepTime | None = None
        self._skip_evaluation = False
        self._stop_request = StopRequest()

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        # The best model is evaluated on this device. Lightning moves the model to the CPU at the end, and calls no
        # other hook if a resumed run has no steps left.
        self.device = trainer.strategy.root_device

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        path = self.files.metrics
        if trainer.is_global_zero:
            if path.exists():
                drop_rows_after(path, trainer.global_step)
            else:
                metric = cast(TrainingModule, module).objective.metric
                write_atomically(path, f"step,split,loss,{metric},lr,unix_time\n")
            for logger in trainer.loggers:
                if isinstance(logger, AppendingCSVLogger):
                    logger.rewind(trainer.global_step)
        self._stop_request.install(STOPPING if trainer.is_global_zero else "", lambda: mark_stopping(self.files.lock))

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self._stop_request.close_listener()

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.stopped_by = self._stop_request.number(self.device)
        self._stop_request.restore()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.steps += 1
        if trainer.loggers and trainer.global_step % LOG_EVERY == 0:
            means = {name: float(value) for name, value in cast(TrainingModule, module).train_means.items()}
            for logger in trainer.loggers:
                logger.log_metrics(means, trainer.global_step)
        if not is_distributed() or self.steps % SIGNAL_CHECK_EVERY.get(self.device.type, 1) == 0:
            self.stopped_by = self._stop_request.number(self.device)
        if self.stopped_by is not None and not trainer.should_stop:
            trainer.should_stop = True
            if not self._is_evaluation_due(trainer.global_step):
                # Lightning would evaluate once more before it stops.
                trainer.limit_val_batches = 0
                self._skip_evaluation = True
                self._save_checkpoint(trainer)

    def _is_evaluation_due(self, step: int) -> bool:
        """Return whether an evaluation is due after this step and has not run yet."""
        is_evaluation_step = step % self.settings.eval_every == 0 or step == self.settings.steps
        return step > 0 and is_evaluation_step and not self._is_evaluated(step)

    def _is_evaluated(self, step: int) -> bool:
        return self._last_evaluation is not None and self._last_evaluation.step == step

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        now, last = self._clock(module), self._last_evaluation
        if last is not None and trainer.global_step > last.step:
            self.step_ms.append(1000 * (now - last.time) / (trainer.global_step - last.step))

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not self._skip_evaluation:
            trained = cast(TrainingModule, module)
            self._record_evaluation(trainer, trained, trained.dev_means)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        # Evaluate the last step even if it is not a multiple of eval_every.
        if not self._skip_evaluation and not self._is_evaluated(trainer.global_step):
            trained = cast(TrainingModule, module)
            dev_means = trained.evaluate()
            for logger in trainer.loggers:
                logger.log_metrics({f"dev_{name}": value for name, value in dev_means.items()}, trainer.global_step)
            self._record_evaluation(trainer, trained, dev_means)

    def _record_evaluation(self, trainer: pl.Trainer, module: TrainingModule, dev_means: dict[str, float]) -> None:
        """Write training and development metrics, the model if it is the best so far, and a checkpoint."""
        objective, step = module.objective, trainer.global_step
        means = {"train": {name: float(value) for name, value in module.train_means.items()}, "dev": dev_means}
        metrics = {split: objective.metric_value(values) if values else math.nan for split, values in means.items()}
        if not math.isfinite(dev_means.get("loss", 0.0)):
            raise ValueError(f"the loss is not finite at step {step}: the training has diverged; lower lr, or set clip")
        if trainer.is_global_zero:
            lr = trainer.optimizers[0].param_groups[0]["lr"]
            losses = {split: values.get("loss", math.nan) for split, values in means.items()}
            rows = (
                f"{step},{split},{loss:.6g},{metrics[split]:.6g},{lr:.6g},{time.time():.1f}\n"
                for split, loss in losses.items()
            )
            append_durably(self.files.metrics, "".join(rows))
            dev_metric = objective.format_metric(metrics["dev"])
            line = f"step {step}/{self.settings.steps}  loss {losses['train']:.3f}  dev {dev_metric}"
            print(line, file=sys.stderr, flush=True)
        if objective.is_better(metrics["dev"], module.best[objective.metric]):
            module.best = {objective.metric: metrics["dev"], "step": step}
            # Imported here: DTensor takes longer to import than the rest of the package.
            from mgk.distributed.checkpoint import gather_weights

            weights = gather_weights(module.model)
            if trainer.is_global_zero:
                save_model(module.model, self.files.best_model, weights)
        self._save_checkpoint(trainer)
        self._last_evaluation = StepTime(trainer.global_step, self._clock(module))

    def _save_checkpoint(self, trainer: pl.Trainer) -> None:
        self._checkpoints.save(lambda path: trainer.save_checkpoint(path, weights_only=False))

    def _clock(self, module: pl.LightningModule) -> float:
        if module.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
