"""Training progress in one line: step, loss, metric, speed and remaining time.

On a terminal the line has a progress bar; elsewhere it is printed every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytorch_lightning as pl
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from mgk.training.objectives import Objective

# Seconds between updates. Each update reads the loss, which synchronizes with the GPU.
BAR_EVERY, LINE_EVERY = 0.5, 10.0
BAR_WIDTH = 20


def clock_time(seconds: float) -> str:
    """Format a duration as 1:02 or 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class StepTime(NamedTuple):
    """A training step, and the time in seconds at which it ended."""

    step: int
    time: float


class ProgressBar(pl.Callback):
    """Print progress from rank 0; on a terminal, other output appears above the bar.

    Args:
        steps: Total number of steps.
        console: Console to print to; stderr by default.
        clock: Clock in seconds.
    """

    def __init__(
        self, steps: int, console: Console | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.steps, self.clock = steps, clock
        self.console = console or Console(stderr=True)
        self._interval = BAR_EVERY if self.console.is_terminal else LINE_EVERY
        self._bar: Progress | None = None
        self._last_update = 0.0
        self._start = StepTime(0, 0.0)
        self._first_step: StepTime | None = None  # includes compilation
        self._evaluation_start = 0.0
        self._evaluation_seconds = 0.0  # total since the first step
        self._dev_metric = ""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self._last_update = self.clock()
        self._start = StepTime(trainer.global_step, self._last_update)
        if self.console.is_terminal:
            # Text before the bar: a narrow terminal truncates the bar, not the text.
            columns = TextColumn("{task.description}"), BarColumn(BAR_WIDTH)
            self._bar = Progress(*columns, console=self.console, auto_refresh=False, transient=True)
            self._bar.add_task("", total=self.steps)
            self._bar.start()
        self._show(trainer.global_step, f"step {trainer.global_step}/{self.steps}  starting on {module.device}")

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._first_step is None and trainer.global_step:
            self._first_step = StepTime(trainer.global_step, self.clock())
        if self._is_due(trainer):
            self._show(trainer.global_step, self.line(trainer, module))

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._evaluation_start = self.clock()

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._is_due(trainer):
            batches = f"{batch_idx + 1} of {sum(trainer.num_val_batches)}"
            self._show(trainer.global_step, f"step {trainer.global_step}/{self.steps}  evaluating, {batches}")

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self._first_step is not None:
            self._evaluation_seconds += self.clock() - self._evaluation_start
        # CheckpointCallback prints a line after each evaluation.
        self._last_update = self.clock()
        dev_means = {name.removeprefix("dev_"): value for name, value in trainer.callback_metrics.items()}
        self._dev_metric = _format_means(module, dev_means) if dev_means else ""

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.close()

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def line(self, trainer: pl.Trainer, module: Any) -> str:
        """Return the line for the current step."""
        step, means = trainer.global_step, module.train_means
        parts = [f"step {step}/{self.steps}"]
        if means:
            parts += [f"loss {float(means['loss']):.3f}", _format_means(module, means)]
        if self._dev_metric:
            parts.append(f"dev {self._dev_metric}")
        return "  ".join([*parts, *self._pace(step)])

    def _pace(self, step: int) -> list[str]:
        """Return speed and remaining time; empty before the first step."""
        first = self._first_step or self._start
        if step == first.step:
            # Only one step so far: estimate from it.
            first = self._start
        if step == first.step:
            return []
        seconds = max(self.clock() - first.time, 1e-9)
        speed = (step - first.step) / max(seconds - self._evaluation_seconds, 1e-9)
        # The remaining time includes evaluations.
        remaining = (self.steps - step) * seconds / (step - first.step)
        pace = f"{speed:.1f} steps/s" if speed >= 1 else f"{1 / speed:.1f} s/step"
        return [pace, f"{clock_time(remaining)} left"]

    def _is_due(self, trainer: pl.Trainer) -> bool:
        return trainer.is_global_zero and self.clock() - self._last_update >= self._interval

    def _show(self, step: int, line: str) -> None:
        self._last_update = self.clock()
        if self._bar is None:
            self.console.print(line, soft_wrap=True, highlight=False, markup=False)
        else:
            self._bar.update(self._bar.task_ids[0], completed=step, description=line, refresh=True)


def _format_means(module: Any, means: dict[str, Any]) -> str:
    objective: Objective = module.objective
    return objective.format_metric(objective.metric_value({name: float(value) for name, value in means.items()}))
