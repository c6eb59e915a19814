"""Analysis of one attention layer, accumulated over samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mgk._core.calls import LinearCall
from mgk._core.validation import fail
from mgk.analysis.ablation import Removal
from mgk.analysis.attention_maps import MapAccumulator, Maps
from mgk.analysis.capture import Call
from mgk.analysis.components import Mixture, MixtureAccumulator
from mgk.analysis.ranks import bytes_per_matrix, max_matrices, spectra, split_range
from mgk.analysis.similarity import Similarity, SimilarityAccumulator
from mgk.analysis.weights import Block, SampleWeights

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
    """Analysis of one attention layer.

    Examples:
        >>> (layer,) = mgk.analysis.analyse(mgk.Attention(32, 4), [torch.randn(1, 20, 32)], removal=0).layers
        >>> layer.heads, layer.components, layer.ranks.rank.shape
        (4, 2, (4,))
    """

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
    key_heads: int  # numbers of key heads and value heads, which divide that of the (query) heads
    value_heads: int


@dataclass(frozen=True)
class LayerSettings:
    """Options of `analyse` that apply to each layer."""

    matrices: int
    threshold: float
    memory: int
    map_size: int
    tiles: Path | None


class MatrixRank(NamedTuple):
    """Ranks of one attention matrix."""

    head: int
    size: int
    rank: int
    effective: float


class SampleMaps:
    """Maps and component usage of the first sample."""

    def __init__(self, number: int, sample: SampleWeights, settings: LayerSettings, device: torch.device) -> None:
        queries, keys = sample.shape
        size, tiles = settings.map_size, settings.tiles
        self.maps = MapAccumulator(f"layer{number + 1}", sample.heads, queries, keys, size, tiles, device)
        self.queries, self.keys = (
            torch.zeros(sample.heads, sample.components, length, dtype=torch.float64, device=device)
            for length in (queries, keys)
        )

    def add(self, block: Block, answered: Tensor | None) -> None:
        """Add rows of the maps and their split over components, [H, R, M, S]."""
        self.maps.add(block.rows, block.weights)
        if answered is not None:
            self.queries[..., block.rows] += answered.sum(3).transpose(1, 2)
            self.keys += answered.sum(1)

    def usage(self) -> ComponentUsage | None:
        """Return the component usage; None for a single component."""
        if self.queries.shape[1] == 1:
            return None
        return ComponentUsage(*(_shares(answered.cpu(), self.maps.factor) for answered in (self.queries, self.keys)))


class LayerAccumulator:
    """Statistics of a layer, updated sample by sample."""

    def __init__(self, name: str, number: int, call: Call, settings: LayerSettings) -> None:
        self.name, self.number, self.settings, self.kind = name, number, settings, describe_attention(call)
        self.heads, self.components, self.head_dim = call.query.shape[1], call.components, call.query.shape[-1]
        self.key_heads, self.value_heads = call.keys.shape[1], call.value.shape[1]
        self.device = call.query.device
        self.similarity = SimilarityAccumulator(self.heads, call.value.shape[-1], self.device)
        self.mixture = MixtureAccumulator(self.heads, self.components, self.device) if self.components > 1 else None
        self.ranks: list[MatrixRank] = []
        self.maps: Maps | None = None
        self.usage: ComponentUsage | None = None
        self.lengths: list[int] = []

    def add(self, sample: SampleWeights, hard: bool) -> None:
        """Add a sample; `hard` is the layer's assignment."""
        queries, keys = sample.shape
        self.lengths.append(keys)
        settings = self.settings
        ranked = len(self.ranks) < settings.matrices
        batch = max_matrices(queries, keys, settings.memory // 2)
        if ranked and batch == 0:
            required = 2 * bytes_per_matrix(queries, keys) / 2**30
            fail("memory", f"is too small to rank a {queries} × {keys} matrix: about {required:.2f} GiB are needed")
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
            numbers = zip(result.rank.tolist(), result.effective_rank.tolist(), strict=True)
            for head, (rank, effective) in enumerate(numbers, heads.start):
                self.ranks.append(MatrixRank(head, min(queries, keys), rank, effective))

    def layer(self, removal: Removal | None) -> Layer:
        """Return the analysis of the layer."""
        assert self.maps is not None
        ranks = Ranks(
            np.array([matrix.head for matrix in self.ranks], np.int64),
            np.array([matrix.size for matrix in self.ranks], np.int64),
            np.array([matrix.rank for matrix in self.ranks], np.int64),
            np.array([matrix.effective for matrix in self.ranks], np.float64),
        )
        mixture = None if self.mixture is None else self.mixture.mixture()
        return Layer(
            name=self.name,
            kind=self.kind,
            heads=self.heads,
            components=self.components,
            head_dim=self.head_dim,
            ranks=ranks,
            similarity=self.similarity.similarity(),
            maps=self.maps,
            mixture=mixture,
            usage=self.usage,
            removal=removal,
            key_heads=self.key_heads,
            value_heads=self.value_heads,
        )


def _shares(answered: Tensor, factor: int) -> Array:
    """Pool the attention of components, [H, M, n], by `factor` and normalize it at each position."""
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
