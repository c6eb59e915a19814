"""What a training leaves while it runs: metrics.csv, checkpoints, the best model, and a clean end."""

from __future__ import annotations

import csv
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from mgk._core.io import write_atomically
from mgk.models import save_model
from mgk.models.run_directory import RunDirectory
from mgk.training.config import TrainConfig
from mgk.training.module import TrainingModule, is_distributed
from mgk.training.signals import SAME, STOPPING, SignalListener

# Steps between two points of the curves that TensorBoard shows.
LOG_EVERY = 50
# Several processes stop together, since they save together: what any of them has heard is asked for at every step, on
# GPUs, which would have to be waited for each time, at every so many.
AGREE_EVERY = {"cpu": 1, "cuda": 10}


class CheckpointCallback(pl.Callback):
    """metrics.csv, step times, the best model, checkpoints, and a clean end on SIGTERM or Ctrl-C."""

    def __init__(self, directory: Path, settings: TrainConfig) -> None:
        self.files, self.settings = RunDirectory(directory), settings
        self.stopped_by: int | None = None  # the signal, where all processes know of it
        self._asked: int | None = None  # the one that this process has heard
        self.step_ms: list[float] = []
        self.steps = 0  # taken by this process
        self._mark: tuple[int, float] | None = None
        self._stopped_at = 0.0
        self._left = False
        self._old_handlers: dict[int, Any] = {}
        self._heard: SignalListener | None = None

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        # Where the model is judged in the end. Lightning leaves it on the CPU when it is done, and a training that is
        # gone on with after its last step never starts.
        self.device = trainer.strategy.root_device

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        # Rows after the checkpoint will be written again.
        done = trainer.global_step
        path = self.files.metrics
        if trainer.is_global_zero and path.exists():
            rows = list(csv.reader(path.read_text().splitlines()))
            kept = [rows[0], *(row for row in rows[1:] if int(row[0]) <= done)]
            write_atomically(path, "".join(",".join(row) + "\n" for row in kept))
        if trainer.is_global_zero and not path.exists():
            write_atomically(path, f"step,split,loss,{cast(TrainingModule, module).objective.metric},lr,unix_time\n")
        # SIGHUP is what a terminal sends when it is closed. Windows has none, and under nohup it stays ignored.
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                self._old_handlers[number] = signal.signal(number, self._stop)
        # Of several processes one tells; all of them end.
        self._heard = SignalListener(self._old_handlers, STOPPING if trainer.is_global_zero else "")

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self._listen_no_more()

    def _listen_no_more(self) -> None:
        if self._heard is not None:
            self._heard.close()

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.stopped_by = self._agreed()
        self._listen_no_more()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: Any) -> None:
        if self._asked is None:
            self._asked, self._stopped_at = number, time.monotonic()
        elif time.monotonic() > self._stopped_at + SAME:
            raise KeyboardInterrupt

    def _agreed(self) -> int | None:
        """The signal that any of the processes has heard."""
        if not is_distributed():
            return self._asked
        heard = torch.tensor(self._asked or 0, device=self.device)
        torch.distributed.all_reduce(heard, torch.distributed.ReduceOp.MAX)
        return int(heard) or None

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.steps += 1
        if trainer.logger is not None and trainer.global_step % LOG_EVERY == 0:
            latest = cast(TrainingModule, module).latest
            trainer.logger.log_metrics({name: float(x) for name, x in latest.items()}, trainer.global_step)
        if not is_distributed() or self.steps % AGREE_EVERY.get(self.device.type, 1) == 0:
            self.stopped_by = self._agreed()
        if self.stopped_by is not None and not trainer.should_stop:
            trainer.should_stop = True
            if not self._due(trainer.global_step):
                # Lightning would evaluate on leaving, which nobody waits for.
                trainer.limit_val_batches = 0
                self._left = True
                self._save(trainer)

    def _due(self, step: int) -> bool:
        """Whether it is to be evaluated, and has not been: the run that goes on begins behind it."""
        evaluated = self._mark is not None and self._mark[0] == step
        return step > 0 and not evaluated and (step % self.settings.eval_every == 0 or step == self.settings.steps)

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        now = self._clock(module)
        if self._mark is not None and trainer.global_step > self._mark[0]:
            self.step_ms.append(1000 * (now - self._mark[1]) / (trainer.global_step - self._mark[0]))

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not self._left:
            dev = {name.removeprefix("dev_"): float(value) for name, value in trainer.callback_metrics.items()}
            self._record(trainer, cast(TrainingModule, module), dev)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        # The last step is evaluated also where it is no multiple of eval_every.
        if not self._left and (self._mark is None or self._mark[0] != trainer.global_step):
            module.eval()
            self._record(
                trainer, cast(TrainingModule, module), cast(TrainingModule, module).objective.evaluate_means("dev")
            )

    def _record(self, trainer: pl.Trainer, module: TrainingModule, dev: dict[str, float]) -> None:
        """The last training step, and the development set."""
        objective, step = module.objective, trainer.global_step
        means = {"train": {name: float(value) for name, value in module.latest.items()}, "dev": dev}
        found = {split: objective.metric_value(each) if each else math.nan for split, each in means.items()}
        if not math.isfinite(means["dev"].get("loss", 0.0)):
            raise ValueError(f"the loss is not finite at step {step}: the training has diverged; lower lr, or set clip")
        if trainer.is_global_zero:
            lr = trainer.optimizers[0].param_groups[0]["lr"]
            with self.files.metrics.open("a") as file:
                for split, each in means.items():
                    loss = each.get("loss", math.nan)
                    file.write(f"{step},{split},{loss:.6g},{found[split]:.6g},{lr:.6g},{time.time():.1f}\n")
            loss = means["train"].get("loss", math.nan)
            told = f"step {step}/{self.settings.steps}  loss {loss:.3f}  dev {objective.format_metric(found['dev'])}"
            print(told, file=sys.stderr, flush=True)
        if objective.is_better(found["dev"], module.best[objective.metric]):
            module.best = {objective.metric: found["dev"], "step": step}
            weights = whole_weights(module.model)
            if trainer.is_global_zero:
                save_model(module.model, self.files.best_model, weights)
        self._save(trainer)
        self._mark = (trainer.global_step, self._clock(module))

    def _save(self, trainer: pl.Trainer) -> None:
        checkpoint = self.files.checkpoint
        temporary = checkpoint.with_name(f".{checkpoint.name}.tmp")
        trainer.save_checkpoint(temporary, weights_only=False)
        if trainer.is_global_zero:
            temporary.replace(checkpoint)

    def _clock(self, module: pl.LightningModule) -> float:
        if module.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model; of one that is shared out, gathered, which all processes must do together."""
    from torch.distributed.tensor import DTensor

    state = model.state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
