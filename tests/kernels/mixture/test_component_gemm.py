"""Compare the component GEMMs and their operands with fp64."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from mgk.kernels.mixture.component_gemm import (
    accumulate_gemm,
    component_gemm,
    component_sums,
    gemm_operand,
    write_key_operand,
)
from mgk.kernels.mixture.tile import KEY_TILE, load_vectors
from tests.kernels.mixture.test_kernels import DEVICE, GPU

pytestmark = [pytest.mark.gpu] if GPU else []


@triton.jit
def compute_sums(
    x_ptr, y_ptr, g_ptr, mixture_ptr, over_keys_ptr, over_rows_ptr, N: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    o, o_c = tl.arange(0, N), tl.arange(0, 16)
    left = gemm_operand(load_vectors(x_ptr, o, N, N, M, 1, False), o_c, M, True)
    right = gemm_operand(load_vectors(y_ptr, o, N, N, M, 1, False), o_c, M, False)
    square = o[:, None] * N + o[None, :]
    b_g = tl.load(g_ptr + square)
    tl.store(mixture_ptr + square, component_gemm(left, right))
    zeros = tl.zeros([N, 16], tl.float32)
    over_keys = component_sums(accumulate_gemm(b_g, right, zeros), 0, M, False)
    over_rows = component_sums(accumulate_gemm(tl.trans(b_g), left, zeros), 0, M, True)
    for r in tl.static_range(M):
        tl.store(over_keys_ptr + r * N + o, over_keys[r])
        tl.store(over_rows_ptr + r * N + o, over_rows[r])


@pytest.mark.parametrize("M", [3, 4, 5])
def test_sums_over_components_have_sixteen_bits(M):
    """Errors come from the operands alone, since the gradients are small integers.

    They are 2^-16 of each factor (2^-14 under the interpreter, which truncates); bf16 without a low part has 2^-9.
    """
    g = torch.Generator().manual_seed(0)
    N = 32
    x, y = (2 * torch.randn(M, N, generator=g).to(DEVICE) for _ in range(2))
    x, y = x.exp2(), y.exp2()
    b_g = torch.randint(1, 100, (N, N), generator=g).float().to(DEVICE)
    mixture, over_keys, over_rows = torch.empty_like(b_g), torch.empty_like(x), torch.empty_like(x)
    compute_sums[(1,)](x, y, b_g, mixture, over_keys, over_rows, N=N, M=M)
    x, y, b_g = x.double(), y.double(), b_g.double()
    for got, want in ((mixture, x.T @ y), (over_keys, y @ b_g.T), (over_rows, x @ b_g)):
        assert ((got - want).abs() / want).max() <= 2**-13


def test_key_operand_holds_high_and_low_parts():
    g = torch.Generator().manual_seed(0)
    heads, M, key_tiles = 2, 3, 2
    factors = torch.randn(heads, M, key_tiles * KEY_TILE.value, generator=g).exp2().to(DEVICE)
    operand = torch.empty(heads * key_tiles * KEY_TILE.value, 16, dtype=torch.bfloat16, device=DEVICE)
    write_key_operand[(key_tiles, heads)](factors, operand, key_tiles, M=M)
    columns = operand.double().view(heads, -1, 16).transpose(1, 2)
    high, low, repeated_high, padding = columns.split((M, M, M, 16 - 3 * M), 1)
    assert torch.equal(high, repeated_high)
    assert not padding.any()
    assert ((high + low - factors.double()).abs() / factors.double()).max() <= 2**-14
