"""The forward pass: one program owns a tile of queries and walks along the keys.

It comes in two: the first takes a bound of the row in place of its running maximum, and the factored form; tiles where
that could lose weights are left to the second, which keeps a running maximum and one exponential a component. Small
calls of soft shifted keys with three components and more have both in one, and each program chooses.
"""

# ruff: noqa: E741, RUF005  (l is the softmax's denominator; Triton has no starred tuples)
import triton
import triton.language as tl

from mgk.kernels.mixture.component_gemm import blend_operand, blended, operand_tile
from mgk.kernels.mixture.exp2 import exact_exp2, weight
from mgk.kernels.mixture.tile import (  # fmt: skip
    LOG2E,
    SAFE_RANGE,
    TILE,
    blend,
    columns,
    component_scores,
    exponents,
    extent,
    head_of,
    hide,
    in_registers,
    kept,
    key_range,
    key_span,
    largest,
    leaves_to_second,
    load_rows,
    load_scales,
    load_tile,
    load_vectors,
    mask_scores,
    not_mine,
    ratios,
    row_terms,
    schedule,
    smallest,
    store_rows,
)


@triton.jit
def weigh(
    scores, row, m, rho, coef, lam,
    M: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr, ONLINE: tl.constexpr, EXACT: tl.constexpr,
    UNEQUAL: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Weights of a tile relative to 2^m, and the new m (FINE: whole). Without ONLINE, m bounds the whole row and is
    already part of `row`."""
    if EXACT:
        if HARD and SHIFTED and not UNEQUAL:
            b_lead = coef[0]
            for r in tl.static_range(1, M):
                b_lead = tl.maximum(b_lead, rho[r - 1] + coef[r])
            b_x = (scores[0] * (lam[0] * LOG2E) + row[0]) + b_lead
        else:
            xs = exponents(scores, row, coef, lam, M, SHIFTED)
            b_x = largest(xs, M)
        if ONLINE:
            top = tl.max(b_x, 1)
            m = tl.maximum(m, tl.ceil(top) if FINE else top)
            m_safe = tl.where(m == -float("inf"), 0.0, m)[:, None]
        else:
            m_safe = 0.0
        if HARD:
            b_p = exact_exp2(b_x - m_safe) if FINE else tl.exp2(b_x - m_safe)
        else:
            for r in tl.static_range(M):
                if FINE:
                    b_pr = weight(scores[0 if SHIFTED else r], lam[r], row[r], coef[r], m_safe)
                else:
                    b_pr = tl.exp2(xs[r] - m_safe)
                b_p = b_pr if r == 0 else b_p + b_pr
    elif SHIFTED:
        b_p = tl.exp2(scores[0] * (lam[0] * LOG2E) + row[0]) * blend(rho, coef, M)
    else:
        b_p = tl.exp2(scores[0] * (lam[0] * LOG2E) + row[0]) * coef[0]
        for r in tl.static_range(1, M):
            b_p += tl.exp2(scores[r] * (lam[r] * LOG2E) + row[0]) * coef[r]
    return b_p, m


@triton.jit
def walk(
    first, last, b_q, b_rows, row, rho, lam, acc, l, m, k_src, v_src, blend_src, i_b, i_k, start_k, slot, c_ptr,
    coef_ptr, mask_ptr, seed,
    i_bh, o_i, causal_offset, dropout_p,
    stride_km, stride_ks, stride_vs, stride_ml, stride_mj, L, S, n_slots,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    SHIFTED: tl.constexpr, HARD: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
    ONLINE: tl.constexpr,
    EXACT: tl.constexpr, UNEQUAL: tl.constexpr, TMA: tl.constexpr, BLEND: tl.constexpr,
):  # fmt: skip
    NS: tl.constexpr = 1 if SHIFTED else M
    FINE: tl.constexpr = b_q.dtype == tl.float32 and PRECISION == "ieee"
    for n in range(first, last, BN):
        o_n = n + tl.arange(0, BN)
        scores = component_scores(
            b_q,
            k_src,
            i_b,
            i_k,
            start_k,
            n,
            stride_km,
            stride_ks,
            S,
            BN,
            D,
            BD,
            0,
            NS,
            MASKED,
            SHIFTED,
            PRECISION,
            TMA,
        )
        if MASK:
            scores = mask_scores(
                scores, mask_ptr, o_i[:, None], o_n[None, :], stride_ml, stride_mj, L, S, lam, NS, MASK
            )
        if MASKED and CAUSAL:
            scores = hide(scores, o_i[:, None] + causal_offset >= o_n[None, :], NS)
        if BLEND:
            b_c = operand_tile(blend_src, (i_k * n_slots + slot) * TILE + n, BN, BN, False, TMA)
            b_p = tl.exp2(scores[0] * (lam[0] * LOG2E) + row[0]) * blended(b_rows, b_c)
            m_new = m
        else:
            coef = load_vectors(c_ptr if EXACT else coef_ptr, o_n, n_slots * TILE, S, M, 0, False)
            b_p, m_new = weigh(scores, row, m, rho, coef, lam, M, SHIFTED, HARD, ONLINE, EXACT, UNEQUAL, FINE)
        if ONLINE:
            alpha = tl.exp2(m - tl.where(m_new == -float("inf"), 0.0, m_new))
            l = l * alpha
            acc = acc * alpha[:, None]
            m = m_new
        l += tl.sum(b_p, 1)
        if DROPOUT:
            b_p = tl.where(kept(seed, i_bh, o_i[:, None], o_n[None, :], S, dropout_p), b_p, 0.0)
        b_v = load_tile(v_src, i_b, i_k, 0, start_k, n, 0, stride_vs, S, BN, E, BE, False, MASKED, TMA)
        acc = tl.dot(b_p.to(b_v.dtype), b_v, acc, input_precision=PRECISION)
    return acc, l, m


@triton.jit
def attend(
    full, last, b_q, a, ceiling, lam, k_src, v_src, blend_src, i_b, i_k, start_k, slot, c_ptr, coef_ptr, mask_ptr, seed,
    i_bh, o_i, causal_offset, dropout_p, stride_km, stride_ks, stride_vs, stride_ml, stride_mj, L, S, n_slots,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, UNEQUAL: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """A tile of rows along all keys: the sums of weighted values and of weights, relative to 2^m, and m. FAST: with m
    the rows' `ceiling`."""
    FACTORED: tl.constexpr = not HARD and not UNEQUAL
    BLEND: tl.constexpr = blend_src is not None and FAST
    acc = tl.zeros([BM, BE], tl.float32)
    l = tl.zeros([BM], tl.float32)
    flat = columns(a, 0.0, M)
    if FAST:
        m = ceiling
        row = columns(a, m, M)
    else:
        m = tl.full([BM], -float("inf"), tl.float32)
        row = flat
    rho = ratios(flat, M, HARD, SAFE_RANGE)
    b_rows = b_q
    if BLEND:
        b_rows = blend_operand((tl.full([BM, 1], 1.0, tl.float32),) + rho, tl.arange(0, 16), M, True)
    for MASKED in tl.static_range(2):
        acc, l, m = walk(
            full if MASKED else 0, last if MASKED else full, b_q, b_rows, row, rho, lam, acc, l, m, k_src, v_src,
            blend_src, i_b, i_k, start_k, slot, c_ptr, coef_ptr, mask_ptr, seed, i_bh, o_i, causal_offset, dropout_p,
            stride_km, stride_ks, stride_vs, stride_ml, stride_mj, L, S, n_slots, M, D, E, BD, BE, BN, SHIFTED, HARD,
            CAUSAL, MASK, DROPOUT, PRECISION, MASKED, not FAST, not FAST or not FACTORED, UNEQUAL, TMA, BLEND,
        )  # fmt: skip
    return acc, l, m


@triton.jit(do_not_specialize=["H", "L", "S", "n_slots", "n_tiles", "n_heads", "SECTION"])
def mixture_forward(
    q_ptr, k_src, v_src, shift_ptr, mask_ptr, seed_ptr, scale_ptr, tau_ptr, cu_q_ptr, cu_k_ptr, c_ptr, stats_ptr,
    flags_ptr, blend_src, out_ptr, lse_ptr,
    scale, tau, dropout_p, stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_km, stride_ks, stride_vb,
    stride_vh, stride_vs,
    stride_mb, stride_mh, stride_ml, stride_mj, stride_ob, stride_oh, stride_ol, GROUP, H, L, S, n_slots, n_tiles,
    n_heads, SECTION,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SHIFTED: tl.constexpr,
    HARD: tl.constexpr, SCALE: tl.constexpr, TAU: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    DROPOUT: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, REGISTERS: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """Output [B, H, L, E] and base-2 lse [B, H, L] (a included; +inf for a row that sees nothing)."""
    UNEQUAL: tl.constexpr = SCALE > 1
    # Keys of a step in the general form: whole ones would need more registers than the fast form beside it.
    GENERAL_STEP: tl.constexpr = BN // 2 if PATH == 3 and BN > 16 else BN
    i_m, i_bh = schedule(n_tiles, n_heads, SECTION)
    i_h = i_bh % H
    i_k = i_h // GROUP
    i_bq, start_q, n_q, _ = extent(cu_q_ptr, i_bh // H, L, PACKED)
    i_b, start_k, n_k, slot = extent(cu_k_ptr, i_bh // H, S, PACKED)
    p_flag = flags_ptr + i_bh * n_tiles + i_m
    if i_m * BM >= n_q or not_mine(p_flag, PATH):
        return
    q_ptr += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh + start_q.to(tl.int64) * stride_ql
    k_src = head_of(k_src, i_b, i_k, start_k, stride_kb, stride_kh, stride_ks, TMA)
    v_src = head_of(v_src, i_b, i_k, start_k, stride_vb, stride_vh, stride_vs, TMA)
    if MASK:
        mask_ptr += i_b.to(tl.int64) * stride_mb + i_h.to(tl.int64) * stride_mh
    c_ptr += (i_k * M).to(tl.int64) * n_slots * TILE + slot * TILE
    coef_ptr = c_ptr + (H // GROUP * M).to(tl.int64) * n_slots * TILE
    stats_ptr += (i_k * n_slots + slot) * 4
    seed = tl.load(seed_ptr) if DROPOUT else 0
    if TAU:
        tau = tl.load(tau_ptr + i_k)
    lam = load_scales(scale_ptr, scale, i_k, M, SCALE)

    o_i = i_m * BM + tl.arange(0, BM)
    b_q = in_registers(load_rows(q_ptr, o_i, stride_ql, n_q, D, BD, True), BD, REGISTERS % 2)
    a, norm = row_terms(b_q, shift_ptr, i_k, lam, tau, M, D, BD, SHIFTED, UNEQUAL)
    top = largest(a, M)
    causal_offset = n_k - n_q if CAUSAL == 2 else 0
    full = n_k // BN * BN
    last = n_k
    if CAUSAL:
        full = max(min(full, (i_m * BM + causal_offset + 1) // BN * BN), 0)
        last = max(min(n_k, i_m * BM + BM + causal_offset), 0)

    high, low, longest, end, _ = key_range(stats_ptr, tl.cdiv(n_k, TILE))
    # What is masked to the end of the sequence is not walked over.
    full = min(full, end)
    last = min(last, end)
    ref = tl.load(stats_ptr + 3)
    spread = tl.max(top - smallest(a, M), 0)
    bound = tl.sqrt(norm) * (longest * largest(lam, M) * LOG2E)
    slack = 2 * tl.max(bound, 0) + spread + tl.maximum(key_span(high, low), high - low)
    safe = (low <= high) & (slack <= SAFE_RANGE)
    if leaves_to_second(p_flag, safe, PATH):
        return
    acc = tl.zeros([BM, BE], tl.float32)
    l = tl.zeros([BM], tl.float32)
    m = tl.zeros([BM], tl.float32)
    for FAST in tl.static_range(2):
        if (safe if FAST else not safe) if PATH == 3 else (PATH == 1) == FAST:
            acc, l, m = attend(
                full, last, b_q, a, bound + top + high, lam, k_src, v_src, blend_src, i_b, i_k, start_k, slot, c_ptr,
                coef_ptr, mask_ptr, seed, i_bh, o_i, causal_offset, dropout_p, stride_km, stride_ks, stride_vs,
                stride_ml, stride_mj, n_q, n_k, n_slots, M, D, E, BD, BE, BM, BN if FAST else GENERAL_STEP, SHIFTED,
                HARD, CAUSAL, MASK, DROPOUT, PRECISION, UNEQUAL, TMA, FAST,
            )  # fmt: skip

    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    inverse = 1.0 / l
    if DROPOUT:
        inverse = inverse / (1.0 - dropout_p)
    out_ptr += i_bq.to(tl.int64) * stride_ob + i_h.to(tl.int64) * stride_oh + start_q.to(tl.int64) * stride_ol
    store_rows(out_ptr, acc * inverse[:, None], o_i, stride_ol, n_q, E, BE)
    if lse_ptr is not None:
        o_row = (i_bq * H + i_h).to(tl.int64) * L + start_q
        tl.store(lse_ptr + o_row + o_i, tl.where(empty, float("inf"), m + tl.log2(l) + ref), mask=o_i < n_q)
