"""Runs a model on samples and gathers what its heads do. The one function to call is `analyse`."""

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
from mgk.analysis.attention_maps import Maps, MapSums
from mgk.analysis.capture import Call, Progress, Watch, call_model, capture_attention
from mgk.analysis.components import Mixture, MixtureSums
from mgk.analysis.ranks import THRESHOLD, in_batches, matrices_at_once, spectra
from mgk.analysis.similarity import PairSums, Similarity
from mgk.analysis.weights import Block, SampleWeights, sample_weights

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Ranks:
    """Of the attention matrices of a layer, one entry each."""

    head: NDArray[np.int64]
    size: NDArray[np.int64]  # the smaller side: the highest rank it could have
    rank: NDArray[np.int64]
    effective: Array


@dataclass(frozen=True)
class ComponentUsage:
    """Which component answers where on the sample that is shown: shares, [H, M, places]."""

    queries: Array
    keys: Array


@dataclass(frozen=True)
class Layer:
    name: str
    kind: str  # in words
    heads: int
    components: int
    head_dim: int
    ranks: Ranks
    similarity: Similarity
    maps: Maps
    mixture: Mixture | None  # None where a key has one component
    where: ComponentUsage | None
    removal: Removal | None


@dataclass(frozen=True)
class Analysis:
    """What was found. Plain data: numbers, arrays and names."""

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
        """How many heads of the whole model are effectively different, by each measure that all layers have."""
        each = [layer.similarity.different for layer in self.layers]
        shared = [measure for measure in each[0] if all(measure in one for one in each)]
        return {measure: sum(one[measure] for one in each) for measure in shared}


@dataclass(frozen=True)
class _Settings:
    matrices: int
    threshold: float
    memory: int
    map_size: int
    tiles: Path | None


class SampleMaps:
    """The sample that is kept for the reader: its maps, and which component answers where."""

    def __init__(self, number: int, sample: SampleWeights, settings: _Settings, device: torch.device) -> None:
        queries, keys = sample.shape
        size, tiles = settings.map_size, settings.tiles
        self.maps = MapSums(f"layer{number + 1}", sample.heads, queries, keys, size, tiles, device)
        self.queries, self.keys = (
            torch.zeros(sample.heads, sample.components, length, dtype=torch.float64, device=device)
            for length in (queries, keys)
        )

    def add(self, block: Block, answered: Tensor | None) -> None:
        self.maps.add(block.rows, block.weights)
        if answered is not None:
            self.queries[..., block.rows] += answered.sum(3).transpose(1, 2)
            self.keys += answered.sum(1)

    def where(self) -> ComponentUsage | None:
        if self.queries.shape[1] == 1:
            return None
        return ComponentUsage(*(_shares(answers.cpu(), self.maps.factor) for answers in (self.queries, self.keys)))


class LayerAccumulator:
    """Everything about a layer that grows with the samples."""

    def __init__(self, name: str, number: int, call: Call, settings: _Settings) -> None:
        self.name, self.number, self.settings, self.kind = name, number, settings, kind(call)
        self.heads, self.components, self.head_dim = call.query.shape[1], call.components, call.query.shape[-1]
        self.device = call.query.device
        self.pairs = PairSums(self.heads, call.value.shape[-1], self.device)
        self.mixture = MixtureSums(self.heads, self.components, self.device) if self.components > 1 else None
        self.ranks: list[tuple[int, int, int, float]] = []  # head, size, rank, effective rank
        self.maps: Maps | None = None
        self.where: ComponentUsage | None = None
        self.lengths: list[int] = []

    def add(self, sample: SampleWeights, hard: bool) -> None:
        queries, keys = sample.shape
        self.lengths.append(keys)
        settings = self.settings
        ranked = len(self.ranks) < settings.matrices
        at_once = matrices_at_once(queries, keys, settings.memory // 2)
        if ranked and at_once == 0:
            needed = 2 * 6 * 8 * max(queries, keys) ** 2 / 2**30
            fail("memory", f"is too little to rank a matrix of {queries} × {keys}: about {needed:.2f} GiB are needed")
        whole = None
        if ranked and at_once >= self.heads:
            whole = torch.empty(self.heads, queries, keys, dtype=torch.float64, device=self.device)
        shown = SampleMaps(self.number, sample, settings, self.device) if self.maps is None else None
        if self.mixture is not None:
            self.mixture.add_sample(sample)
        for block in sample.blocks(settings.memory // 2, components=self.mixture is not None):
            self.pairs.add_maps(block.weights)
            self.pairs.add_outputs(block.weights @ sample.value)
            answered = None if self.mixture is None else self.mixture.add_block(block, hard)
            if whole is not None:
                whole[:, block.rows] = block.weights
            if shown is not None:
                shown.add(block, answered)
        if shown is not None:
            self.maps, self.where = shown.maps.maps(), shown.where()
        if ranked:
            self._rank(sample, whole, at_once)

    def _rank(self, sample: SampleWeights, whole: Tensor | None, at_once: int) -> None:
        queries, keys = sample.shape
        for heads in in_batches(self.heads, at_once):
            part = whole
            if part is None:
                # Not all heads fit at once: their rows are computed again, as many heads at a time as fit.
                count = heads.stop - heads.start
                part = torch.empty(count, queries, keys, dtype=torch.float64, device=self.device)
                for block in sample.blocks(self.settings.memory // 4, heads):
                    part[:, block.rows] = block.weights
            found = spectra(part[: heads.stop - heads.start], threshold=self.settings.threshold)
            for head, rank, effective in zip(
                range(heads.start, heads.stop), found.rank.tolist(), found.effective_rank.tolist(), strict=True
            ):
                self.ranks.append((head, min(queries, keys), rank, effective))

    def layer(self, removal: Removal | None) -> Layer:
        assert self.maps is not None
        head, size, rank = (np.array([row[column] for row in self.ranks], np.int64) for column in range(3))
        ranks = Ranks(head, size, rank, np.array([row[3] for row in self.ranks], np.float64))
        mixture = None if self.mixture is None else self.mixture.mixture()
        return Layer(
            self.name, self.kind, self.heads, self.components, self.head_dim, ranks, self.pairs.similarity(), self.maps,
            mixture, self.where, removal,
        )  # fmt: skip


def _shares(answers: Tensor, factor: int) -> Array:
    """Attention that components answer for, [H, M, n], as shares of each place, pooled."""
    padded = torch.nn.functional.pad(answers, (0, -answers.shape[-1] % factor)).unflatten(-1, (-1, factor)).sum(-1)
    total = padded.sum(1, keepdim=True)
    shares: Array = (padded / total.masked_fill(total == 0, 1)).numpy()
    return shares


def kind(call: Call) -> str:
    """The kind of attention, in words."""
    keys = f"{call.components} {'shifted' if call.shift is not None else 'independent'} components a key"
    if isinstance(call, LinearCall):
        return "linear" if call.components == 1 else f"linear, {keys}"
    if call.components == 1:
        plain = not isinstance(call.tau, Tensor) and call.tau == 0
        return "softmax" if plain else "one Gaussian a key"
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
    watch: Watch = capture_attention,
) -> Analysis:
    """What the heads of a model do on some samples: ranks, redundancy, mixtures, maps.

    Args:
        model: any module that attends through this package (`mgk.Attention`, `mgk.MultiheadAttention`, the operators),
            causal or not, in any dtype; it is run in eval mode and left as it was.
        inputs: what to run it on, one entry a call: a tensor, a tuple of arguments or a dict of keyword arguments.
            Padding is left out of every number. The first sample is the one whose maps are kept.
        matrices: attention matrices to rank in each layer, as far as the inputs suffice.
        threshold: singular values above it count for the rank.
        memory: bytes that the computation may take beside the model. Matrices of all pairs exist only where a rank is
            computed, and as few at once as fit.
        map_size: the sides of the pooled maps.
        tiles: a directory; maps that had to be pooled are also written there in full, as PNG tiles.
        removal: samples to run without each head in turn, to see how much it matters, as far as `memory` holds their
            answers; 0 leaves this out.
        together: so many of those samples in a call, if they are tensors of one shape whose first axis is the batch.
        progress: told (stage, done, total).
        watch: how to look at the calls; Transformers models need their own (`mgk.analysis.hf_models`).
    """
    positive_integer("matrices", matrices)
    positive_integer("memory", memory)
    positive_integer("map_size", map_size)
    number("threshold", threshold, 0, above=True)
    if not inputs:
        fail("inputs", "must hold at least one sample")
    started = time.perf_counter()
    settings = _Settings(matrices, threshold, memory, map_size, tiles)
    layers: dict[str, LayerAccumulator] = {}

    def look(name: str, call: Call, output: Tensor) -> Tensor:
        hard = not isinstance(call, LinearCall) and call.hard
        for index in range(call.query.shape[0]):
            sample = sample_weights(call, index)
            if min(sample.shape) > 0:
                if name not in layers:
                    layers[name] = LayerAccumulator(name, len(layers), call, settings)
                layers[name].add(sample, hard)
        return output

    tell = progress or (lambda stage, done, total: None)
    with eval_mode(model):
        with watch(model, look):
            for done, sample in enumerate(inputs):
                call_model(model, sample)
                tell("looking at the heads", done + 1, len(inputs))
        if not layers:
            fail("model", "has no attention layers that can be looked at")
        removed: dict[str, Removal] = {}
        if removal:
            counts = {name: sums.heads for name, sums in layers.items()}
            removed = remove_heads(model, inputs[:removal], counts, watch, tell, memory=memory, together=together)
    found = [sums.layer(removed.get(name)) for name, sums in layers.items()]
    lengths = next(iter(layers.values())).lengths
    return Analysis(found, len(lengths), min(lengths), max(lengths), threshold, time.perf_counter() - started)
