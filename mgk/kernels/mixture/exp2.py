"""Accurate exp2 for fp32 inputs.

The hardware's ex2 has an error of 2 ulp, and a sum of large exponents that nearly cancel loses digits of the weight;
neither matters in bf16 and fp16. Here an exponent is the sum of an integer and a fraction, accumulated separately.
"""

import torch
import triton
import triton.language as tl

from mgk._core import masks
from mgk.kernels.mixture.tile import INTERPRETED

LOG2E_HIGH = tl.constexpr(1.44269502162933349609375)  # log2(e) rounded to fp32
LOG2E_LOW = tl.constexpr(1.9259630335e-8)
# Adding this to a number below 2^22 rounds it to an integer.
ROUNDING_OFFSET = tl.constexpr(12582912.0)
# Replaces -inf in a score: an integer with fraction 0 whose product with a scale does not overflow.
LOWEST = tl.constexpr(masks.MASK_VALUE)
# Replaces -inf in the term of a row or key. The sum of two is finite and below any finite score of masked padding.
LOWEST_TERM = tl.constexpr(torch.finfo(torch.float32).min / 2)
# Largest exponents of results. Weights are at most 1 but for rounding, which exceeds 1 if a score exceeds 2^24. With
# this limit, sums of weighted values do not overflow.
EXP2_LIMIT, WEIGHT_LIMIT = tl.constexpr(127.0), tl.constexpr(8.0)


@triton.jit
def fma(x, y, z):
    """Return x y + z, on a GPU with a single rounding."""
    if INTERPRETED:
        return x * y + z
    else:
        return tl.fma(x, y, z)


@triton.jit
def round_to_int(x):
    return (x + ROUNDING_OFFSET) - ROUNDING_OFFSET


@triton.jit
def replace_inf(x, NUMBER: tl.constexpr):
    return tl.where(x == -float("inf"), NUMBER, x)


@triton.jit
def exp2_split(n, f, LIMIT: tl.constexpr):
    """Return 2^(n + f) for an integer n and any f: accurate to 1 ulp, 0 instead of a subnormal, about 2^LIMIT above."""
    b_int = round_to_int(f)
    f = f - b_int
    n += b_int
    n = tl.where(n > -127.0, tl.minimum(n, LIMIT), -127.0)  # also if n is NaN: f is NaN too
    b_y = f * 0.00015351262977294773 + 0.0013401483643329106
    b_y = b_y * f + 0.00961846298530275
    b_y = b_y * f + 0.05550326119155088
    b_y = b_y * f + 0.2402264756151652
    b_y = b_y * f + 0.6931472055851813
    b_y = b_y * f + 1.0
    return b_y * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def accurate_exp2(x):
    x = replace_inf(x, LOWEST)
    b_int = round_to_int(x)
    return exp2_split(b_int, x - b_int, EXP2_LIMIT)


@triton.jit
def accurate_weight(b_s, lam, row, key, offset):
    """Return 2^(lam log2(e) s + row + key - offset), where `offset` is an integer."""
    high = lam * LOG2E_HIGH
    low = fma(lam, LOG2E_HIGH, -high) + lam * LOG2E_LOW
    b_s, row, key = replace_inf(b_s, LOWEST), replace_inf(row, LOWEST_TERM), replace_inf(key, LOWEST_TERM)
    int_row, int_key = round_to_int(row), round_to_int(key)
    b_int = round_to_int(b_s * high)
    b_fraction = fma(b_s, low, fma(b_s, high, -b_int))
    b_fraction = (b_fraction + (row - int_row)) + (key - int_key)
    return exp2_split(((b_int + int_row) + int_key) - offset, b_fraction, WEIGHT_LIMIT)
