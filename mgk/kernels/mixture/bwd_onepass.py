"""Backward pass that forms the score gradients once: `mixture_backward_dkdv` also adds up dq, with atomics.

It takes three launches:
1. `mixture_backward_dq` with PATH PREPARE writes the row vectors and clears the sums.
2. `mixture_backward_dkdv` with PATH BOTH adds the dq and d a_r of its tiles to the sums.
3. `mixture_backward_dq` with PATH FINISH reads the sums and writes dq and its part of d shift and d scale.

Sums of a row: `query_sums` [B * H * padded L, BD] holds dq without scale and shifts; the row vectors from 2 M on hold
d a_r for r >= 1. Atomics add in the order in which programs run: results are not bitwise reproducible. delta has the
rounding error of the output, because the row sums of dS that correct it are known only after the walk.
"""

# ruff: noqa: RUF005  (Triton has no starred tuples)
import triton
import triton.language as tl

from mgk.kernels.mixture.component_gemm import accumulate_gemm, component_sums


@triton.jit
def clear_query_sums(query_sums, p_rows, o_vector, m_vector, stride_rows, M: tl.constexpr, BD: tl.constexpr):
    """Set the sums of rows to 0. p_rows: their first row vectors."""
    for r in tl.static_range(1, M):
        tl.store(p_rows + (2 * M + r - 1) * stride_rows, tl.zeros_like(o_vector).to(tl.float32), mask=m_vector)
    p_sums = query_sums + o_vector[:, None] * BD + tl.arange(0, BD)[None, :]
    tl.store(p_sums, tl.zeros([o_vector.shape[0], BD], tl.float32), mask=m_vector[:, None])


@triton.jit
def load_query_sums(query_sums, p_rows, o_vector, m_i, stride_rows, M: tl.constexpr, BD: tl.constexpr):
    """Return the sums of rows: dq without scale and shifts, and d a_r for r >= 1."""
    das = ()
    for r in tl.static_range(1, M):
        das = das + (tl.load(p_rows + (2 * M + r - 1) * stride_rows, mask=m_i, other=0.0),)
    p_sums = query_sums + o_vector[:, None] * BD + tl.arange(0, BD)[None, :]
    return tl.load(p_sums, mask=m_i[:, None], other=0.0), das


@triton.jit
def row_gradients(
    parts, b_k, b_key_operand, rho, coef, M: tl.constexpr, BM: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """Return the d a_r, r >= 1, of a transposed tile: column sums of `score_gradients`' terms."""
    das = ()
    if not EXACT and b_k.dtype == tl.bfloat16 and M > 1 and 3 * M <= 16:
        # Sums over the keys on tensor cores: a tile's keys are distributed over all warps.
        sums = accumulate_gemm(tl.trans(parts[0]), b_key_operand, tl.zeros([BM, 16], tl.float32))
        sums = component_sums(sums, 1, M, False)
        for r in tl.static_range(1, M):
            das = das + (sums[r - 1],)
    else:
        for r in tl.static_range(1, M):
            das = das + (tl.sum(parts[r] if EXACT else parts[r] * coef[r], 0),)
    if not EXACT:
        scaled = ()
        for r in tl.static_range(1, M):
            scaled = scaled + (das[r - 1] * tl.sum(rho[r - 1], 0),)
        das = scaled
    return das


@triton.jit
def add_query_gradients(
    b_ds, parts, b_k, b_key_operand, rho, coef, query_sums, rows_src, o_row, m, stride_rows, M: tl.constexpr,
    BM: tl.constexpr, EXACT: tl.constexpr, TMA: tl.constexpr, TMA_ROWS: tl.constexpr,
):  # fmt: skip
    """Add the gradients of queries m to m + BM, from a transposed tile, to the sums of their rows.

    Rows beyond a head's last one get zeros: the sums of a head are padded to a multiple of BM.
    """
    das = row_gradients(parts, b_k, b_key_operand, rho, coef, M, BM, EXACT)
    b_dq = tl.dot(tl.trans(b_ds.to(b_k.dtype)), b_k)
    first = (o_row + m).to(tl.int32)
    o_x = o_row + m + tl.arange(0, BM)
    if TMA:
        query_sums.atomic_add([first, 0], b_dq)
    else:
        BD: tl.constexpr = b_k.shape[1]
        tl.atomic_add(query_sums + o_x[:, None] * BD + tl.arange(0, BD)[None, :], b_dq, sem="relaxed")
    for r in tl.static_range(1, M):
        if TMA_ROWS:
            rows_src.atomic_add([2 * M + r - 1, first], das[r - 1][None, :])
        else:
            p_da = rows_src + (2 * M + r - 1) * stride_rows.to(tl.int64) + o_x
            tl.atomic_add(p_da, das[r - 1], sem="relaxed")
