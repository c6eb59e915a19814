"""Use of the mixture components of a key: responsibilities, distances, and soft against hard assignment."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mgk.analysis.weights import Block, MixtureWeights, SampleWeights

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Mixture:
    """Component statistics per head, averaged over samples and rows."""

    prior: Array  # π, [H, M], averaged over positions
    answered: Array  # share of the attention for which each component is responsible, [H, M]
    decided: Array  # responsibility of the leading component, weighted by the attention, [H]: 1/M to 1
    distance: Array  # distance between the components' keys, in units of σ (linear attention: unscaled), [H, M, M]
    other_choice: Array  # share of the attention whose leading component is not the hard choice (Eq. 12), [H]
    moved: Array  # attention that moves to other keys under the other assignment, soft or hard, [H]: 0 to 1


class MixtureAccumulator:
    """Sums over rows and samples for a Mixture."""

    def __init__(self, heads: int, components: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.samples, self.attention = 0, zeros(heads)
        self.prior, self.distance = zeros(heads, components), zeros(heads, components, components)
        self.answered = zeros(heads, components)
        self.decided, self.other_choice, self.moved = zeros(heads), zeros(heads), zeros(heads)

    def add_sample(self, sample: SampleWeights) -> None:
        """Add priors and keys of one sample."""
        self.samples += 1
        components = sample.components
        self.prior += 1 / components if sample.log_prior is None else sample.log_prior.exp().mean(-1)
        keys = sample.component_keys.transpose(1, 2)  # [H, S, M, D]
        self.distance += (torch.cdist(keys, keys) * _inverse_sigma(sample)).mean(1)

    def add_block(self, block: Block, hard: bool) -> Tensor:
        """Add a block of rows of one sample and return its attention split over components, [H, R, M, S]."""
        assert block.scores is not None
        assert block.unweighted is not None
        answered = split_over_components(block)
        self.attention += block.weights.sum((1, 2))
        self.answered += answered.sum((1, 3))
        self.decided += answered.amax(2).sum((1, 2))
        differs = block.scores.argmax(2) != block.unweighted.argmax(2)
        self.other_choice += (block.weights * differs).sum((1, 2))
        self.moved += (other_assignment(block, hard) - block.weights).abs().sum((1, 2)) / 2
        return answered

    def mixture(self) -> Mixture:
        """Return the averages."""
        attention = self.attention.clamp(min=torch.finfo(torch.float64).tiny)
        samples = max(self.samples, 1)
        averages = {
            "prior": self.prior / samples,
            "answered": self.answered / attention[:, None],
            "decided": self.decided / attention,
            "distance": self.distance / samples,
            "other_choice": self.other_choice / attention,
            "moved": self.moved / attention,
        }
        return Mixture(**{name: average.cpu().numpy() for name, average in averages.items()})


def split_over_components(block: Block) -> Tensor:
    """Compute responsibility (Eq. 11) times attention weight of each component, [H, R, M, S]."""
    assert block.scores is not None
    # NaN: all scores are -inf, and the weight is 0.
    return block.scores.softmax(2).nan_to_num(0) * block.weights.unsqueeze(2)


def other_assignment(block: Block, hard: bool) -> Tensor:
    """Compute the weights under the other assignment, hard for a soft layer and soft for a hard one: [H, R, S].

    A pair's logit is log Σ_r exp(score_r) + mask for soft and max_r score_r + mask for hard assignment. Only their
    difference is applied to the weights, so the mask cancels.
    """
    assert block.scores is not None
    assert block.unweighted is not None
    step = block.unweighted.amax(2) - block.scores.logsumexp(2)
    step = (-step if hard else step).masked_fill(block.weights == 0, -math.inf)
    peak = step.amax(-1, keepdim=True)
    other = block.weights * (step - peak.masked_fill(peak == -math.inf, 0)).exp()
    total = other.sum(-1, keepdim=True)
    # Same row sum as before: unnormalized linear attention has row sums other than 1.
    return other * (block.weights.sum(-1, keepdim=True) / total.masked_fill(total == 0, 1))


def _inverse_sigma(sample: SampleWeights) -> float | Tensor:
    """Return √λ, which converts distances to units of σ: a number, or [H, 1, 1, 1] if it differs between heads."""
    if not isinstance(sample, MixtureWeights):
        return 1.0
    if not isinstance(sample.scale, Tensor):
        return math.sqrt(sample.scale)
    return sample.scale[0].expand(sample.heads, -1, -1).sqrt().mean((1, 2))[:, None, None, None]
