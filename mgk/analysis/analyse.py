"""Analysis of the attention heads of a model on samples: `analyse`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mgk._core.calls import LinearCall
from mgk._core.eval_mode import eval_mode
from mgk._core.validation import fail, number, positive_integer
from mgk.analysis.ablation import Removal, remove_heads
from mgk.analysis.attention_maps import MapAccumulator, Maps
from mgk.analysis.capture import Call, Capture, Progress, call_model, capture_attention
from mgk.analysis.components import Mixture, MixtureAccumulator
from mgk.analysis.ranks import THRESHOLD, max_matrices, spectra, split_range
from mgk.analysis.similarity import Similarity, SimilarityAccumulator
from mgk.analysis.weights import Block, SampleWeights, sample_weights

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Ranks:
    """Ranks of the attention matrices of a layer, one entry per matrix."""

    head: NDArray[np.int64]
    size: NDArray[np.int64]  # the smaller side of the matrix, the highest possible rank
    rank: NDArray[np.int64]
    effective: Array


@dataclass(frozen=True)
class ComponentUsage:
    """Share of each component at each position of the first sample, pooled: [H, M, positions]."""

    queries: Array
    keys: Array


@dataclass(frozen=True)
class Layer:
    """Analysis of one attention layer."""

    name: str
    kind: str  # kind of attention, for the report
    heads: int
    components: int
    head_dim: int
    ranks: Ranks
    similarity: Similarity
    maps: Maps
    mixture: Mixture | None  # None if keys have a single component
    usage: ComponentUsage | None
    removal: Removal | None


@dataclass(frozen=True)
class Analysis:
    """Result of `analyse`: numbers, arrays and names."""

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
        """Effective number of different heads of the model, by each measure that all layers have."""
        numbers = [layer.similarity.different for layer in self.layers]
        shared = [measure for measure in numbers[0] if all(measure in layer for layer in numbers)]
        return {measure: sum(layer[measure] for layer in numbers) for measure in shared}


@dataclass(frozen=True)
class _Settings:
    matrices: int
    threshold: float
    memory: int
    map_size: int
    tiles: Path | None


class SampleMaps:
    """Maps and component usage of the first sample."""

    def __init__(self, number: int, sample: SampleWeights, settings: _Settings, device: torch.device) -> None:
        queries, keys = sample.shape
        size, tiles = settings.map_size, settings.tiles
        self.maps = MapAccumulator(f"layer{number + 1}", sample.heads, queries, keys, size, tiles, device)
        self.queries, self.keys = (
            torch.zeros(sample.heads, sample.components, length, dtype=torch.float64, device=device)
            for length in (queries, keys)
        )

    def add(self, block: Block, answered: Tensor | None) -> None:
        self.maps.add(block.rows, block.weights)
        if answered is not None:
            self.queries[..., block.rows] += answered.sum(3).transpose(1, 2)
            self.keys += answered.sum(1)

    def usage(self) -> ComponentUsage | None:
        if self.queries.shape[1] == 1:
            return None
        return ComponentUsage(*(_shares(answered.cpu(), self.maps.factor) for answered in (self.queries, self.keys)))


class LayerAccumulator:
    """Statistics of a layer, updated sample by sample."""

    def __init__(self, name: str, number: int, call: Call, settings: _Settings) -> None:
        self.name, self.number, self.settings, self.kind = name, number, settings, describe_attention(call)
        self.heads, self.components, self.head_dim = call.query.shape[1], call.components, call.query.shape[-1]
        self.device = call.query.device
        self.similarity = SimilarityAccumulator(self.heads, call.value.shape[-1], self.device)
        self.mixture = MixtureAccumulator(self.heads, self.components, self.device) if self.components > 1 else None
        self.ranks: list[tuple[int, int, int, float]] = []  # head, size, rank, effective rank
        self.maps: Maps | None = None
        self.usage: ComponentUsage | None = None
        self.lengths: list[int] = []

    def add(self, sample: SampleWeights, hard: bool) -> None:
        queries, keys = sample.shape
        self.lengths.append(keys)
        settings = self.settings
        ranked = len(self.ranks) < settings.matrices
        batch = max_matrices(queries, keys, settings.memory // 2)
        if ranked and batch == 0:
            required = 2 * 6 * 8 * max(queries, keys) ** 2 / 2**30
            fail("memory", f"is too little to rank a matrix of {queries} × {keys}: about {required:.2f} GiB are needed")
        matrices = None
        if ranked and batch >= self.heads:
            matrices = torch.empty(self.heads, queries, keys, dtype=torch.float64, device=self.device)
        first = SampleMaps(self.number, sample, settings, self.device) if self.maps is None else None
        if self.mixture is not None:
            self.mixture.add_sample(sample)
        for block in sample.blocks(settings.memory // 2, components=self.mixture is not None):
            self.similarity.add_maps(block.weights)
            self.similarity.add_outputs(block.weights @ sample.value)
            answered = None if self.mixture is None else self.mixture.add_block(block, hard)
            if matrices is not None:
                matrices[:, block.rows] = block.weights
            if first is not None:
                first.add(block, answered)
        if first is not None:
            self.maps, self.usage = first.maps.maps(), first.usage()
        if ranked:
            self._rank(sample, matrices, batch)

    def _rank(self, sample: SampleWeights, matrices: Tensor | None, batch: int) -> None:
        """Rank the matrices of a sample, `batch` heads at a time; recompute them if they do not fit together."""
        queries, keys = sample.shape
        for heads in split_range(self.heads, batch):
            part = matrices
            if part is None:
                count = heads.stop - heads.start
                part = torch.empty(count, queries, keys, dtype=torch.float64, device=self.device)
                for block in sample.blocks(self.settings.memory // 4, heads):
                    part[:, block.rows] = block.weights
            result = spectra(part[: heads.stop - heads.start], threshold=self.settings.threshold)
            for head, rank, effective in zip(
                range(heads.start, heads.stop), result.rank.tolist(), result.effective_rank.tolist(), strict=True
            ):
                self.ranks.append((head, min(queries, keys), rank, effective))

    def layer(self, removal: Removal | None) -> Layer:
        """Return the analysis of the layer."""
        assert self.maps is not None
        head, size, rank = (np.array([row[column] for row in self.ranks], np.int64) for column in range(3))
        ranks = Ranks(head, size, rank, np.array([row[3] for row in self.ranks], np.float64))
        mixture = None if self.mixture is None else self.mixture.mixture()
        return Layer(
            self.name, self.kind, self.heads, self.components, self.head_dim, ranks, self.similarity.similarity(),
            self.maps, mixture, self.usage, removal,
        )  # fmt: skip


def _shares(answered: Tensor, factor: int) -> Array:
    """Pool the attention of components, [H, M, n], by `factor` and normalise it at each position."""
    padding = (0, -answered.shape[-1] % factor)
    pooled = torch.nn.functional.pad(answered, padding).unflatten(-1, (-1, factor)).sum(-1)
    total = pooled.sum(1, keepdim=True)
    shares: Array = (pooled / total.masked_fill(total == 0, 1)).numpy()
    return shares


def describe_attention(call: Call) -> str:
    """Return a short description of the kind of attention, for the report."""
    keys = f"{call.components} {'shifted' if call.shift is not None else 'independent'} components per key"
    if isinstance(call, LinearCall):
        return "linear" if call.components == 1 else f"linear, {keys}"
    if call.components == 1:
        dot_product = not isinstance(call.tau, Tensor) and call.tau == 0
        return "softmax" if dot_product else "one Gaussian per key"
    return f"hard, {keys}" if call.hard else keys


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
    """Analyze the attention heads of a model: ranks, similarity, mixture components, maps, effect of removal.

    Args:
        model: Any module that uses this package's attention (`mgk.Attention`, `mgk.MultiheadAttention`, the
            operators), causal or not, of any dtype. It runs in eval mode; its mode is restored.
        inputs: Samples, one call each: a tensor, a tuple of arguments or a dict of keyword arguments. Padding is left
            out of all results. The maps are those of the first sample.
        matrices: Attention matrices to rank in each layer, at most all heads of all samples.
        threshold: Singular values above it count for the rank.
        memory: Bytes of workspace beside the model. Full attention matrices are formed only to compute ranks, the
            number that fits at a time.
        map_size: Largest side of the pooled maps, in pixels.
        tiles: Directory for full-resolution PNG tiles of maps that are larger than `map_size`.
        removal: Number of samples on which each head is removed in turn, limited by `memory`; 0 skips it.
        together: Samples per call during removal, if they are tensors of one shape whose first axis is the batch.
        progress: Called with (stage, done, total).
        capture: Context manager that passes the attention calls to a handler; `mgk.analysis.hf_models` has one for
            Transformers models.

    Returns:
        The analysis of every layer.
    """
    positive_integer("matrices", matrices)
    positive_integer("memory", memory)
    positive_integer("map_size", map_size)
    number("threshold", threshold, 0, above=True)
    if not inputs:
        fail("inputs", "must hold at least one sample, got none")
    started = time.perf_counter()
    settings = _Settings(matrices, threshold, memory, map_size, tiles)
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

    report = progress or (lambda stage, done, total: None)
    with eval_mode(model):
        with capture(model, add_call):
            for done, sample in enumerate(inputs):
                call_model(model, sample)
                report("analyzing the heads", done + 1, len(inputs))
        if not layers:
            fail("model", "has no attention layers that can be analyzed")
        removals: dict[str, Removal] = {}
        if removal:
            counts = {name: layer.heads for name, layer in layers.items()}
            removals = remove_heads(model, inputs[:removal], counts, capture, report, memory=memory, together=together)
    analyzed = [layer.layer(removals.get(name)) for name, layer in layers.items()]
    lengths = next(iter(layers.values())).lengths
    return Analysis(analyzed, len(lengths), min(lengths), max(lengths), threshold, time.perf_counter() - started)
