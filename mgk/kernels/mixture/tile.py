"""Tile-level functions shared by the mixture kernels.

Exponents are in base 2. Row i is a query, column j a key, r a component. A score is s_ij = q_i.k_j (or q_i.k_jr) before
scaling. Row terms and key terms are already expanded: to [rows, 1] and [1, keys], or to [1, rows] and [keys, 1] where
the tile is transposed (`query_walk`). README.md of `mgk.kernels` has the formulas, the workspaces and a glossary.
"""

# ruff: noqa: RUF005  (Triton has no starred tuples)
import os

import torch
import triton
import triton.language as tl

from mgk._core import masks
from mgk.kernels.target import cuda_capability_geq, is_hip

# Keys per prepared tile. Block sizes along the keys divide it.
KEY_TILE = tl.constexpr(128)
# Entries of a key tile's statistics: max c, min finite c, max |k| (negative if a key is masked in every component), and
# the reference of the head.
STAT_HIGH, STAT_LOW, STAT_NORM, STAT_REFERENCE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
NUM_STATS = tl.constexpr(4)
# The row vectors of a head are padded to a multiple of this length. TMA then reads no block across their end and none
# from an address that is not a multiple of 16 bytes, which would be a device error. Blocks read by TMA divide this and
# have at least 32 rows: TMA writes to multiples of 128 bytes in shared memory.
ROW_ALIGNMENT = tl.constexpr(64)
LOG2E = tl.constexpr(1.4426950408889634)
MASK_VALUE = tl.constexpr(masks.MASK_VALUE)  # finite stand-in for -inf: biases below it mask the pair
FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
# Range of exponents (base 2) up to which the fast form is used instead of the logsumexp form.
SAFE_RANGE = tl.constexpr(80.0)
# The same if the mixture sum is also computed for masked pairs, whose exponentials must not overflow.
FACTOR_RANGE = tl.constexpr(60.0)
# Values of the constexpr PATH. A kernel runs in its general form for every tile, in its fast form (tiles that are not
# safe are flagged), as the fallback for flagged tiles, or with both forms in one launch. The dq kernel prepares and
# finishes the backward pass of `bwd_onepass`. RUNNING (forward, fp16) is FAST with a running maximum.
GENERAL, FAST, FALLBACK, BOTH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
PREPARE, FINISH, RUNNING = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
# Range of a_ir up to which the mixture sum is factored with a running maximum. The largest weight of a row is then at
# least 2^-RANGE; small weights must not underflow in the dtype of the values.
FACTORED_RANGE_FP16 = tl.constexpr(8.0)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def schedule(n_tiles, n_heads, SECTION):
    """Return (tile, head) of this program.

    Heads are grouped into sections of SECTION heads whose keys fit the L2 cache. Within a section the last tiles, which
    have the most causal work, come first.
    """
    i_p = tl.program_id(0)
    i_section = i_p // (SECTION * n_tiles)
    width = min(SECTION, n_heads - i_section * SECTION)
    i_within = i_p - i_section * SECTION * n_tiles
    return n_tiles - 1 - i_within // width, i_section * SECTION + i_within % width


@triton.jit
def value_head(i_h, i_k, VALUE_GROUP: tl.constexpr):
    """Return the value head of query head i_h with key head i_k; VALUE_GROUP 0: values have the key heads."""
    if VALUE_GROUP:
        return i_h // VALUE_GROUP
    else:
        return i_k


@triton.jit
def padded_rows(n):
    """Return the padded length of a head's row vectors."""
    return tl.cdiv(n, ROW_ALIGNMENT) * ROW_ALIGNMENT


@triton.jit
def sequence_bounds(cu_ptr, i_b, n, PACKED: tl.constexpr):
    """Return batch entry, first position, length and first key tile of sequence i_b."""
    if PACKED:
        start = tl.load(cu_ptr + i_b)
        return i_b * 0, start, tl.load(cu_ptr + i_b + 1) - start, start // KEY_TILE + i_b
    else:
        return i_b, i_b * 0, n, i_b * tl.cdiv(n, KEY_TILE)


@triton.jit
def load_scales(scale_ptr, scale, i_h, M: tl.constexpr, SCALE: tl.constexpr):
    """Return lambda_r of each component (base e).

    SCALE: 0 one number for all heads, 1 one per head, M one per head and component.
    """
    out = ()
    for r in tl.static_range(M):
        if SCALE == 0:
            out = out + (scale,)
        elif SCALE == 1:
            out = out + (tl.load(scale_ptr + i_h),)
        else:
            out = out + (tl.load(scale_ptr + i_h * M + r),)
    return out


@triton.jit
def load_rows(ptr, o_row, stride, n_rows, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """Load [rows, BD], zero beyond n_rows and D."""
    o_d = tl.arange(0, BD)
    p_row = ptr + o_row[:, None].to(tl.int64) * stride + o_d[None, :]
    if MASKED and D < BD:
        return tl.load(p_row, mask=(o_row < n_rows)[:, None] & (o_d < D)[None, :], other=0.0)
    elif MASKED:
        return tl.load(p_row, mask=(o_row < n_rows)[:, None], other=0.0)
    elif D < BD:
        return tl.load(p_row, mask=(o_d < D)[None, :], other=0.0)
    else:
        return tl.load(p_row)


@triton.jit
def head_pointer(src, i_b, i_h, start, stride_b, stride_h, stride_row, TMA: tl.constexpr):
    """Return the pointer to a head's sequence; a TMA descriptor is returned unchanged."""
    if TMA:
        return src
    else:
        return src + i_b.to(tl.int64) * stride_b + i_h.to(tl.int64) * stride_h + start.to(tl.int64) * stride_row


@triton.jit
def load_tile(
    src, i_b, i_h, r: tl.constexpr, start, n, stride_m, stride_row, n_rows, N: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, COMPONENTS: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load rows n to n + N of a head, [N, BD], by pointer or with TMA.

    COMPONENTS: src has an axis of components, of which r is loaded. TMA fills with zeros beyond the tensor; rows of the
    next packed sequence are finite and get weight 0.
    """
    if TMA:
        if COMPONENTS:
            return src.load([i_b, i_h, r, start + n, 0]).reshape(N, BD)
        else:
            return src.load([i_b, i_h, start + n, 0]).reshape(N, BD)
    else:
        return load_rows(src + r * stride_m, n + tl.arange(0, N), stride_row, n_rows, D, BD, MASKED)


@triton.jit
def to_registers(b_x, BD: tl.constexpr, IN_REGISTERS: tl.constexpr):
    """Return b_x as the result of a GEMM with the identity.

    As a left operand it then stays in registers instead of being read from shared memory at every use, and its row sums
    have the layout of later accumulators.
    """
    if IN_REGISTERS:
        o_d = tl.arange(0, BD)
        return tl.dot(b_x, (o_d[:, None] == o_d[None, :]).to(b_x.dtype)).to(b_x.dtype)
    else:
        return b_x


@triton.jit
def store_rows(ptr, b_x, o_row, stride, n_rows, D: tl.constexpr, BD: tl.constexpr):
    o_d = tl.arange(0, BD)
    m_x = (o_row < n_rows)[:, None]
    if D < BD:
        m_x = m_x & (o_d < D)[None, :]
    p_x = ptr + o_row[:, None].to(tl.int64) * stride + o_d[None, :]
    tl.store(p_x, b_x.to(ptr.dtype.element_ty), mask=m_x)


@triton.jit
def load_vectors(ptr, o_x, stride, n, M: tl.constexpr, AXIS: tl.constexpr, MASKED: tl.constexpr):
    """Load M vectors, expanded along AXIS. MASKED: zero beyond n."""
    out = ()
    for r in tl.static_range(M):
        p_x = ptr + r * stride + o_x
        b_x = tl.load(p_x, mask=o_x < n, other=0.0) if MASKED else tl.load(p_x)
        out = out + (tl.expand_dims(b_x, AXIS),)
    return out


@triton.jit
def load_shift(shift_ptr, i_h, r: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    o_d = tl.arange(0, BD)
    return tl.load(shift_ptr + (i_h * M + r) * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)


@triton.jit
def mul_rn(x, y):
    """Return x y, rounded to nearest.

    The compiler would otherwise fuse a product and a later difference into an FMA. The difference of equal products
    would then be the rounding error of one of them instead of 0, and ties would be lost.
    """
    if INTERPRETED:
        return x * y
    elif is_hip():
        # Adding 0 keeps the product, and an explicit FMA is not fused with a later difference.
        return tl.fma(x, y + tl.zeros_like(x), tl.zeros_like(x))
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def row_terms(
    b_q, shift_ptr, i_h, lam, tau, M: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SHIFTED: tl.constexpr,
    UNEQUAL: tl.constexpr,
):  # fmt: skip
    """Return a_ir (base 2) for each r, and |q_i|^2.

    a_ir is lambda_r q_i.b_r for shifted keys (0 otherwise), minus tau lambda_r |q_i|^2 / 2 if scales differ (UNEQUAL).
    """
    b_x = b_q.to(tl.float32)
    squared_norm = tl.sum(b_x * b_x, 1)
    out = ()
    for r in tl.static_range(M):
        b_a = tl.zeros_like(squared_norm)
        if SHIFTED:
            b_a += tl.sum(b_x * load_shift(shift_ptr, i_h, r, M, D, BD)[None, :], 1)
        if UNEQUAL:
            b_a -= 0.5 * tau * squared_norm
        out = out + (mul_rn(b_a, lam[r] * LOG2E),)
    return out, squared_norm


@triton.jit
def as_columns(xs, b_sub, M: tl.constexpr):
    """Return x_r - b_sub as columns [rows, 1]."""
    out = ()
    for r in tl.static_range(M):
        out = out + ((xs[r] - b_sub)[:, None],)
    return out


@triton.jit
def sum_all(b_x):
    """Return the sum of a tile."""
    if INTERPRETED:
        return tl.sum(tl.sum(b_x, 1), 0)
    elif cuda_capability_geq(10, 0):
        # Triton 3.7 fails on the sum of a sum over rows of tensor memory.
        return tl.sum(b_x)
    else:
        return tl.sum(tl.sum(b_x, 1), 0)


@triton.jit
def zeros_tuple(b_x, N: tl.constexpr):
    out = ()
    for _ in tl.static_range(N):
        out = out + (tl.zeros_like(b_x),)
    return out


@triton.jit
def elementwise_max(xs, M: tl.constexpr):
    out = xs[0]
    for r in tl.static_range(1, M):
        out = tl.maximum(out, xs[r])
    return out


@triton.jit
def elementwise_min(xs, M: tl.constexpr):
    out = xs[0]
    for r in tl.static_range(1, M):
        out = tl.minimum(out, xs[r])
    return out


@triton.jit
def key_range(stats_ptr, n_tiles):
    """Reduce the statistics of a head's key tiles.

    Returns the largest c and the smallest finite c (relative to the head's reference), the largest |k|, the end of the
    last tile that has an unmasked key, and 1 if a key is masked, else 0.
    """
    # The size of a warp: every warp reduces without a barrier.
    o_t = tl.arange(0, 32)
    high = tl.full([32], -float("inf"), tl.float32)
    low = tl.full([32], float("inf"), tl.float32)
    norm = tl.zeros([32], tl.float32)
    end = tl.zeros([32], tl.int32)
    masked = tl.zeros([32], tl.int32)
    for i_t in range(0, n_tiles, 32):
        m_t = i_t + o_t < n_tiles
        p_stats = stats_ptr + (i_t + o_t) * NUM_STATS
        b_high = tl.load(p_stats + STAT_HIGH, mask=m_t, other=-float("inf"))
        end = tl.maximum(end, tl.where(b_high > -float("inf"), i_t + o_t + 1, 0))
        high = tl.maximum(high, b_high)
        low = tl.minimum(low, tl.load(p_stats + STAT_LOW, mask=m_t, other=float("inf")))
        b_longest = tl.load(p_stats + STAT_NORM, mask=m_t, other=0.0)
        norm = tl.maximum(norm, tl.abs(b_longest))
        masked = tl.maximum(masked, tl.where(b_longest < 0.0, 1, 0))
    return tl.max(high, 0), tl.min(low, 0), tl.max(norm, 0), tl.max(end, 0) * KEY_TILE, tl.max(masked, 0)


@triton.jit
def key_span(high, low):
    """Return the largest |c_jr| from the range of c; 0 if every key is masked."""
    return tl.maximum(tl.maximum(high, -low), 0.0)


@triton.jit
def key_ends(i_m, n_k, causal_offset, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the end of the keys that need no mask for query tile i_m, and the end of all keys it attends to."""
    full = n_k // BN * BN
    last = n_k
    if CAUSAL:
        full = max(min(full, (i_m * BM + causal_offset + 1) // BN * BN), 0)
        last = max(min(n_k, i_m * BM + BM + causal_offset), 0)
    return full, last


@triton.jit
def query_bounds(i_n, n_q, causal_offset, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the bounds begin, full and whole of the queries for key tile i_n.

    Tiles from begin to full cross the causal diagonal, tiles from full to whole need no mask, and the tile at whole
    crosses the end of the queries.
    """
    begin = 0
    full = 0
    whole = n_q // BM * BM
    if CAUSAL:
        begin = max(i_n * BN - causal_offset, 0) // BM * BM
        full = min(tl.cdiv(max(i_n * BN + BN - 1 - causal_offset, 0), BM) * BM, whole)
    return begin, full, whole


@triton.jit
def max_spread(spread_ptr, i_seq, i_k, n_query_tiles, n_q, GROUP, H, BQ: tl.constexpr):
    """Return the largest spread of the tiles of BQ queries of a group's heads."""
    spread = 0.0
    for t in range(0, GROUP * n_query_tiles, 128):
        o_t = t + tl.arange(0, 128)
        m_t = (o_t < GROUP * n_query_tiles) & (o_t % n_query_tiles < tl.cdiv(n_q, BQ))
        b_spread = tl.load(spread_ptr + (i_seq * H + i_k * GROUP) * n_query_tiles + o_t, mask=m_t, other=0.0)
        spread = tl.maximum(spread, tl.max(b_spread, 0))
    return spread


@triton.jit
def fallback_tiles(flags_ptr, n, TILES: tl.constexpr):
    """Return the range of the TILES tiles of this program of a FALLBACK launch, empty if none of them is flagged.

    n: Number of all tiles.
    """
    first = tl.program_id(0) * TILES
    o_t = first + tl.arange(0, TILES)
    count = tl.sum((tl.load(flags_ptr + o_t, mask=o_t < n, other=0.0) != 0.0).to(tl.int32), 0)
    return first, tl.where(count > 0, min(first + TILES, n), first)


@triton.jit
def flag_for_fallback(p_flag, safe):
    """Flag a tile that is not safe for the fast form, and return whether the fast kernel leaves it to the fallback."""
    tl.store(p_flag, tl.where(safe, 0.0, 1.0))
    return not safe


@triton.jit
def component_scores(
    b_q, k_src, i_b, i_k, start, n, stride_m, stride_s, S,
    BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, MASKED: tl.constexpr,
    SHIFTED: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return q.k_j for shifted keys (one GEMM), or q.k_jr for r from FIRST to LAST (one GEMM per component)."""
    out = ()
    for r in tl.static_range(FIRST, LAST):
        b_k = load_tile(k_src, i_b, i_k, r, start, n, stride_m, stride_s, S, BN, D, BD, not SHIFTED, MASKED, TMA)
        out = out + (tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION),)
    return out


@triton.jit
def exponents(scores, alpha, c, lam, M: tl.constexpr, SHIFTED: tl.constexpr):
    """Return l_ijr = lambda_r s + a_ir + c_jr (base 2) of a tile, one tensor per component."""
    out = ()
    for r in tl.static_range(M):
        # In this order every operation has an operand with the accumulator's layout. With alpha + c first, the compiler
        # gives that sum another layout and moves it through shared memory.
        out = out + ((scores[0 if SHIFTED else r] * (lam[r] * LOG2E) + alpha[r]) + c[r],)
    return out


@triton.jit
def mixture_sum(rho, coef, M: tl.constexpr):
    """Return sum_r A_ir C_jr / A_i0."""
    out = coef[0]
    for r in tl.static_range(1, M):
        out = out + rho[r - 1] * coef[r]
    return out


@triton.jit
def component_ratios(alpha, M: tl.constexpr, HARD: tl.constexpr, LIMIT: tl.constexpr):
    """Return A_ir / A_i0 for r >= 1, at most 2^LIMIT; for hard assignment a_ir - a_i0."""
    out = ()
    for r in tl.static_range(1, M):
        b_lead = alpha[r] - alpha[0]
        # Tiles with rows beyond the limit are left to the fallback, which does not use the ratio.
        out = out + (b_lead if HARD else tl.exp2(tl.minimum(b_lead, LIMIT)),)
    return out
