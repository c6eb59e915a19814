"""The second pass backward: `gradient_keys` walks along the queries for a tile of keys.

A first kernel and a second one, or either form in one, as in the forward.
Each sum is taken by one program in a fixed order, so the result is the same bit for bit on every run.
"""

# ruff: noqa: RUF005  (Triton has no starred tuples)
import triton
import triton.language as tl

from mgk.kernels.mixture.bwd_common import blended_gradients, gradients, independent_gradients, scaled, times
from mgk.kernels.mixture.component_gemm import add_products, blend_operand, blended, component_sums, operand_tile
from mgk.kernels.mixture.tile import (  # fmt: skip
    FACTOR_RANGE,
    SAFE_RANGE,
    TILE,
    extent,
    head_of,
    hide,
    in_registers,
    kept,
    key_span,
    leaves_to_second,
    load_rows,
    load_scales,
    load_shift,
    load_tile,
    load_vectors,
    mask_scores,
    not_mine,
    padded_rows,
    schedule,
    store_rows,
    zeros_like_each,
)

# What a launch of `gradient_keys` computes: dk with all that belongs to it, dv, or both.
BOTH, KEYS, VALUES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


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
def row_vectors(
    src, o_row, m, stride, n, FIRST: tl.constexpr, LAST: tl.constexpr, BM: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """What `gradient_queries` left for rows m to m + BM of a head whose first is o_row: the vectors from FIRST to LAST.
    By the bulk copy engine, what lies beyond n is zero, and meets no weight."""
    out = ()
    for r in tl.static_range(FIRST, LAST):
        if TMA:
            out = out + (src.load([r, o_row.to(tl.int32) + m]),)
        else:
            out = out + load_vectors(
                src + r * stride.to(tl.int64) + o_row, m + tl.arange(0, BM), stride, n, 1, 0, MASKED
            )
    return out


@triton.jit
def some(xs, FIRST: tl.constexpr, COUNT: tl.constexpr):
    out = ()
    for r in tl.static_range(FIRST, FIRST + COUNT):
        out = out + (xs[r],)
    return out


@triton.jit
def products(keys, b_q, M: tl.constexpr, PRECISION: tl.constexpr):
    out = ()
    for r in tl.static_range(M):
        out = out + (tl.dot(keys[r], tl.trans(b_q), input_precision=PRECISION),)
    return out


@triton.jit
def visible(
    scores, mask_ptr, o_i, o_j, causal_offset, stride_ml, stride_mj, L, S, lam, NS: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The scores of a transposed tile under every mask."""
    if MASK:
        scores = mask_scores(scores, mask_ptr, o_i[None, :], o_j[:, None], stride_ml, stride_mj, L, S, lam, NS, MASK)
    if MASKED:
        m_valid = (o_i < L)[None, :]
        if CAUSAL:
            m_valid = m_valid & (o_i[None, :] + causal_offset >= o_j[:, None])
        scores = hide(scores, m_valid, NS)
    return scores


@triton.jit
def walk_queries(
    first, last, keys, b_v, b_factors, coef, lam, dks, dv, dcs, dlams, q_src, do_src, i_b, i_h, start_q, rows_src,
    operand_src, o_row, mask_ptr, seed, i_bh, o_j, causal_offset, dropout_p,
    stride_ql, stride_gl, stride_ml, stride_mj, stride_rows, L, S,
    FIRST: tl.constexpr, M: tl.constexpr, ALL: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BM: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, UNEQUAL: tl.constexpr,
    MASKED: tl.constexpr,
    EXACT: tl.constexpr, TMA: tl.constexpr, WANTED: tl.constexpr,
    ROWS: tl.constexpr, ONE_SIDE: tl.constexpr, BLEND: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Tiles are transposed here, [keys, queries]: the weights and score gradients are then left operands straight from
    registers. M components from FIRST on, of ALL."""
    NS: tl.constexpr = 1 if SHIFTED else M
    # One row term will do: the factored form and leads have the others in rho, and independent keys have only one.
    ONE: tl.constexpr = not EXACT or (not UNEQUAL and (HARD or not SHIFTED))
    FINE: tl.constexpr = b_v.dtype == tl.float32 and PRECISION == "ieee"
    for m in range(first, last, BM):
        o_i = m + tl.arange(0, BM)
        b_q = load_tile(q_src, i_b, i_h, 0, start_q, m, 0, stride_ql, L, BM, D, BD, False, MASKED, TMA)
        b_do = load_tile(do_src, i_b, i_h, 0, start_q, m, 0, stride_gl, L, BM, E, BE, False, MASKED, TMA)
        raw = products(keys, b_q, NS, PRECISION)
        b_g = tl.zeros_like(raw[0]) if WANTED == VALUES else tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
        scores = visible(
            raw, mask_ptr, o_i, o_j, causal_offset, stride_ml, stride_mj, L, S, lam, NS, CAUSAL, MASK, MASKED
        )
        alpha = row_vectors(
            rows_src, o_row, m, stride_rows, L, 0 if ONE else FIRST, 1 if ONE else FIRST + M, BM, MASKED, ROWS
        )
        if ONE and not SHIFTED:
            for _ in tl.static_range(1, M):
                alpha = alpha + (alpha[0],)
        rho = (
            ()
            if BLEND
            else row_vectors(rows_src, o_row, m, stride_rows, L, ALL, 2 * ALL - 1 if SHIFTED else ALL, BM, MASKED, ROWS)
        )
        delta = row_vectors(rows_src, o_row, m, stride_rows, L, 2 * ALL - 1, 2 * ALL, BM, MASKED, ROWS)
        if DROPOUT:
            m_kept = kept(seed, i_bh, o_i[None, :], o_j[:, None], S, dropout_p)
            b_g = tl.where(m_kept, b_g / (1.0 - dropout_p), 0.0)
        b_g -= delta[0]
        if BLEND:
            b_rows = operand_tile(operand_src, o_row + m, L - m, BM, MASKED, OPERAND)
            b_p, b_ds, b_ge = blended_gradients(scores, b_g, alpha, blended(b_factors, b_rows), lam)
            dcs = (add_products(b_ge, b_rows, dcs[0]),)
        elif SHIFTED or EXACT:
            b_p, b_ds, parts = gradients(
                scores, b_g, alpha, rho, coef, lam, M, SHIFTED, HARD, EXACT, UNEQUAL, 0, FINE, ONE_SIDE
            )
        else:
            b_p, b_ds, parts = independent_gradients(scores, b_g, alpha, coef, lam, M, True)
        if WANTED != VALUES and not BLEND:
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
        if DROPOUT and WANTED != KEYS:
            b_p = tl.where(m_kept, b_p / (1.0 - dropout_p), 0.0)
        if WANTED != KEYS:
            dv = tl.dot(b_p.to(b_do.dtype), b_do, dv, input_precision=PRECISION)
        if WANTED != VALUES:
            updated_dks = ()
            for r in tl.static_range(NS):
                updated_dks = updated_dks + (tl.dot(b_ds[r].to(b_q.dtype), b_q, dks[r], input_precision=PRECISION),)
            dks = updated_dks
    return dks, dv, dcs, dlams


@triton.jit
def key_sums(
    begin, full, whole, keys, b_v, coef, lam, dks, dv, q_src, do_src, i_b, i_k, i_seq, start_q, rows_src, operand_src,
    mask_ptr, seed, o_j, causal_offset, dropout_p,
    stride_qb, stride_qh, stride_ql, stride_gb, stride_gh, stride_gl, stride_mb, stride_mh, stride_ml, stride_mj,
    stride_rows, GROUP, H, L, n_q, n_k,
    FIRST: tl.constexpr, COUNT: tl.constexpr, M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    UNEQUAL: tl.constexpr, TMA: tl.constexpr, ROWS: tl.constexpr, WANTED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Of a tile of keys along the queries of a group's heads, by either form: dks without tau, dv, d c and d lambda of
    COUNT components from FIRST on."""
    # The components of soft shifted keys by the tensor cores.
    BLEND: tl.constexpr = operand_src is not None and FAST
    # Hard assignment of shifted keys: the first component's term of the exponents is a factor.
    FACTOR: tl.constexpr = FAST and HARD
    b_factors = b_v
    if BLEND:
        b_factors = blend_operand(coef, tl.arange(0, 16), M, False)
        dcs = (tl.zeros([BN, 16], tl.float32),)
    else:
        dcs = zeros_like_each(tl.zeros([BN], tl.float32), COUNT)
    dlams = zeros_like_each(tl.zeros([BN], tl.float32), COUNT if UNEQUAL else 0)
    for g in range(GROUP):
        i_h = i_k * GROUP + g
        o_row = (i_b * H + i_h).to(tl.int64) * padded_rows(L) + start_q
        q_head = head_of(q_src, i_b, i_h, start_q, stride_qb, stride_qh, stride_ql, TMA)
        do_head = head_of(do_src, i_b, i_h, start_q, stride_gb, stride_gh, stride_gl, TMA)
        mask_head = mask_ptr
        if MASK:
            mask_head += i_b.to(tl.int64) * stride_mb + i_h.to(tl.int64) * stride_mh
        for part in tl.static_range(0 if CAUSAL else 1, 3):
            dks, dv, dcs, dlams = walk_queries(
                begin if part == 0 else (full if part == 1 else max(whole, begin)),
                full if part == 0 else (whole if part == 1 else n_q),
                keys, b_v, b_factors, some(coef, FIRST, COUNT), some(lam, FIRST, COUNT), dks, dv, dcs, dlams,
                q_head, do_head, i_b, i_h, start_q, rows_src, operand_src, o_row, mask_head, seed,
                i_seq * H + i_h, o_j, causal_offset, dropout_p, stride_ql, stride_gl, stride_ml, stride_mj,
                stride_rows, n_q, n_k, FIRST, COUNT, M, D, E, BD, BE, BM, SHIFTED, HARD, CAUSAL, MASK, DROPOUT,
                PRECISION, UNEQUAL, part != 1, not FAST or HARD, TMA, WANTED, ROWS, FACTOR, BLEND,
                TMA and not PACKED,
            )  # fmt: skip
    if BLEND:
        dcs = component_sums(dcs[0], 0, M, True)
    if FACTOR:
        b_factor = tl.where((o_j < n_k)[:, None], tl.exp2(coef[0]), 0.0)
        dv *= b_factor
        dks = scaled(dks, b_factor, 1 if SHIFTED else M)
        dcs = scaled(dcs, tl.sum(b_factor, 1), M)
    if FAST and WANTED != VALUES:
        if not FACTOR:
            dcs = times(dcs, coef, 0, M)
        if not SHIFTED:
            dks = times_columns(dks, coef, M)
    return dks, dv, dcs, dlams


@triton.jit(
    do_not_specialize=["H", "L", "S", "n_slots", "n_tiles", "n_heads", "n_query_tiles", "n_query_sums", "SECTION"]
)
def gradient_keys(
    q_src, k_ptr, v_ptr, shift_ptr, mask_ptr, seed_ptr, scale_ptr, tau_ptr, cu_q_ptr, cu_k_ptr, c_ptr, stats_ptr,
    do_src, rows_src, operand_src, spread_ptr, flags_ptr,
    dk_ptr, dv_ptr, dbias_ptr, sums_ptr, scale, tau, dropout_p,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_km, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_mb, stride_mh, stride_ml, stride_mj,
    stride_gb, stride_gh, stride_gl, stride_rows, GROUP, H, L, S, n_slots, n_tiles, n_heads, n_query_tiles,
    n_query_sums, SECTION,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BQ: tl.constexpr,
    SHIFTED: tl.constexpr, HARD: tl.constexpr, SCALE: tl.constexpr, TAU: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, DROPOUT: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, REGISTERS: tl.constexpr,
    ROWS: tl.constexpr, WANTED: tl.constexpr, PRIOR: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """dk, dv, this tile's part of d shift, d tau, d scale, and dc, the gradient of log pi (PRIOR 1: this tile's part of
    its sum, 2: of each key); a group's query heads one after another."""
    UNEQUAL: tl.constexpr = SCALE > 1
    NS: tl.constexpr = 1 if SHIFTED else M
    # Soft independent keys whose dk do not fit the registers beside dv: a walk for each component.
    IN_TURN: tl.constexpr = REGISTERS >= 2 and WANTED == BOTH and not SHIFTED and not HARD
    COUNT: tl.constexpr = 1 if IN_TURN else M
    # Queries of a step in the general form: whole ones would need more registers than the fast form beside it.
    GENERAL_STEP: tl.constexpr = BM // 2 if PATH == 3 and BM > 16 else BM
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
    if PATH == 1 or PATH == 3:
        for t in range(0, GROUP * n_query_tiles, 128):
            o_t = t + tl.arange(0, 128)
            m_t = (o_t < GROUP * n_query_tiles) & (o_t % n_query_tiles < tl.cdiv(n_q, BQ))
            b_spread = tl.load(spread_ptr + (i_seq * H + i_k * GROUP) * n_query_tiles + o_t, mask=m_t, other=0.0)
            spread = tl.maximum(spread, tl.max(b_spread, 0))
    # From c to C.
    o_factors = (HK * M).to(tl.int64) * n_slots * TILE
    if PATH == 1 or (HARD and SHIFTED and not UNEQUAL):
        slot_c += o_factors
    if PATH != 3:
        coef = load_vectors(c_ptr + slot_c, o_j, n_slots * TILE, n_k, M, 1, False)
    slack = spread + key_span(high, low) if SHIFTED else tl.maximum(spread, key_span(high, low))
    if PATH == 1 and HARD:
        b_reach = tl.where((o_j < n_k)[:, None], tl.abs(coef[0]), 0.0)
        slack = tl.max(tl.max(b_reach, 1), 0)
    elif not SHIFTED and PATH == 1:
        # A masked component is not in the lse, which then bounds nothing.
        for r in tl.static_range(M):
            b_masked = (coef[r] == 0.0) & (o_j < n_k)[:, None]
            slack += tl.max(tl.max(tl.where(b_masked, 2 * SAFE_RANGE, 0.0), 1), 0)
    safe = slack <= (SAFE_RANGE if HARD or not SHIFTED else FACTOR_RANGE)
    if leaves_to_second(p_flag, safe, PATH):
        return

    b_v = in_registers(load_rows(v_ptr, o_j, stride_vs, n_k, E, BE, True), BE, REGISTERS % 2)
    causal_offset = n_k - n_q if CAUSAL == 2 else 0
    begin = 0
    full = 0
    whole = n_q // BM * BM
    if CAUSAL:
        begin = max(i_n * BN - causal_offset, 0) // BM * BM
        full = min(tl.cdiv(max(i_n * BN + BN - 1 - causal_offset, 0), BM) * BM, whole)
    dv = tl.zeros([BN, BE], tl.float32)
    TAUS: tl.constexpr = M * D if SHIFTED else 0
    SUMS: tl.constexpr = TAUS + 1 + M + (M if PRIOR == 1 else 0)
    o_d = tl.arange(0, BD)
    p_sums = sums_ptr + ((n_query_sums + i_seq * n_tiles + i_n) * HK + i_k).to(tl.int64) * SUMS
    # [B, S, HK, NS, D] and [B, S, HK, E]
    o_first = (i_b * S + start_k).to(tl.int64) * HK + i_k
    p_dk = dk_ptr + o_first * NS * D
    p_dbias = dbias_ptr + ((i_b * HK + i_k) * M).to(tl.int64) * S + start_k + o_j
    dtau = 0.0
    dscale = 0.0
    # The components from `first` on, COUNT of them: all, or one a walk.
    for first in tl.static_range(0, M, COUNT):
        keys = ()
        for r in tl.static_range(first, first + (1 if SHIFTED else COUNT)):
            b_kr = load_rows(k_ptr + r * stride_km, o_j, stride_ks, n_k, D, BD, True)
            keys = keys + (in_registers(b_kr, BD, REGISTERS % 2),)
        dks = zeros_like_each(tl.zeros([BN, BD], tl.float32), 1 if SHIFTED else COUNT)
        dcs = zeros_like_each(tl.zeros([BN], tl.float32), COUNT)
        dlams = zeros_like_each(tl.zeros([BN], tl.float32), COUNT if UNEQUAL else 0)
        for FAST in tl.static_range(2):
            if (safe if FAST else not safe) if PATH == 3 else (PATH == 1) == FAST:
                if PATH == 3:
                    terms = load_vectors(c_ptr + slot_c + FAST * o_factors, o_j, n_slots * TILE, n_k, M, 1, False)
                else:
                    terms = coef
                dks, dv, dcs, dlams = key_sums(
                    begin, full, whole, keys, b_v, terms, lam, dks, dv, q_src, do_src, i_b, i_k, i_seq, start_q,
                    rows_src, operand_src, mask_ptr, seed, o_j, causal_offset, dropout_p, stride_qb, stride_qh,
                    stride_ql, stride_gb, stride_gh, stride_gl, stride_mb, stride_mh, stride_ml, stride_mj, stride_rows,
                    GROUP, H, L, n_q, n_k, first, COUNT, M, D, E, BD, BE, BM if FAST else GENERAL_STEP, BN, SHIFTED,
                    HARD, CAUSAL, MASK, DROPOUT, PACKED, PRECISION, UNEQUAL, TMA, ROWS, WANTED, FAST,
                )  # fmt: skip
        if WANTED != KEYS and first + COUNT == M:
            store_rows(dv_ptr + o_first * E, dv, o_j, HK * E, n_k, E, BE)
        if WANTED != VALUES:
            if HARD and not UNEQUAL:
                dcs = without_others(dcs, M)
            total = tl.zeros([BN, BD], tl.float32)
            for r in tl.static_range(first, first + COUNT):
                if REGISTERS % 2:
                    b_kr = keys[0 if SHIFTED else r - first].to(tl.float32)
                else:
                    # Kept from the beginning, they would hold registers over the walk.
                    p_kr = k_ptr + (0 if SHIFTED else r) * stride_km
                    b_kr = load_rows(p_kr, o_j, stride_ks, n_k, D, BD, True).to(tl.float32)
                if SHIFTED:
                    b_kr = tl.where((o_j < n_k)[:, None], b_kr + load_shift(shift_ptr, i_k, r, M, D, BD)[None, :], 0.0)
                b_pull = dcs[r - first][:, None] * b_kr
                square = tl.sum(tl.sum(b_pull * b_kr, 1), 0)
                dtau -= 0.5 * lam[r] * square
                if PRIOR == 1:
                    tl.store(p_sums + TAUS + 1 + M + r, tl.sum(tl.where(o_j < n_k, dcs[r - first], 0.0), 0))
                elif PRIOR == 2:
                    tl.store(p_dbias + r * S, dcs[r - first], mask=o_j < n_k)
                if SHIFTED:
                    total += b_pull * (lam[r] if UNEQUAL else 1.0)
                    tl.store(p_sums + r * D + o_d, -tau * lam[r] * tl.sum(b_pull, 0), mask=o_d < D)
                else:
                    b_dk = lam[r] * (dks[r - first] - tau * b_pull)
                    store_rows(p_dk + r * D, b_dk, o_j, HK * NS * D, n_k, D, BD)
                if UNEQUAL:
                    tl.store(p_sums + TAUS + 1 + r, tl.sum(dlams[r - first], 0) - 0.5 * tau * square)
                else:
                    dscale -= 0.5 * tau * square
            if SHIFTED:
                b_dk = dks[0] - tau * total if UNEQUAL else lam[0] * (dks[0] - tau * total)
                store_rows(p_dk, b_dk, o_j, HK * D, n_k, D, BD)
    if WANTED != VALUES:
        tl.store(p_sums + TAUS, dtau)
        if not UNEQUAL:
            tl.store(p_sums + TAUS + 1, dscale)
