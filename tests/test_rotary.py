"""Dtypes of the rotary embedding."""

import pytest
import torch

from mgk import Rotary


def rotated(x, positions, base=10000.0):
    """Return the rotation of x in fp64, computed with complex numbers."""
    pairs = x.shape[-1] // 2
    angles = positions.double()[:, None] * base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    numbers = torch.complex(x[..., :pairs].double(), x[..., pairs:].double())
    numbers = numbers * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([numbers.real, numbers.imag], -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_angles_of_distant_positions_are_accurate_in_every_dtype(dtype):
    """In bf16 position 3001 would be rounded to 3008, and in fp32 the angles of fp64 inputs have an error of 1e-4."""
    x, positions = torch.randn(1, 2, 3, 8).to(dtype), torch.tensor([1, 1000, 3001])
    out = Rotary(8)(x, positions)
    assert out.dtype == dtype
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    error = (out.double() - rotated(x, positions)).abs().max()
    assert error <= 8 * torch.finfo(dtype).eps + 3001 * eps * 4
