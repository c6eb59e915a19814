"""Forward kernel for short sequences: each program computes the terms of the keys it reads, so nothing runs before it.

A program keeps the running maximum of s_ij + max_r c_jr. If the row terms a_ir of its queries are close to each other,
the mixture sum is factored, with one exponential per pair; otherwise the program takes one per component. For the
backward pass, the programs of a head also write the prepared keys, one key tile after another.
"""

# ruff: noqa: E741, RUF005, SIM102  (l is the softmax's denominator; Triton has no starred tuples, and evaluates the
# first of two nested conditions while it compiles)
import triton
import triton.language as tl

from mgk.kernels.mixture.fwd import tile_weights
from mgk.kernels.mixture.preprocess import prepare_tile
from mgk.kernels.mixture.tile import (
    FACTORED_RANGE,
    FACTORED_RANGE_FP16,
    FP32_MAX,
    KEY_TILE,
    LOG2E,
    apply_mask,
    as_columns,
    elementwise_max,
    elementwise_min,
    key_ends,
    load_rows,
    load_scales,
    load_shift,
    row_terms,
    schedule,
    store_rows,
    to_registers,
    value_head,
)


@triton.jit
def key_terms(
    keys, shifts, bias_ptr, o_n, n_k, scale, tau, constant, stride_bm, stride_bs,
    M: tl.constexpr, SHIFTED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Return c_jr (base 2) of a block of keys as rows [1, keys], -inf beyond the last key."""
    out = ()
    for r in tl.static_range(M):
        if SHIFTED:
            b_kr = keys[0].to(tl.float32) + shifts[r][None, :]
        else:
            b_kr = keys[r].to(tl.float32)
        b_c = constant - 0.5 * tau * scale * tl.minimum(tl.sum(b_kr * b_kr, 1), FP32_MAX)
        if BIAS:
            b_c += tl.load(bias_ptr + r * stride_bm + o_n * stride_bs, mask=o_n < n_k, other=0.0).to(tl.float32)
        out = out + (tl.where(o_n < n_k, b_c * LOG2E, -float("inf"))[None, :],)
    return out


@triton.jit
def key_factors(c, top, M: tl.constexpr):
    """Return 2^(c_jr - max_r c_jr), 0 for a masked key."""
    out = ()
    for r in tl.static_range(M):
        out = out + (tl.exp2(c[r] - tl.where(top == -float("inf"), 0.0, top)),)
    return out


@triton.jit
def scaled_mixture_sum(rho, gamma, M: tl.constexpr):
    """Return sum_r rho_ir gamma_jr."""
    out = rho[0] * gamma[0]
    for r in tl.static_range(1, M):
        out += rho[r] * gamma[r]
    return out


@triton.jit
def walk_keys(
    first, last, b_q, row, rho, lam, acc, l, m, k_ptr, v_ptr, bias_ptr, shifts, o_i, causal_offset, tau, constant,
    stride_km, stride_ks, stride_vs, stride_bm, stride_bs, n_k,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    SHIFTED: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    FACTORED: tl.constexpr,
):  # fmt: skip
    """Accumulate acc, l and m over the keys first to last. MASKED: tiles that may cross the end or the diagonal."""
    NS: tl.constexpr = 1 if SHIFTED else M
    for n in range(first, last, BN):
        o_n = n + tl.arange(0, BN)
        keys = ()
        scores = ()
        for r in tl.static_range(NS):
            b_k = load_rows(k_ptr + r * stride_km, o_n, stride_ks, n_k, D, BD, MASKED)
            keys = keys + (b_k,)
            scores = scores + (tl.dot(b_q, tl.trans(b_k)),)
        c = key_terms(keys, shifts, bias_ptr, o_n, n_k, lam[0], tau, constant, stride_bm, stride_bs, M, SHIFTED, BIAS)
        if MASKED and CAUSAL:
            scores = apply_mask(scores, o_i[:, None] + causal_offset >= o_n[None, :], NS)
        if FACTORED:
            top = elementwise_max(c, M)
            b_x = scores[0] * (lam[0] * LOG2E) + top
            m_new = tl.maximum(m, tl.max(b_x, 1))
            m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)[:, None]
            b_p = tl.exp2(b_x - m_safe) * scaled_mixture_sum(rho, key_factors(c, top, M), M)
        else:
            b_p, m_new = tile_weights(scores, row, m, rho, c, lam, M, SHIFTED, False, True, True, False, False)
        rescale = tl.exp2(m - tl.where(m_new == -float("inf"), 0.0, m_new))
        m = m_new
        l = l * rescale + tl.sum(b_p, 1)
        acc = acc * rescale[:, None]
        b_v = load_rows(v_ptr, o_n, stride_vs, n_k, E, BE, MASKED)
        acc = tl.dot(b_p.to(b_v.dtype), b_v, acc)
    return acc, l, m


@triton.jit(do_not_specialize=["H", "L", "S", "n_key_tiles", "n_tiles", "n_heads", "SECTION"])
def short_forward(
    q_ptr, k_ptr, v_ptr, shift_ptr, bias_ptr, scale_ptr, tau_ptr, c_ptr, stats_ptr, out_ptr, lse_ptr, scale, tau,
    constant, stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_km, stride_ks, stride_vb, stride_vh,
    stride_vs, stride_bb, stride_bh, stride_bm, stride_bs, stride_ob, stride_oh, stride_ol, GROUP, H, L, S, n_key_tiles,
    n_tiles, n_heads, SECTION,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SHIFTED: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    TAU: tl.constexpr, CAUSAL: tl.constexpr, VALUE_GROUP: tl.constexpr,
    IN_REGISTERS: tl.constexpr, FACTORED: tl.constexpr,
):  # fmt: skip
    """Write the output [B, H, L, E] and, for the backward pass, the base-2 lse [B, H, L] and the prepared keys.

    lse is +inf for fully masked rows. FACTORED: programs may factor the mixture sum. Soft assignment, one scale per
    head, no masks per query.
    """
    i_m, i_bh = schedule(n_tiles, n_heads, SECTION)
    i_h = i_bh % H
    i_b = i_bh // H
    i_k = i_h // GROUP
    i_v = value_head(i_h, i_k, VALUE_GROUP)
    k_head = k_ptr + i_b.to(tl.int64) * stride_kb + i_k.to(tl.int64) * stride_kh
    v_ptr += i_b.to(tl.int64) * stride_vb + i_v.to(tl.int64) * stride_vh
    q_ptr += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh
    bias_head = bias_ptr
    if BIAS:
        bias_head += i_b.to(tl.int64) * stride_bb + i_k * stride_bh
    lam = load_scales(scale_ptr, scale, i_k, M, SCALE)
    own_tau = tl.load(tau_ptr + i_k) if TAU else tau
    shifts = ()
    if SHIFTED:
        for r in tl.static_range(M):
            shifts = shifts + (load_shift(shift_ptr, i_k, r, M, D, BD),)
    o_i = i_m * BM + tl.arange(0, BM)
    b_q = to_registers(load_rows(q_ptr, o_i, stride_ql, L, D, BD, True), BD, IN_REGISTERS)
    a, _ = row_terms(b_q, shift_ptr, i_k, lam, own_tau, M, D, BD, SHIFTED, False)
    top = elementwise_max(a, M)
    row = as_columns(a, 0.0, M)
    rho = ()
    for r in tl.static_range(M):
        rho = rho + (tl.exp2(a[r] - top)[:, None],)
    causal_offset = S - L if CAUSAL == 2 else 0
    full, last = key_ends(i_m, S, causal_offset, BM, BN, CAUSAL)
    spread = tl.max(top - elementwise_min(a, M), 0)
    safe = spread <= (FACTORED_RANGE_FP16 if b_q.dtype == tl.float16 else FACTORED_RANGE)
    acc = tl.zeros([BM, BE], tl.float32)
    l = tl.zeros([BM], tl.float32)
    m = tl.full([BM], -float("inf"), tl.float32)
    for USE_FACTORS in tl.static_range(2):
        if (safe if USE_FACTORS else not safe) if FACTORED else not USE_FACTORS:
            for MASKED in tl.static_range(2):
                acc, l, m = walk_keys(
                    full if MASKED else 0, last if MASKED else full, b_q, row, rho, lam, acc, l, m, k_head, v_ptr,
                    bias_head, shifts, o_i, causal_offset, own_tau, constant, stride_km, stride_ks, stride_vs,
                    stride_bm, stride_bs, S, M, D, E, BD, BE, BN, SHIFTED, BIAS, CAUSAL, MASKED, USE_FACTORS,
                )  # fmt: skip
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    out_ptr += i_b.to(tl.int64) * stride_ob + i_h.to(tl.int64) * stride_oh
    store_rows(out_ptr, acc * (1.0 / l)[:, None], o_i, stride_ol, L, E, BE)
    if lse_ptr is not None:
        if FACTORED:
            m = tl.where(safe, m + top, m)
        o_row = (i_b * H + i_h).to(tl.int64) * L
        tl.store(lse_ptr + o_row + o_i, tl.where(empty, float("inf"), m + tl.log2(l)), mask=o_i < L)
    if c_ptr is not None:
        if i_h % GROUP == 0:
            for i_t in range(i_m, tl.cdiv(S, KEY_TILE), n_tiles):
                prepare_tile(
                    i_t, i_k, i_b, i_b * 0, S, i_b * tl.cdiv(S, KEY_TILE), k_ptr, shift_ptr, bias_ptr, scale_ptr,
                    tau_ptr, c_ptr, stats_ptr, None, scale, tau, constant, stride_kb, stride_kh, stride_km, stride_ks,
                    stride_bb, stride_bh, stride_bm, stride_bs, H // GROUP, n_key_tiles, M, D, BC, SHIFTED, BIAS, SCALE,
                    TAU, False,
                )  # fmt: skip
