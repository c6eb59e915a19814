"""The operands that blend components by products, against fp64."""

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
def sums_and_blend(
    x_ptr, y_ptr, g_ptr, blend_ptr, over_keys_ptr, over_rows_ptr, N: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    o, o_c = tl.arange(0, N), tl.arange(0, 16)
    left = gemm_operand(load_vectors(x_ptr, o, N, N, M, 1, False), o_c, M, True)
    right = gemm_operand(load_vectors(y_ptr, o, N, N, M, 1, False), o_c, M, False)
    square = o[:, None] * N + o[None, :]
    b_g = tl.load(g_ptr + square)
    tl.store(blend_ptr + square, component_gemm(left, right))
    nothing = tl.zeros([N, 16], tl.float32)
    over_keys = component_sums(accumulate_gemm(b_g, right, nothing), 0, M, False)
    over_rows = component_sums(accumulate_gemm(tl.trans(b_g), left, nothing), 0, M, True)
    for r in tl.static_range(M):
        tl.store(over_keys_ptr + r * N + o, over_keys[r])
        tl.store(over_rows_ptr + r * N + o, over_rows[r])


@pytest.mark.parametrize("M", [3, 4, 5])
def test_sixteen_bits(M):
    """The gradients are small whole numbers here: what is lost is the operands' alone, 2^-16 of each factor (2^-14
    under the interpreter, which cuts off), where one part in bf16 would lose 2^-9."""
    g = torch.Generator().manual_seed(0)
    N = 32
    x, y = (2 * torch.randn(M, N, generator=g).to(DEVICE) for _ in range(2))
    x, y = x.exp2(), y.exp2()
    b_g = torch.randint(1, 100, (N, N), generator=g).float().to(DEVICE)
    blend, over_keys, over_rows = torch.empty_like(b_g), torch.empty_like(x), torch.empty_like(x)
    sums_and_blend[(1,)](x, y, b_g, blend, over_keys, over_rows, N=N, M=M)
    x, y, b_g = x.double(), y.double(), b_g.double()
    for got, want in ((blend, x.T @ y), (over_keys, y @ b_g.T), (over_rows, x @ b_g)):
        assert ((got - want).abs() / want).max() <= 2**-13


def test_key_operand_of_each_head():
    g = torch.Generator().manual_seed(0)
    heads, M, slots = 2, 3, 2
    factors = torch.randn(heads, M, slots * KEY_TILE.value, generator=g).exp2().to(DEVICE)
    operand = torch.empty(heads * slots * KEY_TILE.value, 16, dtype=torch.bfloat16, device=DEVICE)
    write_key_operand[(slots, heads)](factors, operand, slots, M=M)
    columns = operand.double().view(heads, -1, 16).transpose(1, 2)
    high, low, again, rest = columns.split((M, M, M, 16 - 3 * M), 1)
    assert torch.equal(high, again)
    assert not rest.any()
    assert ((high + low - factors.double()).abs() / factors.double()).max() <= 2**-14
