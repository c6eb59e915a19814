"""What a row of a comparison costs by itself: a training step, a forward, and the memory of the step.

The trainings of a comparison share the machine, so their own step times say nothing of the model.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mgk.batches import Order, seed_of
from mgk.evaluation import description, peak_memory_mb
from mgk.objectives import OBJECTIVES
from mgk.steps import Fit
from mgk.training import Run

METRICS = ("step_ms_alone", "forward_ms_alone", "peak_mem_mb_alone")
WARM_UP, WINDOWS, STEPS = 5, 5, 10
COUNT = WARM_UP + WINDOWS * STEPS


def measure(run: Run, task: Any, device: torch.device) -> list[dict[str, Any]]:
    """Rows of results: medians of windows of steps, all on the same few of the task's own batches."""
    torch.compiler.reset()
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    kind = OBJECTIVES[task.objective]
    config, settings = run.model_config(task), run.recipe.training
    splits = {"train": task.split(run.data_dir, "train")}
    module = Fit(kind(kind.model_class(config), settings, task, splits), run.seed, graphs=True).to(device)
    module.setup("fit")
    optimizer = module.configure_optimizers()["optimizer"]
    order = Order(len(splits["train"]), seed_of(run.seed, 1))
    size = settings.batch_size // settings.accumulate

    def batch(number: int) -> Tensor:
        return torch.from_numpy(order.take(number * size, size))

    def step(number: int) -> None:
        for part in range(number * settings.accumulate, (number + 1) * settings.accumulate):
            with module.objective.autocast():
                loss = module.training_step(batch(part), part)
            module.backward(loss / settings.accumulate)
        module.configure_gradient_clipping(optimizer, settings.clip)
        optimizer.step()
        module.optimizer_zero_grad(0, number, optimizer)

    def forward(number: int) -> None:
        with torch.no_grad(), module.objective.autocast():
            module.objective.measure(batch(number), "train")

    step_ms, memory = median_ms(step, device), peak_memory_mb()
    module.eval()
    forward_ms = median_ms(forward, device)
    common = description(run, task, config)
    common.update(step_ms=f"{step_ms:.3f}", peak_mem_mb=f"{memory:.0f}", split="train", n_examples=size)
    return [
        {**common, "metric": name, "value": f"{value:.4f}"}
        for name, value in zip(METRICS, (step_ms, forward_ms, memory), strict=True)
    ]


def median_ms(work: Callable[[int], None], device: torch.device, windows: int = WINDOWS) -> float:
    """Of windows of steps, after a warm-up; work(number) is one step."""

    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    # On a GPU every shape that will come is compiled, or recorded, when it first does: of few, that takes less than the
    # rest. So all windows have the same.
    for number in range(WARM_UP + STEPS if device.type == "cuda" else WARM_UP):
        work(number)
    times = []
    for _ in range(windows):
        start = wait()
        for number in range(STEPS):
            work(WARM_UP + number)
        times.append(1000 * (wait() - start) / STEPS)
    return statistics.median(times)
