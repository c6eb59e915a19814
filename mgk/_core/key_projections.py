"""Projections to the keys of M components per head (§2.3 of the paper, options A and B)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mgk._core.head_shards import local_tensor
from mgk.variants import Preset


class KeyProjection(nn.Module):
    """Projection of [B, S, kdim] to keys, with an optional shift [Hk, M, D] that the operator adds."""

    def __init__(self, kdim: int, heads: int, components: int, head_dim: int, outputs: int, bias: bool, **factory: Any):
        super().__init__()
        self.heads, self.components, self.head_dim = heads, components, head_dim
        self.projection = nn.Linear(kdim, outputs, bias=bias, **factory)

    @property
    def shift(self) -> Tensor | None:
        """Shift of the components, [Hk, M, D], or None if each component has a projection."""
        return None

    def forward(self, x: Tensor) -> Tensor:
        """Return the keys before any shift: [B, Hk, M, S, D] or, with shifts, [B, Hk, S, D]."""
        raise NotImplementedError

    def load_softmax_keys(self, weight: Tensor, bias: Tensor | None, noise: float) -> None:
        """Initialize from the key projection of a softmax layer, [Hk·D, kdim] and [Hk·D]."""
        raise NotImplementedError


class IndependentKeys(KeyProjection):
    """Option A: k_jr = W_r x_j, one projection per component."""

    def __init__(
        self, kdim: int, heads: int, components: int, head_dim: int, *, bias: bool, preset: Preset, **factory: Any
    ):
        super().__init__(kdim, heads, components, head_dim, heads * components * head_dim, bias, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        weight = self.projection.weight.unflatten(0, (self.heads, self.components, self.head_dim))
        for r in range(self.components):
            initial = torch.empty_like(weight[:, r]).flatten(0, 1)
            nn.init.xavier_uniform_(initial)
            with torch.no_grad():
                weight[:, r] = initial.unflatten(0, (self.heads, self.head_dim))
        if self.projection.bias is not None:
            nn.init.zeros_(self.projection.bias)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.projection(x).view(*x.shape[:2], self.heads, self.components, self.head_dim)
        return keys.permute(0, 2, 3, 1, 4)

    @torch.no_grad()
    def load_softmax_keys(self, weight: Tensor, bias: Tensor | None, noise: float) -> None:
        """Copy the weights to all components, with noise that sums to 0 over them: no first-order change of outputs."""
        # Drawn on the CPU, so that a seed gives the same noise on every device.
        noise_values = torch.randn(self.heads, self.components, self.head_dim, weight.shape[1], device="cpu")
        noise_values = noise_values.to(weight.device) * noise * weight.std()
        noise_values = (noise_values - noise_values.mean(1, keepdim=True)).to(weight)
        copies = weight.unflatten(0, (self.heads, 1, self.head_dim)) + noise_values
        self.projection.weight.copy_(copies.flatten(0, 2))
        if self.projection.bias is not None and bias is not None:
            copies = bias.unflatten(0, (self.heads, 1, self.head_dim)).expand(-1, self.components, -1)
            self.projection.bias.copy_(copies.flatten())


class ShiftedKeys(KeyProjection):
    """Option B: k_jr = W x_j + b_r, one projection and M learned shifts."""

    def __init__(
        self, kdim: int, heads: int, components: int, head_dim: int, *, bias: bool, preset: Preset, **factory: Any
    ):
        super().__init__(kdim, heads, components, head_dim, heads * head_dim, bias, **factory)
        self.anchored = preset.shifts_anchored
        self.shifts = nn.Parameter(torch.empty(heads, components, head_dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.projection.weight)
        if self.projection.bias is not None:
            nn.init.zeros_(self.projection.bias)
        nn.init.normal_(self.shifts, std=0.5 if self.anchored else 1.0)
        if self.anchored:
            with torch.no_grad():
                self.shifts[:, 0] = 0

    @property
    def shift(self) -> Tensor:
        """Shift of the components, [Hk, M, D]."""
        shifts = local_tensor(self.shifts)
        return -shifts if self.anchored else shifts

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x).view(*x.shape[:2], self.heads, self.head_dim).transpose(1, 2)

    @torch.no_grad()
    def load_softmax_keys(self, weight: Tensor, bias: Tensor | None, noise: float) -> None:
        """Copy the weights; the shifts keep their initial values, which cancel at τ = 0."""
        self.projection.weight.copy_(weight)
        if self.projection.bias is not None and bias is not None:
            self.projection.bias.copy_(bias)


KEYS = {"independent": IndependentKeys, "shifted": ShiftedKeys}


def mix_keys(keys: Tensor, shift: Tensor | None, log_prior: Tensor | None) -> Tensor:
    """Return Σ_r π_r k_jr as one component, [B, Hk, 1, S, D]."""
    components = keys.shape[2] if shift is None else shift.shape[1]
    prior = keys.new_full((1, components, 1), 1 / components) if log_prior is None else log_prior.exp()
    prior = prior.unsqueeze(-1)  # [(B,) Hk or 1, M, S or 1, 1]
    if shift is None:
        return (prior * keys).sum(2, keepdim=True).to(keys.dtype)
    mixed = keys.unsqueeze(2) * prior.sum(-3, keepdim=True) + (prior * shift.unsqueeze(-2)).sum(-3, keepdim=True)
    return mixed.to(keys.dtype)
