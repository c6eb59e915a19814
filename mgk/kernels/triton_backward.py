"""The backward pass: `gradient_queries` walks along the keys for a tile of queries, then `gradient_keys` along the
queries for a tile of keys.

Each sum is taken by one program in a fixed order, so the result is the same bit for bit on every run.
"""

# ruff: noqa: RUF005  (Triton has no starred tuples)
import triton
import triton.language as tl

from .triton_gradients import gradients, independent_gradients
from .triton_tiles import (
    LOG2E,
    SAFE_RANGE,
    TILE,
    columns,
    component_scores,
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
    load_shift,
    load_tile,
    load_vectors,
    mask_scores,
    not_mine,
    ratios,
    row_terms,
    schedule,
    smallest,
    store_rows,
    zeros_like_each,
)  # fmt: skip

# What a launch of `gradient_keys` computes: dk with all that belongs to it, dv, or both.
BOTH, KEYS, VALUES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def times(xs, columns_, FIRST: tl.constexpr, M: tl.constexpr):
    """x_r times a factor that is expanded to a column; 0 where that is 0, whatever x_r."""
    out = ()
    for r in tl.static_range(FIRST, M):
        b_factor = tl.sum(columns_[r - FIRST], 1)
        out = out + (tl.where(b_factor == 0.0, 0.0, xs[r - FIRST] * b_factor),)
    return out


@triton.jit
def times_columns(xs, columns_, M: tl.constexpr):
    out = ()
    for r in tl.static_range(M):
        out = out + (tl.where(columns_[r] == 0.0, 0.0, xs[r] * columns_[r]),)
    return out


@triton.jit
def without_others(xs, M: tl.constexpr):
    """The first of xs holds the sum of all: takes the others out of it."""
    first = xs[0]
    out = ()
    for r in tl.static_range(1, M):
        first -= xs[r]
        out = out + (xs[r],)
    return (first,) + out


@triton.jit
def walk_keys(
    first, last, b_q, b_do, delta, alpha, rho, lam, acc, das, total, k_src, v_src, i_b, i_k, start_k, c_ptr, coef_ptr,
    mask_ptr, dmask_ptr, seed, i_bh, o_i, causal_offset,
    dropout_p, stride_km, stride_ks, stride_vs, stride_ml, stride_mj, stride_dl, L, S, n_slots,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    SHIFTED: tl.constexpr, HARD: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DMASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    UNEQUAL: tl.constexpr,
    MASKED: tl.constexpr, EXACT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    NS: tl.constexpr = 1 if SHIFTED else M
    FIRST: tl.constexpr = 1 if SHIFTED or UNEQUAL else M
    LEADS: tl.constexpr = HARD and SHIFTED and not UNEQUAL
    FINE: tl.constexpr = b_q.dtype == tl.float32 and PRECISION == "ieee"
    for n in range(first, last, BN):
        o_n = n + tl.arange(0, BN)
        scores = component_scores(
            b_q, k_src, i_b, i_k, start_k, n, stride_km, stride_ks, S, BN, D, BD, M, MASKED, SHIFTED, PRECISION, TMA
        )
        b_v = load_tile(v_src, i_b, i_k, 0, start_k, n, 0, stride_vs, S, BN, E, BE, False, MASKED, TMA)
        b_g = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        if MASK:
            scores = mask_scores(
                scores, mask_ptr, o_i[:, None], o_n[None, :], stride_ml, stride_mj, L, S, lam, NS, MASK
            )
        if MASKED and CAUSAL:
            scores = hide(scores, o_i[:, None] + causal_offset >= o_n[None, :], NS)
        if DROPOUT:
            b_g = tl.where(kept(seed, i_bh, o_i[:, None], o_n[None, :], S, dropout_p), b_g / (1.0 - dropout_p), 0.0)
        b_g -= delta[:, None]
        factors = LEADS or (SHIFTED and not EXACT)
        coef = load_vectors(coef_ptr if factors else c_ptr, o_n, n_slots * TILE, S, M, 0, False)
        if SHIFTED or EXACT:
            b_p, b_ds, parts = gradients(
                scores, b_g, alpha, rho, coef, lam, M, SHIFTED, HARD, EXACT, UNEQUAL, FIRST, FINE
            )
        else:
            b_p, b_ds, parts = independent_gradients(scores, b_g, coef, coef, lam, M, False)
        if DMASK:
            p_dmask = dmask_ptr + o_i[:, None].to(tl.int64) * stride_dl + o_n[None, :]
            tl.store(p_dmask, b_p * b_g, mask=(o_i < L)[:, None] & (o_n < S)[None, :])
        total += tl.sum(b_ds[0] if SHIFTED and not UNEQUAL else b_p * b_g, 1)
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


@triton.jit(do_not_specialize=["H", "L", "S", "n_slots", "n_tiles", "n_heads", "SECTION"])
def gradient_queries(
    q_ptr, k_src, v_src, shift_ptr, mask_ptr, seed_ptr, scale_ptr, tau_ptr, cu_q_ptr, cu_k_ptr, c_ptr, stats_ptr,
    out_ptr, lse_ptr, do_ptr, dlse_ptr,
    dq_ptr, dmask_ptr, rows_ptr, spread_ptr, flags_ptr, sums_ptr, scale, tau, dropout_p,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_km, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_mb, stride_mh, stride_ml, stride_mj,
    stride_ob, stride_oh, stride_ol, stride_rows, GROUP, H, L, S, n_slots, n_tiles, n_heads, SECTION,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SHIFTED: tl.constexpr,
    HARD: tl.constexpr, SCALE: tl.constexpr, TAU: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    DMASK: tl.constexpr, DLSE: tl.constexpr,
    DROPOUT: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, REGISTERS: tl.constexpr,
    PATH: tl.constexpr,
):  # fmt: skip
    """dq, the gradient of a float mask, what `gradient_keys` needs per query (alpha_r, rho_r, delta) and this tile's
    part of d shift, d tau, d scale."""
    UNEQUAL: tl.constexpr = SCALE > 1
    FIRST: tl.constexpr = 1 if SHIFTED or UNEQUAL else M
    i_m, i_bh = schedule(n_tiles, n_heads, SECTION)
    i_h = i_bh % H
    i_k = i_h // GROUP
    i_seq = i_bh // H
    i_b, start_q, n_q, _ = extent(cu_q_ptr, i_seq, L, PACKED)
    _, start_k, n_k, slot = extent(cu_k_ptr, i_seq, S, PACKED)
    p_flag = flags_ptr + i_bh * n_tiles + i_m
    if i_m * BM >= n_q or not_mine(p_flag, PATH):
        return
    o_row = (i_b * H + i_h).to(tl.int64) * L + start_q
    q_ptr += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh + start_q.to(tl.int64) * stride_ql
    do_ptr += i_b.to(tl.int64) * stride_ob + i_h.to(tl.int64) * stride_oh + start_q.to(tl.int64) * stride_ol
    k_src = head_of(k_src, i_b, i_k, start_k, stride_kb, stride_kh, stride_ks, TMA)
    v_src = head_of(v_src, i_b, i_k, start_k, stride_vb, stride_vh, stride_vs, TMA)
    if MASK:
        mask_ptr += i_b.to(tl.int64) * stride_mb + i_h.to(tl.int64) * stride_mh
    if DMASK:
        dmask_ptr += (i_b * H + i_h).to(tl.int64) * L * S
    c_ptr += (i_k * M).to(tl.int64) * n_slots * TILE + slot * TILE
    coef_ptr = c_ptr + (H // GROUP * M).to(tl.int64) * n_slots * TILE
    stats_ptr += (i_k * n_slots + slot) * 4
    seed = tl.load(seed_ptr) if DROPOUT else 0
    if TAU:
        tau = tl.load(tau_ptr + i_k)
    lam = load_scales(scale_ptr, scale, i_k, M, SCALE)

    o_i = i_m * BM + tl.arange(0, BM)
    m_i = o_i < n_q
    b_q = in_registers(load_rows(q_ptr, o_i, stride_ql, n_q, D, BD, True), BD, REGISTERS)
    b_do = in_registers(load_rows(do_ptr, o_i, stride_ol, n_q, E, BE, True), BE, REGISTERS)
    delta = tl.sum(load_rows(out_ptr + o_row * E, o_i, E, n_q, E, BE, True).to(tl.float32) * b_do.to(tl.float32), 1)
    lse = tl.load(lse_ptr + o_row + o_i, mask=m_i, other=float("inf"))
    if DLSE:
        dlse = tl.load(dlse_ptr + o_row + o_i, mask=m_i & (lse < float("inf")), other=0.0) * LOG2E
        delta -= dlse
    else:
        dlse = tl.zeros_like(delta)
    lse -= tl.load(stats_ptr + 3)
    a, norm = row_terms(b_q, shift_ptr, i_k, lam, tau, M, D, BD, SHIFTED, UNEQUAL)
    flat = columns(a, 0.0, M)
    alpha = columns(a, lse, M)
    rho = ratios(flat, M, HARD)
    p_rows = rows_ptr + o_row + o_i
    for r in tl.static_range(M):
        tl.store(p_rows + r * stride_rows, a[r] - lse, mask=m_i)
    for r in tl.static_range(1, M):
        tl.store(p_rows + (M + r - 1) * stride_rows, tl.sum(rho[r - 1], 1), mask=m_i)
    causal_offset = n_k - n_q if CAUSAL == 2 else 0
    full = n_k // BN * BN
    last = n_k
    if CAUSAL:
        full = max(min(full, (i_m * BM + causal_offset + 1) // BN * BN), 0)
        last = max(min(n_k, i_m * BM + BM + causal_offset), 0)
    high, low, longest, end, masked = key_range(stats_ptr, tl.cdiv(n_k, TILE))
    spread = tl.max(largest(a, M) - smallest(a, M), 0)
    # No lse bounds a masked key. Its exponent may be 40 above what the others may lose before a weight of 0 times its
    # power is not 0.
    reach = tl.sqrt(norm) * (longest * largest(lam, M) * LOG2E) + (a[0] - lse)
    reach = tl.max(tl.where(m_i & (masked > 0), reach, 0.0), 0)
    spread = tl.maximum(spread, reach - 40.0)
    tl.store(spread_ptr + i_bh * n_tiles + i_m, spread)
    # The gradient of a float mask is written for every pair.
    if not DMASK:
        full = min(full, end)
        last = min(last, end)
    if SHIFTED:
        slack = spread + key_span(high, low)
    else:
        # No exponent of a row is above its lse.
        slack = tl.maximum(tl.max(tl.where(lse < float("inf"), tl.abs(lse), 0.0), 0), high)
    if leaves_to_second(p_flag, slack <= SAFE_RANGE, PATH):
        return
    acc = tl.zeros([BM, BD], tl.float32)
    das = zeros_like_each(norm, M - FIRST)
    total = tl.zeros_like(norm)
    for MASKED in tl.static_range(2):
        acc, das, total = walk_keys(
            full if MASKED else 0, last if MASKED else full, b_q, b_do, delta, alpha, rho, lam, acc, das, total,
            k_src, v_src, i_b, i_k, start_k,
            c_ptr, coef_ptr, mask_ptr, dmask_ptr, seed, i_bh, o_i, causal_offset, dropout_p, stride_km, stride_ks,
            stride_vs,
            stride_ml, stride_mj, S, n_q, n_k, n_slots, M, D, E, BD, BE, BN, SHIFTED, HARD, CAUSAL, MASK, DMASK,
            DROPOUT, PRECISION,
            UNEQUAL, MASKED, PATH != 1, TMA,
        )  # fmt: skip
    if PATH == 1 and not SHIFTED:
        factor = tl.exp2(-lse)
        total *= factor
        acc *= factor[:, None]
    # delta came from the rounded output. The score gradients of a row must add up to that of its lse: what they miss
    # is delta's error.
    tl.store(p_rows + (2 * M - 1) * stride_rows, delta + (total - dlse), mask=m_i)
    if PATH == 1 and SHIFTED:
        das = times(das, rho, 1, M)

    # The components' gradients of a row add up to that of its lse, so the first is the rest.
    if FIRST < M or M == 1:
        first = dlse
        for r in tl.static_range(1, M):
            first -= das[r - 1]
        das = (first,) + das
    b_x = b_q.to(tl.float32)
    o_d = tl.arange(0, BD)
    i_row = (i_seq * GROUP + i_h % GROUP) * n_tiles + i_m
    p_sums = sums_ptr + (i_row * (H // GROUP) + i_k).to(tl.int64) * (M * D + 1 + M)
    if SHIFTED:
        for r in tl.static_range(M):
            b_r = load_shift(shift_ptr, i_k, r, M, D, BD)
            acc += das[r][:, None] * b_r[None, :] * (lam[r] if UNEQUAL else 1.0)
            tl.store(p_sums + r * D + o_d, lam[r] * tl.sum(das[r][:, None] * b_x, 0), mask=o_d < D)
    dtau = 0.0
    if UNEQUAL:
        for r in tl.static_range(M):
            acc -= (das[r] * (tau * lam[r]))[:, None] * b_x
            dtau -= 0.5 * lam[r] * tl.sum(das[r] * norm, 0)
            tl.store(p_sums + M * D + 1 + r, tl.sum(das[r] * a[r], 0) / (lam[r] * LOG2E))
    else:
        tl.store(p_sums + M * D + 1, tl.sum(tl.sum(acc * b_x, 1), 0))
        acc *= lam[0]
    tl.store(p_sums + M * D, dtau)
    store_rows(dq_ptr + o_row * D, acc, o_i, D, n_q, D, BD)


@triton.jit
def walk_queries(
    first, last, keys, b_v, coef, lam, dks, dv, dcs, dlams, q_src, do_src, i_b, i_h, start_q, rows_ptr, mask_ptr,
    seed, i_bh, o_j, causal_offset, dropout_p,
    stride_ql, stride_ol, stride_ml, stride_mj, stride_rows, L, S,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    SHIFTED: tl.constexpr, HARD: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, UNEQUAL: tl.constexpr,
    MASKED: tl.constexpr,
    EXACT: tl.constexpr, TMA: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    """Tiles are transposed here, [keys, queries]: the weights and score gradients are then left operands straight from
    registers."""
    NS: tl.constexpr = 1 if SHIFTED else M
    # One row term will do: the factored form and leads have the others in rho, and independent keys have only one.
    ONE: tl.constexpr = not EXACT or (not UNEQUAL and (HARD or not SHIFTED))
    FINE: tl.constexpr = b_v.dtype == tl.float32 and PRECISION == "ieee"
    for m in range(first, last, BM):
        o_i = m + tl.arange(0, BM)
        b_q = load_tile(q_src, i_b, i_h, 0, start_q, m, 0, stride_ql, L, BM, D, BD, False, MASKED, TMA)
        b_do = load_tile(do_src, i_b, i_h, 0, start_q, m, 0, stride_ol, L, BM, E, BE, False, MASKED, TMA)
        raw = ()
        for r in tl.static_range(NS):
            raw = raw + (tl.dot(keys[r], tl.trans(b_q), input_precision=PRECISION),)
        if WANTED == VALUES:
            b_g = tl.zeros_like(raw[0])
        else:
            b_g = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
        scores = raw
        if MASK:
            scores = mask_scores(
                scores, mask_ptr, o_i[None, :], o_j[:, None], stride_ml, stride_mj, L, S, lam, NS, MASK
            )
        if MASKED:
            m_valid = (o_i < L)[None, :]
            if CAUSAL:
                m_valid = m_valid & (o_i[None, :] + causal_offset >= o_j[:, None])
            scores = hide(scores, m_valid, NS)
        alpha = load_vectors(rows_ptr, o_i, stride_rows, L, 1 if ONE else M, 0, MASKED)
        if ONE and not SHIFTED:
            for _ in tl.static_range(1, M):
                alpha = alpha + (alpha[0],)
        rho = load_vectors(rows_ptr + M * stride_rows, o_i, stride_rows, L, M - 1, 0, MASKED)
        delta = load_vectors(rows_ptr + (2 * M - 1) * stride_rows, o_i, stride_rows, L, 1, 0, MASKED)
        if DROPOUT:
            m_kept = kept(seed, i_bh, o_i[None, :], o_j[:, None], S, dropout_p)
            b_g = tl.where(m_kept, b_g / (1.0 - dropout_p), 0.0)
        b_g -= delta[0]
        if SHIFTED or EXACT:
            b_p, b_ds, parts = gradients(scores, b_g, alpha, rho, coef, lam, M, SHIFTED, HARD, EXACT, UNEQUAL, 0, FINE)
        else:
            b_p, b_ds, parts = independent_gradients(scores, b_g, alpha, coef, lam, M, True)
        if WANTED != VALUES:
            updated = ()
            for r in tl.static_range(M):
                part = parts[r]
                if SHIFTED and not EXACT and r > 0:
                    part = part * rho[r - 1]
                updated = updated + (dcs[r] + tl.sum(part, 1),)
            dcs = updated
        if UNEQUAL and WANTED != VALUES:
            updated_lams = ()
            for r in tl.static_range(M):
                updated_lams = updated_lams + (dlams[r] + tl.sum(parts[r] * raw[0 if SHIFTED else r], 1),)
            dlams = updated_lams
        if DROPOUT:
            b_p = tl.where(m_kept, b_p / (1.0 - dropout_p), 0.0)
        if WANTED != KEYS:
            dv = tl.dot(b_p.to(b_do.dtype), b_do, dv, input_precision=PRECISION)
        if WANTED != VALUES:
            updated_dks = ()
            for r in tl.static_range(NS):
                updated_dks = updated_dks + (tl.dot(b_ds[r].to(b_q.dtype), b_q, dks[r], input_precision=PRECISION),)
            dks = updated_dks
    return dks, dv, dcs, dlams


@triton.jit(
    do_not_specialize=["H", "L", "S", "n_slots", "n_tiles", "n_heads", "n_query_tiles", "n_query_sums", "SECTION"]
)
def gradient_keys(
    q_src, k_ptr, v_ptr, shift_ptr, mask_ptr, seed_ptr, scale_ptr, tau_ptr, cu_q_ptr, cu_k_ptr, c_ptr, stats_ptr,
    do_src, rows_ptr, spread_ptr, flags_ptr,
    dk_ptr, dv_ptr, dbias_ptr, sums_ptr, scale, tau, dropout_p,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_km, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_mb, stride_mh, stride_ml, stride_mj,
    stride_ob, stride_oh, stride_ol, stride_rows, GROUP, H, L, S, n_slots, n_tiles, n_heads, n_query_tiles,
    n_query_sums, SECTION,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BQ: tl.constexpr,
    SHIFTED: tl.constexpr, HARD: tl.constexpr, SCALE: tl.constexpr, TAU: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, DROPOUT: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, REGISTERS: tl.constexpr,
    WANTED: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """dk, dv, dc (the gradient of log pi) and this tile's part of d shift, d tau, d scale; a group's query heads one
    after another."""
    UNEQUAL: tl.constexpr = SCALE > 1
    NS: tl.constexpr = 1 if SHIFTED else M
    i_n, i_bk = schedule(n_tiles, n_heads, SECTION)
    if CAUSAL:
        i_n = n_tiles - 1 - i_n
    HK = H // GROUP
    i_k = i_bk % HK
    i_seq = i_bk // HK
    i_b, start_q, n_q, _ = extent(cu_q_ptr, i_seq, L, PACKED)
    _, start_k, n_k, slot = extent(cu_k_ptr, i_seq, S, PACKED)
    p_flag = flags_ptr + i_bk * n_tiles + i_n
    if i_n * BN >= n_k or not_mine(p_flag, PATH):
        return
    k_ptr += i_b.to(tl.int64) * stride_kb + i_k.to(tl.int64) * stride_kh + start_k.to(tl.int64) * stride_ks
    v_ptr += i_b.to(tl.int64) * stride_vb + i_k.to(tl.int64) * stride_vh + start_k.to(tl.int64) * stride_vs
    seed = tl.load(seed_ptr) if DROPOUT else 0
    if TAU:
        tau = tl.load(tau_ptr + i_k)
    lam = load_scales(scale_ptr, scale, i_k, M, SCALE)
    o_j = i_n * BN + tl.arange(0, BN)
    slot_c = (i_k * M).to(tl.int64) * n_slots * TILE + slot * TILE
    p_stats = stats_ptr + (i_k * n_slots + slot + i_n * BN // TILE) * 4
    high = tl.load(p_stats)
    low = tl.load(p_stats + 1)
    # Keys that are all masked need no walk.
    n_q = tl.where(high == -float("inf"), 0, n_q)

    spread = 0.0
    if PATH == 1:
        for t in range(0, GROUP * n_query_tiles, 128):
            o_t = t + tl.arange(0, 128)
            m_t = (o_t < GROUP * n_query_tiles) & (o_t % n_query_tiles < tl.cdiv(n_q, BQ))
            b_spread = tl.load(spread_ptr + (i_seq * H + i_k * GROUP) * n_query_tiles + o_t, mask=m_t, other=0.0)
            spread = tl.maximum(spread, tl.max(b_spread, 0))
    if PATH == 1 or (HARD and SHIFTED and not UNEQUAL):
        slot_c += (HK * M).to(tl.int64) * n_slots * TILE
    coef = load_vectors(c_ptr + slot_c, o_j, n_slots * TILE, n_k, M, 1, False)
    slack = spread + key_span(high, low)
    if not SHIFTED and PATH == 1:
        # A masked component is not in the lse, which then bounds nothing.
        for r in tl.static_range(M):
            b_masked = (coef[r] == 0.0) & (o_j < n_k)[:, None]
            slack += tl.max(tl.max(tl.where(b_masked, 2 * SAFE_RANGE, 0.0), 1), 0)
    if leaves_to_second(p_flag, slack <= SAFE_RANGE, PATH):
        return

    keys = ()
    for r in tl.static_range(NS):
        keys = keys + (in_registers(load_rows(k_ptr + r * stride_km, o_j, stride_ks, n_k, D, BD, True), BD, REGISTERS),)
    b_v = in_registers(load_rows(v_ptr, o_j, stride_vs, n_k, E, BE, True), BE, REGISTERS)
    causal_offset = n_k - n_q if CAUSAL == 2 else 0
    begin = 0
    full = 0
    whole = n_q // BM * BM
    if CAUSAL:
        begin = max(i_n * BN - causal_offset, 0) // BM * BM
        full = min(tl.cdiv(max(i_n * BN + BN - 1 - causal_offset, 0), BM) * BM, whole)
    dks = zeros_like_each(tl.zeros([BN, BD], tl.float32), NS)
    dv = tl.zeros([BN, BE], tl.float32)
    dcs = zeros_like_each(tl.zeros([BN], tl.float32), M)
    dlams = zeros_like_each(tl.zeros([BN], tl.float32), M if UNEQUAL else 0)
    for g in range(GROUP):
        i_h = i_k * GROUP + g
        o_row = (i_b * H + i_h).to(tl.int64) * L + start_q
        q_head = head_of(q_src, i_b, i_h, start_q, stride_qb, stride_qh, stride_ql, TMA)
        do_head = head_of(do_src, i_b, i_h, start_q, stride_ob, stride_oh, stride_ol, TMA)
        mask_head = mask_ptr
        if MASK:
            mask_head += i_b.to(tl.int64) * stride_mb + i_h.to(tl.int64) * stride_mh
        for part in tl.static_range(0 if CAUSAL else 1, 3):
            dks, dv, dcs, dlams = walk_queries(
                begin if part == 0 else (full if part == 1 else max(whole, begin)),
                full if part == 0 else (whole if part == 1 else n_q),
                keys, b_v, coef, lam, dks, dv, dcs, dlams, q_head, do_head, i_b, i_h, start_q, rows_ptr + o_row,
                mask_head, seed,
                i_seq * H + i_h, o_j, causal_offset, dropout_p, stride_ql, stride_ol, stride_ml, stride_mj,
                stride_rows, n_q, n_k,
                M, D, E, BD, BE, BM, SHIFTED, HARD, CAUSAL, MASK, DROPOUT, PRECISION, UNEQUAL, part != 1, PATH != 1,
                TMA, WANTED,
            )  # fmt: skip
    if WANTED != KEYS:
        store_rows(dv_ptr + (i_b * HK + i_k).to(tl.int64) * S * E + start_k * E, dv, o_j, E, n_k, E, BE)
    if WANTED == VALUES:
        return
    if PATH == 1:
        dcs = times(dcs, coef, 0, M)
    if PATH == 1 and not SHIFTED:
        dks = times_columns(dks, coef, M)
    if HARD and not UNEQUAL:
        dcs = without_others(dcs, M)

    o_d = tl.arange(0, BD)
    p_sums = sums_ptr + ((n_query_sums + i_seq * n_tiles + i_n) * HK + i_k).to(tl.int64) * (M * D + 1 + M)
    p_dk = dk_ptr + ((i_b * HK + i_k) * NS).to(tl.int64) * S * D + start_k * D
    p_dbias = dbias_ptr + ((i_b * HK + i_k) * M).to(tl.int64) * S + start_k + o_j
    dtau = 0.0
    dscale = 0.0
    total = tl.zeros([BN, BD], tl.float32)
    for r in tl.static_range(M):
        b_kr = keys[0 if SHIFTED else r].to(tl.float32)
        if SHIFTED:
            b_kr = tl.where((o_j < n_k)[:, None], b_kr + load_shift(shift_ptr, i_k, r, M, D, BD)[None, :], 0.0)
        b_pull = dcs[r][:, None] * b_kr
        square = tl.sum(tl.sum(b_pull * b_kr, 1), 0)
        dtau -= 0.5 * lam[r] * square
        tl.store(p_dbias + r * S, dcs[r], mask=o_j < n_k)
        if SHIFTED:
            total += b_pull * (lam[r] if UNEQUAL else 1.0)
            tl.store(p_sums + r * D + o_d, -tau * lam[r] * tl.sum(b_pull, 0), mask=o_d < D)
        else:
            store_rows(p_dk + r * S * D, lam[r] * (dks[r] - tau * b_pull), o_j, D, n_k, D, BD)
        if UNEQUAL:
            tl.store(p_sums + M * D + 1 + r, tl.sum(dlams[r], 0) - 0.5 * tau * square)
        else:
            dscale -= 0.5 * tau * square
    if SHIFTED:
        b_dk = dks[0] - tau * total if UNEQUAL else lam[0] * (dks[0] - tau * total)
        store_rows(p_dk, b_dk, o_j, D, n_k, D, BD)
    tl.store(p_sums + M * D, dtau)
    if not UNEQUAL:
        tl.store(p_sums + M * D + 1, dscale)
