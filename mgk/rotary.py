"""Rotary positions: queries and keys turned by an angle that grows with their position; products see distances."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mgk._core.validation import fail, number, positive_integer


class Rotary(nn.Module):
    """Turns pairs of features of [B, H, (M,) S, D] by position × base^(-n/P), P = D // 2 pairs. An odd last feature is
    left alone."""

    def __init__(self, head_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.pairs = positive_integer("head_dim", head_dim) // 2
        self.base = number("base", base, 0, above=True)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """positions: [S] or [B, S]."""
        if x.shape[-1] // 2 != self.pairs:
            fail("x", f"has width {x.shape[-1]}, but the positions turn {self.pairs} pairs of features")
        dtype = torch.promote_types(x.dtype, torch.float32)
        steps = torch.arange(self.pairs, device=x.device, dtype=dtype)
        angles = positions.to(dtype).unsqueeze(-1) * self.base ** (-steps / max(self.pairs, 1))  # [(B,) S, pairs]
        if positions.dim() == 2:
            angles = angles.reshape(angles.shape[0], *(1,) * (x.dim() - 3), *angles.shape[1:])
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second, rest = x.split([self.pairs, self.pairs, x.shape[-1] - 2 * self.pairs], dim=-1)
        return torch.cat([first * cosine - second * sine, first * sine + second * cosine, rest], dim=-1)
