"""The loss of a batch and its gradients as CUDA graphs.

A small model is bound by Python and by the launches of its kernels, not by the GPU. A recorded step is one launch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Means = dict[str, Tensor]
# Sizes of batches that are recorded; those seen first, and so the most frequent. The others run as they come.
MOST = 64


@dataclass(frozen=True)
class Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    means: Means

    def replay(self, inputs: Sequence[Tensor]) -> Means:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.graph.replay()
        # All graphs share their memory: the next one writes over this.
        return {name: value.clone() for name, value in self.means.items()}


class GraphedGradients:
    """measure(*inputs) gives means, "loss" among them. Called with a batch it leaves the loss's gradients in the
    parameters and returns the means. Sizes of batches are recorded at their first appearance.

    The parameters must stay where they are in memory. What happens is the same function of weights, inputs and the
    generator's state whether it is just being recorded or not: recording draws no random numbers.
    """

    def __init__(self, parameters: Sequence[Tensor], measure: Callable[..., Means]) -> None:
        self.parameters, self.measure = list(parameters), measure
        # What the graphs write to: not .grad, which others set to None, so that its memory goes to something else.
        self.gradients = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.recorded: dict[tuple[torch.Size, ...], Recorded] = {}
        self.pool: Any = None
        self.recording = True

    def __call__(self, inputs: tuple[Tensor, ...]) -> Means:
        size = tuple(x.shape for x in inputs)
        if size not in self.recorded and self.recording and len(self.recorded) < MOST:
            self._record(size, inputs)
        means = self.recorded[size].replay(inputs) if size in self.recorded else self._run(inputs)
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return means

    def _run(self, inputs: tuple[Tensor, ...]) -> Means:
        kind = inputs[0].device.type
        # A cached cast of a weight would be recorded as it is now, and never be made again.
        with torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), False):
            means = self.measure(*inputs)
        found = torch.autograd.grad(means["loss"], self.parameters, allow_unused=True)
        for mine, gradient in zip(self.gradients, found, strict=True):
            if gradient is not None:
                mine.copy_(gradient)
        return {name: value.detach() for name, value in means.items()}

    def _record(self, size: tuple[torch.Size, ...], inputs: tuple[Tensor, ...]) -> None:
        held = tuple(x.clone() for x in inputs)
        state = torch.cuda.get_rng_state()
        # Once as it is, on a stream of its own, so that everything is compiled.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(held)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                means = self._run(held)
        except RuntimeError as error:
            self.recording = False
            reason = str(error).strip().splitlines()[0]
            words = f"a training step could not be recorded as a CUDA graph ({reason}): steps take longer"
            warnings.warn(words, stacklevel=2)
        else:
            self.pool = graph.pool()
            self.recorded[size] = Recorded(graph, held, means)
        torch.cuda.set_rng_state(state)
