"""The forward pass: one program owns a tile of queries and walks along the keys."""

import triton
import triton.language as tl

from .triton_tiles import (
    LOG2E,
    SAFE_RANGE,
    TILE,
    blend,
    columns,
    component_scores,
    exponents,
    extent,
    hide,
    kept,
    key_range,
    largest,
    load_rows,
    load_scales,
    load_vectors,
    mask_scores,
    ratios,
    row_terms,
    schedule,
    smallest,
    store_rows,
)  # fmt: skip


@triton.jit
def weigh(scores, row, top, m, rho, coef, ref, lam, M: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr, ONLINE: tl.constexpr, EXACT: tl.constexpr):
    """Weights of a tile relative to 2^m, and the new m. Without ONLINE, m is an upper bound of the whole row and already part of `row`."""
    if EXACT:
        xs = exponents(scores, row, coef, lam, M, SHIFTED)
        b_x = largest(xs, M)
        if ONLINE:
            m = tl.maximum(m, tl.max(b_x, 1))
            m_safe = tl.where(m == -float("inf"), 0.0, m)[:, None]
            b_x = b_x - m_safe
        if HARD:
            b_p = tl.exp2(b_x)
        else:
            b_p = tl.zeros_like(b_x)
            for r in tl.static_range(M):
                b_p += tl.exp2(xs[r] - m_safe) if ONLINE else tl.exp2(xs[r])
    elif SHIFTED:
        offset = row[0] + ref
        if ONLINE:
            m = tl.maximum(m, tl.max(scores[0], 1) * (lam[0] * LOG2E) + (top + ref))
            offset -= tl.where(m == -float("inf"), 0.0, m)[:, None]
        b_p = tl.exp2(scores[0] * (lam[0] * LOG2E) + offset) * blend(rho, coef, M)
    else:
        offset = row[0] + ref
        b_p = tl.exp2(scores[0] * (lam[0] * LOG2E) + offset) * coef[0]
        for r in tl.static_range(1, M):
            b_p += tl.exp2(scores[r] * (lam[r] * LOG2E) + offset) * coef[r]
    return b_p, m


@triton.jit
def walk(
    first, last, b_q, row, top, rho, lam, acc, l, m, k_ptr, v_ptr, c_ptr, coef_ptr, stats_ptr, mask_ptr, seed, i_bh, o_i, causal_offset, dropout_p,
    stride_km, stride_ks, stride_vs, stride_ml, stride_mj, L, S, n_slots,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, ONLINE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    NS: tl.constexpr = 1 if SHIFTED else M
    for n in range(first, last, BN):
        o_n = n + tl.arange(0, BN)
        scores = component_scores(b_q, k_ptr, o_n, stride_km, stride_ks, S, D, BD, M, MASKED, SHIFTED, PRECISION)
        if MASK:
            scores = mask_scores(scores, mask_ptr, o_i[:, None], o_n[None, :], stride_ml, stride_mj, L, S, lam, NS, MASK)
        if MASKED and CAUSAL:
            scores = hide(scores, o_i[:, None] + causal_offset >= o_n[None, :], NS)
        ref = tl.load(stats_ptr + (n // TILE) * 4)
        ref = tl.where(ref == -float("inf"), 0.0, ref)
        coef = load_vectors(c_ptr if EXACT else coef_ptr, o_n, n_slots * TILE, S, M, 0, False)
        b_p, m_new = weigh(scores, row, top, m, rho, coef, ref, lam, M, SHIFTED, HARD, ONLINE, EXACT)
        if ONLINE:
            alpha = tl.exp2(m - tl.where(m_new == -float("inf"), 0.0, m_new))
            l = l * alpha
            acc = acc * alpha[:, None]
            m = m_new
        l += tl.sum(b_p, 1)
        if DROPOUT:
            b_p = tl.where(kept(seed, i_bh, o_i[:, None], o_n[None, :], S, dropout_p), b_p, 0.0)
        b_v = load_rows(v_ptr, o_n, stride_vs, S, E, BE, MASKED)
        acc = tl.dot(b_p.to(b_v.dtype), b_v, acc, input_precision=PRECISION)
    return acc, l, m


@triton.jit(do_not_specialize=["H", "L", "S", "n_slots", "n_tiles", "n_heads", "SECTION"])
def mixture_forward(
    q_ptr, k_ptr, v_ptr, shift_ptr, mask_ptr, seed_ptr, scale_ptr, tau_ptr, cu_q_ptr, cu_k_ptr, c_ptr, coef_ptr, stats_ptr, out_ptr, lse_ptr,
    scale, tau, dropout_p, stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_km, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_mb, stride_mh, stride_ml, stride_mj, H, GROUP, L, S, n_slots, n_tiles, n_heads, SECTION,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SHIFTED: tl.constexpr,
    HARD: tl.constexpr, SCALE: tl.constexpr, TAU: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, BOUNDED: tl.constexpr, RANGE: tl.constexpr, PATHS: tl.constexpr,
):  # fmt: skip
    """Output [B, H, L, E] and base-2 lse [B, H, L] (a included; +inf for a row that sees nothing)."""
    UNEQUAL: tl.constexpr = SCALE > 1
    FACTORED: tl.constexpr = not HARD and not UNEQUAL
    i_m, i_bh = schedule(n_tiles, n_heads, SECTION)
    i_h = i_bh % H
    i_k = i_h // GROUP
    i_bq, start_q, n_q, _ = extent(cu_q_ptr, i_bh // H, L, PACKED)
    i_b, start_k, n_k, slot = extent(cu_k_ptr, i_bh // H, S, PACKED)
    if i_m * BM >= n_q:
        return
    q_ptr += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh + start_q.to(tl.int64) * stride_ql
    k_ptr += i_b.to(tl.int64) * stride_kb + i_k.to(tl.int64) * stride_kh + start_k.to(tl.int64) * stride_ks
    v_ptr += i_b.to(tl.int64) * stride_vb + i_k.to(tl.int64) * stride_vh + start_k.to(tl.int64) * stride_vs
    if MASK:
        mask_ptr += i_b.to(tl.int64) * stride_mb + i_h.to(tl.int64) * stride_mh
    o_c = (i_k * M).to(tl.int64) * n_slots * TILE + slot * TILE
    c_ptr += o_c
    coef_ptr += o_c
    stats_ptr += (i_k * n_slots + slot) * 4
    seed = tl.load(seed_ptr) if DROPOUT else 0
    if TAU:
        tau = tl.load(tau_ptr + i_k)
    lam = load_scales(scale_ptr, scale, i_k, M, SCALE)

    o_i = i_m * BM + tl.arange(0, BM)
    b_q = load_rows(q_ptr, o_i, stride_ql, n_q, D, BD, True)
    a, norm = row_terms(b_q, shift_ptr, i_k, lam, tau, M, D, BD, SHIFTED, UNEQUAL)
    top = largest(a, M)
    causal_offset = n_k - n_q if CAUSAL == 2 else 0
    full = n_k // BN * BN
    last = n_k
    if CAUSAL:
        full = max(min(full, (i_m * BM + causal_offset + 1) // BN * BN), 0)
        last = max(min(n_k, i_m * BM + BM + causal_offset), 0)

    high, low, width, longest = key_range(stats_ptr, tl.cdiv(n_k, TILE))
    spread = tl.max(top - smallest(a, M), 0)
    bound = tl.sqrt(norm) * (longest * largest(lam, M) * LOG2E)
    acc = tl.zeros([BM, BE], tl.float32)
    l = tl.zeros([BM], tl.float32)
    m = tl.full([BM], -float("inf"), tl.float32)
    flat = columns(a, 0.0, M)
    if PATHS == 1 or (BOUNDED and (low <= high) & (2 * tl.max(bound, 0) + spread + high - low <= SAFE_RANGE)):
        m = bound + top + high
        for MASKED in tl.static_range(2):
            acc, l, m = walk(
                full if MASKED else 0, last if MASKED else full, b_q, columns(a, m, M), top, ratios(flat, M), lam, acc, l, m, k_ptr, v_ptr, c_ptr, coef_ptr, stats_ptr, mask_ptr,
                seed, i_bh, o_i, causal_offset, dropout_p, stride_km, stride_ks, stride_vs, stride_ml, stride_mj, n_q, n_k, n_slots, M, D, E, BD, BE, BN,
                SHIFTED, HARD, CAUSAL, MASK, DROPOUT, PRECISION, MASKED, False, not FACTORED,
            )  # fmt: skip
    elif PATHS == 2 or (FACTORED and SHIFTED and (spread + width <= RANGE)):
        for MASKED in tl.static_range(2):
            acc, l, m = walk(
                full if MASKED else 0, last if MASKED else full, b_q, flat, top, ratios(flat, M), lam, acc, l, m, k_ptr, v_ptr, c_ptr, coef_ptr, stats_ptr, mask_ptr,
                seed, i_bh, o_i, causal_offset, dropout_p, stride_km, stride_ks, stride_vs, stride_ml, stride_mj, n_q, n_k, n_slots, M, D, E, BD, BE, BN,
                SHIFTED, HARD, CAUSAL, MASK, DROPOUT, PRECISION, MASKED, True, False,
            )  # fmt: skip
    else:
        for MASKED in tl.static_range(2):
            acc, l, m = walk(
                full if MASKED else 0, last if MASKED else full, b_q, flat, top, flat, lam, acc, l, m, k_ptr, v_ptr, c_ptr, coef_ptr, stats_ptr, mask_ptr,
                seed, i_bh, o_i, causal_offset, dropout_p, stride_km, stride_ks, stride_vs, stride_ml, stride_mj, n_q, n_k, n_slots, M, D, E, BD, BE, BN,
                SHIFTED, HARD, CAUSAL, MASK, DROPOUT, PRECISION, MASKED, True, True,
            )  # fmt: skip

    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    inverse = 1.0 / l
    if DROPOUT:
        inverse = inverse / (1.0 - dropout_p)
    o_row = (i_bq * H + i_h).to(tl.int64) * L + start_q
    store_rows(out_ptr + o_row * E, acc * inverse[:, None], o_i, E, n_q, E, BE)
    tl.store(lse_ptr + o_row + o_i, tl.where(empty, float("inf"), m + tl.log2(l)), mask=o_i < n_q)
