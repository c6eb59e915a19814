"""Second backward kernel: one program computes dk and dv of a tile of keys, in a loop over the queries.

Fast form, fallback and PATH BOTH work as in `fwd`. Every sum is taken by one program in a fixed order: results are
bitwise reproducible, except those of `bwd_onepass`.
"""

# ruff: noqa: RUF005, SIM109  (Triton has neither starred tuples nor `in`)
import triton
import triton.language as tl

from mgk.kernels.mixture.bwd_common import (
    factored_gradients,
    independent_gradients,
    mul_all,
    mul_columns,
    mul_vectors,
    score_gradients,
    subtract_rest,
    take,
)
from mgk.kernels.mixture.bwd_onepass import add_query_gradients
from mgk.kernels.mixture.component_gemm import (
    accumulate_gemm,
    component_gemm,
    component_sums,
    gemm_operand,
    load_operand,
)
from mgk.kernels.mixture.tile import (  # fmt: skip
    BOTH,
    FACTOR_RANGE,
    FAST,
    KEY_TILE,
    SAFE_RANGE,
    apply_mask,
    dropout_mask,
    flag_for_fallback,
    head_pointer,
    key_span,
    load_rows,
    load_scales,
    load_shift,
    load_tile,
    load_vectors,
    mask_scores,
    max_spread,
    padded_rows,
    query_bounds,
    schedule,
    sequence_bounds,
    shared_head,
    skip_tile,
    store_rows,
    to_registers,
    zeros_tuple,
)

# Values of the constexpr OUTPUTS: a launch writes dk (with d c and the partial sums), dv, or both.
DK_AND_DV, DK_ONLY, DV_ONLY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def load_row_vectors(
    src, o_row, m, stride, n, FIRST: tl.constexpr, LAST: tl.constexpr, BM: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Load the row vectors FIRST to LAST of rows m to m + BM of a head whose first row is o_row.

    With TMA, values beyond n are 0 and get weight 0.
    """
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
def transposed_scores(keys, b_q, M: tl.constexpr, PRECISION: tl.constexpr):
    out = ()
    for r in tl.static_range(M):
        out = out + (tl.dot(keys[r], tl.trans(b_q), input_precision=PRECISION),)
    return out


@triton.jit
def mask_transposed_tile(
    scores, mask_ptr, o_i, o_j, causal_offset, stride_ml, stride_mj, L, S, lam,
    NS: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Apply attn_mask, the end of the rows and the causal mask to the scores of a transposed tile."""
    if MASK:
        scores = mask_scores(scores, mask_ptr, o_i[None, :], o_j[:, None], stride_ml, stride_mj, L, S, lam, NS, MASK)
    if MASKED:
        m_valid = (o_i < L)[None, :]
        if CAUSAL:
            m_valid = m_valid & (o_i[None, :] + causal_offset >= o_j[:, None])
        scores = apply_mask(scores, m_valid, NS)
    return scores


@triton.jit
def walk_queries(
    first, last, keys, b_v, b_key_operand, coef, lam, dks, dv, dcs, dlams, q_src, do_src, i_b, i_h, start_q, rows_src,
    row_operand_src, query_sums, o_row, mask_ptr, seed, i_bh, o_j, causal_offset, dropout_p, stride_ql, stride_gl,
    stride_ml, stride_mj, stride_rows, L, S,
    FIRST: tl.constexpr, M: tl.constexpr, ALL: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BM: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, UNEQUAL: tl.constexpr, MASKED: tl.constexpr,
    EXACT: tl.constexpr, TMA: tl.constexpr, OUTPUTS: tl.constexpr, TMA_ROWS: tl.constexpr, DEFER_FACTOR: tl.constexpr,
    COMPONENT_GEMM: tl.constexpr, TMA_OPERAND: tl.constexpr,
):  # fmt: skip
    """Accumulate dks, dv, dcs and dlams over the queries first to last, for M of ALL components from FIRST on.

    Tiles are transposed, [keys, queries]: weights and score gradients are then left operands of GEMMs, read from
    registers. Unless query_sums is None, gradients of the queries are added to the sums of their rows.
    """
    NS: tl.constexpr = 1 if SHIFTED else M
    # A single row term is loaded: rho replaces the other ones in the factored form and for hard shifted keys, and
    # independent keys have only one.
    ONE_TERM: tl.constexpr = not EXACT or (not UNEQUAL and (HARD or not SHIFTED))
    ACCURATE: tl.constexpr = b_v.dtype == tl.float32 and PRECISION == "ieee"
    for m in range(first, last, BM):
        o_i = m + tl.arange(0, BM)
        b_q = load_tile(q_src, i_b, i_h, 0, start_q, m, 0, stride_ql, L, BM, D, BD, False, MASKED, TMA)
        b_do = load_tile(do_src, i_b, i_h, 0, start_q, m, 0, stride_gl, L, BM, E, BE, False, MASKED, TMA)
        raw = transposed_scores(keys, b_q, NS, PRECISION)
        b_g = tl.zeros_like(raw[0]) if OUTPUTS == DV_ONLY else tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
        scores = mask_transposed_tile(
            raw, mask_ptr, o_i, o_j, causal_offset, stride_ml, stride_mj, L, S, lam, NS, CAUSAL, MASK, MASKED
        )
        alpha = load_row_vectors(
            rows_src, o_row, m, stride_rows, L, 0 if ONE_TERM else FIRST, 1 if ONE_TERM else FIRST + M, BM, MASKED,
            TMA_ROWS,
        )  # fmt: skip
        if ONE_TERM and not SHIFTED:
            for _ in tl.static_range(1, M):
                alpha = alpha + (alpha[0],)
        rho = (
            ()
            if COMPONENT_GEMM
            else load_row_vectors(
                rows_src, o_row, m, stride_rows, L, ALL, 2 * ALL - 1 if SHIFTED else ALL, BM, MASKED, TMA_ROWS
            )
        )
        delta = load_row_vectors(rows_src, o_row, m, stride_rows, L, 2 * ALL - 1, 2 * ALL, BM, MASKED, TMA_ROWS)
        if DROPOUT:
            m_keep = dropout_mask(seed, i_bh, o_i[None, :], o_j[:, None], S, dropout_p)
            b_g = tl.where(m_keep, b_g / (1.0 - dropout_p), 0.0)
        b_g -= delta[0]
        if COMPONENT_GEMM:
            b_row_operand = load_operand(row_operand_src, o_row + m, L - m, BM, MASKED, TMA_OPERAND)
            b_p, b_ds, b_ge = factored_gradients(scores, b_g, alpha, component_gemm(b_key_operand, b_row_operand), lam)
            dcs = (accumulate_gemm(b_ge, b_row_operand, dcs[0]),)
        elif SHIFTED or EXACT:
            b_p, b_ds, parts = score_gradients(
                scores, b_g, alpha, rho, coef, lam, M, SHIFTED, HARD, EXACT, UNEQUAL, 0, ACCURATE, DEFER_FACTOR
            )
        else:
            b_p, b_ds, parts = independent_gradients(scores, b_g, alpha, coef, lam, M, True)
        if OUTPUTS != DV_ONLY and not COMPONENT_GEMM:
            updated = ()
            for r in tl.static_range(M):
                part = parts[r]
                if SHIFTED and not EXACT and r > 0:
                    part = part * rho[r - 1]
                updated = updated + (dcs[r] + tl.sum(part, 1),)
            dcs = updated
        if UNEQUAL and OUTPUTS != DV_ONLY:
            updated_lams = ()
            for r in tl.static_range(M):
                updated_lams = updated_lams + (dlams[r] + tl.sum(parts[r] * raw[0 if SHIFTED else r], 1),)
            dlams = updated_lams
        if DROPOUT and OUTPUTS != DK_ONLY:
            b_p = tl.where(m_keep, b_p / (1.0 - dropout_p), 0.0)
        if OUTPUTS != DK_ONLY:
            dv = tl.dot(b_p.to(b_do.dtype), b_do, dv, input_precision=PRECISION)
        if OUTPUTS != DV_ONLY:
            updated_dks = ()
            for r in tl.static_range(NS):
                updated_dks = updated_dks + (tl.dot(b_ds[r].to(b_q.dtype), b_q, dks[r], input_precision=PRECISION),)
            dks = updated_dks
        if query_sums is not None:
            add_query_gradients(
                b_ds[0], parts, keys[0], b_key_operand, rho, coef, query_sums, rows_src, o_row, m, stride_rows, M, BM,
                EXACT, TMA, TMA_ROWS,
            )  # fmt: skip
    return dks, dv, dcs, dlams


@triton.jit
def sum_over_queries(
    begin, full, whole, keys, b_v, coef, lam, dks, dv, q_src, do_src, i_b, i_p, i_seq, start_q, rows_src,
    row_operand_src, query_sums, mask_ptr, seed, o_j, causal_offset, dropout_p, stride_qb, stride_qh, stride_ql,
    stride_gb, stride_gh, stride_gl, stride_mb, stride_mh, stride_ml, stride_mj, stride_rows, GROUP, H, L, n_q, n_k,
    FIRST: tl.constexpr, COUNT: tl.constexpr, M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    UNEQUAL: tl.constexpr, TMA: tl.constexpr, TMA_ROWS: tl.constexpr, OUTPUTS: tl.constexpr, USE_FAST: tl.constexpr,
):  # fmt: skip
    """Return dks (without the tau term), dv, d c and d lambda of COUNT components from FIRST on.

    They are sums over the queries of the GROUP heads of pair head i_p. USE_FAST selects the form.
    """
    COMPONENT_GEMM: tl.constexpr = row_operand_src is not None and USE_FAST
    # Hard assignment of shifted keys: 2^c_j0 is a factor, applied after the loop.
    FACTOR: tl.constexpr = USE_FAST and HARD
    b_key_operand = b_v
    if COMPONENT_GEMM or (query_sums is not None and USE_FAST):
        b_key_operand = gemm_operand(coef, tl.arange(0, 16), M, False)
    if COMPONENT_GEMM:
        dcs = (tl.zeros([BN, 16], tl.float32),)
    else:
        dcs = zeros_tuple(tl.zeros([BN], tl.float32), COUNT)
    dlams = zeros_tuple(tl.zeros([BN], tl.float32), COUNT if UNEQUAL else 0)
    for g in range(GROUP):
        i_h = i_p * GROUP + g
        o_row = (i_b * H + i_h).to(tl.int64) * padded_rows(L) + start_q
        q_head = head_pointer(q_src, i_b, i_h, start_q, stride_qb, stride_qh, stride_ql, TMA)
        do_head = head_pointer(do_src, i_b, i_h, start_q, stride_gb, stride_gh, stride_gl, TMA)
        mask_head = mask_ptr
        if MASK:
            mask_head += i_b.to(tl.int64) * stride_mb + i_h.to(tl.int64) * stride_mh
        for part in tl.static_range(0 if CAUSAL else 1, 3):
            dks, dv, dcs, dlams = walk_queries(
                begin if part == 0 else (full if part == 1 else max(whole, begin)),
                full if part == 0 else (whole if part == 1 else n_q), keys, b_v, b_key_operand,
                take(coef, FIRST, COUNT), take(lam, FIRST, COUNT), dks, dv, dcs, dlams, q_head, do_head, i_b, i_h,
                start_q, rows_src, row_operand_src, query_sums, o_row, mask_head, seed, i_seq * H + i_h, o_j,
                causal_offset, dropout_p, stride_ql, stride_gl, stride_ml, stride_mj, stride_rows, n_q, n_k, FIRST,
                COUNT, M, D, E, BD, BE, BM, SHIFTED, HARD, CAUSAL, MASK, DROPOUT, PRECISION, UNEQUAL, part != 1,
                not USE_FAST or HARD, TMA, OUTPUTS, TMA_ROWS, FACTOR, COMPONENT_GEMM, TMA and not PACKED,
            )  # fmt: skip
    if COMPONENT_GEMM:
        dcs = component_sums(dcs[0], 0, M, True)
    if FACTOR:
        b_factor = tl.where((o_j < n_k)[:, None], tl.exp2(coef[0]), 0.0)
        dv *= b_factor
        dks = mul_all(dks, b_factor, 1 if SHIFTED else M)
        dcs = mul_all(dcs, tl.sum(b_factor, 1), M)
    if USE_FAST and OUTPUTS != DV_ONLY:
        if not FACTOR:
            dcs = mul_vectors(dcs, take(coef, FIRST, COUNT), 0, COUNT)
        if not SHIFTED:
            dks = mul_columns(dks, take(coef, FIRST, COUNT), COUNT)
    return dks, dv, dcs, dlams


@triton.jit(
    do_not_specialize=["H", "L", "S", "n_key_tiles", "n_tiles", "n_heads", "n_query_tiles", "n_query_sums", "SECTION"]
)
def mixture_backward_dkdv(
    q_src, k_ptr, v_ptr, shift_ptr, mask_ptr, seed_ptr, scale_ptr, tau_ptr, cu_q_ptr, cu_k_ptr, c_ptr, stats_ptr,
    do_src, rows_src, row_operand_src, query_sums, spread_ptr, flags_ptr, dk_ptr, dv_ptr, dbias_ptr, sums_ptr,
    scale, tau, dropout_p, stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_km, stride_ks, stride_vb,
    stride_vh, stride_vs, stride_mb, stride_mh, stride_ml, stride_mj, stride_gb, stride_gh, stride_gl, stride_rows,
    GROUP, H, L, S, n_key_tiles, n_tiles, n_heads, n_query_tiles, n_query_sums, SECTION,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BQ: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr, SCALE: tl.constexpr,
    TAU: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, KEY_REPEAT: tl.constexpr, VALUE_REPEAT: tl.constexpr, TMA: tl.constexpr,
    IN_REGISTERS: tl.constexpr, PER_COMPONENT: tl.constexpr, TMA_ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    PRIOR: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """Write dk, dv, this tile's part of d shift, d tau and d scale, and d log pi.

    PRIOR: 1 this tile's part of the sum of d log pi, 2 d log pi of every key. The query heads of a group are processed
    one after another. With different numbers of key and value heads, the group of a program are the query heads of a
    pair of them; dk, dv and d log pi are written per pair head, KEY_REPEAT of a key head, VALUE_REPEAT of a value head.
    Unless query_sums is None, gradients of the queries are added to it (`bwd_onepass`).
    """
    UNEQUAL: tl.constexpr = SCALE > 1
    NS: tl.constexpr = 1 if SHIFTED else M
    # Components per loop over the queries: one where all dk of soft independent keys and dv do not fit the registers.
    COUNT: tl.constexpr = 1 if PER_COMPONENT and OUTPUTS != DV_ONLY and not SHIFTED and not HARD else M
    # With BM queries per step, the general form would need more registers than the fast form in the same kernel. A TMA
    # descriptor has blocks of BM.
    GENERAL_BM: tl.constexpr = BM // 2 if PATH == BOTH and BM > 16 and not TMA else BM
    i_n, i_bk = schedule(n_tiles, n_heads, SECTION)
    if CAUSAL:
        i_n = n_tiles - 1 - i_n
    HP = H // GROUP
    HK = shared_head(HP, KEY_REPEAT)
    i_p = i_bk % HP
    i_k = shared_head(i_p, KEY_REPEAT)
    i_v = shared_head(i_p, VALUE_REPEAT)
    i_seq = i_bk // HP
    i_b, start_q, n_q, _ = sequence_bounds(cu_q_ptr, i_seq, L, PACKED)
    _, start_k, n_k, key_tile = sequence_bounds(cu_k_ptr, i_seq, S, PACKED)
    p_flag = flags_ptr + i_bk * n_tiles + i_n
    if i_n * BN >= n_k or skip_tile(p_flag, PATH):
        return
    k_ptr += i_b.to(tl.int64) * stride_kb + i_k.to(tl.int64) * stride_kh + start_k.to(tl.int64) * stride_ks
    v_ptr += i_b.to(tl.int64) * stride_vb + i_v.to(tl.int64) * stride_vh + start_k.to(tl.int64) * stride_vs
    seed = tl.load(seed_ptr) if DROPOUT else 0
    if TAU:
        tau = tl.load(tau_ptr + i_k)
    lam = load_scales(scale_ptr, scale, i_k, M, SCALE)
    o_j = i_n * BN + tl.arange(0, BN)
    o_c = (i_k * M).to(tl.int64) * n_key_tiles * KEY_TILE + key_tile * KEY_TILE
    p_stats = stats_ptr + (i_k * n_key_tiles + key_tile + i_n * BN // KEY_TILE) * 4
    high = tl.load(p_stats)
    low = tl.load(p_stats + 1)
    # Skip the loop if all keys of the tile are masked.
    n_q = tl.where(high == -float("inf"), 0, n_q)

    spread = 0.0
    if PATH == FAST or PATH == BOTH:
        spread = max_spread(spread_ptr, i_seq, i_p, n_query_tiles, n_q, GROUP, H, BQ)
    # Offset from c to C.
    o_factors = (HK * M).to(tl.int64) * n_key_tiles * KEY_TILE
    if PATH == FAST or (HARD and SHIFTED and not UNEQUAL):
        o_c += o_factors
    if PATH != BOTH:
        coef = load_vectors(c_ptr + o_c, o_j, n_key_tiles * KEY_TILE, n_k, M, 1, False)
    slack = spread + key_span(high, low) if SHIFTED else tl.maximum(spread, key_span(high, low))
    if PATH == FAST and HARD:
        b_reach = tl.where((o_j < n_k)[:, None], tl.abs(coef[0]), 0.0)
        slack = tl.max(tl.max(b_reach, 1), 0)
    elif not SHIFTED and PATH == FAST:
        # lse does not include a masked component, so it does not bound its exponent: use the fallback.
        for r in tl.static_range(M):
            b_masked = (coef[r] == 0.0) & (o_j < n_k)[:, None]
            slack += tl.max(tl.max(tl.where(b_masked, 2 * SAFE_RANGE, 0.0), 1), 0)
    safe = slack <= (SAFE_RANGE if HARD or not SHIFTED else FACTOR_RANGE)
    if flag_for_fallback(p_flag, safe, PATH):
        return

    b_v = to_registers(load_rows(v_ptr, o_j, stride_vs, n_k, E, BE, True), BE, IN_REGISTERS)
    causal_offset = n_k - n_q if CAUSAL == 2 else 0
    begin, full, whole = query_bounds(i_n, n_q, causal_offset, BM, BN, CAUSAL)
    dv = tl.zeros([BN, BE], tl.float32)
    TAUS: tl.constexpr = M * D if SHIFTED else 0
    SUMS: tl.constexpr = TAUS + 1 + M + (M if PRIOR == 1 else 0)
    o_d = tl.arange(0, BD)
    i_part = i_seq * n_tiles + i_n
    if KEY_REPEAT > 1:
        i_part = i_part * KEY_REPEAT + i_p % KEY_REPEAT
    p_sums = sums_ptr + ((n_query_sums + i_part) * HK + i_k).to(tl.int64) * SUMS
    # dk is [B, S, HP, NS, D] and dv [B, S, HP, E] in memory.
    o_head = (i_b * S + start_k).to(tl.int64) * HP + i_p
    p_dk = dk_ptr + o_head * NS * D
    p_dbias = dbias_ptr + ((i_b * HP + i_p) * M).to(tl.int64) * S + start_k + o_j
    dtau = 0.0
    dscale = 0.0
    # COUNT components from `first` on: all of them, or one per loop.
    for first in tl.static_range(0, M, COUNT):
        keys = ()
        for r in tl.static_range(first, first + (1 if SHIFTED else COUNT)):
            b_kr = load_rows(k_ptr + r * stride_km, o_j, stride_ks, n_k, D, BD, True)
            keys = keys + (to_registers(b_kr, BD, IN_REGISTERS),)
        dks = zeros_tuple(tl.zeros([BN, BD], tl.float32), 1 if SHIFTED else COUNT)
        dcs = zeros_tuple(tl.zeros([BN], tl.float32), COUNT)
        dlams = zeros_tuple(tl.zeros([BN], tl.float32), COUNT if UNEQUAL else 0)
        for USE_FAST in tl.static_range(2):
            if (safe if USE_FAST else not safe) if PATH == BOTH else (PATH == FAST) == USE_FAST:
                if PATH == BOTH:
                    terms = load_vectors(
                        c_ptr + o_c + USE_FAST * o_factors, o_j, n_key_tiles * KEY_TILE, n_k, M, 1, False
                    )
                else:
                    terms = coef
                dks, dv, dcs, dlams = sum_over_queries(
                    begin, full, whole, keys, b_v, terms, lam, dks, dv, q_src, do_src, i_b, i_p, i_seq, start_q,
                    rows_src, row_operand_src, query_sums, mask_ptr, seed, o_j, causal_offset, dropout_p, stride_qb,
                    stride_qh, stride_ql, stride_gb, stride_gh, stride_gl, stride_mb, stride_mh, stride_ml, stride_mj,
                    stride_rows, GROUP, H, L, n_q, n_k, first, COUNT, M, D, E, BD, BE, BM if USE_FAST else GENERAL_BM,
                    BN, SHIFTED, HARD, CAUSAL, MASK, DROPOUT, PACKED, PRECISION, UNEQUAL, TMA, TMA_ROWS, OUTPUTS,
                    USE_FAST,
                )  # fmt: skip
        if OUTPUTS != DK_ONLY and first + COUNT == M:
            store_rows(dv_ptr + o_head * E, dv, o_j, HP * E, n_k, E, BE)
        if OUTPUTS != DV_ONLY:
            if HARD and not UNEQUAL:
                dcs = subtract_rest(dcs, M)
            if SHIFTED and BD > 128:
                # Stored before the sums below: their tiles and this accumulator would not fit the registers.
                b_dk = dks[0]
                weight = tl.zeros([BN], tl.float32)
                for r in tl.static_range(M):
                    part = dcs[r] * (tau * lam[r] if UNEQUAL else tau)
                    b_dk -= part[:, None] * load_shift(shift_ptr, i_k, r, M, D, BD)[None, :]
                    weight += part
                b_dk -= weight[:, None] * load_rows(k_ptr, o_j, stride_ks, n_k, D, BD, True).to(tl.float32)
                store_rows(p_dk, b_dk if UNEQUAL else lam[0] * b_dk, o_j, HP * D, n_k, D, BD)
            total = tl.zeros([BN, BD], tl.float32)
            for r in tl.static_range(first, first + COUNT):
                if IN_REGISTERS:
                    b_kr = keys[0 if SHIFTED else r - first].to(tl.float32)
                else:
                    # Loaded again: keeping the keys during the loop would take registers.
                    p_kr = k_ptr + (0 if SHIFTED else r) * stride_km
                    b_kr = load_rows(p_kr, o_j, stride_ks, n_k, D, BD, True).to(tl.float32)
                if SHIFTED:
                    b_kr = tl.where((o_j < n_k)[:, None], b_kr + load_shift(shift_ptr, i_k, r, M, D, BD)[None, :], 0.0)
                b_dck = dcs[r - first][:, None] * b_kr
                square = tl.sum(tl.sum(b_dck * b_kr, 1), 0)
                dtau -= 0.5 * lam[r] * square
                if PRIOR == 1:
                    tl.store(p_sums + TAUS + 1 + M + r, tl.sum(tl.where(o_j < n_k, dcs[r - first], 0.0), 0))
                elif PRIOR == 2:
                    tl.store(p_dbias + r * S, dcs[r - first], mask=o_j < n_k)
                if SHIFTED:
                    total += b_dck * (lam[r] if UNEQUAL else 1.0)
                    tl.store(p_sums + r * D + o_d, -tau * lam[r] * tl.sum(b_dck, 0), mask=o_d < D)
                else:
                    b_dk = lam[r] * (dks[r - first] - tau * b_dck)
                    store_rows(p_dk + r * D, b_dk, o_j, HP * NS * D, n_k, D, BD)
                if UNEQUAL:
                    tl.store(p_sums + TAUS + 1 + r, tl.sum(dlams[r - first], 0) - 0.5 * tau * square)
                else:
                    dscale -= 0.5 * tau * square
            if SHIFTED and BD <= 128:
                b_dk = dks[0] - tau * total if UNEQUAL else lam[0] * (dks[0] - tau * total)
                store_rows(p_dk, b_dk, o_j, HP * D, n_k, D, BD)
    if OUTPUTS != DV_ONLY:
        tl.store(p_sums + TAUS, dtau)
        if not UNEQUAL:
            tl.store(p_sums + TAUS + 1, dscale)
