"""How a training goes, in one line: step, loss, metric, speed, time left. A bar on a terminal, elsewhere a plain line
now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

# Seconds between two looks at the numbers: on a GPU each look waits for the step.
BAR_EVERY, LINE_EVERY = 0.5, 10.0
BAR_WIDTH = 20


def clock_time(seconds: float) -> str:
    """1:02 or 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class ProgressBar(pl.Callback):
    """Tells the first process's terminal or log. What others print meanwhile appears above the bar."""

    def __init__(
        self, steps: int, console: Console | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.steps, self.clock = steps, clock
        self.console = console or Console(stderr=True)
        self._every = BAR_EVERY if self.console.is_terminal else LINE_EVERY
        self._bar: Progress | None = None
        self._told = 0.0  # when the last line was
        self._began = 0, 0.0  # step and time
        self._since: tuple[int, float] | None = None  # the first step's end: it holds what is compiled
        self._evaluation = 0.0  # when the one that runs began
        self._evaluating = 0.0  # seconds in all, since the first step
        self._dev = ""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self._told = self.clock()
        self._began = trainer.global_step, self._told
        if self.console.is_terminal:
            # The line first: where the terminal is narrow, the bar gives way.
            columns = TextColumn("{task.description}"), BarColumn(BAR_WIDTH)
            self._bar = Progress(*columns, console=self.console, auto_refresh=False, transient=True)
            self._bar.add_task("", total=self.steps)
            self._bar.start()
        self._show(trainer.global_step, f"step {trainer.global_step}/{self.steps}  starting on {module.device}")

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._since is None and trainer.global_step:
            self._since = trainer.global_step, self.clock()
        if self._due(trainer):
            self._show(trainer.global_step, self.line(trainer, module))

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._evaluation = self.clock()

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._due(trainer):
            of = sum(trainer.num_val_batches)
            self._show(
                trainer.global_step, f"step {trainer.global_step}/{self.steps}  evaluating, {batch_idx + 1} of {of}"
            )

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._evaluating += self.clock() - self._evaluation if self._since is not None else 0.0
        # The evaluation has its own line.
        self._told = self.clock()
        dev = {name.removeprefix("dev_"): value for name, value in trainer.callback_metrics.items()}
        self._dev = _metric(module, dev) if dev else ""

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.close()

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def line(self, trainer: pl.Trainer, module: Any) -> str:
        step, latest = trainer.global_step, module.latest
        parts = [f"step {step}/{self.steps}"]
        if latest:
            parts += [f"loss {float(latest['loss']):.3f}", _metric(module, latest)]
        parts += [f"dev {self._dev}"] if self._dev else []
        return "  ".join([*parts, *self._pace(step)])

    def _pace(self, step: int) -> list[str]:
        first, began = self._since or self._began
        if step == first:
            # With no other to go by, the first step: where each takes minutes, they are told after it.
            first, began = self._began
        if step == first:
            return []
        seconds = max(self.clock() - began, 1e-9)
        speed = (step - first) / max(seconds - self._evaluating, 1e-9)
        # What is left has its evaluations too.
        left = (self.steps - step) * seconds / (step - first)
        told = f"{speed:.1f} steps/s" if speed >= 1 else f"{1 / speed:.1f} s/step"
        return [told, f"{clock_time(left)} left"]

    def _due(self, trainer: pl.Trainer) -> bool:
        return trainer.is_global_zero and self.clock() - self._told >= self._every

    def _show(self, step: int, line: str) -> None:
        self._told = self.clock()
        if self._bar is None:
            self.console.print(line, soft_wrap=True, highlight=False, markup=False)
        else:
            self._bar.update(self._bar.task_ids[0], completed=step, description=line, refresh=True)


def _metric(module: Any, means: dict[str, Any]) -> str:
    """In words, from the means of an objective."""
    return str(
        module.objective.format_metric(
            module.objective.metric_value({name: float(value) for name, value in means.items()})
        )
    )
