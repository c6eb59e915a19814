"""Rotary positions: queries and keys turned by an angle that grows with their position; products see distances."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Turns pairs of features of [B, H, (M,) S, D] by position × base^(-2n/D). An odd last feature is left alone."""

    def __init__(self, head_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.pairs = head_dim // 2
        self.base = base

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """positions: [S] or [B, S]."""
        steps = torch.arange(self.pairs, device=x.device, dtype=torch.float32)
        angles = positions.to(torch.float32).unsqueeze(-1) * self.base ** (
            -steps / max(self.pairs, 1)
        )  # [(B,) S, pairs]
        if positions.dim() == 2:
            angles = angles.reshape(angles.shape[0], *(1,) * (x.dim() - 3), *angles.shape[1:])
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second, rest = x.split([self.pairs, self.pairs, x.shape[-1] - 2 * self.pairs], dim=-1)
        return torch.cat([first * cosine - second * sine, first * sine + second * cosine, rest], dim=-1)
