"""Compare the accurate exp2 with fp64."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from mgk.kernels.mixture.exp2 import accurate_exp2, accurate_weight
from tests.kernels.mixture.test_kernels import DEVICE, GPU

pytestmark = [pytest.mark.gpu] if GPU else []
ULP = 2.0**-23


@triton.jit
def apply(x_ptr, row_ptr, key_ptr, plain_ptr, weight_ptr, lam, offset, N: tl.constexpr):
    o = tl.arange(0, N)
    b_x, row, key = tl.load(x_ptr + o), tl.load(row_ptr + o), tl.load(key_ptr + o)
    tl.store(plain_ptr + o, accurate_exp2(row))
    tl.store(weight_ptr + o, accurate_weight(b_x, lam, row, key, offset))


def run(x, row, key, lam, offset):
    x, row, key = (t.float().to(DEVICE) for t in (x, row, key))
    plain, weights = torch.empty_like(x), torch.empty_like(x)
    apply[(1,)](x, row, key, plain, weights, lam, offset, N=len(x))
    return plain.cpu().double(), weights.cpu().double()


def test_exp2_is_accurate_to_one_ulp():
    row = torch.linspace(-126, 127, 1 << 14)
    plain, _ = run(row, row, row, 1.0, 0.0)
    want = row.double().exp2()
    assert ((plain - want).abs() / want).max() <= ULP
    assert torch.equal(plain[row == row.round()], want[row == row.round()])


def test_weight_of_cancelling_terms_is_accurate():
    """Terms of about 40 nearly cancel: rounded sums would have an error of about 1e-6.

    Without a GPU, one rounding remains: that of s log2(e), since there is no FMA.
    """
    g = torch.Generator().manual_seed(0)
    x, row = (20 * (torch.rand(1 << 12, generator=g) - 0.5) for _ in range(2))
    key = (-(x.double() + row) + 3 * torch.rand(1 << 12, generator=g)).float()
    lam, offset = 0.7, 5.0
    lam32 = torch.tensor(lam).double()
    _, weights = run(x, row, key, lam, offset)
    want = (x.double() * lam32 / torch.log(torch.tensor(2.0).double()) + row + key - offset).exp2()
    product = 0.0 if GPU else (x * lam * 1.4427).abs().max().item() * ULP / 2
    assert ((weights - want).abs() / want).max() <= 1.5 * ULP + product


def test_minus_infinity_and_subnormal_weights_are_zero():
    inf = float("inf")
    x = torch.tensor([-inf, 0.0, 0.0, -inf, -300.0, 0.0, 1e20, 1.0])
    row = torch.tensor([0.0, -inf, 0.0, -inf, 0.0, -140.0, -inf, float("nan")])
    key = torch.tensor([0.0, 0.0, -inf, -inf, 0.0, 0.0, 0.0, 0.0])
    plain, weights = run(x, row, key, 1.0, 0.0)
    assert not weights[:7].any()
    assert weights[7].isnan()
    assert torch.equal(plain[:7], torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0]).double())
