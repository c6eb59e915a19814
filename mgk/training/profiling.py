"""What a row of a comparison costs by itself: a training step, a forward, and the memory of the step.

The trainings of a comparison share the machine, so their own step times say nothing of the model.
"""

from __future__ import annotations

import gc
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from mgk.models.cuda_graphs import GraphedForward
from mgk.training.data import EpochPermutation, seed_of
from mgk.training.evaluate import peak_memory_mb, result_columns
from mgk.training.module import TrainingModule
from mgk.training.objectives import OBJECTIVES
from mgk.training.sweep import COSTS
from mgk.training.trainer import Run

WARM_UP, WINDOWS, STEPS = 5, 5, 10
COUNT = WARM_UP + WINDOWS * STEPS


class StepProfiler:
    """The model of a run, which is trained and asked on the same few of its task's own batches."""

    def __init__(self, run: Run, task: Any, device: torch.device) -> None:
        torch.compiler.reset()
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.run, self.task, self.device, self.settings = run, task, device, run.recipe.training
        self.kind = OBJECTIVES[task.objective]
        self.config = run.model_config(task)
        splits = {"train": task.split(run.data_dir, "train")}
        objective = self.kind(self.kind.model_class(self.config), self.settings, task, splits)
        self.module = TrainingModule(objective, run.seed, graphs=True).to(device)
        self.module.setup("fit")
        self.optimizer = self.module.configure_optimizers()["optimizer"]
        self.order = EpochPermutation(len(splits["train"]), seed_of(run.seed, 1))
        self.size = self.settings.batch_size // self.settings.accumulate
        self.asked = GraphedForward(objective.measure_batch, recording=objective.is_compiled)
        self.memory_mb = 0.0
        self.batches: list[Any] = []  # of forwards, on the device

    def batch(self, number: int) -> Tensor:
        return torch.from_numpy(self.order.take(number * self.size, self.size))

    def step(self, number: int) -> None:
        module, parts = self.module, self.settings.accumulate
        for part in range(number * parts, (number + 1) * parts):
            with module.objective.autocast():
                loss = module.training_step(self.batch(part), part)
            module.backward(loss / parts)
        module.configure_gradient_clipping(self.optimizer, self.settings.clip)
        self.optimizer.step()
        module.optimizer_zero_grad(0, number, self.optimizer)

    def forward(self, number: int) -> None:
        """Of a batch that is ready: to make one takes Python longer than a small model takes the device."""
        with torch.no_grad(), self.module.objective.autocast():
            self.asked(*self.batches[number])

    def warm_up(self) -> None:
        """Everything that is compiled or recorded, is."""
        self.module.train()
        warm_up(self.step, self.device)
        self.memory_mb = peak_memory_mb()
        self.batches = [self.module.objective.batch(self.batch(number), "train") for number in range(WARM_UP + STEPS)]
        self.module.eval()
        warm_up(self.forward, self.device)

    def timed(self) -> list[dict[str, Any]]:
        """Rows of results."""
        self.module.train()
        step_ms = median_ms(self.step, self.device)
        self.module.eval()
        inference_ms = median_ms(self.forward, self.device)
        common = result_columns(self.run, self.task, self.config)
        common.update(step_ms=f"{step_ms:.3f}", peak_mem_mb=f"{self.memory_mb:.0f}", split="train")
        return [
            {**common, "n_examples": self.size, "metric": name, "value": f"{value:.4f}"}
            for name, value in zip(COSTS, (step_ms, inference_ms, self.memory_mb), strict=True)
        ]


def measure(run: Run, task: Any, device: torch.device) -> list[dict[str, Any]]:
    """Rows of results."""
    subject = StepProfiler(run, task, device)
    subject.warm_up()
    return subject.timed()


def measure_in_turn(runs: Sequence[Run], task: Any, device: torch.device) -> Iterator[list[dict[str, Any]]]:
    """Rows of results of each run. All warm up at once, each in a process of its own, since to compile takes far longer
    than to time; then one after another is timed while the others wait. What fails beside the others, for want of
    memory above all, is measured again when they are gone."""
    context = get_context("spawn")
    ends, processes, failed = [], [], []
    try:
        for run in runs:
            mine, its = context.Pipe()
            process = context.Process(target=_wait_for_turn, args=(its, run, task, device))
            process.start()
            processes.append(process)
            # With no other end open here, one that dies is noticed.
            its.close()
            ends.append(mine)
        warm = [_received(end) is not None for end in ends]
        for run, end, process, is_warm in zip(runs, ends, processes, warm, strict=True):
            found = _asked(end) if is_warm else None
            process.join()
            if found is None:
                failed.append(run)
            else:
                yield found
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
    for run in failed:
        yield measure(run, task, device)


def _asked(end: Connection) -> Any:
    """The times of a process whose turn it is; None of one that has failed."""
    try:
        end.send(True)
    except OSError:
        return None
    return _received(end)


def _received(end: Connection) -> Any:
    """None from a process that has failed."""
    try:
        return end.recv()
    except (EOFError, OSError):
        return None


def _wait_for_turn(end: Connection, run: Run, task: Any, device: torch.device) -> None:
    # An interrupt on the terminal reaches all; the process that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    subject = StepProfiler(run, task, device)
    subject.warm_up()
    end.send(True)
    end.recv()
    end.send(subject.timed())


def warm_up(work: Callable[[int], None], device: torch.device) -> None:
    """On a GPU every shape that will come is compiled, or recorded, when it first does: of few, that takes less than
    the rest. So all windows have the same. work(number) is one step."""
    for number in range(WARM_UP + STEPS if device.type == "cuda" else WARM_UP):
        work(number)


def median_ms(work: Callable[[int], None], device: torch.device, windows: int = WINDOWS) -> float:
    """Of windows of steps, after a warm-up."""

    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    times = []
    for _ in range(windows):
        start = wait()
        for number in range(STEPS):
            work(WARM_UP + number)
        times.append(1000 * (wait() - start) / STEPS)
    return statistics.median(times)
