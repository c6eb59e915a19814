"""Time and peak memory of a forward pass, and of a forward and backward pass.

Times are medians in ms after a warm-up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mgk.bench.implementations import BenchmarkCase

PASSES = ("forward", "forward+backward")
# Time budget for the repeats of one median, and limits on their number.
BUDGET_MS, MIN_REPEATS, MAX_REPEATS = 100.0, 5, 200
# Warm-up calls before the repeats on a GPU, as a share of their number: the caches of the host are cold.
WARM_UP_SHARE = 0.25


@dataclass(frozen=True)
class Timing:
    """Times and peak memory of one pass."""

    device_ms: float  # CUDA graph replay, without Python and launch overhead; eager_ms without a graph
    eager_ms: float  # eager calls
    peak_mb: float | None  # peak memory beyond the inputs; None on a CPU


@dataclass(frozen=True)
class Memory:
    """Peak memory of one pass."""

    peak_mb: float  # beyond the inputs
    extra_mb: float  # beyond inputs, outputs and gradients


def make_passes(case: BenchmarkCase, backward: bool = True) -> dict[str, Callable[[], object]]:
    """Return the functions to measure, by pass."""

    def forward() -> object:
        with torch.no_grad():
            return case.forward()

    passes: dict[str, Callable[[], object]] = {"forward": forward}
    if backward:
        with torch.no_grad():
            grad = torch.randn_like(case.forward())

        def forward_backward() -> object:
            output = case.forward()
            return output, torch.autograd.grad(output, case.inputs, grad)

        passes["forward+backward"] = forward_backward
    return passes


def time_on_cpu(function: Callable[[], object]) -> float:
    """Return the median time of a call on the CPU."""

    def time_once() -> float:
        start = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - start)

    time_once()
    return statistics.median(time_once() for _ in range(_repeats(time_once())))


def _repeats(ms: float) -> int:
    return max(MIN_REPEATS, min(MAX_REPEATS, int(BUDGET_MS / max(ms, 1e-3))))


def time_on_gpu(function: Callable[[], object]) -> float:
    """Return the median time of a call between CUDA events."""

    def run(repeats: int) -> float:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in events:
            begin.record()
            function()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events)

    run(2)
    repeats = _repeats(run(1))
    run(max(1, int(WARM_UP_SHARE * repeats)))
    return run(repeats)


def capture_graph(function: Callable[[], object]) -> Callable[[], None]:
    """Capture the kernels of a call in a CUDA graph and return its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def measure_time(case: BenchmarkCase, device: str, backward: bool = True, graph: bool = True) -> dict[str, Timing]:
    """Measure time and peak memory of a case.

    Args:
        case: The call to measure.
        device: "cuda" or "cpu".
        backward: Whether to measure forward and backward too.
        graph: Whether to measure device times by CUDA graph replay.

    Returns:
        Timings by pass.
    """
    timings = {}
    for name, function in make_passes(case, backward).items():
        if device == "cpu":
            ms = time_on_cpu(function)
            timings[name] = Timing(ms, ms, None)
            continue
        function()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        eager = time_on_gpu(function)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        timings[name] = Timing(time_on_gpu(capture_graph(function)) if graph else eager, eager, peak)
    return timings


def measure_memory(case: BenchmarkCase) -> dict[str, Memory]:
    """Measure the peak memory of one call per pass, on a GPU."""
    measured = {}
    for name, function in make_passes(case).items():
        function()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs = function()  # kept alive until the peak is read: outputs and gradients are subtracted from it
        torch.cuda.synchronize()
        peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        measured[name] = Memory((peak - before) / 2**20, (peak - after) / 2**20)
        del outputs
    return measured
