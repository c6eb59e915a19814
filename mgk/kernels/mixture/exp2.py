"""Powers of two for fp32 inputs. The hardware's are off by two units, which nothing in bf16 or fp16 shows, and a sum of
exponents loses digits: those of two large terms that nearly cancel are digits of the weight.

An exponent is therefore kept as a whole number and a rest, which are added up apart.
"""

import triton
import triton.language as tl

from mgk.kernels.mixture.tile import INTERPRETED

LOG2E_HIGH = tl.constexpr(1.44269502162933349609375)  # fp32's own
LOG2E_LOW = tl.constexpr(1.9259630335e-8)
# Adding it to a number below 2^22 leaves no digits after the point.
ROUNDING_OFFSET = tl.constexpr(12582912.0)
# For what should be -inf: whole, with a rest of 0.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def fma(x, y, z):
    """x y + z with one rounding, on a GPU."""
    if INTERPRETED:
        return x * y + z
    else:
        return tl.fma(x, y, z)


@triton.jit
def round_to_int(x):
    return (x + ROUNDING_OFFSET) - ROUNDING_OFFSET


@triton.jit
def replace_inf(x):
    return tl.where(x == -float("inf"), LOWEST, x)


@triton.jit
def exp2_split(n, f):
    """2^(n + f) for whole n and any f: to one unit, 0 where it would be subnormal."""
    b_whole = round_to_int(f)
    f = f - b_whole
    n += b_whole
    n = tl.where(n > -127.0, tl.minimum(n, 127.0), -127.0)  # NaN too: it comes through f
    b_y = f * 0.00015351262977294773 + 0.0013401483643329106
    b_y = b_y * f + 0.00961846298530275
    b_y = b_y * f + 0.05550326119155088
    b_y = b_y * f + 0.2402264756151652
    b_y = b_y * f + 0.6931472055851813
    b_y = b_y * f + 1.0
    return b_y * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def accurate_exp2(x):
    x = replace_inf(x)
    b_whole = round_to_int(x)
    return exp2_split(b_whole, x - b_whole)


@triton.jit
def accurate_weight(b_s, lam, row, key, less):
    """2^(lam log2(e) s + row + key - less), `less` whole."""
    high = lam * LOG2E_HIGH
    low = fma(lam, LOG2E_HIGH, -high) + lam * LOG2E_LOW
    b_s, row, key = replace_inf(b_s), replace_inf(row), replace_inf(key)
    whole_row, whole_key = round_to_int(row), round_to_int(key)
    b_whole = round_to_int(b_s * high)
    b_rest = fma(b_s, low, fma(b_s, high, -b_whole))
    b_rest = (b_rest + (row - whole_row)) + (key - whole_key)
    return exp2_split(((b_whole + whole_row) + whole_key) - less, b_rest)
