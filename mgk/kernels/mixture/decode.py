"""Decode kernels: few queries against many keys, forward only.

The keys are split over programs, whose partial sums are then merged by their logsumexps (split-K). Each program
computes the key terms of the keys that it loads: a separate preprocessing pass would cost half as much as the decoding.
"""

# ruff: noqa: RUF005  (Triton has no starred tuples)
import triton
import triton.language as tl

from mgk.kernels.mixture.masks import apply_mask, mask_scores
from mgk.kernels.mixture.tile import (
    FP32_MAX,
    LOG2E,
    as_columns,
    elementwise_max,
    exponents,
    load_rows,
    load_scales,
    load_shift,
    row_terms,
    value_head,
)


@triton.jit
def split_bounds(count_ptr, S, n_splits, BN: tl.constexpr):
    """Return the number of keys, read from device memory, and the number of keys per split."""
    S = tl.minimum(S, tl.load(count_ptr))
    return S, tl.cdiv(tl.cdiv(S, n_splits), BN) * BN


@triton.jit(do_not_specialize=["H", "L", "S", "split_size", "n_splits"])
def decode_split(
    q_ptr, k_ptr, v_ptr, shift_ptr, bias_ptr, mask_ptr, scale_ptr, tau_ptr, count_ptr, acc_ptr, ml_ptr, scale, tau,
    constant, stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_km, stride_ks, stride_vb, stride_vh,
    stride_vs, stride_bb, stride_bh, stride_bm, stride_bs, stride_mb, stride_mh, stride_ml, stride_mj, GROUP, H, L, S,
    split_size, n_splits,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, SHIFTED: tl.constexpr,
    HARD: tl.constexpr, SCALE: tl.constexpr, TAU: tl.constexpr, CAUSAL: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, COUNTED: tl.constexpr,
    VALUE_GROUP: tl.constexpr, VALUE_HEADS: tl.constexpr, VALUE_STEP: tl.constexpr,
):  # fmt: skip
    """Attend to one split of the keys of a key head, for the queries of all heads of its group.

    The keys are read once, and the VALUE_HEADS value heads of the group one after another; head t of them belongs to
    the VALUE_STEP query heads from t * VALUE_STEP on.
    Writes the sum of weighted values [B, HK, n_splits, BM, E], and the largest exponent and the sum of weights
    [2, B, HK, n_splits, BM].
    """
    UNEQUAL: tl.constexpr = SCALE > 1
    NS: tl.constexpr = 1 if SHIFTED else M
    i_s, i_k, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if COUNTED:
        S, split_size = split_bounds(count_ptr, S, n_splits, BN)
    lam = load_scales(scale_ptr, scale, i_k, M, SCALE)
    if TAU:
        tau = tl.load(tau_ptr + i_k)
    # Rows are (head of the group, query) pairs. Rows beyond GROUP * L read from the last head and are masked.
    o_row = tl.arange(0, BM)
    i_g = tl.minimum(o_row // L, GROUP - 1)
    o_i = o_row % L
    m_row = o_row < GROUP * L
    i_h = i_k * GROUP + i_g
    o_d = tl.arange(0, BD)
    p_q = q_ptr + i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh + o_i * stride_ql
    b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_row[:, None] & (o_d < D)[None, :], other=0.0)
    a, _ = row_terms(b_q, shift_ptr, i_k, lam, tau, M, D, BD, SHIFTED, UNEQUAL)
    row = as_columns(a, 0.0, M)
    k_ptr += i_b.to(tl.int64) * stride_kb + i_k.to(tl.int64) * stride_kh
    if VALUE_GROUP == 0:
        v_ptr += i_b.to(tl.int64) * stride_vb + i_k.to(tl.int64) * stride_vh
    else:
        v_ptr += i_b.to(tl.int64) * stride_vb
    if BIAS:
        bias_ptr += i_b.to(tl.int64) * stride_bb + i_k * stride_bh
    if MASK:
        mask_ptr += i_b.to(tl.int64) * stride_mb + i_h.to(tl.int64)[:, None] * stride_mh
    acc = tl.zeros([BM, BE], tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    row_max = tl.full([BM], -float("inf"), tl.float32)
    for n in range(i_s * split_size, min(i_s * split_size + split_size, S), BN):
        o_n = n + tl.arange(0, BN)
        keys = ()
        scores = ()
        for r in tl.static_range(NS):
            keys = keys + (load_rows(k_ptr + r * stride_km, o_n, stride_ks, S, D, BD, True),)
            scores = scores + (tl.dot(b_q, tl.trans(keys[r]), input_precision=PRECISION),)
        terms = ()
        for r in tl.static_range(M):
            b_k = keys[0 if SHIFTED else r].to(tl.float32)
            if SHIFTED:
                b_k += load_shift(shift_ptr, i_k, r, M, D, BD)[None, :]
            # At most FP32_MAX, as in `preprocess`.
            b_c = constant - 0.5 * tau * lam[r] * tl.minimum(tl.sum(b_k * b_k, 1), FP32_MAX)
            if BIAS:
                p_bias = bias_ptr + r * stride_bm + o_n * stride_bs
                b_c += tl.load(p_bias, mask=o_n < S, other=0.0).to(tl.float32)
            terms = terms + ((b_c * LOG2E)[None, :],)
        if MASK:
            scores = mask_scores(
                scores, mask_ptr, o_i[:, None], o_n[None, :], stride_ml, stride_mj, L, S, lam, NS, MASK
            )
        valid = m_row[:, None] & (o_n < S)[None, :]
        if CAUSAL:
            valid = valid & (o_i[:, None] + (S - L if CAUSAL == 2 else 0) >= o_n[None, :])
        b_exponents = apply_mask(exponents(scores, row, terms, lam, M, SHIFTED), valid, M)
        b_top = elementwise_max(b_exponents, M)
        new_max = tl.maximum(row_max, tl.max(b_top, 1))
        finite_max = tl.where(new_max == -float("inf"), 0.0, new_max)
        if HARD:
            b_p = tl.exp2(b_top - finite_max[:, None])
        else:
            b_p = tl.zeros_like(b_top)
            for r in tl.static_range(M):
                b_p += tl.exp2(b_exponents[r] - finite_max[:, None])
        rescale = tl.exp2(row_max - finite_max)
        row_sum = row_sum * rescale + tl.sum(b_p, 1)
        if VALUE_GROUP == 0:
            b_v = load_rows(v_ptr, o_n, stride_vs, S, E, BE, True)
            acc = tl.dot(b_p.to(b_v.dtype), b_v, acc * rescale[:, None], input_precision=PRECISION)
        else:
            acc = acc * rescale[:, None]
            for t in tl.static_range(VALUE_HEADS):
                i_v = (i_k * GROUP + t * VALUE_STEP) // VALUE_GROUP
                b_v = load_rows(v_ptr + i_v.to(tl.int64) * stride_vh, o_n, stride_vs, S, E, BE, True)
                b_new = tl.dot(b_p.to(b_v.dtype), b_v, acc, input_precision=PRECISION)
                acc = tl.where((i_g // VALUE_STEP == t)[:, None], b_new, acc)
        row_max = new_max
    i_partial = ((i_b * (H // GROUP) + i_k) * n_splits + i_s).to(tl.int64)
    o_e = tl.arange(0, BE)
    p_acc = acc_ptr + (i_partial * BM + o_row[:, None]) * E + o_e[None, :]
    tl.store(p_acc, acc, mask=(o_e < E)[None, :])
    n_partials = tl.num_programs(2).to(tl.int64) * (H // GROUP) * n_splits
    tl.store(ml_ptr + i_partial * BM + o_row, row_max)
    tl.store(ml_ptr + (n_partials + i_partial) * BM + o_row, row_sum)


@triton.jit
def load_fp32(ptr, n, o_n, stride, last, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """Load rows n + o_n of a head, [keys, BD], as fp32.

    bf16 may be passed as pairs in int32: a bit shift or mask then converts a number to fp32 at half the cost.
    """
    PAIRS: tl.constexpr = ptr.dtype.element_ty == tl.int32
    WIDTH: tl.constexpr = BD // 2 if PAIRS else BD
    END: tl.constexpr = D // 2 if PAIRS else D
    o_d = tl.arange(0, WIDTH)
    p_x = ptr + tl.cast(n, tl.int64) * stride + (o_n[:, None] * stride + o_d[None, :])
    if MASKED:
        b_x = tl.load(p_x, mask=(n + o_n < last)[:, None] & (o_d < END)[None, :], other=0)
    elif END < WIDTH:
        b_x = tl.load(p_x, mask=(o_d < END)[None, :], other=0)
    else:
        b_x = tl.load(p_x)
    if PAIRS:
        b_even = (b_x << 16).to(tl.float32, bitcast=True)
        b_odd = (b_x & -65536).to(tl.float32, bitcast=True)
        return tl.join(b_even, b_odd).reshape(o_n.shape[0], BD)
    else:
        return b_x.to(tl.float32)


@triton.jit
def walk_keys(
    first, last, rows, constants, lam, tau, accs, sums, maxima, k_ptr, v_ptrs, bias_ptr, stride_km, stride_ks,
    stride_vs, stride_bm, stride_bs,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, GROUP: tl.constexpr,
    BN: tl.constexpr, BI: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr, BIAS: tl.constexpr,
    STAGES: tl.constexpr, VALUE_HEADS: tl.constexpr, VALUE_STEP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Accumulate accs, sums and maxima (one per query) over the keys first to last.

    rows and constants have one entry per query and component, v_ptrs one per value head.
    """
    o_i = tl.arange(0, BI)
    # num_stages is set on the loop: the compiler does not pipeline a loop without GEMMs otherwise.
    for n in tl.range(first, last, BN, num_stages=STAGES):
        # Ordered by key group, component and query: the terms of a key are computed once for all queries.
        b_exponents = ()
        values = ()
        for i in tl.static_range(BN // BI):
            o_n = i * BI + o_i
            b_k = load_fp32(k_ptr, n, o_n, stride_ks, last, D, BD, MASKED)
            for t in tl.static_range(VALUE_HEADS):
                values = values + (load_fp32(v_ptrs[t], n, o_n, stride_vs, last, E, BE, MASKED),)
            for r in tl.static_range(M):
                if r > 0 and not SHIFTED:
                    b_k = load_fp32(k_ptr + r * stride_km, n, o_n, stride_ks, last, D, BD, MASKED)
                if r == 0 or not SHIFTED:
                    b_norm = 0.5 * tau * tl.minimum(tl.sum(b_k * b_k, 1), FP32_MAX)
                if BIAS == 2:
                    p_bias = bias_ptr + r * stride_bm + (n + o_n) * stride_bs
                    b_bias = tl.load(p_bias, mask=n + o_n < last, other=0.0) if MASKED else tl.load(p_bias)
                    b_bias = b_bias.to(tl.float32) * LOG2E
                for g in tl.static_range(GROUP):
                    b_exponent = (tl.sum(b_k * rows[g * M + r], 1) - b_norm) * (lam[r] * LOG2E) + constants[g * M + r]
                    if BIAS == 2:
                        b_exponent += b_bias
                    b_exponents = b_exponents + (
                        tl.where(n + o_n < last, b_exponent, -float("inf")) if MASKED else b_exponent,
                    )
        new_accs = ()
        new_sums = ()
        new_maxima = ()
        for g in tl.static_range(GROUP):
            row_max = maxima[g]
            for i in tl.static_range(BN // BI * M):
                row_max = tl.maximum(row_max, b_exponents[i * GROUP + g])
            finite_max = tl.where(row_max == -float("inf"), 0.0, row_max)
            rescale = tl.exp2(maxima[g] - finite_max)
            row_sum = sums[g] * rescale
            acc = accs[g] * rescale[:, None]
            for i in tl.static_range(BN // BI):
                b_p = b_exponents[i * M * GROUP + g]
                if HARD:
                    for r in tl.static_range(1, M):
                        b_p = tl.maximum(b_p, b_exponents[(i * M + r) * GROUP + g])
                    b_p = tl.exp2(b_p - finite_max)
                else:
                    b_p = tl.exp2(b_p - finite_max)
                    for r in tl.static_range(1, M):
                        b_p += tl.exp2(b_exponents[(i * M + r) * GROUP + g] - finite_max)
                row_sum += b_p
                acc += b_p[:, None] * values[i * VALUE_HEADS + g // VALUE_STEP]
            new_accs = new_accs + (acc,)
            new_sums = new_sums + (row_sum,)
            new_maxima = new_maxima + (row_max,)
        accs = new_accs
        sums = new_sums
        maxima = new_maxima
    return accs, sums, maxima


@triton.jit(do_not_specialize=["HK", "S", "split_size", "n_splits"])
def decode_row(
    q_ptr, k_ptr, v_ptr, shift_ptr, bias_ptr, scale_ptr, tau_ptr, count_ptr, acc_ptr, ml_ptr, scale, tau, constant,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_km, stride_ks, stride_vb, stride_vh, stride_vs, stride_bb,
    stride_bh, stride_bm, stride_bs, HK, S, split_size, n_splits,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, SHIFTED: tl.constexpr,
    HARD: tl.constexpr, SCALE: tl.constexpr, TAU: tl.constexpr, CAUSAL: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, BI: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr, COUNTED: tl.constexpr,
    VALUE_GROUP: tl.constexpr, VALUE_HEADS: tl.constexpr, VALUE_STEP: tl.constexpr,
):  # fmt: skip
    """Attend to one split of the keys, for one query of each of GROUP heads, which share every load.

    Computes the same as `decode_split` without GEMMs. BI keys are loaded side by side; the BN / BI groups of a block
    are processed one after another by the same threads. Each of the BI lanes has its own running maximum and sums until
    the end, so the loop needs no reduction across threads and is memory-bound. With k_jr = k_j + b_r the exponent is
    linear in k_j except for its norm: lambda_r ((q - tau b_r).k_j - tau |k_j|^2 / 2) plus a term independent of j.
    BIAS: 1 the same for all keys, 2 one per key. VALUE_GROUP, VALUE_HEADS, VALUE_STEP: as in `decode_split`.
    """
    i_s, i_k, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if COUNTED:
        S, split_size = split_bounds(count_ptr, S, n_splits, BN)
    lam = load_scales(scale_ptr, scale, i_k, M, SCALE)
    if TAU:
        tau = tl.load(tau_ptr + i_k)
    if BIAS:
        bias_ptr += i_b.to(tl.int64) * stride_bb + i_k * stride_bh
    o_d = tl.arange(0, BD)
    o_e = tl.arange(0, BE)
    rows = ()
    constants = ()
    accs = ()
    sums = ()
    maxima = ()
    for g in tl.static_range(GROUP):
        p_q = q_ptr + i_b.to(tl.int64) * stride_qb + (i_k * GROUP + g).to(tl.int64) * stride_qh + o_d
        b_q = tl.load(p_q, mask=o_d < D, other=0.0).to(tl.float32)
        for r in tl.static_range(M):
            b_row = b_q
            b_constant = constant
            if SHIFTED:
                b_shift = load_shift(shift_ptr, i_k, r, M, D, BD)
                b_row = b_q - tau * b_shift
                b_constant += lam[r] * (tl.sum(b_q * b_shift, 0) - 0.5 * tau * tl.sum(b_shift * b_shift, 0))
            if SCALE > 1:
                b_constant -= 0.5 * tau * lam[r] * tl.sum(b_q * b_q, 0)
            if BIAS == 1:
                b_constant += tl.load(bias_ptr + r * stride_bm).to(tl.float32)
            rows = rows + (b_row[None, :],)
            constants = constants + (b_constant * LOG2E,)
        accs = accs + (tl.zeros([BI, BE], tl.float32),)
        sums = sums + (tl.zeros([BI], tl.float32),)
        maxima = maxima + (tl.full([BI], -float("inf"), tl.float32),)
    k_ptr += i_b.to(tl.int64) * stride_kb + i_k.to(tl.int64) * stride_kh
    v_ptrs = ()
    for t in tl.static_range(VALUE_HEADS):
        i_v = value_head(i_k * GROUP + t * VALUE_STEP, i_k, VALUE_GROUP)
        v_ptrs = v_ptrs + (v_ptr + (i_b.to(tl.int64) * stride_vb + i_v.to(tl.int64) * stride_vh),)
    first = i_s * split_size
    last = min(first + split_size, S)
    if CAUSAL == 1:
        last = min(last, 1)
    full = first + max(last - first, 0) // BN * BN
    for MASKED in tl.static_range(2):
        accs, sums, maxima = walk_keys(
            full if MASKED else first, last if MASKED else full, rows, constants, lam, tau, accs, sums, maxima, k_ptr,
            v_ptrs, bias_ptr, stride_km, stride_ks, stride_vs, stride_bm, stride_bs, M, D, E, BD, BE, GROUP, BN, BI,
            SHIFTED, HARD, BIAS, 1 if MASKED else STAGES, VALUE_HEADS, VALUE_STEP, MASKED,
        )  # fmt: skip
    i_partial = ((i_b * HK + i_k) * n_splits + i_s).to(tl.int64)
    n_partials = tl.num_programs(2).to(tl.int64) * HK * n_splits
    for g in tl.static_range(GROUP):
        top = tl.max(maxima[g], 0)
        b_w = tl.exp2(maxima[g] - tl.where(top == -float("inf"), 0.0, top))
        o_partial = i_partial * GROUP + g
        tl.store(acc_ptr + o_partial * E + o_e, tl.sum(accs[g] * b_w[:, None], 0), mask=o_e < E)
        tl.store(ml_ptr + o_partial, top)
        tl.store(ml_ptr + n_partials * GROUP + o_partial, tl.sum(sums[g] * b_w, 0))


@triton.jit(do_not_specialize=["H", "L", "n_splits"])
def decode_merge(
    acc_ptr, ml_ptr, out_ptr, lse_ptr, GROUP, H, L, n_splits,
    E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Merge the sums of the splits of one row into the output [B, H, L, E] and the base-2 lse [B, H, L]."""
    i_row, i_k, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    HK = H // GROUP
    n_partials = tl.num_programs(2).to(tl.int64) * HK * n_splits
    i_partial = (i_b * HK + i_k).to(tl.int64) * n_splits
    o_e = tl.arange(0, BE)
    acc = tl.zeros([BE], tl.float32)
    row_sum = 0.0
    row_max = -float("inf")
    for s in range(0, n_splits, BS):
        o_s = s + tl.arange(0, BS)
        p_ml = ml_ptr + (i_partial + o_s) * BM + i_row
        b_max = tl.load(p_ml, mask=o_s < n_splits, other=-float("inf"))
        b_sum = tl.load(p_ml + n_partials * BM, mask=o_s < n_splits, other=0.0)
        p_acc = acc_ptr + ((i_partial + o_s) * BM + i_row)[:, None] * E + o_e[None, :]
        b_acc = tl.load(p_acc, mask=(o_s < n_splits)[:, None] & (o_e < E)[None, :], other=0.0)
        new_max = tl.maximum(row_max, tl.max(b_max, 0))
        finite_max = tl.where(new_max == -float("inf"), 0.0, new_max)
        b_w = tl.exp2(b_max - finite_max)
        rescale = tl.exp2(row_max - finite_max)
        acc = acc * rescale + tl.sum(b_acc * b_w[:, None], 0)
        row_sum = row_sum * rescale + tl.sum(b_sum * b_w, 0)
        row_max = new_max
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    o_out = ((i_b * H + i_k * GROUP + i_row // L) * L + i_row % L).to(tl.int64)
    tl.store(out_ptr + o_out * E + o_e, (acc / row_sum).to(out_ptr.dtype.element_ty), mask=o_e < E)
    tl.store(lse_ptr + o_out, tl.where(empty, float("inf"), row_max + tl.log2(row_sum)))
