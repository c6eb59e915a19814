"""The loop of the second backward kernel over the queries, whose tiles are transposed: [keys, queries]."""

# ruff: noqa: RUF005  (Triton has no starred tuples)
import triton
import triton.language as tl

from mgk.kernels.mixture.bwd_common import (
    factored_gradients,
    independent_gradients,
    mul_all,
    mul_columns,
    mul_vectors,
    score_gradients,
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
from mgk.kernels.mixture.masks import apply_mask, dropout_mask, mask_scores
from mgk.kernels.mixture.tile import (  # fmt: skip
    head_pointer,
    load_tile,
    load_vectors,
    padded_rows,
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
            if COMPONENT_GEMM and query_sums is None
            else load_row_vectors(
                rows_src, o_row, m, stride_rows, L, ALL, 2 * ALL - 1 if SHIFTED else ALL, BM, MASKED, TMA_ROWS
            )
        )
        delta = load_row_vectors(rows_src, o_row, m, stride_rows, L, 2 * ALL - 1, 2 * ALL, BM, MASKED, TMA_ROWS)
        if DROPOUT:
            m_keep = dropout_mask(seed, i_bh, o_i[None, :], o_j[:, None], dropout_p)
            b_g = tl.where(m_keep, b_g / (1.0 - dropout_p), 0.0)
        b_g -= delta[0]
        if COMPONENT_GEMM:
            b_row_operand = load_operand(row_operand_src, o_row + m, L - m, BM, MASKED, TMA_OPERAND)
            b_p, b_ds, b_ge = factored_gradients(scores, b_g, alpha, component_gemm(b_key_operand, b_row_operand), lam)
            dcs = (accumulate_gemm(b_ge, b_row_operand, dcs[0]),)
            parts = (b_ge,)  # for `add_query_gradients`, which adds the terms of all components in one GEMM
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
            first = begin if part == 0 else (full if part == 1 else max(whole, begin))
            last = full if part == 0 else (whole if part == 1 else n_q)
            # Skip an empty loop: its first copies still cost time. At D 128 the condition makes the other loop spill,
            # and dkdv takes 8 to 17 % longer (H200).
            if True if part == 1 or BD > 64 else first < last:
                dks, dv, dcs, dlams = walk_queries(
                    first, last, keys, b_v, b_key_operand, take(coef, FIRST, COUNT), take(lam, FIRST, COUNT), dks, dv,
                    dcs, dlams, q_head, do_head, i_b, i_h, start_q, rows_src, row_operand_src, query_sums, o_row,
                    mask_head, seed, i_seq * H + i_h, o_j, causal_offset, dropout_p, stride_ql, stride_gl, stride_ml,
                    stride_mj, stride_rows, n_q, n_k, FIRST, COUNT, M, D, E, BD, BE, BM, SHIFTED, HARD, CAUSAL, MASK,
                    DROPOUT, PRECISION, UNEQUAL, part != 1, not USE_FAST or HARD, TMA, OUTPUTS, TMA_ROWS, FACTOR,
                    COMPONENT_GEMM, TMA and not PACKED,
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
