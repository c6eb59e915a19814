"""CUDA graphs of a batch's metrics and gradients.

Small models are limited by Python and kernel launches, not by the GPU. Replaying a captured graph is one launch.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Means = dict[str, Tensor]
# Maximum number of graphs. The first shapes to occur are the most frequent ones; later ones run eagerly.
MAX_GRAPHS = 64
# A failed capture is repeated after gc.collect().
MAX_ATTEMPTS = 2


class CaptureError(Exception):
    """A function that cannot be captured.

    Attributes:
        output: Result of the eager run before the capture.
    """

    def __init__(self, reason: str, output: Any) -> None:
        super().__init__(reason)
        self.output = output


def uncached_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context manager that disables autocast's cache: a replay would reuse weights cast at the capture."""
    enabled = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, torch.get_autocast_dtype(device_type), enabled, cache_enabled=False)


def capture_graph(
    run: Callable[[], T], stream: torch.cuda.Stream, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, T, T]:
    """Run a function eagerly, so that its kernels are compiled, and capture a second call.

    Args:
        run: Function to capture; it reads and writes only tensors that stay in place.
        stream: Stream to run and capture on.
        pool: Memory pool of an earlier graph to share.

    Returns:
        The graph, the output of the eager run, and the tensors that a replay writes.

    Raises:
        CaptureError: The capture failed. The random number generator has its state after the eager run.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        output = run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    rng_state, graph = torch.cuda.get_rng_state(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            static_output = run()
    except RuntimeError as error:
        # The generator is still in capture mode: replace its state by that of a new generator.
        torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(torch.Generator("cuda"))
        torch.cuda.set_rng_state(rng_state)
        raise CaptureError(str(error).strip().splitlines()[0], output) from error
    return graph, output, static_output


@dataclass(frozen=True)
class CapturedGraph:
    """A graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    means: Means

    def replay(self, inputs: Sequence[Tensor]) -> Means:
        for static_input, new_input in zip(self.inputs, inputs, strict=True):
            static_input.copy_(new_input)
        self.graph.replay()
        # All graphs share a memory pool: the next replay overwrites the results.
        return {name: value.clone() for name, value in self.means.items()}


class GraphedForward:
    """Compute the means of a batch by one CUDA graph per combination of shapes.

    A graph is captured when its shapes first occur. The parameters must stay in place in memory. Results depend on
    weights, inputs and generator state only: capturing draws no random numbers and leaves buffers unchanged.

    Args:
        measure: `measure(*inputs, *sizes)` returns the means; `sizes` are integers that determine shapes.
        buffers: Returns the tensors that `measure` changes in place. Called at each capture, because moving a module
            to a device replaces its buffers.
        use_graphs: False runs every batch eagerly.
    """

    description = "a batch"

    def __init__(
        self,
        measure: Callable[..., Means],
        *,
        buffers: Callable[[], Iterable[Tensor]] = tuple,
        use_graphs: bool = True,
    ) -> None:
        self.measure, self.buffers, self.use_graphs = measure, buffers, use_graphs
        self.captured: dict[tuple[Any, ...], CapturedGraph] = {}
        self.failures = 0
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, inputs: tuple[Tensor, ...], sizes: tuple[int, ...] = ()) -> Means:
        key = (*(x.shape for x in inputs), sizes)
        if key not in self.captured and self.use_graphs and len(self.captured) < MAX_GRAPHS:
            self._capture(key, inputs, sizes)
        return self.captured[key].replay(inputs) if key in self.captured else self._run(inputs, sizes)

    def _run(self, inputs: tuple[Tensor, ...], sizes: tuple[int, ...]) -> Means:
        with uncached_autocast(inputs[0].device.type):
            return self.measure(*inputs, *sizes)

    def _capture(self, key: tuple[Any, ...], inputs: tuple[Tensor, ...], sizes: tuple[int, ...]) -> None:
        static_inputs = tuple(x.clone() for x in inputs)
        rng_state = torch.cuda.get_rng_state()
        saved_buffers = [(buffer, buffer.clone()) for buffer in self.buffers()]
        # One stream for all captures: autograd keeps the first stream of each parameter while any part of that pass is
        # alive, and synchronizes passes on other streams with it.
        self._stream = self._stream or torch.cuda.Stream()
        try:
            graph, _, means = capture_graph(lambda: self._run(static_inputs, sizes), self._stream, self._pool)
        except CaptureError as error:
            self.failures += 1
            # Graphs registered with the replaced generator would repeat the same random numbers.
            self.captured.clear()
            self._pool = None
            gc.collect()
            if self.failures == MAX_ATTEMPTS:
                self.use_graphs = False
                message = f"{self.description} could not be captured as a CUDA graph; it runs eagerly, which is slower"
                warnings.warn(f"{message}: {error}", stacklevel=3)
        else:
            self._pool = graph.pool()
            self.captured[key] = CapturedGraph(graph, static_inputs, means)
        # Undo the side effects of the eager run.
        torch.cuda.set_rng_state(rng_state)
        for buffer, value in saved_buffers:
            buffer.copy_(value)


class GraphedBackward(GraphedForward):
    """Compute the means of a batch and write the gradients of its loss to the parameters.

    Args:
        parameters: Parameters that get a gradient.
        measure: As in GraphedForward; the means include "loss".
        buffers: As in GraphedForward.
        use_graphs: As in GraphedForward.
    """

    description = "a training step"

    def __init__(
        self,
        parameters: Sequence[Tensor],
        measure: Callable[..., Means],
        *,
        buffers: Callable[[], Iterable[Tensor]] = tuple,
        use_graphs: bool = True,
    ) -> None:
        super().__init__(measure, buffers=buffers, use_graphs=use_graphs)
        self.parameters = list(parameters)
        self.gradients: list[Tensor] = []

    def __call__(self, inputs: tuple[Tensor, ...], sizes: tuple[int, ...] = ()) -> Means:
        if not self.gradients:
            # Static buffers instead of .grad, which optimizers set to None. Allocated at the first call, because the
            # parameters may move to a device before it.
            self.gradients = [torch.zeros_like(parameter) for parameter in self.parameters]
        means = super().__call__(inputs, sizes)
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return means

    def _run(self, inputs: tuple[Tensor, ...], sizes: tuple[int, ...]) -> Means:
        means = super()._run(inputs, sizes)
        gradients = torch.autograd.grad(means["loss"], self.parameters, allow_unused=True)
        # Copies between equal strides take a few launches in all; one pair of unequal strides in the list would
        # make _foreach_copy_ launch one kernel per tensor.
        same_strides: list[tuple[Tensor, Tensor]] = []
        for buffer, gradient in zip(self.gradients, gradients, strict=True):
            if gradient is None:
                continue
            if buffer.stride() == gradient.stride():
                same_strides.append((buffer, gradient))
            else:
                buffer.copy_(gradient)
        if same_strides:
            torch._foreach_copy_([buffer for buffer, _ in same_strides], [gradient for _, gradient in same_strides])
        return {name: value.detach() for name, value in means.items()}
