"""First backward kernel: one program computes dq of a tile of queries, in a loop over the keys.

Fast form, fallback and PATH BOTH work as in `fwd`. Every sum is taken by one program in a fixed order: results are
bitwise reproducible.
"""

# ruff: noqa: RUF005, SIM102, SIM109  (Triton has neither starred tuples nor `in`, and drops the code under a false
# constexpr only if the condition stands alone)
import triton
import triton.language as tl

from mgk.kernels.mixture.bwd_common import (
    factored_gradients,
    independent_gradients,
    mul_all,
    mul_vectors,
    score_gradients,
)
from mgk.kernels.mixture.bwd_onepass import clear_query_sums, load_query_sums
from mgk.kernels.mixture.component_gemm import (
    accumulate_gemm,
    component_gemm,
    component_sums,
    gemm_operand,
    load_operand,
)
from mgk.kernels.mixture.masks import dropout_mask, mask_tile
from mgk.kernels.mixture.tile import (  # fmt: skip
    BOTH,
    FACTOR_RANGE,
    FALLBACK,
    FAST,
    FINISH,
    KEY_TILE,
    LOG2E,
    NUM_STATS,
    PREPARE,
    SAFE_RANGE,
    STAT_REFERENCE,
    as_columns,
    component_ratios,
    component_scores,
    elementwise_max,
    elementwise_min,
    fallback_tiles,
    flag_for_fallback,
    head_pointer,
    key_ends,
    key_range,
    key_span,
    load_rows,
    load_scales,
    load_shift,
    load_tile,
    load_vectors,
    padded_rows,
    row_terms,
    schedule,
    sequence_bounds,
    store_rows,
    sum_all,
    to_registers,
    value_head,
    zeros_tuple,
)


@triton.jit
def walk_keys(
    first, last, b_q, b_do, b_row_operand, delta, alpha, rho, lam, acc, das, total, k_src, v_src, key_operand_src, i_b,
    i_k, i_v, start_k, o_operand, c_ptr, coef_ptr, mask_ptr, dmask_ptr, seed, i_bh, o_i, causal_offset, dropout_p,
    stride_km, stride_ks, stride_vs, stride_ml, stride_mj, stride_dl, L, S, n_key_tiles,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    SHIFTED: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, DMASK: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, UNEQUAL: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
    TMA: tl.constexpr, DEFER_FACTOR: tl.constexpr, COMPONENT_GEMM: tl.constexpr,
):  # fmt: skip
    """Accumulate dq (`acc`), d a (`das`) and the row sums of dS (`total`) over the keys first to last."""
    NS: tl.constexpr = 1 if SHIFTED else M
    FIRST: tl.constexpr = 1 if SHIFTED or UNEQUAL else M
    LEADS: tl.constexpr = HARD and SHIFTED and not UNEQUAL
    ACCURATE: tl.constexpr = b_q.dtype == tl.float32 and PRECISION == "ieee"
    for n in range(first, last, BN):
        o_n = n + tl.arange(0, BN)
        scores = component_scores(
            b_q, k_src, i_b, i_k, start_k, n, stride_km, stride_ks, S, BN, D, BD, 0, NS, MASKED, SHIFTED, PRECISION,
            TMA,
        )  # fmt: skip
        b_v = load_tile(v_src, i_b, i_v, 0, start_k, n, 0, stride_vs, S, BN, E, BE, False, MASKED, TMA)
        b_g = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        scores = mask_tile(
            scores, mask_ptr, o_i, o_n, causal_offset, stride_ml, stride_mj, L, S, lam, NS, CAUSAL, MASK, MASKED
        )
        if DROPOUT:
            b_g = tl.where(
                dropout_mask(seed, i_bh, o_i[:, None], o_n[None, :], dropout_p), b_g / (1.0 - dropout_p), 0.0
            )
        b_g -= delta[:, None]
        use_factors = LEADS or (SHIFTED and not EXACT)
        if not COMPONENT_GEMM:
            coef = load_vectors(coef_ptr if use_factors else c_ptr, o_n, n_key_tiles * KEY_TILE, S, M, 0, False)
        if COMPONENT_GEMM:
            b_key_operand = load_operand(key_operand_src, o_operand + n, BN, BN, False, TMA)
            b_p, b_ds, b_ge = factored_gradients(scores, b_g, alpha, component_gemm(b_row_operand, b_key_operand), lam)
        elif SHIFTED or EXACT:
            addends = coef if DEFER_FACTOR else alpha
            b_p, b_ds, parts = score_gradients(
                scores, b_g, addends, rho, coef, lam, M, SHIFTED, HARD, EXACT, UNEQUAL, FIRST, ACCURATE, DEFER_FACTOR
            )
        else:
            b_p, b_ds, parts = independent_gradients(scores, b_g, coef, coef, lam, M, False)
        if DMASK:
            p_dmask = dmask_ptr + o_i[:, None].to(tl.int64) * stride_dl + o_n[None, :]
            tl.store(p_dmask, b_p * b_g, mask=(o_i < L)[:, None] & (o_n < S)[None, :])
        total += tl.sum(b_ds[0] if SHIFTED and not UNEQUAL else b_p * b_g, 1)
        if COMPONENT_GEMM:
            das = (accumulate_gemm(b_ge, b_key_operand, das[0]),)
        else:
            updated = ()
            for r in tl.static_range(FIRST, M):
                part = parts[r - FIRST] if EXACT else parts[r - FIRST] * coef[r]
                updated = updated + (das[r - FIRST] + tl.sum(part, 1),)
            das = updated
        for r in tl.static_range(NS):
            b_k = load_tile(
                k_src, i_b, i_k, r, start_k, n, stride_km, stride_ks, S, BN, D, BD, not SHIFTED, MASKED, TMA
            )
            b_dsr = b_ds[r] * lam[r] if UNEQUAL and not SHIFTED else b_ds[r]
            acc = tl.dot(b_dsr.to(b_k.dtype), b_k, acc, input_precision=PRECISION)
    return acc, das, total


@triton.jit
def sum_over_keys(
    full, last, b_q, b_do, b_row_operand, delta, alpha, rho, lam, k_src, v_src, key_operand_src, i_b, i_k, i_v, start_k,
    o_operand, c_ptr, coef_ptr, mask_ptr, dmask_ptr, seed, i_bh, o_i, causal_offset, dropout_p, stride_km, stride_ks,
    stride_vs, stride_ml, stride_mj, stride_dl, L, S, n_key_tiles,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    DMASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, UNEQUAL: tl.constexpr, TMA: tl.constexpr,
    USE_FAST: tl.constexpr,
):  # fmt: skip
    """Return sums over all keys: dq without scale and shifts, d a_r for r >= FIRST, and the row sums of dS.

    In the fast form of hard assignment and of independent keys, the row's factor 2^(a_i0 - lse_i) is not yet applied.
    """
    FIRST: tl.constexpr = 1 if SHIFTED or UNEQUAL else M
    COMPONENT_GEMM: tl.constexpr = key_operand_src is not None and USE_FAST
    acc = tl.zeros([BM, BD], tl.float32)
    if COMPONENT_GEMM:
        das = (tl.zeros([BM, 16], tl.float32),)
    else:
        das = zeros_tuple(delta, M - FIRST)
    total = tl.zeros_like(delta)
    for MASKED in tl.static_range(2):
        # Skip an empty loop: its first copies still cost time.
        if full < last if MASKED else True:
            acc, das, total = walk_keys(
                full if MASKED else 0, last if MASKED else full, b_q, b_do, b_row_operand, delta, alpha, rho, lam, acc,
                das, total, k_src, v_src, key_operand_src, i_b, i_k, i_v, start_k, o_operand, c_ptr, coef_ptr, mask_ptr,
                dmask_ptr, seed, i_bh, o_i, causal_offset, dropout_p, stride_km, stride_ks, stride_vs, stride_ml,
                stride_mj, stride_dl, L, S, n_key_tiles, M, D, E, BD, BE, BN, SHIFTED, HARD, CAUSAL, MASK, DMASK,
                DROPOUT, PRECISION, UNEQUAL, MASKED, not USE_FAST or HARD, TMA, USE_FAST and HARD, COMPONENT_GEMM,
            )  # fmt: skip
    if COMPONENT_GEMM:
        das = component_sums(das[0], 1, M, False)
    if USE_FAST and SHIFTED and not HARD:
        das = mul_vectors(das, rho, 1, M)
    return acc, das, total


@triton.jit
def store_shift_sums(
    p_sums, das, b_x, o_d, lam, M: tl.constexpr, D: tl.constexpr, OPPOSITE: tl.constexpr
):  # fmt: skip
    """Store this tile's part of d shift, lambda_r sum_i d a_ir q_i. OPPOSITE: d a_i0 = -d a_i1 for two components."""
    if OPPOSITE:
        b_sum = tl.sum(das[1][:, None] * b_x, 0)
        tl.store(p_sums + o_d, -lam[0] * b_sum, mask=o_d < D)
        tl.store(p_sums + D + o_d, lam[1] * b_sum, mask=o_d < D)
    else:
        for r in tl.static_range(M):
            tl.store(p_sums + r * D + o_d, lam[r] * tl.sum(das[r][:, None] * b_x, 0), mask=o_d < D)


@triton.jit
def dq_tile(
    i_m, i_bh, q_ptr, k_src, v_src, shift_ptr, mask_ptr, seed_ptr, scale_ptr, tau_ptr, cu_q_ptr, cu_k_ptr, c_ptr,
    stats_ptr, out_ptr, lse_ptr, do_ptr, dlse_ptr, dq_ptr, dmask_ptr, rows_ptr, row_operand_ptr, key_operand_src,
    query_sums, spread_ptr, flags_ptr, sums_ptr, scale, tau, dropout_p, stride_qb, stride_qh, stride_ql, stride_kb,
    stride_kh, stride_km, stride_ks, stride_vb, stride_vh, stride_vs, stride_mb, stride_mh, stride_ml, stride_mj,
    stride_gb, stride_gh, stride_gl, stride_rows, GROUP, stride_ob, stride_oh, stride_ol, H, L, S, n_key_tiles, n_tiles,
    n_heads,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr, SCALE: tl.constexpr, TAU: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DMASK: tl.constexpr, DLSE: tl.constexpr, DROPOUT: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, VALUE_GROUP: tl.constexpr, TMA: tl.constexpr,
    IN_REGISTERS: tl.constexpr, PRIOR: tl.constexpr, TILES: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """Write the gradients of query tile i_m and what dkdv reads; i_bh is the index of batch entry and head."""
    UNEQUAL: tl.constexpr = SCALE > 1
    FIRST: tl.constexpr = 1 if SHIFTED or UNEQUAL else M
    # 2^(a_i0 - lse_i) is a factor, applied after the loop.
    FACTOR: tl.constexpr = PATH == FAST and (HARD or not SHIFTED)
    # With BN keys per step, the general form would need more registers than the fast form in the same kernel.
    GENERAL_BN: tl.constexpr = BN // 2 if PATH == BOTH and BN > 16 else BN
    i_h = i_bh % H
    i_k = i_h // GROUP
    i_v = value_head(i_h, i_k, VALUE_GROUP)
    i_seq = i_bh // H
    i_b, start_q, n_q, _ = sequence_bounds(cu_q_ptr, i_seq, L, PACKED)
    _, start_k, n_k, key_tile = sequence_bounds(cu_k_ptr, i_seq, S, PACKED)
    p_flag = flags_ptr + i_bh * n_tiles + i_m
    if PATH != FALLBACK or TILES == 1:
        if i_m * BM >= n_q:
            return
    o_row = (i_b * H + i_h).to(tl.int64) * L + start_q
    q_ptr += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh + start_q.to(tl.int64) * stride_ql
    do_ptr += i_b.to(tl.int64) * stride_gb + i_h.to(tl.int64) * stride_gh + start_q.to(tl.int64) * stride_gl
    out_ptr += i_b.to(tl.int64) * stride_ob + i_h.to(tl.int64) * stride_oh + start_q.to(tl.int64) * stride_ol
    k_src = head_pointer(k_src, i_b, i_k, start_k, stride_kb, stride_kh, stride_ks, TMA)
    v_src = head_pointer(v_src, i_b, i_v, start_k, stride_vb, stride_vh, stride_vs, TMA)
    if MASK:
        mask_ptr += i_b.to(tl.int64) * stride_mb + i_h.to(tl.int64) * stride_mh
    if DMASK:
        dmask_ptr += (i_b * H + i_h).to(tl.int64) * L * S
    c_ptr += (i_k * M).to(tl.int64) * n_key_tiles * KEY_TILE + key_tile * KEY_TILE
    coef_ptr = c_ptr + (H // GROUP * M).to(tl.int64) * n_key_tiles * KEY_TILE
    stats_ptr += (i_k * n_key_tiles + key_tile) * NUM_STATS
    seed = tl.load(seed_ptr) if DROPOUT else 0
    if TAU:
        tau = tl.load(tau_ptr + i_k)
    lam = load_scales(scale_ptr, scale, i_k, M, SCALE)

    o_i = i_m * BM + tl.arange(0, BM)
    m_i = o_i < n_q
    # All loads are issued before the first one is awaited. Three tiles wider than 128 do not fit the registers.
    b_q = load_rows(q_ptr, o_i, stride_ql, n_q, D, BD, True)
    b_do = load_rows(do_ptr, o_i, stride_gl, n_q, E, BE, True)
    if BE <= 128:
        b_out = load_rows(out_ptr, o_i, stride_ol, n_q, E, BE, True)
    lse = tl.load(lse_ptr + o_row + o_i, mask=m_i, other=float("inf"))
    high, low, longest, end, masked = key_range(stats_ptr, tl.cdiv(n_k, KEY_TILE))
    b_q = to_registers(b_q, BD, IN_REGISTERS)
    b_do = to_registers(b_do, BE, IN_REGISTERS)
    if BE > 128:
        b_out = load_rows(out_ptr, o_i, stride_ol, n_q, E, BE, True)
    # From the gradients in registers: the sum then has the layout of the scores' rows. With that of the loads, sm_90
    # spills 76 values in the loop.
    delta = tl.sum(b_out.to(tl.float32) * b_do.to(tl.float32), 1)
    if DLSE:
        dlse = tl.load(dlse_ptr + o_row + o_i, mask=m_i & (lse < float("inf")), other=0.0) * LOG2E
        delta -= dlse
    else:
        dlse = tl.zeros_like(delta)
    # A sequence without keys has no reference exponent.
    lse = tl.where(lse < float("inf"), lse - tl.load(stats_ptr + STAT_REFERENCE), float("inf"))
    a, squared_norm = row_terms(b_q, shift_ptr, i_k, lam, tau, M, D, BD, SHIFTED, UNEQUAL)
    a_columns = as_columns(a, 0.0, M)
    alpha = as_columns(a, lse, M)
    rho = component_ratios(a_columns, M, HARD, FACTOR_RANGE)
    # Row vectors, read by `mixture_backward_dkdv`. Zeros beyond a head's last row, since TMA reads whole blocks.
    o_vector = (i_b * H + i_h).to(tl.int64) * padded_rows(L) + start_q + o_i
    m_vector = m_i if PACKED else o_i < padded_rows(L)
    p_rows = rows_ptr + o_vector
    stride_rows = stride_rows.to(tl.int64)
    if PATH != FINISH:
        for r in tl.static_range(M):
            tl.store(p_rows + r * stride_rows, tl.where(m_i, a[r] - lse, 0.0), mask=m_vector)
        for r in tl.static_range(1, M):
            tl.store(p_rows + (M + r - 1) * stride_rows, tl.where(m_i, tl.sum(rho[r - 1], 1), 0.0), mask=m_vector)
    b_row_operand = b_q
    if (key_operand_src is not None and (PATH == FAST or PATH == BOTH)) or row_operand_ptr is not None:
        o_c = tl.arange(0, 16)
        b_row_operand = gemm_operand((tl.full([BM, 1], 1.0, tl.float32),) + rho, o_c, M, True)
        if row_operand_ptr is not None:
            p_operand = row_operand_ptr + o_vector[:, None] * 16 + o_c[None, :]
            tl.store(p_operand, tl.where(m_i[:, None], b_row_operand, 0.0), mask=m_vector[:, None])
    causal_offset = n_k - n_q if CAUSAL == 2 else 0
    full, last = key_ends(i_m, n_k, causal_offset, BM, BN, CAUSAL)
    spread = tl.max(elementwise_max(a, M) - elementwise_min(a, M), 0)
    # lse does not bound the exponent of a masked key. It may exceed the safe range by 40 before its power of two
    # overflows, which times 0 would be NaN.
    reach = tl.sqrt(squared_norm) * (longest * elementwise_max(lam, M) * LOG2E) + (a[0] - lse)
    reach = tl.max(tl.where(m_i & (masked > 0), reach, 0.0), 0)
    spread = tl.maximum(spread, reach - 40.0)
    if not SHIFTED:
        spread = tl.maximum(spread, tl.max(tl.where(lse < float("inf"), tl.abs(lse), 0.0), 0))
    if PATH != FINISH:
        tl.store(spread_ptr + i_bh * n_tiles + i_m, spread)
    if PATH == PREPARE:
        tl.store(p_rows + (2 * M - 1) * stride_rows, tl.where(m_i, delta, 0.0), mask=m_vector)
        clear_query_sums(query_sums, p_rows, o_vector, m_vector, stride_rows, M, BD)
        return
    # The gradient of a float mask is written for every pair.
    if not DMASK:
        full = min(full, end)
        last = min(last, end)
    if FACTOR:
        # lse bounds the exponents of a row from above.
        slack = tl.maximum(tl.max(tl.where(lse < float("inf"), tl.abs(a[0] - lse), 0.0), 0), high)
    else:
        slack = spread + key_span(high, low)
    safe = slack <= (SAFE_RANGE if HARD or not SHIFTED else FACTOR_RANGE)
    if PATH == FAST:
        if flag_for_fallback(p_flag, safe):
            return
    if PATH == FINISH:
        acc, das = load_query_sums(query_sums, p_rows, o_vector, m_i, stride_rows, M, BD)
    else:
        acc = tl.zeros([BM, BD], tl.float32)
        das = zeros_tuple(squared_norm, M - FIRST)
    total = tl.zeros_like(squared_norm)
    IS_FAST: tl.constexpr = PATH == FAST
    for USE_FAST in tl.static_range(2 if PATH != FINISH else 0):
        # PATH BOTH selects a form for each program, the other paths select one at compile time.
        is_selected = safe if USE_FAST else not safe
        if is_selected if PATH == BOTH else IS_FAST == USE_FAST:
            acc, das, total = sum_over_keys(
                full, last, b_q, b_do, b_row_operand, delta, alpha, rho, lam, k_src, v_src, key_operand_src, i_b, i_k,
                i_v, start_k, (i_k * n_key_tiles + key_tile) * KEY_TILE, c_ptr, coef_ptr, mask_ptr, dmask_ptr, seed,
                i_bh, o_i, causal_offset, dropout_p, stride_km, stride_ks, stride_vs, stride_ml, stride_mj, S, n_q, n_k,
                n_key_tiles, M, D, E, BD, BE, BM, BN if USE_FAST else GENERAL_BN, SHIFTED, HARD, CAUSAL, MASK, DMASK,
                DROPOUT, PRECISION, UNEQUAL, TMA, USE_FAST,
            )  # fmt: skip
    if FACTOR:
        factor = tl.exp2(a[0] - lse)
        total *= factor
        das = mul_all(das, factor, M - FIRST)
        acc *= factor[:, None]
    # delta is computed from the rounded output. The row sum of dS must equal the gradient of lse; the difference is the
    # error of delta.
    corrected = delta + (total - dlse)
    # PATH BOTH loads by pointer and reads nothing beyond the last row; keeping m_i over the loop would take registers.
    if PATH != BOTH:
        corrected = tl.where(m_i, corrected, 0.0)
    if PATH != FINISH:
        tl.store(p_rows + (2 * M - 1) * stride_rows, corrected, mask=m_vector)

    # The d a_r of a row add up to the gradient of its lse, which gives d a_0.
    # A single sum is left for two components without gradient of lse: the other one is its negative.
    OPPOSITE: tl.constexpr = FIRST == 1 and M == 2 and not DLSE
    if FIRST < M or M == 1:
        da_0 = dlse
        for r in tl.static_range(1, M):
            da_0 -= das[r - 1]
        das = (da_0,) + das
    # Loaded again: keeping the queries during the loop would take registers.
    b_x = (b_q if IN_REGISTERS else load_rows(q_ptr, o_i, stride_ql, n_q, D, BD, True)).to(tl.float32)
    o_d = tl.arange(0, BD)
    i_row = (i_seq * GROUP + i_h % GROUP) * n_tiles + i_m
    # Entries of a head: d shift, d tau (at TAUS), d scale, d log pi.
    TAUS: tl.constexpr = M * D if SHIFTED else 0
    SUMS: tl.constexpr = TAUS + 1 + M + (M if PRIOR == 1 else 0)
    p_sums = sums_ptr + (i_row * (H // GROUP) + i_k).to(tl.int64) * SUMS
    # d log pi is written by `mixture_backward_dkdv`.
    for r in tl.static_range(SUMS - (TAUS + 1 + M)):
        tl.store(p_sums + TAUS + 1 + M + r, 0.0)
    if SHIFTED:
        for r in tl.static_range(M):
            b_r = load_shift(shift_ptr, i_k, r, M, D, BD)
            acc += das[r][:, None] * b_r[None, :] * (lam[r] if UNEQUAL else 1.0)
        if BD <= 128:
            store_shift_sums(p_sums, das, b_x, o_d, lam, M, D, OPPOSITE)
    dtau = 0.0
    if UNEQUAL:
        for r in tl.static_range(M):
            acc -= (das[r] * (tau * lam[r]))[:, None] * b_x
            dtau -= 0.5 * lam[r] * tl.sum(das[r] * squared_norm, 0)
            tl.store(p_sums + TAUS + 1 + r, tl.sum(das[r] * a[r], 0) / (lam[r] * LOG2E))
    else:
        # A scale that is a number has no gradient.
        tl.store(p_sums + TAUS + 1, sum_all(acc * b_x) if SCALE == 1 else 0.0)
        acc *= lam[0]
    tl.store(p_sums + TAUS, dtau)
    # dq is [B, L, H, D] in memory.
    dq_ptr += ((i_b * L + start_q).to(tl.int64) * H + i_h) * D
    store_rows(dq_ptr, acc, o_i, H * D, n_q, D, BD)
    if SHIFTED and BD > 128:
        # After dq is stored: the tiles of these sums and the accumulator would not fit the registers.
        b_x = load_rows(q_ptr, o_i, stride_ql, n_q, D, BD, True).to(tl.float32)
        store_shift_sums(p_sums, das, b_x, o_d, lam, M, D, OPPOSITE)


@triton.jit(do_not_specialize=["H", "L", "S", "n_key_tiles", "n_tiles", "n_heads", "SECTION"])
def mixture_backward_dq(
    q_ptr, k_src, v_src, shift_ptr, mask_ptr, seed_ptr, scale_ptr, tau_ptr, cu_q_ptr, cu_k_ptr, c_ptr, stats_ptr,
    out_ptr, lse_ptr, do_ptr, dlse_ptr, dq_ptr, dmask_ptr, rows_ptr, row_operand_ptr, key_operand_src, query_sums,
    spread_ptr, flags_ptr, sums_ptr, scale, tau, dropout_p, stride_qb, stride_qh, stride_ql, stride_kb, stride_kh,
    stride_km, stride_ks, stride_vb, stride_vh, stride_vs, stride_mb, stride_mh, stride_ml, stride_mj, stride_gb,
    stride_gh, stride_gl, stride_rows, GROUP, stride_ob, stride_oh, stride_ol, H, L, S, n_key_tiles, n_tiles, n_heads,
    SECTION,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr, SCALE: tl.constexpr, TAU: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DMASK: tl.constexpr, DLSE: tl.constexpr, DROPOUT: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, VALUE_GROUP: tl.constexpr, TMA: tl.constexpr,
    IN_REGISTERS: tl.constexpr, PRIOR: tl.constexpr, TILES: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """Write dq, the gradient of a float mask, and this tile's part of d shift, d tau and d scale.

    Also writes the inputs of `mixture_backward_dkdv`: the row vectors alpha_r, rho_r and delta, the rows' operand of
    the component GEMM (unless row_operand_ptr is None) and the tile's spread.
    PATH PREPARE writes only these, FINISH only the gradients, from query_sums (`bwd_onepass`).
    """
    if PATH == FALLBACK and TILES > 1:
        first, last = fallback_tiles(flags_ptr, n_tiles * n_heads, TILES)
        for t in range(first, last):
            _, _, n_q, _ = sequence_bounds(cu_q_ptr, t // n_tiles // H, L, PACKED)
            # Flags of tiles beyond the end of a sequence are not written.
            if (tl.load(flags_ptr + t) != 0.0) & (t % n_tiles * BM < n_q):
                dq_tile(
                    t % n_tiles, t // n_tiles, q_ptr, k_src, v_src, shift_ptr, mask_ptr, seed_ptr, scale_ptr, tau_ptr,
                    cu_q_ptr, cu_k_ptr, c_ptr, stats_ptr, out_ptr, lse_ptr, do_ptr, dlse_ptr, dq_ptr, dmask_ptr,
                    rows_ptr, row_operand_ptr, key_operand_src, query_sums, spread_ptr, flags_ptr, sums_ptr, scale, tau,
                    dropout_p, stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_km, stride_ks, stride_vb,
                    stride_vh, stride_vs, stride_mb, stride_mh, stride_ml, stride_mj, stride_gb, stride_gh, stride_gl,
                    stride_rows, GROUP, stride_ob, stride_oh, stride_ol, H, L, S, n_key_tiles, n_tiles, n_heads, M, D,
                    E, BD, BE, BM, BN, SHIFTED, HARD, SCALE, TAU, CAUSAL, MASK, DMASK, DLSE, DROPOUT, PACKED, PRECISION,
                    VALUE_GROUP, TMA, IN_REGISTERS, PRIOR, TILES, PATH,
                )  # fmt: skip
    else:
        i_m, i_bh = schedule(n_tiles, n_heads, SECTION)
        if PATH == FALLBACK:
            if tl.load(flags_ptr + i_bh * n_tiles + i_m) == 0.0:
                return
        dq_tile(
            i_m, i_bh, q_ptr, k_src, v_src, shift_ptr, mask_ptr, seed_ptr, scale_ptr, tau_ptr, cu_q_ptr, cu_k_ptr,
            c_ptr, stats_ptr, out_ptr, lse_ptr, do_ptr, dlse_ptr, dq_ptr, dmask_ptr, rows_ptr, row_operand_ptr,
            key_operand_src, query_sums, spread_ptr, flags_ptr, sums_ptr, scale, tau, dropout_p, stride_qb, stride_qh,
            stride_ql, stride_kb, stride_kh, stride_km, stride_ks, stride_vb, stride_vh, stride_vs, stride_mb,
            stride_mh, stride_ml, stride_mj, stride_gb, stride_gh, stride_gl, stride_rows, GROUP, stride_ob, stride_oh,
            stride_ol, H, L, S, n_key_tiles, n_tiles, n_heads, M, D, E, BD, BE, BM, BN, SHIFTED, HARD, SCALE, TAU,
            CAUSAL, MASK, DMASK, DLSE, DROPOUT, PACKED, PRECISION, VALUE_GROUP, TMA, IN_REGISTERS, PRIOR, TILES, PATH,
        )  # fmt: skip
