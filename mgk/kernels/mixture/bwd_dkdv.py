"""Second backward kernel: one program computes dk and dv of a tile of keys, in a loop over the queries.

Fast form, fallback and PATH BOTH work as in `fwd`. Every sum is taken by one program in a fixed order: results are
bitwise reproducible, except those of `bwd_onepass`.
"""

# ruff: noqa: RUF005, SIM102, SIM109  (Triton has neither starred tuples nor `in`, and drops the code under a false
# constexpr only if the condition stands alone)
import triton
import triton.language as tl

from mgk.kernels.heads import shared_head
from mgk.kernels.mixture.bwd_common import (
    subtract_rest,
)
from mgk.kernels.mixture.query_walk import DK_ONLY, DV_ONLY, sum_over_queries
from mgk.kernels.mixture.tile import (  # fmt: skip
    BOTH,
    FACTOR_RANGE,
    FALLBACK,
    FAST,
    KEY_TILE,
    NUM_STATS,
    SAFE_RANGE,
    STAT_HIGH,
    STAT_LOW,
    fallback_tiles,
    flag_for_fallback,
    key_span,
    load_rows,
    load_scales,
    load_shift,
    load_vectors,
    max_spread,
    query_bounds,
    schedule,
    sequence_bounds,
    store_rows,
    to_registers,
    zeros_tuple,
)


@triton.jit
def dkdv_tile(
    i_n, i_bk, q_src, k_ptr, v_ptr, shift_ptr, mask_ptr, seed_ptr, scale_ptr, tau_ptr, cu_q_ptr, cu_k_ptr, c_ptr,
    stats_ptr, do_src, rows_src, row_operand_src, query_sums, spread_ptr, flags_ptr, dk_ptr, dv_ptr, dbias_ptr,
    sums_ptr, scale, tau, dropout_p, stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_km, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_mb, stride_mh, stride_ml, stride_mj, stride_gb, stride_gh, stride_gl,
    stride_rows, GROUP, H, L, S, n_key_tiles, n_tiles, n_heads, n_query_tiles, n_query_sums,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BQ: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr, SCALE: tl.constexpr,
    TAU: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, KEY_REPEAT: tl.constexpr, VALUE_REPEAT: tl.constexpr, TMA: tl.constexpr,
    IN_REGISTERS: tl.constexpr, PER_COMPONENT: tl.constexpr, TMA_ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    PRIOR: tl.constexpr, TILES: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """Write the gradients of key tile i_n; i_bk is the index of batch entry and pair head."""
    UNEQUAL: tl.constexpr = SCALE > 1
    NS: tl.constexpr = 1 if SHIFTED else M
    # Components per loop over the queries: one where all dk of soft independent keys and dv do not fit the registers.
    COUNT: tl.constexpr = 1 if PER_COMPONENT and OUTPUTS != DV_ONLY and not SHIFTED and not HARD else M
    # With BM queries per step, the general form would need more registers than the fast form in the same kernel. A TMA
    # descriptor has blocks of BM.
    GENERAL_BM: tl.constexpr = BM // 2 if PATH == BOTH and BM > 16 and not TMA else BM
    HP = H // GROUP
    HK = shared_head(HP, KEY_REPEAT)
    i_p = i_bk % HP
    i_k = shared_head(i_p, KEY_REPEAT)
    i_v = shared_head(i_p, VALUE_REPEAT)
    i_seq = i_bk // HP
    i_b, start_q, n_q, _ = sequence_bounds(cu_q_ptr, i_seq, L, PACKED)
    _, start_k, n_k, key_tile = sequence_bounds(cu_k_ptr, i_seq, S, PACKED)
    p_flag = flags_ptr + i_bk * n_tiles + i_n
    if PATH != FALLBACK or TILES == 1:
        if i_n * BN >= n_k:
            return
    k_ptr += i_b.to(tl.int64) * stride_kb + i_k.to(tl.int64) * stride_kh + start_k.to(tl.int64) * stride_ks
    v_ptr += i_b.to(tl.int64) * stride_vb + i_v.to(tl.int64) * stride_vh + start_k.to(tl.int64) * stride_vs
    seed = tl.load(seed_ptr) if DROPOUT else 0
    if TAU:
        tau = tl.load(tau_ptr + i_k)
    lam = load_scales(scale_ptr, scale, i_k, M, SCALE)
    o_j = i_n * BN + tl.arange(0, BN)
    # Issued before the loads that decide about the tile.
    b_v = load_rows(v_ptr, o_j, stride_vs, n_k, E, BE, True)
    if SHIFTED:
        b_k = load_rows(k_ptr, o_j, stride_ks, n_k, D, BD, True)
    o_c = (i_k * M).to(tl.int64) * n_key_tiles * KEY_TILE + key_tile * KEY_TILE
    p_stats = stats_ptr + (i_k * n_key_tiles + key_tile + i_n * BN // KEY_TILE) * NUM_STATS
    high = tl.load(p_stats + STAT_HIGH)
    low = tl.load(p_stats + STAT_LOW)
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
    if PATH == FAST:
        if flag_for_fallback(p_flag, safe):
            return

    b_v = to_registers(b_v, BE, IN_REGISTERS)
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
    IS_FAST: tl.constexpr = PATH == FAST
    # COUNT components from `first` on: all of them, or one per loop.
    for first in tl.static_range(0, M, COUNT):
        keys = ()
        if SHIFTED:
            keys = (to_registers(b_k, BD, IN_REGISTERS),)
        else:
            for r in tl.static_range(first, first + COUNT):
                b_kr = load_rows(k_ptr + r * stride_km, o_j, stride_ks, n_k, D, BD, True)
                keys = keys + (to_registers(b_kr, BD, IN_REGISTERS),)
        dks = zeros_tuple(tl.zeros([BN, BD], tl.float32), 1 if SHIFTED else COUNT)
        dcs = zeros_tuple(tl.zeros([BN], tl.float32), COUNT)
        dlams = zeros_tuple(tl.zeros([BN], tl.float32), COUNT if UNEQUAL else 0)
        for USE_FAST in tl.static_range(2):
            # PATH BOTH selects a form for each program, the other paths select one at compile time.
            is_selected = safe if USE_FAST else not safe
            if is_selected if PATH == BOTH else IS_FAST == USE_FAST:
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
            if SHIFTED:
                # Loaded again: keeping the keys during the loop would take registers.
                b_x = (keys[0] if IN_REGISTERS else load_rows(k_ptr, o_j, stride_ks, n_k, D, BD, True)).to(tl.float32)
            for r in tl.static_range(first, first + COUNT):
                b_dc = tl.where(o_j < n_k, dcs[r - first], 0.0)
                if SHIFTED:
                    b_kr = b_x + load_shift(shift_ptr, i_k, r, M, D, BD)[None, :]
                elif IN_REGISTERS:
                    b_kr = keys[r - first].to(tl.float32)
                else:
                    b_kr = load_rows(k_ptr + r * stride_km, o_j, stride_ks, n_k, D, BD, True).to(tl.float32)
                b_dck = b_dc[:, None] * b_kr
                # tau and scale have no gradient if they are numbers.
                square = tl.sum(tl.sum(b_dck * b_kr, 1), 0) if TAU or SCALE > 0 else 0.0
                dtau -= 0.5 * lam[r] * square
                if PRIOR == 1:
                    tl.store(p_sums + TAUS + 1 + M + r, tl.sum(b_dc, 0))
                elif PRIOR == 2:
                    tl.store(p_dbias + r * S, b_dc, mask=o_j < n_k)
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
    PRIOR: tl.constexpr, TILES: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """Write dk, dv, this tile's part of d shift, d tau and d scale, and d log pi.

    PRIOR: 1 this tile's part of the sum of d log pi, 2 d log pi of every key. The query heads of a group are processed
    one after another. With different numbers of key and value heads, the group of a program are the query heads of a
    pair of them; dk, dv and d log pi are written per pair head, KEY_REPEAT of a key head, VALUE_REPEAT of a value head.
    Unless query_sums is None, gradients of the queries are added to it (`bwd_onepass`).
    """
    if PATH == FALLBACK and TILES > 1:
        first, last = fallback_tiles(flags_ptr, n_tiles * n_heads, TILES)
        for t in range(first, last):
            _, _, n_k, _ = sequence_bounds(cu_k_ptr, t // n_tiles // (H // GROUP), S, PACKED)
            # Flags of tiles beyond the end of a sequence are not written.
            if (tl.load(flags_ptr + t) != 0.0) & (t % n_tiles * BN < n_k):
                dkdv_tile(
                    t % n_tiles, t // n_tiles, q_src, k_ptr, v_ptr, shift_ptr, mask_ptr, seed_ptr, scale_ptr, tau_ptr,
                    cu_q_ptr, cu_k_ptr, c_ptr, stats_ptr, do_src, rows_src, row_operand_src, query_sums, spread_ptr,
                    flags_ptr, dk_ptr, dv_ptr, dbias_ptr, sums_ptr, scale, tau, dropout_p, stride_qb, stride_qh,
                    stride_ql, stride_kb, stride_kh, stride_km, stride_ks, stride_vb, stride_vh, stride_vs, stride_mb,
                    stride_mh, stride_ml, stride_mj, stride_gb, stride_gh, stride_gl, stride_rows, GROUP, H, L, S,
                    n_key_tiles, n_tiles, n_heads, n_query_tiles, n_query_sums, M, D, E, BD, BE, BM, BN, BQ, SHIFTED,
                    HARD, SCALE, TAU, CAUSAL, MASK, DROPOUT, PACKED, PRECISION, KEY_REPEAT, VALUE_REPEAT, TMA,
                    IN_REGISTERS, PER_COMPONENT, TMA_ROWS, OUTPUTS, PRIOR, TILES, PATH,
                )  # fmt: skip
    else:
        i_n, i_bk = schedule(n_tiles, n_heads, SECTION)
        if CAUSAL:
            i_n = n_tiles - 1 - i_n
        if PATH == FALLBACK:
            if tl.load(flags_ptr + i_bk * n_tiles + i_n) == 0.0:
                return
        dkdv_tile(
            i_n, i_bk, q_src, k_ptr, v_ptr, shift_ptr, mask_ptr, seed_ptr, scale_ptr, tau_ptr, cu_q_ptr, cu_k_ptr,
            c_ptr, stats_ptr, do_src, rows_src, row_operand_src, query_sums, spread_ptr, flags_ptr, dk_ptr, dv_ptr,
            dbias_ptr, sums_ptr, scale, tau, dropout_p, stride_qb, stride_qh, stride_ql, stride_kb, stride_kh,
            stride_km, stride_ks, stride_vb, stride_vh, stride_vs, stride_mb, stride_mh, stride_ml, stride_mj,
            stride_gb, stride_gh, stride_gl, stride_rows, GROUP, H, L, S, n_key_tiles, n_tiles, n_heads, n_query_tiles,
            n_query_sums, M, D, E, BD, BE, BM, BN, BQ, SHIFTED, HARD, SCALE, TAU, CAUSAL, MASK, DROPOUT, PACKED,
            PRECISION, KEY_REPEAT, VALUE_REPEAT, TMA, IN_REGISTERS, PER_COMPONENT, TMA_ROWS, OUTPUTS, PRIOR, TILES,
            PATH,
        )  # fmt: skip
