"""Feature maps φ of linear attention, in which φ(q)·φ(k) replaces the exponential of Eq. 10.

A feature map is a callable [..., D] -> [..., F] with values ≥ 0. If its values span many orders of magnitude, it also
has a method `key_features`, which returns the features of each token divided by their maximum, and the logarithm of
that maximum. Backends then sum in a common scale without overflow; in causal attention the scale does not depend on
later tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mgk._core.validation import fail, number, one_of, positive_integer


def elu_plus_one(x: Tensor) -> Tensor:
    """Compute elu(x) + 1 without rounding to 0, as the sum does below -17 in fp32."""
    # The zeros keep exp finite where it is not selected: inf × 0 would be NaN in the backward. clamp is not an
    # alternative: from torch 2.15 on its derivative at 0 is 0, but that of elu is 1.
    positive = x > 0
    return torch.where(positive, x + 1, x.masked_fill(positive, 0).exp())


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {"elu": elu_plus_one, "relu": torch.relu}


def resolve_feature_map(feature_map: Any) -> Callable[[Tensor], Tensor]:
    """Return the feature map for a name in FEATURE_MAPS; return a callable unchanged."""
    if callable(feature_map):
        return feature_map
    if not isinstance(feature_map, str) or feature_map not in FEATURE_MAPS:
        names = ", ".join(map(repr, FEATURE_MAPS))
        fail("feature_map", f"must be one of {names}, or a callable, got {feature_map!r}")
    return FEATURE_MAPS[feature_map]


class FAVOR(nn.Module):
    """Positive random features of Performer, with E[φ(q)·φ(k)] = exp(scale · q·k), the kernel of Eq. 8.

    The directions are drawn once, orthogonal in blocks of ``head_dim``, and saved with the weights.

    Args:
        head_dim: Dimension D of a head.
        num_features: Number of features F. Default: D log D, rounded.
        scale: Factor of the dot product. Default: 1/√D.
        similarity: ``"dot"`` (Eq. 8), or ``"gaussian"``: the key features are multiplied by exp(-scale/2 ‖k‖²), which
            gives the kernel of Eq. 9 up to a factor per query that the normalization removes.

    Features are divided by their maximum, which the normalization removes too. Linear attention without it (preset
    ``"ref-lra"``) keeps these factors: outputs then have another scale for each query.

    Examples:
        >>> attention = mgk.Attention(64, 2, variant="mlk", feature_map=mgk.FAVOR(head_dim=32, num_features=64))
        >>> attention(torch.randn(1, 10, 64)).shape
        torch.Size([1, 10, 64])
    """

    directions: Tensor  # [F, D]

    def __init__(
        self, head_dim: int, num_features: int | None = None, *, scale: float | None = None, similarity: str = "dot"
    ) -> None:
        super().__init__()
        positive_integer("head_dim", head_dim)
        self.similarity = one_of("similarity", similarity, ("dot", "gaussian"))
        self.scale = 1 / math.sqrt(head_dim) if scale is None else number("scale", scale, 0)
        if num_features is not None:
            positive_integer("num_features", num_features)
        features = num_features or max(1, round(head_dim * math.log(max(head_dim, 3))))
        self.register_buffer("directions", torch.empty(features, head_dim))
        self.redraw()

    def reset_parameters(self) -> None:
        """Draw new directions."""
        self.redraw()

    @torch.no_grad()
    def redraw(self) -> None:
        """Draw new directions.

        Examples:
            >>> favor = mgk.FAVOR(head_dim=8, num_features=16)
            >>> before = favor.directions.clone()
            >>> favor.redraw()
            >>> torch.equal(favor.directions, before)
            False
        """
        count, width = self.directions.shape
        blocks = []
        for _ in range(math.ceil(count / width)):
            q, r = torch.linalg.qr(torch.randn(width, width))
            # LAPACK fixes the signs, which biases q; the signs of r's diagonal make it uniform.
            blocks.append(q * r.diagonal().sign())
        # Rows of an orthogonal matrix have norm 1; these are the norms of rows of a Gaussian matrix.
        norms = torch.randn(count, width).norm(dim=-1, keepdim=True)
        self.directions.copy_(torch.cat(blocks)[:count] * norms)

    def _log_features(self, x: Tensor, norm_weight: float) -> Tensor:
        if x.shape[-1] != self.directions.shape[1]:
            fail("feature_map", f"has head_dim {self.directions.shape[1]}, but the heads have dimension {x.shape[-1]}")
        x = x * math.sqrt(self.scale)
        projected = x @ self.directions.to(x.dtype).T
        return projected - norm_weight * x.square().sum(-1, keepdim=True) - 0.5 * math.log(self.directions.shape[0])

    def forward(self, x: Tensor) -> Tensor:
        """Return query features [..., F], scaled to a maximum of 1; the factor cancels in the normalization.

        Examples:
            >>> features = mgk.FAVOR(head_dim=8, num_features=16)(torch.randn(1, 2, 10, 8))
            >>> features.shape, features.max().item()
            (torch.Size([1, 2, 10, 16]), 1.0)
        """
        logs = self._log_features(x, 0.5)
        return (logs - logs.amax(-1, keepdim=True).detach()).exp()

    def key_features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return key features divided by their maximum, [..., F], and its logarithm, [...].

        Examples:
            >>> features, log_peak = mgk.FAVOR(head_dim=8, num_features=16).key_features(torch.randn(1, 2, 10, 8))
            >>> features.shape, log_peak.shape
            (torch.Size([1, 2, 10, 16]), torch.Size([1, 2, 10]))
        """
        logs = self._log_features(x, 1.0 if self.similarity == "gaussian" else 0.5)
        peak = logs.amax(-1).detach()
        return (logs - peak.unsqueeze(-1)).exp(), peak


class DPFP(nn.Module):
    """Deterministic parameter-free projection (Schlag et al. 2021): products of rectified entries.

    Args:
        nu: Number of shifted products per entry; there are 2·D·nu features.

    Examples:
        >>> mgk.DPFP(nu=2)(torch.randn(1, 10, 8)).shape  # 2·D·nu features
        torch.Size([1, 10, 32])
    """

    def __init__(self, nu: int = 1) -> None:
        super().__init__()
        self.nu = positive_integer("nu", nu)

    def forward(self, x: Tensor) -> Tensor:
        """Return features [..., 2·D·nu] of x [..., D].

        Examples:
            >>> mgk.DPFP()(torch.tensor([1.0, 2.0]))  # max(x, 0) and max(-x, 0), times their neighbours
            tensor([0., 2., 0., 0.])
        """
        rectified = torch.cat([x, -x], dim=-1).relu()
        return torch.cat([rectified * rectified.roll(shift, dims=-1) for shift in range(1, self.nu + 1)], dim=-1)


class L1Features(nn.Module):
    """A feature map divided by the sum of its features, as in the authors' language model."""

    def __init__(self, feature_map: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.feature_map = feature_map

    def forward(self, x: Tensor) -> Tensor:
        """Return features [..., F] that sum to 1."""
        features = self.feature_map(x)
        return features / features.sum(-1, keepdim=True).clamp(min=torch.finfo(features.dtype).tiny)


# Constructors of the feature maps that model configurations name; the argument is the head dimension.
FEATURE_MAP_FACTORIES: dict[str, Callable[[int], Callable[[Tensor], Tensor]]] = {
    "elu": lambda head_dim: elu_plus_one,
    "relu": lambda head_dim: torch.relu,
    "favor": FAVOR,
    "dpfp": lambda head_dim: DPFP(),
}
