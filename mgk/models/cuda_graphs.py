"""Work that is the same every time, recorded as a CUDA graph; the loss of a batch and its gradients above all.

A small model is bound by Python and by the launches of its kernels, not by the GPU. A recorded step is one launch.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Means = dict[str, Tensor]
# Kinds of batches that are recorded; those seen first, and so the most frequent. The others run as they come.
MOST = 64
# What could not be recorded is tried once more, when all that Python has not yet cleared away is gone.
ATTEMPTS = 2


class CaptureError(Exception):
    """Work that no graph can hold, why, and what it gave when it ran."""

    def __init__(self, reason: str, found: Any) -> None:
        super().__init__(reason)
        self.found = found


def record(run: Callable[[], T], stream: torch.cuda.Stream, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T, T]:
    """The graph of `run`, what it gave when it ran, and what a replay writes to.

    It runs once as it is, so that everything is compiled. Nothing runs while it is recorded; should that fail,
    everything but this one run is as before.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    state, graph = torch.cuda.get_rng_state(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            written = run()
    except RuntimeError as error:
        # The generator still thinks that it is being recorded: one that does not takes its place.
        torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(torch.Generator("cuda"))
        torch.cuda.set_rng_state(state)
        raise CaptureError(str(error).strip().splitlines()[0], found) from error
    return graph, found, written


@dataclass(frozen=True)
class CapturedGraph:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    means: Means

    def replay(self, inputs: Sequence[Tensor]) -> Means:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.graph.replay()
        # All graphs share their memory: the next one writes over this.
        return {name: value.clone() for name, value in self.means.items()}


class GraphedForward:
    """measure(*inputs, *fixed) gives means; `fixed` are numbers that decide shapes. A kind of batch, its shapes and
    fixed numbers, is recorded when it first appears.

    The parameters must stay where they are in memory. What happens is the same function of weights, inputs and the
    generator's state whether it is just being recorded or not: recording draws no random numbers.
    """

    what = "a batch"

    def __init__(
        self,
        measure: Callable[..., Means],
        *,
        buffers: Callable[[], Iterable[Tensor]] = tuple,
        recording: bool = True,
    ) -> None:
        """buffers: gives what `measure` changes in place; asked for when a batch is recorded, since a module that moves
        to a device has others there. recording: False runs every batch as it comes, to compare with."""
        self.measure, self.buffers, self.recording = measure, buffers, recording
        self.recorded: dict[tuple[Any, ...], CapturedGraph] = {}
        self.failures = 0
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, inputs: tuple[Tensor, ...], fixed: tuple[int, ...] = ()) -> Means:
        kind = (*(x.shape for x in inputs), fixed)
        if kind not in self.recorded and self.recording and len(self.recorded) < MOST:
            self._record(kind, inputs, fixed)
        return self.recorded[kind].replay(inputs) if kind in self.recorded else self._run(inputs, fixed)

    def _run(self, inputs: tuple[Tensor, ...], fixed: tuple[int, ...]) -> Means:
        kind = inputs[0].device.type
        # A cached cast of a weight would be recorded as it is now, and never be made again.
        with torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), False):
            return self.measure(*inputs, *fixed)

    def _record(self, kind: tuple[Any, ...], inputs: tuple[Tensor, ...], fixed: tuple[int, ...]) -> None:
        held = tuple(x.clone() for x in inputs)
        state, before = torch.cuda.get_rng_state(), [(buffer, buffer.clone()) for buffer in self.buffers()]
        # One stream for all: autograd keeps for every parameter the stream it was first used on, for as long as
        # anything of that pass is alive, and another pass would be made to wait for that stream.
        self._stream = self._stream or torch.cuda.Stream()
        try:
            graph, _, means = record(lambda: self._run(held, fixed), self._stream, self._pool)
        except CaptureError as error:
            self.failures += 1
            # Graphs that know the generator of before would draw the same numbers again and again.
            self.recorded.clear()
            self._pool = None
            gc.collect()
            if self.failures == ATTEMPTS:
                self.recording = False
                words = f"{self.what} could not be recorded as a CUDA graph ({error}): it takes longer"
                warnings.warn(words, stacklevel=3)
        else:
            self._pool = graph.pool()
            self.recorded[kind] = CapturedGraph(graph, held, means)
        # The run that everything was compiled by does not count.
        torch.cuda.set_rng_state(state)
        for buffer, old in before:
            buffer.copy_(old)


class GraphedBackward(GraphedForward):
    """measure gives "loss" among the means: called with a batch it leaves the loss's gradients in the parameters."""

    what = "a training step"

    def __init__(
        self,
        parameters: Sequence[Tensor],
        measure: Callable[..., Means],
        *,
        buffers: Callable[[], Iterable[Tensor]] = tuple,
        recording: bool = True,
    ) -> None:
        super().__init__(measure, buffers=buffers, recording=recording)
        self.parameters = list(parameters)
        self.gradients: list[Tensor] = []

    def __call__(self, inputs: tuple[Tensor, ...], fixed: tuple[int, ...] = ()) -> Means:
        if not self.gradients:
            # What the graphs write to: not .grad, which others set to None, so that its memory goes to something else.
            # Not sooner: the parameters may have moved to the device since.
            self.gradients = [torch.zeros_like(parameter) for parameter in self.parameters]
        means = super().__call__(inputs, fixed)
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return means

    def _run(self, inputs: tuple[Tensor, ...], fixed: tuple[int, ...]) -> Means:
        means = super()._run(inputs, fixed)
        found = torch.autograd.grad(means["loss"], self.parameters, allow_unused=True)
        pairs = [(mine, of) for mine, of in zip(self.gradients, found, strict=True) if of is not None]
        # Those that lie as their parameters do take a few launches in all; with another among them, each takes its own.
        alike: list[tuple[Tensor, Tensor]] = []
        for mine, of in pairs:
            if mine.stride() == of.stride():
                alike.append((mine, of))
            else:
                mine.copy_(of)
        if alike:
            torch._foreach_copy_([mine for mine, _ in alike], [of for _, of in alike])
        return {name: value.detach() for name, value in means.items()}
