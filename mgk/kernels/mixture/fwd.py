"""Forward kernel: one program computes a tile of queries, in a loop over the keys.

The fast form uses an upper bound of each row instead of its running maximum, and the factored mixture sum (one
exponential per pair). Tiles in which weights could then underflow are flagged for the fallback: running maximum, one
exponential per component. PATH BOTH (small calls) compiles both forms into one kernel, and each program selects one.
"""

# ruff: noqa: E741, RUF005, SIM102, SIM109  (l is the softmax's denominator; Triton has neither starred tuples nor `in`,
# and drops the code under a false constexpr only if the condition stands alone)
import triton
import triton.language as tl

from mgk.kernels.mixture.component_gemm import component_gemm, gemm_operand, load_operand
from mgk.kernels.mixture.exp2 import accurate_exp2, accurate_weight
from mgk.kernels.mixture.masks import dropout_mask, mask_tile
from mgk.kernels.mixture.tile import (  # fmt: skip
    BOTH,
    FACTOR_RANGE,
    FACTORED_RANGE_FP16,
    FALLBACK,
    FAST,
    KEY_TILE,
    LOG2E,
    NUM_STATS,
    RUNNING,
    SAFE_RANGE,
    STAT_REFERENCE,
    as_columns,
    component_ratios,
    component_scores,
    elementwise_max,
    elementwise_min,
    exponents,
    fallback_tiles,
    flag_for_fallback,
    head_pointer,
    key_ends,
    key_range,
    key_span,
    load_rows,
    load_scales,
    load_tile,
    load_vectors,
    mixture_sum,
    row_terms,
    schedule,
    sequence_bounds,
    store_rows,
    to_registers,
    value_head,
)


@triton.jit
def tile_weights(
    scores, row, m, rho, coef, lam,
    M: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr, ONLINE: tl.constexpr, EXACT: tl.constexpr,
    UNEQUAL: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    """Return the weights of a tile relative to 2^m, and the new m.

    ONLINE: m is the running maximum (ACCURATE: rounded up to an integer). Otherwise m bounds the whole row and is
    already subtracted from `row`.
    """
    if EXACT:
        if HARD and SHIFTED and not UNEQUAL:
            b_lead = coef[0]
            for r in tl.static_range(1, M):
                b_lead = tl.maximum(b_lead, rho[r - 1] + coef[r])
            b_x = (scores[0] * (lam[0] * LOG2E) + row[0]) + b_lead
        else:
            xs = exponents(scores, row, coef, lam, M, SHIFTED)
            b_x = elementwise_max(xs, M)
        if ONLINE:
            top = tl.max(b_x, 1)
            m = tl.maximum(m, tl.ceil(top) if ACCURATE else top)
            m_safe = tl.where(m == -float("inf"), 0.0, m)[:, None]
        else:
            m_safe = 0.0
        if HARD:
            b_p = accurate_exp2(b_x - m_safe) if ACCURATE else tl.exp2(b_x - m_safe)
        else:
            for r in tl.static_range(M):
                if ACCURATE:
                    b_pr = accurate_weight(scores[0 if SHIFTED else r], lam[r], row[r], coef[r], m_safe)
                else:
                    b_pr = tl.exp2(xs[r] - m_safe)
                b_p = b_pr if r == 0 else b_p + b_pr
    elif SHIFTED:
        b_p = tl.exp2(scores[0] * (lam[0] * LOG2E) + row[0]) * mixture_sum(rho, coef, M)
    else:
        b_p = tl.exp2(scores[0] * (lam[0] * LOG2E) + row[0]) * coef[0]
        for r in tl.static_range(1, M):
            b_p += tl.exp2(scores[r] * (lam[r] * LOG2E) + row[0]) * coef[r]
    return b_p, m


@triton.jit
def running_weights(scores, m, rho, coef, c, lam, M: tl.constexpr, MASKED: tl.constexpr):
    """Return the weights of a tile relative to 2^m times 2^a_i0, and the new m, the maximum of s_ij + max_r c_jr.

    One exponential per pair, without c_jr: 2^(s_ij - m) C_jr is at most 1.
    """
    b_s = scores[0] * (lam[0] * LOG2E)
    m = tl.maximum(m, tl.max(b_s + elementwise_max(c, M), 1))
    b_x = b_s - tl.where(m == -float("inf"), 0.0, m)[:, None]
    if MASKED:
        # m does not bound the scores of keys beyond the end: infinity times C = 0 would be NaN.
        b_x = tl.minimum(b_x, 126.0)
    return tl.exp2(b_x) * mixture_sum(rho, coef, M), m


@triton.jit
def walk_keys(
    first, last, b_q, b_row_operand, row, rho, lam, acc, l, m, k_src, v_src, key_operand_src, i_b, i_k, i_v, start_k,
    key_tile, c_ptr, coef_ptr, mask_ptr, seed, i_bh, o_i, causal_offset, dropout_p, stride_km, stride_ks, stride_vs,
    stride_ml, stride_mj, L, S, n_key_tiles,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    SHIFTED: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr, ONLINE: tl.constexpr, EXACT: tl.constexpr, UNEQUAL: tl.constexpr,
    TMA: tl.constexpr, COMPONENT_GEMM: tl.constexpr,
):  # fmt: skip
    """Accumulate acc, l and m over the keys first to last. MASKED: tiles that may cross the end or the diagonal."""
    NS: tl.constexpr = 1 if SHIFTED else M
    ACCURATE: tl.constexpr = b_q.dtype == tl.float32 and PRECISION == "ieee"
    for n in range(first, last, BN):
        o_n = n + tl.arange(0, BN)
        scores = component_scores(
            b_q, k_src, i_b, i_k, start_k, n, stride_km, stride_ks, S, BN, D, BD, 0, NS, MASKED, SHIFTED, PRECISION,
            TMA,
        )  # fmt: skip
        scores = mask_tile(
            scores, mask_ptr, o_i, o_n, causal_offset, stride_ml, stride_mj, L, S, lam, NS, CAUSAL, MASK, MASKED
        )
        if COMPONENT_GEMM:
            o_operand = (i_k * n_key_tiles + key_tile) * KEY_TILE
            b_key_operand = load_operand(key_operand_src, o_operand + n, BN, BN, False, TMA)
            b_p = tl.exp2(scores[0] * (lam[0] * LOG2E) + row[0]) * component_gemm(b_row_operand, b_key_operand)
            m_new = m
        else:
            coef = load_vectors(c_ptr if EXACT else coef_ptr, o_n, n_key_tiles * KEY_TILE, S, M, 0, False)
            if ONLINE and not EXACT:
                c = load_vectors(c_ptr, o_n, n_key_tiles * KEY_TILE, S, M, 0, False)
                b_p, m_new = running_weights(scores, m, rho, coef, c, lam, M, MASKED)
            else:
                b_p, m_new = tile_weights(
                    scores, row, m, rho, coef, lam, M, SHIFTED, HARD, ONLINE, EXACT, UNEQUAL, ACCURATE
                )
        if ONLINE:
            rescale = tl.exp2(m - tl.where(m_new == -float("inf"), 0.0, m_new))
            l = l * rescale
            acc = acc * rescale[:, None]
            m = m_new
        l += tl.sum(b_p, 1)
        if DROPOUT:
            b_p = tl.where(dropout_mask(seed, i_bh, o_i[:, None], o_n[None, :], dropout_p), b_p, 0.0)
        b_v = load_tile(v_src, i_b, i_v, 0, start_k, n, 0, stride_vs, S, BN, E, BE, False, MASKED, TMA)
        acc = tl.dot(b_p.to(b_v.dtype), b_v, acc, input_precision=PRECISION)
    return acc, l, m


@triton.jit
def attend_tile(
    full, last, b_q, a, bound, lam, k_src, v_src, key_operand_src, i_b, i_k, i_v, start_k, key_tile, c_ptr, coef_ptr,
    mask_ptr, seed, i_bh, o_i, causal_offset, dropout_p, stride_km, stride_ks, stride_vs, stride_ml, stride_mj, L, S,
    n_key_tiles,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, UNEQUAL: tl.constexpr, TMA: tl.constexpr, USE_FAST: tl.constexpr,
    ONLINE: tl.constexpr,
):  # fmt: skip
    """Return the sums of weighted values and of weights over all keys, relative to 2^m, and m.

    ONLINE: m is the running maximum; otherwise `bound`, an upper bound of the rows' exponents.
    """
    FACTORED: tl.constexpr = not HARD and not UNEQUAL
    COMPONENT_GEMM: tl.constexpr = key_operand_src is not None and USE_FAST
    acc = tl.zeros([BM, BE], tl.float32)
    l = tl.zeros([BM], tl.float32)
    a_columns = as_columns(a, 0.0, M)
    if not ONLINE:
        m = bound
        row = as_columns(a, m, M)
    else:
        m = tl.full([BM], -float("inf"), tl.float32)
        row = a_columns
    rho = component_ratios(a_columns, M, HARD, SAFE_RANGE)
    b_row_operand = b_q
    if COMPONENT_GEMM:
        b_row_operand = gemm_operand((tl.full([BM, 1], 1.0, tl.float32),) + rho, tl.arange(0, 16), M, True)
    for MASKED in tl.static_range(2):
        # Skip an empty loop: its first copies still cost time.
        if full < last if MASKED else True:
            acc, l, m = walk_keys(
                full if MASKED else 0, last if MASKED else full, b_q, b_row_operand, row, rho, lam, acc, l, m, k_src,
                v_src, key_operand_src, i_b, i_k, i_v, start_k, key_tile, c_ptr, coef_ptr, mask_ptr, seed, i_bh, o_i,
                causal_offset, dropout_p, stride_km, stride_ks, stride_vs, stride_ml, stride_mj, L, S, n_key_tiles, M,
                D, E, BD, BE, BN, SHIFTED, HARD, CAUSAL, MASK, DROPOUT, PRECISION, MASKED, ONLINE,
                not USE_FAST or not FACTORED, UNEQUAL, TMA, COMPONENT_GEMM,
            )  # fmt: skip
    if USE_FAST and ONLINE:
        m += a[0]
    return acc, l, m


@triton.jit
def forward_tile(
    i_m, i_bh, q_ptr, k_src, v_src, shift_ptr, mask_ptr, seed_ptr, scale_ptr, tau_ptr, cu_q_ptr, cu_k_ptr, c_ptr,
    stats_ptr, flags_ptr, key_operand_src, out_ptr, lse_ptr, scale, tau, dropout_p, stride_qb, stride_qh, stride_ql,
    stride_kb, stride_kh, stride_km, stride_ks, stride_vb, stride_vh, stride_vs, stride_mb, stride_mh, stride_ml,
    stride_mj, stride_ob, stride_oh, stride_ol, GROUP, H, L, S, n_key_tiles, n_tiles,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr, SCALE: tl.constexpr, TAU: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    VALUE_GROUP: tl.constexpr, TMA: tl.constexpr, IN_REGISTERS: tl.constexpr, TILES: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """Write the output and lse of query tile i_m; i_bh is the index of batch entry and head."""
    UNEQUAL: tl.constexpr = SCALE > 1
    # With BN keys per step, the general form would need more registers than the fast form in the same kernel.
    GENERAL_BN: tl.constexpr = BN // 2 if PATH == BOTH and BN > 16 else BN
    i_h = i_bh % H
    i_k = i_h // GROUP
    i_v = value_head(i_h, i_k, VALUE_GROUP)
    i_bq, start_q, n_q, _ = sequence_bounds(cu_q_ptr, i_bh // H, L, PACKED)
    i_b, start_k, n_k, key_tile = sequence_bounds(cu_k_ptr, i_bh // H, S, PACKED)
    p_flag = flags_ptr + i_bh * n_tiles + i_m
    if PATH != FALLBACK or TILES == 1:
        if i_m * BM >= n_q:
            return
    q_ptr += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh + start_q.to(tl.int64) * stride_ql
    k_src = head_pointer(k_src, i_b, i_k, start_k, stride_kb, stride_kh, stride_ks, TMA)
    v_src = head_pointer(v_src, i_b, i_v, start_k, stride_vb, stride_vh, stride_vs, TMA)
    if MASK:
        mask_ptr += i_b.to(tl.int64) * stride_mb + i_h.to(tl.int64) * stride_mh
    c_ptr += (i_k * M).to(tl.int64) * n_key_tiles * KEY_TILE + key_tile * KEY_TILE
    coef_ptr = c_ptr + (H // GROUP * M).to(tl.int64) * n_key_tiles * KEY_TILE
    stats_ptr += (i_k * n_key_tiles + key_tile) * NUM_STATS
    seed = tl.load(seed_ptr) if DROPOUT else 0
    if TAU:
        tau = tl.load(tau_ptr + i_k)
    lam = load_scales(scale_ptr, scale, i_k, M, SCALE)

    o_i = i_m * BM + tl.arange(0, BM)
    b_q = load_rows(q_ptr, o_i, stride_ql, n_q, D, BD, True)
    # Before the queries are used: the loads of both are then in flight together.
    high, low, longest, end, masked = key_range(stats_ptr, tl.cdiv(n_k, KEY_TILE))
    b_q = to_registers(b_q, BD, IN_REGISTERS)
    a, squared_norm = row_terms(b_q, shift_ptr, i_k, lam, tau, M, D, BD, SHIFTED, UNEQUAL)
    top = elementwise_max(a, M)
    causal_offset = n_k - n_q if CAUSAL == 2 else 0
    full, last = key_ends(i_m, n_k, causal_offset, BM, BN, CAUSAL)
    # Skip keys that are masked up to the end of the sequence.
    full = min(full, end)
    last = min(last, end)
    ref = tl.load(stats_ptr + STAT_REFERENCE)
    spread = tl.max(top - elementwise_min(a, M), 0)
    # |q_i| max |k| bounds the scores (Cauchy-Schwarz).
    score_bound = tl.sqrt(squared_norm) * (longest * elementwise_max(lam, M) * LOG2E)
    slack = 2 * tl.max(score_bound, 0) + spread + tl.maximum(key_span(high, low), high - low)
    if PATH == RUNNING:
        # Powers of two of the keys must fit fp32, those of the rows fp16. m does not bound the scores of masked keys.
        safe = (spread <= FACTORED_RANGE_FP16) & (key_span(high, low) <= FACTOR_RANGE)
        safe = safe & ((masked == 0) | (2 * tl.max(score_bound, 0) <= FACTOR_RANGE))
    else:
        safe = (low <= high) & (slack <= SAFE_RANGE)
    if PATH == FAST or PATH == RUNNING:
        if flag_for_fallback(p_flag, safe):
            return
    acc = tl.zeros([BM, BE], tl.float32)
    l = tl.zeros([BM], tl.float32)
    m = tl.zeros([BM], tl.float32)
    IS_FAST: tl.constexpr = PATH == FAST or PATH == RUNNING
    for USE_FAST in tl.static_range(2):
        # PATH BOTH selects a form for each program, the other paths select one at compile time.
        is_selected = safe if USE_FAST else not safe
        if is_selected if PATH == BOTH else IS_FAST == USE_FAST:
            acc, l, m = attend_tile(
                full, last, b_q, a, score_bound + top + high, lam, k_src, v_src, key_operand_src, i_b, i_k, i_v,
                start_k, key_tile, c_ptr, coef_ptr, mask_ptr, seed, i_bh, o_i, causal_offset, dropout_p, stride_km,
                stride_ks, stride_vs, stride_ml, stride_mj, n_q, n_k, n_key_tiles, M, D, E, BD, BE, BM,
                BN if USE_FAST else GENERAL_BN, SHIFTED, HARD, CAUSAL, MASK, DROPOUT, PRECISION, UNEQUAL, TMA, USE_FAST,
                not USE_FAST or PATH == RUNNING,
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


@triton.jit(do_not_specialize=["H", "L", "S", "n_key_tiles", "n_tiles", "n_heads", "SECTION"])
def mixture_forward(
    q_ptr, k_src, v_src, shift_ptr, mask_ptr, seed_ptr, scale_ptr, tau_ptr, cu_q_ptr, cu_k_ptr, c_ptr, stats_ptr,
    flags_ptr, key_operand_src, out_ptr, lse_ptr, scale, tau, dropout_p, stride_qb, stride_qh, stride_ql, stride_kb,
    stride_kh, stride_km, stride_ks, stride_vb, stride_vh, stride_vs, stride_mb, stride_mh, stride_ml, stride_mj,
    stride_ob, stride_oh, stride_ol, GROUP, H, L, S, n_key_tiles, n_tiles, n_heads, SECTION,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr, SCALE: tl.constexpr, TAU: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    VALUE_GROUP: tl.constexpr, TMA: tl.constexpr, IN_REGISTERS: tl.constexpr, TILES: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """Write the output [B, H, L, E] and the base-2 lse [B, H, L], +inf for fully masked rows."""
    if PATH == FALLBACK and TILES > 1:
        first, last = fallback_tiles(flags_ptr, n_tiles * n_heads, TILES)
        for t in range(first, last):
            _, _, n_q, _ = sequence_bounds(cu_q_ptr, t // n_tiles // H, L, PACKED)
            # Flags of tiles beyond the end of a sequence are not written.
            if (tl.load(flags_ptr + t) != 0.0) & (t % n_tiles * BM < n_q):
                forward_tile(
                    t % n_tiles, t // n_tiles, q_ptr, k_src, v_src, shift_ptr, mask_ptr, seed_ptr, scale_ptr, tau_ptr,
                    cu_q_ptr, cu_k_ptr, c_ptr, stats_ptr, flags_ptr, key_operand_src, out_ptr, lse_ptr, scale, tau,
                    dropout_p, stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_km, stride_ks, stride_vb,
                    stride_vh, stride_vs, stride_mb, stride_mh, stride_ml, stride_mj, stride_ob, stride_oh, stride_ol,
                    GROUP, H, L, S, n_key_tiles, n_tiles, M, D, E, BD, BE, BM, BN, SHIFTED, HARD, SCALE, TAU, CAUSAL,
                    MASK, DROPOUT, PACKED, PRECISION, VALUE_GROUP, TMA, IN_REGISTERS, TILES, PATH,
                )  # fmt: skip
    else:
        i_m, i_bh = schedule(n_tiles, n_heads, SECTION)
        if PATH == FALLBACK:
            if tl.load(flags_ptr + i_bh * n_tiles + i_m) == 0.0:
                return
        forward_tile(
            i_m, i_bh, q_ptr, k_src, v_src, shift_ptr, mask_ptr, seed_ptr, scale_ptr, tau_ptr, cu_q_ptr, cu_k_ptr,
            c_ptr, stats_ptr, flags_ptr, key_operand_src, out_ptr, lse_ptr, scale, tau, dropout_p, stride_qb, stride_qh,
            stride_ql, stride_kb, stride_kh, stride_km, stride_ks, stride_vb, stride_vh, stride_vs, stride_mb,
            stride_mh, stride_ml, stride_mj, stride_ob, stride_oh, stride_ol, GROUP, H, L, S, n_key_tiles, n_tiles, M,
            D, E, BD, BE, BM, BN, SHIFTED, HARD, SCALE, TAU, CAUSAL, MASK, DROPOUT, PACKED, PRECISION, VALUE_GROUP, TMA,
            IN_REGISTERS, TILES, PATH,
        )  # fmt: skip
