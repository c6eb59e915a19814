"""Training step time, forward time and peak memory of one model, timed in isolation.

The jobs of a sweep share the machine, so the step times that they record are not comparable between models.
"""

from __future__ import annotations

import gc
import signal
import statistics
import sys
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
from mgk.training.sweep import SOLO_METRICS
from mgk.training.trainer import Run

# Steps before the first window, number of windows, and steps per window.
WARM_UP, WINDOWS, STEPS = 5, 5, 10
TOTAL_STEPS = WARM_UP + WINDOWS * STEPS


class StepProfiler:
    """Measures the model of a run on a few batches of the run's task.

    Args:
        run: Run that defines the model and the training settings.
        task: Task that provides the training split.
        device: Device to measure on.
    """

    def __init__(self, run: Run, task: Any, device: torch.device) -> None:
        torch.compiler.reset()
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.run, self.task, self.device, self.settings = run, task, device, run.recipe.training
        objective_class = OBJECTIVES[task.objective]
        self.config = run.model_config(task)
        splits = {"train": task.split(run.data_dir, "train")}
        objective = objective_class(objective_class.model_class(self.config), self.settings, task, splits)
        self.module = TrainingModule(objective, run.seed, graphs=True).to(device)
        self.module.setup("fit")
        self.optimizer = self.module.configure_optimizers()["optimizer"]
        self.order = EpochPermutation(len(splits["train"]), seed_of(run.seed, 1))
        self.batch_size = self.settings.batch_size // self.settings.accumulate
        self.graphed_forward = GraphedForward(objective.measure_batch, use_graphs=objective.is_compiled)
        self.memory_mb = 0.0
        self.forward_batches: list[Any] = []  # on the device

    def indices(self, number: int) -> Tensor:
        """Return the indices of the examples of batch `number`, [batch_size]."""
        return torch.from_numpy(self.order.take(number * self.batch_size, self.batch_size))

    def step(self, number: int) -> None:
        """Run training step `number`."""
        module, parts = self.module, self.settings.accumulate
        for part in range(number * parts, (number + 1) * parts):
            with module.objective.autocast():
                loss = module.training_step(self.indices(part), part)
            module.backward(loss / parts)
        module.configure_gradient_clipping(self.optimizer, self.settings.clip)
        self.optimizer.step()
        module.optimizer_zero_grad(0, number, self.optimizer)

    def forward(self, number: int) -> None:
        """Run a forward pass on a prepared batch.

        Preparing a batch on the host takes longer than the forward pass of a small model.
        """
        with torch.no_grad(), self.module.objective.autocast():
            self.graphed_forward(*self.forward_batches[number])

    def warm_up(self) -> None:
        """Compile kernels, capture CUDA graphs and record the peak memory of a step."""
        self.module.train()
        warm_up(self.step, self.device)
        self.memory_mb = peak_memory_mb()
        self.forward_batches = [
            self.module.objective.batch(self.indices(number), "train") for number in range(WARM_UP + STEPS)
        ]
        self.module.eval()
        warm_up(self.forward, self.device)

    def measure(self) -> list[dict[str, Any]]:
        """Return one result row for each of `SOLO_METRICS`; call `warm_up` first."""
        self.module.train()
        step_ms = median_ms(self.step, self.device)
        self.module.eval()
        inference_ms = median_ms(self.forward, self.device)
        common = result_columns(self.run, self.task, self.config)
        common.update(step_ms=f"{step_ms:.3f}", peak_mem_mb=f"{self.memory_mb:.0f}", split="train")
        return [
            {**common, "n_examples": self.batch_size, "metric": name, "value": f"{value:.4f}"}
            for name, value in zip(SOLO_METRICS, (step_ms, inference_ms, self.memory_mb), strict=True)
        ]


def profile_run(run: Run, task: Any, device: torch.device) -> list[dict[str, Any]]:
    """Warm up and measure the model of a run; return one result row for each of `SOLO_METRICS`."""
    profiler = StepProfiler(run, task, device)
    profiler.warm_up()
    return profiler.measure()


def profile_in_groups(
    runs: Sequence[Run], task: Any, device: torch.device, size: int, deadline: float
) -> Iterator[list[dict[str, Any]]]:
    """Yield the result rows of each run, and print the names of the models on stderr. No group starts after `deadline`.

    Each run has a process of its own, also without a GPU: the peak memory of a process includes its earlier models.

    Args:
        runs: Runs to profile.
        task: Task of all runs.
        device: Device to measure on.
        size: Number of runs that warm up at the same time on a GPU.
        deadline: Time on the monotonic clock.
    """
    size = size if device.type == "cuda" else 1
    for start in range(0, len(runs), size):
        if time.monotonic() >= deadline:
            names = ", ".join(str(run.row) for run in runs[start:])
            print(f"time limit reached before timing {names}; the same command continues there", file=sys.stderr)
            return
        group = runs[start : start + size]
        names = ", ".join(str(run.row) for run in group)
        print(f"timing {names} of {group[0].recipe.name} in isolation, {TOTAL_STEPS} steps", file=sys.stderr)
        yield from profile_many(group, task, device)


def profile_many(runs: Sequence[Run], task: Any, device: torch.device) -> Iterator[list[dict[str, Any]]]:
    """Profile several runs, each in its own process, and yield the result rows of each.

    All processes warm up in parallel, because compiling takes far longer than timing; then they are timed one after
    another. A run that fails while sharing the machine, for example for lack of memory, is profiled again after the
    others have ended.

    Args:
        runs: Runs to profile.
        task: Task of all runs.
        device: Device to measure on.
    """
    context = get_context("spawn")
    connections, processes, failed = [], [], []
    try:
        for run in runs:
            connection, worker_end = context.Pipe()
            process = context.Process(target=_worker, args=(worker_end, run, task, device))
            process.start()
            processes.append(process)
            # With the worker's end closed here, recv raises EOFError if the worker dies.
            worker_end.close()
            connections.append(connection)
        # All workers warm up before the first is measured.
        are_warm = [_receive(connection) is not None for connection in connections]
        for run, connection, process, is_warm in zip(runs, connections, processes, are_warm, strict=True):
            rows = _measure_in(connection) if is_warm else None
            process.join()
            if rows is None:
                failed.append(run)
            else:
                yield rows
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
    for run in failed:
        yield profile_run(run, task, device)


def _measure_in(connection: Connection) -> Any:
    """Measure in a warm worker; return its result rows, or None if it has failed."""
    try:
        connection.send(True)
    except OSError:
        return None
    return _receive(connection)


def _receive(connection: Connection) -> Any:
    """Return the next message from a worker, or None if it has failed."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


def _worker(connection: Connection, run: Run, task: Any, device: torch.device) -> None:
    # Ctrl-C reaches all processes of the terminal; the parent terminates this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    profiler = StepProfiler(run, task, device)
    profiler.warm_up()
    connection.send(True)
    connection.recv()
    connection.send(profiler.measure())


def warm_up(work: Callable[[int], None], device: torch.device) -> None:
    """Run the warm-up steps and, on a GPU, every step of a window once.

    On a GPU, each new shape is compiled or captured at its first step. All windows repeat the same steps.

    Args:
        work: Function that runs step `number`.
        device: Device of the work.
    """
    for number in range(WARM_UP + STEPS if device.type == "cuda" else WARM_UP):
        work(number)


def median_ms(work: Callable[[int], None], device: torch.device, windows: int = WINDOWS) -> float:
    """Return the median over windows of the mean time per step in ms; call `warm_up` first.

    Args:
        work: Function that runs step `number`.
        device: Device of the work.
        windows: Number of windows, of `STEPS` steps each.
    """

    def synchronized_time() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    times = []
    for _ in range(windows):
        start = synchronized_time()
        for number in range(STEPS):
            work(WARM_UP + number)
        times.append(1000 * (synchronized_time() - start) / STEPS)
    return statistics.median(times)
