"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mgk._core.validation import fail, number, positive_integer

# Devices and elements of a tensor from which compiled code reads the rotations from a table.
TABLE_DEVICES = frozenset({"cuda"})
MIN_ELEMENTS_FOR_TABLE = 1 << 22
# Since torch 2.7.
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)


def rotations(positions: Tensor, pairs: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of all angles, each [..., pairs] for positions [...]."""
    steps = torch.arange(pairs, device=positions.device, dtype=dtype)
    angles = positions.to(dtype).unsqueeze(-1) * base ** (-steps / max(pairs, 1))
    return angles.cos(), angles.sin()


# An operator that the compiler does not fuse.
rotation_table = torch.library.custom_op("mgk::rotation_table", rotations, mutates_args=())


@rotation_table.register_fake
def _(positions: Tensor, pairs: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cosine = positions.new_empty((*positions.shape, pairs), dtype=dtype)
    return cosine, torch.empty_like(cosine)


def uses_table(x: Tensor) -> bool:
    """Return whether to compute the rotations of x with `rotation_table`.

    torch.compile fuses `rotations` into the kernel that rotates x, which then computes two powers, cosines and sines
    for each element of x: 18 of the 64 ms of a training step of the study's decoder on an H200.
    """
    if not torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export():
        return False
    # In Dynamo of torch 2.11 is_exporting() is True for all compiled code, so Dynamo is not asked. A strict export,
    # which uses Dynamo, has the operator and needs `import mgk` where it is loaded.
    if not torch.compiler.is_dynamo_compiling() and _is_exporting():
        return False
    return x.device.type in TABLE_DEVICES and x.numel() >= MIN_ELEMENTS_FOR_TABLE


class Rotary(nn.Module):
    """Rotary position embedding: rotates pairs of features by angles proportional to the position.

    Pair n of P = D // 2 is rotated by position × base^(-n/P), so that dot products of queries and keys depend on
    distances. An odd last feature is not rotated.

    Args:
        head_dim: Dimension D of a head.
        base: Base of the angles.

    Examples:
        >>> rotary = mgk.Rotary(head_dim=32)
        >>> rotary(torch.randn(2, 4, 10, 32), torch.arange(10)).shape
        torch.Size([2, 4, 10, 32])
        >>> attention = mgk.Attention(64, 2, rotary=10000.0)  # the same embedding as part of a layer
    """

    def __init__(self, head_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.pairs = positive_integer("head_dim", head_dim) // 2
        self.base = number("base", base, 0, above=True)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate queries or keys.

        Args:
            x: [B, H, (M,) S, D].
            positions: [S] or [B, S].

        Returns:
            The rotated tensor, of the shape of x.

        Examples:
            >>> rotary, x = mgk.Rotary(head_dim=2), torch.tensor([[[[1.0, 0.0], [1.0, 0.0]]]])  # [B, H, S, D]
            >>> rotary(x, torch.tensor([0, 1]))[0, 0, 1]  # angle 1 at position 1
            tensor([0.5403, 0.8415])
        """
        if x.shape[-1] // 2 != self.pairs:
            fail("x", f"has head dimension {x.shape[-1]}, but Rotary was made for {self.pairs} pairs of features")
        dtype = torch.promote_types(x.dtype, torch.float32)
        compute = rotation_table if uses_table(x) else rotations
        cosine, sine = compute(positions, self.pairs, self.base, dtype)  # [(B,) S, pairs]
        if positions.dim() == 2:
            shape = (cosine.shape[0], *(1,) * (x.dim() - 3), *cosine.shape[1:])
            cosine, sine = cosine.reshape(shape), sine.reshape(shape)
        cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
        first, second, unpaired = x.split([self.pairs, self.pairs, x.shape[-1] - 2 * self.pairs], dim=-1)
        return torch.cat([first * cosine - second * sine, first * sine + second * cosine, unpaired], dim=-1)
