"""Sums over the components of shifted keys as tensor-core GEMMs with K = 16.

The mixture sum sum_r x_ir y_jr of a tile is a GEMM of two operands with 16 columns. The gradients' sums over keys
(rows) with y_jr (x_ir) are GEMMs with the same operands.

An operand holds the high and low bf16 part of each number, so that high * high + high * low + low * high has 16 bits:
columns r, M + r and 2 M + r are high, high and low of x_ir (rows, LEFT) and high, low and high of y_jr (keys). M is at
most 5.
"""

import triton
import triton.language as tl

from mgk.kernels.mixture.tile import INTERPRETED, KEY_TILE, load_vectors


@triton.jit
def gemm_operand(xs, o_c, M: tl.constexpr, LEFT: tl.constexpr):
    """Return the operand [rows, 16] of columns x_r [rows, 1]."""
    out = tl.zeros([xs[0].shape[0], 16], tl.float32)
    for r in tl.static_range(M):
        high = xs[r].to(tl.bfloat16).to(tl.float32)
        low = xs[r] - high
        middle = high if LEFT else low
        last = low if LEFT else high
        out += tl.where((o_c == r)[None, :], high, 0.0)
        out += tl.where((o_c == M + r)[None, :], middle, 0.0) + tl.where((o_c == 2 * M + r)[None, :], last, 0.0)
    return out.to(tl.bfloat16)


@triton.jit
def load_operand(src, first, n, N: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr):
    """Load rows `first` to `first` + N of an operand.

    MASKED: rows from n on are 0. With TMA they are finite, but not 0.
    """
    if TMA:
        return src.load([first.to(tl.int32), 0])
    else:
        o_x = tl.arange(0, N)
        p_x = src + (first + o_x).to(tl.int64)[:, None] * 16 + tl.arange(0, 16)[None, :]
        if MASKED:
            return tl.load(p_x, mask=(o_x < n)[:, None], other=0.0)
        else:
            return tl.load(p_x)


@triton.jit
def component_gemm(b_x, b_y):
    """Return sum_r x_ir y_jr of two operands, one of rows and one of keys, in either order."""
    if INTERPRETED:
        # The interpreter has no bf16 GEMM.
        return tl.dot(b_x.to(tl.float32), tl.trans(b_y.to(tl.float32)))
    else:
        return tl.dot(b_x, tl.trans(b_y))


@triton.jit
def accumulate_gemm(b_g, b_y, acc):
    """Return acc + g y for a tile g and the operand y of the axis that is summed; g is rounded to bf16."""
    if INTERPRETED:
        return tl.dot(b_g.to(tl.bfloat16).to(tl.float32), b_y.to(tl.float32), acc)
    else:
        return tl.dot(b_g.to(tl.bfloat16), b_y, acc)


@triton.jit
def component_sums(acc, FIRST: tl.constexpr, M: tl.constexpr, LEFT: tl.constexpr):
    """Return the sum of each component from FIRST on from an accumulator of `accumulate_gemm`.

    It is the sum of the component's high and low columns. LEFT: the operand was that of the rows.
    """
    o_c = tl.arange(0, 16)
    out = ()
    for r in tl.static_range(FIRST, M):
        m_c = (o_c == r) | (o_c == (2 * M if LEFT else M) + r)
        out = out + (tl.sum(tl.where(m_c[None, :], acc, 0.0), 1),)  # noqa: RUF005  (Triton has no starred tuples)
    return out


@triton.jit(do_not_specialize=["n_key_tiles"])
def write_key_operand(c_ptr, operand_ptr, n_key_tiles, M: tl.constexpr):
    """Write the keys' operand [HK * n_key_tiles * KEY_TILE, 16] of C [HK, M, n_key_tiles * KEY_TILE]."""
    i_t, i_h = tl.program_id(0), tl.program_id(1)
    o_x = i_t * KEY_TILE + tl.arange(0, KEY_TILE)
    o_c = tl.arange(0, 16)
    factors = load_vectors(
        c_ptr + (i_h * M).to(tl.int64) * n_key_tiles * KEY_TILE, o_x, n_key_tiles * KEY_TILE, n_key_tiles * KEY_TILE,
        M, 1, False,
    )  # fmt: skip
    p_x = operand_ptr + (i_h.to(tl.int64) * n_key_tiles * KEY_TILE + o_x)[:, None] * 16 + o_c[None, :]
    tl.store(p_x, gemm_operand(factors, o_c, M, False))
