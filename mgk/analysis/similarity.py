"""Similarity of the heads of a layer, by their attention maps and by their outputs, and that of unrelated heads.

Only sums over rows and samples are stored, not the maps. Heads that attend nearly uniformly have similar maps whatever
they compute. The similarity is therefore compared with that of unrelated heads whose attention is as concentrated: the
weights of each row, shuffled over its visible keys, independently for each head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mgk._core.integers import ceil_div

Array = NDArray[np.float64]

# Heads whose maps are closer than this on average (Jensen–Shannon, in bits) form one group.
SAME_GROUP = 0.1
# Rows of a block of a sample that are shuffled: their mean is precise enough for a baseline.
SHUFFLED_ROWS = 32


@dataclass(frozen=True)
class Similarity:
    """Similarity of all pairs of heads, [H, H] each, and groups of similar heads."""

    divergence: Array  # Jensen–Shannon divergence of the rows of the maps, in bits: 0 identical, 1 disjoint
    cosine: Array  # cosine similarity of the maps as vectors
    cka: Array | None  # centred kernel alignment of the outputs: 1 for equal up to rotation and scale
    order: list[int]  # heads, ordered so that similar ones are adjacent
    groups: list[int]  # group number of each head
    concentration: Array | None = None  # Kullback–Leibler divergence of the rows from uniform attention, in bits, [H]
    chance_divergence: Array | None = None  # divergence of the shuffled maps: of unrelated heads as concentrated
    chance_cka: Array | None = None  # expected CKA of unrelated outputs of these spectra over this number of tokens

    @property
    def different(self) -> dict[str, float]:
        """Effective number of different heads, by measure: maps, cosine and, if available, outputs."""
        numbers = {"maps": effective_number(1 - self.divergence), "cosine": effective_number(self.cosine)}
        if self.cka is not None:
            numbers["outputs"] = effective_number(self.cka)
        return numbers

    @property
    def output_groups(self) -> list[int] | None:
        """Group of each head by CKA: heads of a group have nearly the same outputs, up to rotation and scale."""
        return None if self.cka is None else _number_groups(_cluster(1 - self.cka), len(self.cka))

    @property
    def different_by_chance(self) -> dict[str, float]:
        """Effective number of different heads if they were unrelated: maps and outputs, as far as available."""
        numbers = {}
        if self.chance_divergence is not None:
            numbers["maps"] = effective_number(1 - self.chance_divergence)
        if self.chance_cka is not None:
            numbers["outputs"] = effective_number(self.chance_cka)
        return numbers


class SimilarityAccumulator:
    """Sums over rows and samples for a Similarity.

    Args:
        heads: Number of heads.
        width: Width of a head's output; None ignores the outputs.
        device: Device of the sums.
    """

    def __init__(self, heads: int, width: int | None, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.heads, self.width = heads, width
        self.divergence, self.rows = zeros(heads, heads), 0
        self.chance_divergence, self.shuffled_rows = zeros(heads, heads), 0
        self.concentration = zeros(heads)
        self.generator = torch.Generator().manual_seed(0)
        self.products = zeros(heads, heads)
        total = heads * (width or 0)
        self.tokens, self.mean, self.covariance = 0, zeros(total), zeros(total, total)

    def add_maps(self, weights: Tensor) -> None:
        """Add rows [H, R, S] of the maps of one sample."""
        flat = weights.flatten(1)
        self.products += flat @ flat.mT
        total = weights.sum(-1, keepdim=True)
        rows = weights / total.masked_fill(total == 0, 1)
        # Skip rows with a single visible key, such as the first row of a causal map: all heads agree on them.
        visible = (weights != 0).any(0)
        informative = (visible.sum(-1) > 1) & (total != 0).all(0).squeeze(-1)
        rows, visible = rows[:, informative], visible[informative]
        count = int(informative.sum())
        if not count:
            return
        self.rows += count
        divergence, entropy = _divergence_bits(rows)
        self.divergence += divergence
        self.concentration += visible.sum(-1).double().log2().sum() - entropy
        step = ceil_div(count, SHUFFLED_ROWS)
        shuffled = _shuffle_visible(rows[:, ::step], visible[::step], self.generator)
        self.chance_divergence += _divergence_bits(shuffled)[0]
        self.shuffled_rows += shuffled.shape[1]

    def add_outputs(self, outputs: Tensor) -> None:
        """Add outputs [H, L, E] of one sample."""
        flat = outputs.transpose(0, 1).flatten(1)  # [L, H·E]
        count = flat.shape[0]
        if count == 0:
            return
        # Pairwise update of mean and covariance (Chan et al. 1983): stable for a large mean.
        mean = flat.mean(0)
        centred, difference = flat - mean, mean - self.mean
        total = self.tokens + count
        self.covariance += centred.mT @ centred + torch.outer(difference, difference) * (self.tokens * count / total)
        self.mean += difference * (count / total)
        self.tokens = total

    def similarity(self) -> Similarity:
        """Return the similarities and groups."""
        divergence = _mean_of_pairs(self.divergence, self.rows)
        norms = self.products.diagonal().sqrt()
        cosine = self.products / torch.outer(norms, norms).clamp(min=torch.finfo(torch.float64).tiny)
        merges = _cluster(divergence)
        cka, chance_cka = self._cka() if self.width else (None, None)
        return Similarity(
            divergence=divergence,
            cosine=cosine.cpu().numpy(),
            cka=cka,
            order=merges[-1][1],
            groups=_number_groups(merges, self.heads),
            concentration=(self.concentration / max(self.rows, 1)).clamp(min=0).cpu().numpy(),
            chance_divergence=_mean_of_pairs(self.chance_divergence, self.shuffled_rows),
            chance_cka=chance_cka,
        )

    def _cka(self) -> tuple[Array, Array]:
        """Compute CKA and its expectation for unrelated outputs.

        CKA is ‖X_gᵀX_h‖² / (‖X_gᵀX_g‖ ‖X_hᵀX_h‖), X the centred outputs (Kornblith et al. 2019, linear). For
        unrelated outputs of n tokens, ‖X_gᵀX_h‖² is about ‖X_g‖² ‖X_h‖² / (n − 1).
        """
        blocks = self.covariance.unflatten(0, (self.heads, -1)).unflatten(-1, (self.heads, -1))  # [H, E, H, E]
        overlap = blocks.square().sum((1, 3))
        norms = overlap.diagonal().sqrt()
        scale = torch.outer(norms, norms).clamp(min=torch.finfo(torch.float64).tiny)
        energy = self.covariance.diagonal().unflatten(0, (self.heads, -1)).sum(-1)
        chance = (torch.outer(energy, energy) / max(self.tokens - 1, 1) / scale).clamp(max=1)
        # A head with zero output has similarity 1 to itself and 0 to all others.
        return (overlap / scale).fill_diagonal_(1).cpu().numpy(), chance.fill_diagonal_(1).cpu().numpy()


def similarity_of_pairs(divergence: Array, cosine: Array) -> Similarity:
    """Return the similarity of heads whose maps alone were compared, from matrices [H, H]."""
    merges = _cluster(divergence)
    return Similarity(divergence, cosine, None, merges[-1][1], _number_groups(merges, len(divergence)))


def _divergence_bits(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the Jensen–Shannon divergences of the rows of all pairs of heads, [H, H] above the diagonal, and entropies.

    Args:
        rows: Distributions [H, R, S].
    """
    heads = rows.shape[0]
    entropy = _entropy_bits(rows)  # [H]
    divergence = rows.new_zeros(heads, heads)
    for head in range(heads - 1):
        later = slice(head + 1, heads)
        mixed = _entropy_bits((rows[head] + rows[later]) / 2)
        divergence[head, later] = (mixed - (entropy[head] + entropy[later]) / 2).clamp(min=0)
    return divergence, entropy


def _mean_of_pairs(total: Tensor, rows: int) -> Array:
    """Return the mean divergences as a symmetric matrix, from sums above the diagonal."""
    mean: Array = ((total + total.mT) / max(rows, 1)).clamp(max=1).cpu().numpy()
    return mean


def _shuffle_visible(rows: Tensor, visible: Tensor, generator: torch.Generator) -> Tensor:
    """Shuffle the weights [H, R, S] of each row over its visible keys [R, S], independently for each head."""
    noise = torch.rand(rows.shape, generator=generator).to(rows.device) + 2.0 * ~visible
    return rows.gather(-1, noise.argsort(-1))


def _entropy_bits(rows: Tensor) -> Tensor:
    """Sum the entropy of all rows, in bits: [..., R, S] -> [...]."""
    return torch.special.entr(rows).sum((-1, -2)) / math.log(2)


def effective_number(similarity: Array) -> float:
    """Compute the Vendi score of a similarity matrix [H, H], from 1 (all the same) to H (all different).

    It is the exponential of the entropy of the eigenvalues of similarity / H.

    Examples:
        >>> round(mgk.analysis.effective_number(torch.eye(3).numpy()), 3)  # nothing is similar
        3.0
    """
    values = np.linalg.eigvalsh((similarity + similarity.T) / 2).clip(min=0)
    shares = values[values > 0] / values.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def _cluster(distance: Array) -> list[tuple[float, list[int]]]:
    """Cluster by average linkage; return the distance and members of each merge, starting with single heads."""
    groups = [[head] for head in range(len(distance))]
    merges = [(0.0, group) for group in groups]
    while len(groups) > 1:
        closest, a, b = min(
            (float(distance[np.ix_(groups[a], groups[b])].mean()), a, b)
            for a in range(len(groups))
            for b in range(a + 1, len(groups))
        )
        merges.append((closest, groups[a] + groups[b]))
        groups = [group for n, group in enumerate(groups) if n not in (a, b)] + [merges[-1][1]]
    return merges


def _number_groups(merges: list[tuple[float, list[int]]], heads: int) -> list[int]:
    """Return the group of each head, numbered from 0 in the order of the heads."""
    group = list(range(heads))
    for merge_distance, members in merges:
        if merge_distance <= SAME_GROUP:
            for head in members:
                group[head] = min(members)
    names = {first: n for n, first in enumerate(dict.fromkeys(group))}
    return [names[first] for first in group]
