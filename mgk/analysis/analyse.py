"""Analysis of the attention heads of a model on samples: `analyse`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mgk._core.calls import LinearCall
from mgk._core.eval_mode import eval_mode
from mgk._core.progress import Progress, no_progress
from mgk._core.validation import fail, number, positive_integer
from mgk.analysis.ablation import Removal, measure_removals
from mgk.analysis.capture import Call, Capture, call_model, capture_attention
from mgk.analysis.layer import Layer, LayerAccumulator, LayerSettings
from mgk.analysis.ranks import THRESHOLD
from mgk.analysis.weights import sample_weights


@dataclass(frozen=True)
class Analysis:
    """Result of `analyse`.

    Examples:
        >>> analysis = mgk.analysis.analyse(mgk.Attention(32, 4), [torch.randn(1, 20, 32)], removal=0)
        >>> analysis.samples, analysis.longest, len(analysis.layers)
        (1, 20, 1)
    """

    layers: list[Layer]
    samples: int
    shortest: int  # in tokens
    longest: int
    threshold: float
    seconds: float

    @property
    def heads(self) -> int:
        return sum(layer.heads for layer in self.layers)

    @property
    def different(self) -> dict[str, float]:
        """Effective number of different heads in the model, for each measure available in all layers."""
        return _sum_shared([layer.similarity.different for layer in self.layers])

    @property
    def different_by_chance(self) -> dict[str, float]:
        """Effective number of different heads if they were unrelated, by maps and outputs.

        Unrelated heads have the same attention weights in each row, shuffled over the visible keys.
        """
        return _sum_shared([layer.similarity.different_by_chance for layer in self.layers])


def _sum_shared(numbers: list[dict[str, float]]) -> dict[str, float]:
    """Sum numbers over layers, for each measure available in all of them."""
    shared = [measure for measure in numbers[0] if all(measure in layer for layer in numbers)]
    return {measure: sum(layer[measure] for layer in numbers) for measure in shared}


@torch.no_grad()
def analyse(
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    matrices: int = 200,
    threshold: float = THRESHOLD,
    memory: int = 2 << 30,
    map_size: int = 256,
    tiles: Path | None = None,
    removal: int = 16,
    together: int = 1,
    progress: Progress | None = None,
    capture: Capture = capture_attention,
) -> Analysis:
    """Analyze the attention heads of a model: ranks, similarity, mixture components, maps and ablation.

    Args:
        model: Any module that uses this package's attention (`mgk.Attention`, `mgk.MultiheadAttention`, the
            operators), causal or not, of any dtype. It runs in eval mode; its mode is restored.
        inputs: Samples, one call each: a tensor, a tuple of arguments or a dict of keyword arguments. Padding is
            excluded from all results. The maps are those of the first sample.
        matrices: Attention matrices to rank in each layer, at most all heads of all samples.
        threshold: The rank is the number of singular values above this.
        memory: Bytes of workspace in addition to the model. Full attention matrices are formed only to compute ranks,
            as many at a time as fit.
        map_size: Maximum side of the pooled maps, in pixels.
        tiles: Directory for full-resolution PNG tiles of maps that are larger than `map_size`.
        removal: Number of samples on which each head is removed in turn, limited by `memory`; 0 skips it.
        together: Samples per call during removal, if they are tensors of one shape whose first axis is the batch.
        progress: Called with (stage, done, total).
        capture: Context manager that passes the attention calls to a handler; for Transformers models, use
            `mgk.analysis.hf_models.capture_attention`.

    Returns:
        The analysis of every layer.

    Examples:
        >>> model = torch.nn.Sequential(mgk.Attention(32, 4), mgk.Attention(32, 4, variant="softmax"))
        >>> analysis = mgk.analysis.analyse(model, [torch.randn(1, 20, 32)])
        >>> analysis.heads, sorted(analysis.different)
        (8, ['cosine', 'maps', 'outputs'])
    """
    positive_integer("matrices", matrices)
    positive_integer("memory", memory)
    positive_integer("map_size", map_size)
    number("threshold", threshold, 0, above=True)
    if not inputs:
        fail("inputs", "must hold at least one sample, got none")
    started = time.perf_counter()
    settings = LayerSettings(matrices, threshold, memory, map_size, tiles)
    layers: dict[str, LayerAccumulator] = {}

    def add_call(name: str, call: Call, output: Tensor) -> Tensor:
        hard = not isinstance(call, LinearCall) and call.hard
        for index in range(call.query.shape[0]):
            sample = sample_weights(call, index)
            if min(sample.shape) > 0:
                if name not in layers:
                    layers[name] = LayerAccumulator(name, len(layers), call, settings)
                layers[name].add(sample, hard)
        return output

    report_progress = progress or no_progress
    with eval_mode(model):
        with capture(model, add_call):
            for done, sample in enumerate(inputs):
                call_model(model, sample)
                report_progress("analyzing the heads", done + 1, len(inputs))
        if not layers:
            fail("model", "has no attention layers that can be analyzed")
        removals: dict[str, Removal] = {}
        if removal:
            counts = {name: layer.heads for name, layer in layers.items()}
            removals = measure_removals(
                model, inputs[:removal], counts, capture, report_progress, memory=memory, together=together
            )
    analyzed = [layer.layer(removals.get(name)) for name, layer in layers.items()]
    lengths = next(iter(layers.values())).lengths
    return Analysis(analyzed, len(lengths), min(lengths), max(lengths), threshold, time.perf_counter() - started)
