"""Preprocessing kernel: the terms of the exponents that depend on the keys alone.

c_jr = log pi_jr - tau lambda_r |k_jr|^2 / 2, in base 2 and relative to a reference of the head, and C_jr = 2^c_jr (hard
assignment: c_jr - c_j0).
"""

# ruff: noqa: RUF005  (Triton has no starred tuples)
import triton
import triton.language as tl

from mgk.kernels.mixture.component_gemm import gemm_operand
from mgk.kernels.mixture.tile import (
    FP32_MAX,
    KEY_TILE,
    LOG2E,
    MASK_VALUE,
    NUM_STATS,
    STAT_HIGH,
    STAT_LOW,
    STAT_NORM,
    STAT_REFERENCE,
    load_scales,
    sequence_bounds,
)

# Number of keys that determine the reference of a head. Every program reads them in addition to its tile of keys.
SAMPLE = tl.constexpr(32)
# Lower bound of the largest norm of a tile with a masked key, whose sign marks it: -0.0 is not negative.
SMALLEST_NORM = tl.constexpr(1e-30)
# Lowest reference if every sampled key is masked: their c may be any number.
LOWEST_REFERENCE = tl.constexpr(-1024.0)


@triton.jit
def squared_norms(
    k_ptr, shift_ptr, o_j, m_j, stride_km, stride_ks, M: tl.constexpr, D: tl.constexpr, BC: tl.constexpr,
    SHIFTED: tl.constexpr,
):  # fmt: skip
    """Return |k_jr|^2 for each r, and |k_j|^2 (independent keys: max_r |k_jr|^2), at most FP32_MAX.

    Infinite norms of masked keys would give NaN: tau = 0 times infinity, or their difference to an infinite lse.
    """
    norm = tl.zeros([o_j.shape[0]], tl.float32)
    norms = ()
    for _ in tl.static_range(M):
        norms = norms + (norm,)
    for d in tl.static_range(0, D, BC):
        o_d = d + tl.arange(0, BC)
        m_jd = m_j[:, None] & (o_d < D)[None, :]
        p_k = k_ptr + o_j[:, None].to(tl.int64) * stride_ks + o_d[None, :]
        if SHIFTED:
            b_k = tl.load(p_k, mask=m_jd, other=0.0).to(tl.float32)
            norm += tl.sum(b_k * b_k, 1)
        updated = ()
        for r in tl.static_range(M):
            if SHIFTED:
                b_kr = b_k + tl.load(shift_ptr + r * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
            else:
                b_kr = tl.load(p_k + r * stride_km, mask=m_jd, other=0.0).to(tl.float32)
            updated = updated + (norms[r] + tl.sum(b_kr * b_kr, 1),)
        norms = updated
    finite = ()
    for r in tl.static_range(M):
        finite = finite + (tl.minimum(norms[r], FP32_MAX),)
        if not SHIFTED:
            norm = tl.maximum(norm, finite[r])
    return finite, tl.minimum(norm, FP32_MAX)


@triton.jit
def prepare_tile(
    i_t, i_h, i_b, start, n_keys, key_tile, k_ptr, shift_ptr, bias_ptr, scale_ptr, tau_ptr, c_ptr, stats_ptr,
    key_operand_ptr, scale, tau, constant, stride_kb, stride_kh, stride_km, stride_ks, stride_bb, stride_bh, stride_bm,
    stride_bs, HK, n_key_tiles,
    M: tl.constexpr, D: tl.constexpr, BC: tl.constexpr, SHIFTED: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    TAU: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """Write c, C and the statistics of key tile i_t of a sequence, whose first tile is `key_tile`."""
    key_tile += i_t
    o_j = i_t * KEY_TILE + tl.arange(0, KEY_TILE)
    m_j = o_j < n_keys
    lam = load_scales(scale_ptr, scale, i_h, M, SCALE)
    if TAU:
        tau = tl.load(tau_ptr + i_h)
    k_ptr += i_b.to(tl.int64) * stride_kb + i_h.to(tl.int64) * stride_kh + start.to(tl.int64) * stride_ks
    if SHIFTED:
        shift_ptr += i_h * M * D
    # The reference is the largest c, without priors, of SAMPLE keys spread over the sequence. The statistics hold the
    # range of c around it. Masked keys count only if all of the sample is masked.
    o_sample = (tl.arange(0, SAMPLE) * n_keys.to(tl.int64) // SAMPLE).to(tl.int32)
    norms, _ = squared_norms(k_ptr, shift_ptr, o_sample, o_sample < n_keys, stride_km, stride_ks, M, D, BC, SHIFTED)
    if BIAS:
        bias_ptr += i_b.to(tl.int64) * stride_bb + i_h * stride_bh + start.to(tl.int64) * stride_bs
    # Maxima over the components first: a reduction over the keys takes barriers.
    b_reference = tl.full([SAMPLE], -float("inf"), tl.float32)
    b_masked_reference = tl.full([SAMPLE], LOWEST_REFERENCE, tl.float32)
    for r in tl.static_range(M):
        b_key_term = (constant - 0.5 * tau * lam[r] * norms[r]) * LOG2E
        if BIAS:
            b_bias = tl.load(bias_ptr + r * stride_bm + o_sample * stride_bs, mask=o_sample < n_keys, other=0.0)
            b_masked_reference = tl.maximum(b_masked_reference, b_key_term)
            b_key_term = tl.where(b_bias.to(tl.float32) < MASK_VALUE, -float("inf"), b_key_term)
        b_reference = tl.maximum(b_reference, b_key_term)
    reference = tl.max(b_reference, 0)
    reference = tl.where(
        reference > -float("inf"), reference, tl.max(b_masked_reference, 0) if BIAS else LOWEST_REFERENCE
    )
    norms, norm = squared_norms(k_ptr, shift_ptr, o_j, m_j, stride_km, stride_ks, M, D, BC, SHIFTED)
    if BIAS:
        bias_ptr += o_j * stride_bs
    b_lowest = tl.full([KEY_TILE], float("inf"), tl.float32)
    factors = ()
    p_c = c_ptr + (i_h * M).to(tl.int64) * n_key_tiles * KEY_TILE + key_tile * KEY_TILE + tl.arange(0, KEY_TILE)
    for r in tl.static_range(M):
        b_key_term = constant - 0.5 * tau * lam[r] * norms[r]
        if BIAS:
            b_key_term += tl.load(bias_ptr + r * stride_bm, mask=m_j, other=0.0).to(tl.float32)
        b_key_term = tl.where(m_j, b_key_term * LOG2E - reference, -float("inf"))
        b_lowest = tl.minimum(b_lowest, tl.where(b_key_term == -float("inf"), float("inf"), b_key_term))
        tl.store(p_c + r * n_key_tiles * KEY_TILE, b_key_term)
        if r == 0:
            b_highest = b_key_term
            b_first_term = tl.maximum(b_key_term, MASK_VALUE)
        else:
            b_highest = tl.maximum(b_highest, b_key_term)
        if not HARD:
            b_coef = tl.exp2(tl.minimum(b_key_term, 126.0))
        elif r == 0:
            b_coef = b_key_term
        else:
            b_coef = tl.where(b_key_term == -float("inf"), 0.0, b_key_term - b_first_term)
        tl.store(p_c + (HK * M + r).to(tl.int64) * n_key_tiles * KEY_TILE, b_coef)
        factors = factors + (b_coef[:, None],)
    if key_operand_ptr is not None:
        o_c = tl.arange(0, 16)
        o_operand = (i_h * n_key_tiles + key_tile).to(tl.int64) * KEY_TILE + tl.arange(0, KEY_TILE)
        tl.store(key_operand_ptr + o_operand[:, None] * 16 + o_c[None, :], gemm_operand(factors, o_c, M, False))
    p_stats = stats_ptr + (i_h * n_key_tiles + key_tile) * NUM_STATS
    tl.store(p_stats + STAT_HIGH, tl.max(b_highest, 0))
    tl.store(p_stats + STAT_LOW, tl.min(b_lowest, 0))
    longest = tl.sqrt(tl.max(tl.where(m_j, norm, 0.0), 0))
    masked = tl.max(tl.where(m_j & (b_highest == -float("inf")), 1, 0), 0)
    tl.store(p_stats + STAT_NORM, tl.where(masked > 0, -tl.maximum(longest, SMALLEST_NORM), longest))
    tl.store(p_stats + STAT_REFERENCE, reference)


@triton.jit(do_not_specialize=["HK", "S", "n_key_tiles", "n_tiles"])
def prepare_keys(
    k_ptr, shift_ptr, bias_ptr, scale_ptr, tau_ptr, cu_k_ptr, c_ptr, stats_ptr, key_operand_ptr, scale, tau, constant,
    stride_kb, stride_kh, stride_km, stride_ks, stride_bb, stride_bh, stride_bm, stride_bs, HK, S, n_key_tiles, n_tiles,
    M: tl.constexpr, D: tl.constexpr, BC: tl.constexpr, SHIFTED: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    TAU: tl.constexpr, HARD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Write c, C (hard: c_j0 and c_jr - c_j0) and the statistics of each key tile.

    c and C are [2, HK, M, n_key_tiles * KEY_TILE], -inf and 0 beyond the keys. The statistics are max c, min finite c,
    max |k| (negative if a key is masked in every component) and the reference; c is relative to the reference. Also
    writes the keys' operand of the component GEMM, unless key_operand_ptr is None.
    """
    # Sequences are on the first grid axis: the other two are limited to 65,535.
    i_t, i_h, i_b = tl.program_id(0) % n_tiles, tl.program_id(1), tl.program_id(0) // n_tiles
    i_b, start, n_keys, key_tile = sequence_bounds(cu_k_ptr, i_b, S, PACKED)
    if i_t * KEY_TILE >= n_keys:
        return
    prepare_tile(
        i_t, i_h, i_b, start, n_keys, key_tile, k_ptr, shift_ptr, bias_ptr, scale_ptr, tau_ptr, c_ptr, stats_ptr,
        key_operand_ptr, scale, tau, constant, stride_kb, stride_kh, stride_km, stride_ks, stride_bb, stride_bh,
        stride_bm, stride_bs, HK, n_key_tiles, M, D, BC, SHIFTED, BIAS, SCALE, TAU, HARD,
    )  # fmt: skip
