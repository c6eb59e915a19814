"""Times and memory of one call, forward and with all gradients. Times are medians in milliseconds, after a warm-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mgk.bench.implementations import BenchmarkCase

PASSES = ("forward", "forward+backward")
# How long the repeats of one median may take, and how many there are at least and at most.
BUDGET_MS, FEWEST, MOST = 100.0, 5, 30


@dataclass(frozen=True)
class Timing:
    device_ms: float  # replays of a CUDA graph: without Python and launches. Where there is no graph, as eager_ms
    eager_ms: float  # plain calls
    peak_mb: float | None  # the largest memory in use beyond the inputs; None on a CPU


@dataclass(frozen=True)
class Memory:
    peak_mb: float  # beyond the inputs
    extra_mb: float  # beyond inputs, outputs and gradients


def passes(problem: BenchmarkCase, backward: bool = True) -> dict[str, Callable[[], object]]:
    def without_gradients() -> object:
        with torch.no_grad():
            return problem.forward()

    found: dict[str, Callable[[], object]] = {"forward": without_gradients}
    if backward:
        with torch.no_grad():
            grad = torch.randn_like(problem.forward())

        def with_gradients() -> object:
            output = problem.forward()
            return output, torch.autograd.grad(output, problem.inputs, grad)

        found["forward+backward"] = with_gradients
    return found


def on_cpu(f: Callable[[], object]) -> float:
    def once() -> float:
        start = time.perf_counter()
        f()
        return 1e3 * (time.perf_counter() - start)

    once()
    return statistics.median(once() for _ in range(_repeats(once())))


def _repeats(ms: float) -> int:
    return max(FEWEST, min(MOST, int(BUDGET_MS / max(ms, 1e-3))))


def on_gpu(f: Callable[[], object]) -> float:
    def run(repeats: int) -> float:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in events:
            begin.record()
            f()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events)

    run(2)
    return run(_repeats(run(1)))


def graph_of(f: Callable[[], object]) -> Callable[[], None]:
    """A replay of f's kernels, recorded once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return graph.replay


def measure(problem: BenchmarkCase, device: str, backward: bool = True, graph: bool = True) -> dict[str, Timing]:
    found = {}
    for name, f in passes(problem, backward).items():
        if device == "cpu":
            ms = on_cpu(f)
            found[name] = Timing(ms, ms, None)
            continue
        f()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        eager = on_gpu(f)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        found[name] = Timing(on_gpu(graph_of(f)) if graph else eager, eager, peak)
    return found


def memory(problem: BenchmarkCase) -> dict[str, Memory]:
    """Of one call each, on a GPU."""
    found = {}
    for name, f in passes(problem).items():
        f()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = f()  # what is given back counts as output, so it must live when the peak is read
        torch.cuda.synchronize()
        peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        found[name] = Memory((peak - before) / 2**20, (peak - after) / 2**20)
        del kept
    return found
