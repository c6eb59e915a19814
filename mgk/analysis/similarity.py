"""How alike the heads of a layer are: where they look (their maps) and what they pass on (their outputs).

H heads, L queries, S keys, D the width of a head's output. Sums over samples are kept, never the maps themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

# Heads whose maps are on average closer than this (Jensen–Shannon, in bits) stand in one group.
SAME_GROUP = 0.1


@dataclass(frozen=True)
class Similarity:
    """Between all pairs of heads, [H, H] each."""

    divergence: Array  # Jensen–Shannon divergence of the rows of the maps, in bits: 0 the same, 1 nothing in common
    cosine: Array  # of the maps as vectors
    cka: Array | None  # centred kernel alignment of the outputs: 1 the same up to rotation and scale
    order: list[int]  # the heads with similar ones side by side
    groups: list[int]  # the group of each head

    @property
    def different(self) -> dict[str, float]:
        """How many heads are effectively different, by each measure."""
        numbers = {"maps": effective_number(1 - self.divergence), "cosine": effective_number(self.cosine)}
        if self.cka is not None:
            numbers["outputs"] = effective_number(self.cka)
        return numbers


class PairSums:
    """Sums over rows and samples from which the similarities follow."""

    def __init__(self, heads: int, width: int | None, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.heads, self.width = heads, width
        self.divergence, self.rows = zeros(heads, heads), 0
        self.products = zeros(heads, heads)
        total = heads * (width or 0)
        self.tokens, self.mean, self.covariance = 0, zeros(total), zeros(total, total)

    def add_maps(self, weights: Tensor) -> None:
        """Rows [H, rows, S] of the maps of one sample."""
        flat = weights.flatten(1)
        self.products += flat @ flat.mT
        total = weights.sum(-1, keepdim=True)
        rows = weights / total.masked_fill(total == 0, 1)
        # A row with one key to see says nothing about the head: the first one of a causal map, for example.
        telling = ((weights != 0).any(0).sum(-1) > 1) & (total != 0).all(0).squeeze(-1)
        rows = rows[:, telling]
        self.rows += int(telling.sum())
        own = _bits(rows)  # [H]
        for head in range(self.heads - 1):
            others = slice(head + 1, self.heads)
            between = _bits((rows[head] + rows[others]) / 2) - (own[head] + own[others]) / 2
            self.divergence[head, others] += between.clamp(min=0)

    def add_outputs(self, outputs: Tensor) -> None:
        """Outputs [H, tokens, D] of one sample."""
        flat = outputs.transpose(0, 1).flatten(1)  # [tokens, H·D]
        count = flat.shape[0]
        if count == 0:
            return
        # The mean and the covariance of two parts together (Chan et al. 1983), which no large mean can spoil.
        mean = flat.mean(0)
        centred, apart = flat - mean, mean - self.mean
        both = self.tokens + count
        self.covariance += centred.mT @ centred + torch.outer(apart, apart) * (self.tokens * count / both)
        self.mean += apart * (count / both)
        self.tokens = both

    def similarity(self) -> Similarity:
        divergence = (self.divergence + self.divergence.mT) / max(self.rows, 1)
        norms = self.products.diagonal().sqrt()
        cosine = self.products / torch.outer(norms, norms).clamp(min=torch.finfo(torch.float64).tiny)
        found = divergence.clamp(max=1).cpu().numpy()
        merges = _merge(found)
        return Similarity(
            found, cosine.cpu().numpy(), self._cka() if self.width else None, merges[-1][1], _groups(merges, self.heads)
        )

    def _cka(self) -> Array:
        """‖X_gᵀX_h‖² / (‖X_gᵀX_g‖ ‖X_hᵀX_h‖), X the centred outputs (Kornblith et al. 2019, linear)."""
        blocks = self.covariance.unflatten(0, (self.heads, -1)).unflatten(-1, (self.heads, -1))  # [H, D, H, D]
        overlap = blocks.square().sum((1, 3))
        norms = overlap.diagonal().sqrt()
        cka = overlap / torch.outer(norms, norms).clamp(min=torch.finfo(torch.float64).tiny)
        # A head that passes on nothing is like no other, and like itself.
        return cka.fill_diagonal_(1).cpu().numpy()


def _bits(rows: Tensor) -> Tensor:
    """The entropy of each row, summed over rows: [..., rows, S] -> [...]."""
    return torch.special.entr(rows).sum((-1, -2)) / math.log(2)


def effective_number(similarity: Array) -> float:
    """How many different things there are among H that are more or less alike, from 1 (all the same) to H (none alike).

    The exponential of the entropy of the eigenvalues of similarity / H, known as the Vendi score.
    """
    values = np.linalg.eigvalsh((similarity + similarity.T) / 2).clip(min=0)
    shares = values[values > 0] / values.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def _merge(distance: Array) -> list[tuple[float, list[int]]]:
    """Average linkage: the two closest groups become one until one is left. The distance and members of each merge."""
    groups = [[head] for head in range(len(distance))]
    merges = [(0.0, group) for group in groups]
    while len(groups) > 1:
        between, a, b = min(
            (float(distance[np.ix_(groups[a], groups[b])].mean()), a, b)
            for a in range(len(groups))
            for b in range(a + 1, len(groups))
        )
        merges.append((between, groups[a] + groups[b]))
        groups = [group for n, group in enumerate(groups) if n not in (a, b)] + [merges[-1][1]]
    return merges


def _groups(merges: list[tuple[float, list[int]]], heads: int) -> list[int]:
    """Numbers from 0 in the order of the heads."""
    group = list(range(heads))
    for between, members in merges:
        if between <= SAME_GROUP:
            for head in members:
                group[head] = min(members)
    names = {first: n for n, first in enumerate(dict.fromkeys(group))}
    return [names[first] for first in group]
