"""Masks of the mixture kernels."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from mgk.kernels.mixture.masks import dropout_mask
from tests.kernels.mixture.test_kernels import DEVICE, GPU

pytestmark = [pytest.mark.gpu] if GPU else []
ROWS, COLUMNS = 16, 128


@triton.jit
def write_mask(out, seed_ptr, i_bh, first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    keep = dropout_mask(tl.load(seed_ptr), i_bh, first_row + rows[:, None], columns[None, :], 0.5)
    tl.store(out + rows[:, None] * COLUMNS + columns[None, :], keep.to(tl.int32))


@pytest.mark.parametrize("place", [(0, 32_768), (0, 65_536), (0, 1 << 30), (1, 0), (1 << 16, 0)], ids=str)
def test_dropout_of_distant_rows_and_heads_is_independent(place):
    """Row i of S keys began with draw i * S in 32 bits: with 65,536 keys, row 65,536 had the mask of row 0."""
    seed = torch.tensor([2**31 - 1], device=DEVICE)

    def mask(i_bh, first_row):
        out = torch.empty(ROWS, COLUMNS, dtype=torch.int32, device=DEVICE)
        write_mask[(1,)](out, seed, i_bh, first_row, ROWS, COLUMNS)
        return out.bool()

    first, other = mask(0, 0), mask(*place)
    assert torch.equal(first, mask(0, 0))
    # 2,048 draws: the standard deviation of a share of one half is 0.011.
    for share in (first.float().mean(), other.float().mean(), (first == other).float().mean()):
        assert 0.44 < share.item() < 0.56
