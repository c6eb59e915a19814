"""Counts N_jr of expectation maximization: kernels over all query-key pairs, without the values, and their operator.

For shifted keys with equal scales, the responsibilities do not depend on q.k_j: gamma_ijr = A_ir C_jr / sum_s A_is C_js
takes one multiply-add per component and one reciprocal per pair.
"""

# ruff: noqa: RUF005  (Triton has no starred tuples)
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mgk._core.integers import ceil_div
from mgk.kernels.jit_cache import LaunchSpec, launch
from mgk.kernels.mixture.args import MixtureArgs
from mgk.kernels.mixture.launch import count_key_tiles, empty_workspace, leading_strides, precision_of, preprocess
from mgk.kernels.mixture.launch_config import key_strides, padded_width
from mgk.kernels.mixture.tile import (
    INTERPRETED,
    KEY_TILE,
    MASK_VALUE,
    elementwise_max,
    elementwise_min,
    exponents,
    load_rows,
    load_scales,
    load_vectors,
    max_spread,
    query_bounds,
    row_terms,
    sequence_bounds,
)
from mgk.kernels.target import is_hip

# Range of a_ir - a_is (base 2) up to which A_ir C_jr of the largest component does not underflow.
COUNT_RANGE = tl.constexpr(100.0)


@triton.jit
def reciprocal(b_x):
    """Return 1 / x with the approximate instruction, which is accurate to 1 ulp."""
    if INTERPRETED:
        # Finite for a key whose components are all masked, whose counts are discarded.
        return 1.0 / tl.maximum(b_x, 1e-32)
    elif is_hip():
        return 1.0 / b_x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b_x], tl.float32, True, 1)


@triton.jit(do_not_specialize=["H", "L", "n_tiles"])
def query_terms(
    q_ptr, shift_ptr, scale_ptr, tau_ptr, cu_q_ptr, rows_ptr, spread_ptr, scale, tau, stride_qb, stride_qh, stride_ql,
    stride_rows, GROUP, H, L, n_tiles,
    M: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, SHIFTED: tl.constexpr, SCALE: tl.constexpr,
    TAU: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Write a_ir and A_ir = 2^(a_ir - max_r a_ir), [2 M, B H L], and per tile the largest range of a_i."""
    # Sequences are on the first grid axis: the other two are limited to 65,535.
    i_m, i_h, i_seq = tl.program_id(0) % n_tiles, tl.program_id(1), tl.program_id(0) // n_tiles
    i_b, start, n_q, _ = sequence_bounds(cu_q_ptr, i_seq, L, PACKED)
    if i_m * BM >= n_q:
        return
    i_k = i_h // GROUP
    if TAU:
        tau = tl.load(tau_ptr + i_k)
    lam = load_scales(scale_ptr, scale, i_k, M, SCALE)
    o_i = i_m * BM + tl.arange(0, BM)
    q_ptr += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh + start.to(tl.int64) * stride_ql
    b_q = load_rows(q_ptr, o_i, stride_ql, n_q, D, BD, True)
    a, _ = row_terms(b_q, shift_ptr, i_k, lam, tau, M, D, BD, SHIFTED, SCALE > 1)
    top = elementwise_max(a, M)
    p_rows = rows_ptr + (i_b * H + i_h).to(tl.int64) * L + start + o_i
    for r in tl.static_range(M):
        tl.store(p_rows + r * stride_rows, a[r], mask=o_i < n_q)
        tl.store(p_rows + (M + r) * stride_rows, tl.exp2(a[r] - top), mask=o_i < n_q)
    tl.store(spread_ptr + (i_seq * H + i_h) * n_tiles + i_m, tl.max(top - elementwise_min(a, M), 0))


@triton.jit
def count_tile(
    first, last, keys, c, factors, lam, counts, pairs, q_ptr, rows_ptr, mask_ptr, o_j, causal_offset, stride_ql,
    stride_ml, stride_mj, stride_rows, L, S,
    M: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, SHIFTED: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, USE_SCORES: tl.constexpr, FACTORED: tl.constexpr,
):  # fmt: skip
    """Accumulate the counts and the number of unmasked pairs over the queries first to last."""
    for m in range(first, last, BM):
        o_i = m + tl.arange(0, BM)
        valid = tl.zeros([1, BM], tl.int1) | (o_i < L)[None, :]
        if CAUSAL and MASKED:
            valid = valid & (o_i[None, :] + causal_offset >= o_j[:, None])
        if MASK:
            p_mask = mask_ptr + o_i[None, :].to(tl.int64) * stride_ml + o_j[:, None].to(tl.int64) * stride_mj
            m_in = (o_i < L)[None, :] & (o_j < S)[:, None]
            if MASK == 1:
                valid = valid & (tl.load(p_mask, mask=m_in, other=0) != 0)
            else:
                # A bias below MASK_VALUE masks the pair.
                valid = valid & (tl.load(p_mask, mask=m_in, other=0.0).to(tl.float32) >= MASK_VALUE)
        updated = ()
        if FACTORED:
            rows = load_vectors(rows_ptr + M * stride_rows, o_i, stride_rows, L, M, 0, True)
            b_mix = rows[0] * factors[0]
            for r in tl.static_range(1, M):
                b_mix += rows[r] * factors[r]
            b_inverse = reciprocal(b_mix)
            if MASKED or MASK:
                b_inverse = tl.where(valid, b_inverse, 0.0)
            for r in tl.static_range(M):
                updated = updated + (counts[r] + b_inverse * rows[r],)
        else:
            rows = load_vectors(rows_ptr, o_i, stride_rows, L, M, 0, True)
            if USE_SCORES:
                b_q = tl.trans(load_rows(q_ptr, o_i, stride_ql, L, D, BD, True))
                scores = ()
                for r in tl.static_range(1 if SHIFTED else M):
                    scores = scores + (tl.dot(keys[r], b_q, input_precision=PRECISION),)
                xs = exponents(scores, rows, c, lam, M, SHIFTED)
            else:
                xs = ()
                for r in tl.static_range(M):
                    xs = xs + (rows[r] + c[r],)
            b_top = tl.maximum(elementwise_max(xs, M), MASK_VALUE)
            parts = ()
            b_sum = tl.zeros_like(b_top)
            for r in tl.static_range(M):
                parts = parts + (tl.exp2(xs[r] - b_top),)
                b_sum += parts[r]
            b_inverse = tl.where(valid, reciprocal(b_sum), 0.0)
            for r in tl.static_range(M):
                updated = updated + (counts[r] + b_inverse * parts[r],)
        counts = updated
        if MASKED or MASK:
            pairs += tl.sum(tl.where(valid & (o_j < S)[:, None], 1.0, 0.0), 1)
        else:
            pairs += BM
    return counts, pairs


@triton.jit(do_not_specialize=["H", "L", "S", "n_key_tiles", "n_query_tiles", "n_tiles"])
def count_components(
    q_ptr, k_ptr, mask_ptr, scale_ptr, cu_q_ptr, cu_k_ptr, c_ptr, rows_ptr, spread_ptr, count_ptr, pairs_ptr, scale,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_km, stride_ks, stride_mb, stride_mh, stride_ml,
    stride_mj, stride_rows, GROUP, H, L, S, n_key_tiles, n_query_tiles, n_tiles,
    M: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SHIFTED: tl.constexpr,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write N_jr [B, HK, M, S] and N_j [B, HK, S] of a tile of keys.

    The query heads of a group are processed one after another.
    """
    USE_SCORES: tl.constexpr = not SHIFTED or SCALE > 1
    i_n, i_k, i_seq = tl.program_id(0) % n_tiles, tl.program_id(1), tl.program_id(0) // n_tiles
    i_b, start_q, n_q, _ = sequence_bounds(cu_q_ptr, i_seq, L, PACKED)
    _, start_k, n_k, key_tile = sequence_bounds(cu_k_ptr, i_seq, S, PACKED)
    if i_n * BN >= n_k:
        return
    lam = load_scales(scale_ptr, scale, i_k, M, SCALE)
    o_j = i_n * BN + tl.arange(0, BN)
    k_ptr += i_b.to(tl.int64) * stride_kb + i_k.to(tl.int64) * stride_kh + start_k.to(tl.int64) * stride_ks
    keys = ()
    if USE_SCORES:
        for r in tl.static_range(1 if SHIFTED else M):
            keys = keys + (load_rows(k_ptr + r * stride_km, o_j, stride_ks, n_k, D, BD, True),)
    c_ptr += (i_k * M).to(tl.int64) * n_key_tiles * KEY_TILE + key_tile * KEY_TILE
    c = load_vectors(c_ptr, o_j, n_key_tiles * KEY_TILE, n_k, M, 1, False)
    b_top = tl.maximum(elementwise_max(c, M), MASK_VALUE)
    factors = ()
    for r in tl.static_range(M):
        factors = factors + (tl.exp2(c[r] - b_top),)
    spread = max_spread(spread_ptr, i_seq, i_k, n_query_tiles, n_q, GROUP, H, BM)
    causal_offset = n_k - n_q if CAUSAL == 2 else 0
    begin, full, whole = query_bounds(i_n, n_q, causal_offset, BM, BN, CAUSAL)
    counts = ()
    for _ in tl.static_range(M):
        counts = counts + (tl.zeros([BN, BM], tl.float32),)
    pairs = tl.zeros([BN], tl.float32)
    for g in range(GROUP):
        i_h = i_k * GROUP + g
        o_row = (i_b * H + i_h).to(tl.int64) * L + start_q
        q_head = q_ptr + i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh + start_q.to(tl.int64) * stride_ql
        mask_head = mask_ptr
        if MASK:
            mask_head += i_b.to(tl.int64) * stride_mb + i_h.to(tl.int64) * stride_mh
        for part in tl.static_range(0 if CAUSAL else 1, 3):
            first = begin if part == 0 else (full if part == 1 else max(whole, begin))
            last = full if part == 0 else (whole if part == 1 else n_q)
            # Both forms are compiled and one gets an empty range. Beyond COUNT_RANGE the largest exponent is
            # subtracted first.
            for FACTORED in tl.static_range(0, 1 if USE_SCORES else 2):
                selected = (spread <= COUNT_RANGE) == (FACTORED == 1) if not USE_SCORES else True
                counts, pairs = count_tile(
                    first, last if selected else first, keys, c, factors, lam, counts, pairs, q_head, rows_ptr + o_row,
                    mask_head, o_j, causal_offset, stride_ql, stride_ml, stride_mj, stride_rows, n_q, n_k, M, D, BD, BM,
                    SHIFTED, CAUSAL, MASK, PRECISION, part != 1, USE_SCORES, FACTORED,
                )  # fmt: skip
    p_count = count_ptr + ((i_b * (H // GROUP) + i_k) * M).to(tl.int64) * S + start_k + o_j
    empty = tl.sum(tl.where(b_top > MASK_VALUE, 0.0, 1.0), 1) > 0.0
    for r in tl.static_range(M):
        b_count = tl.sum(counts[r], 1)
        if not USE_SCORES:
            b_count = tl.where(spread <= COUNT_RANGE, b_count * tl.sum(factors[r], 1), b_count)
        tl.store(p_count + r * S, tl.where(empty, 0.0, b_count), mask=o_j < n_k)
    tl.store(pairs_ptr + (i_b * (H // GROUP) + i_k).to(tl.int64) * S + start_k + o_j, pairs, mask=o_j < n_k)


@torch.library.custom_op("mgk::component_counts", mutates_args=())
def component_counts(
    query: Tensor, keys: Tensor, shift: Tensor | None, log_prior: Tensor | None, scale_t: Tensor | None,
    tau_t: Tensor | None, mask: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, scale: float, tau: float,
    causal: int, max_q: int, max_k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return N_jr [B, Hk, M, S] and N_j [B, Hk, S], the number of queries for which key j is not masked."""
    (B, H, L, D), HK, S = query.shape, keys.shape[1], keys.shape[-2]
    # There are no values: keys stand in for them.
    args = MixtureArgs(
        query=query, keys=keys, value=keys, shift=shift, bias=log_prior, scale_t=scale_t, tau_t=tau_t, mask=mask,
        seed=None, cu_q=cu_q, cu_k=cu_k, scale=scale, tau=tau, constant=0.0, dropout_p=0.0, causal=causal, hard=False,
        max_q=max_q, max_k=max_k,
    )  # fmt: skip
    M = args.components
    count = query.new_empty(B, HK, M, S, dtype=torch.float32)
    pairs = count.new_empty(B, HK, S)
    if query.numel() == 0 or S == 0:
        return count.zero_(), pairs.zero_()
    sequences, key_tiles, shifted = args.num_sequences, count_key_tiles(cu_k, B, S), shift is not None
    prepared, stats = empty_workspace(count, HK, M, key_tiles)
    preprocess(args, prepared, stats)
    scales = 0 if scale_t is None else scale_t.shape[1]
    has_gemm = not shifted or scales > 1
    block = 32 if has_gemm and (query.element_size() > 2 or D > 128) else 64
    q_tiles, k_tiles = ceil_div(max_q, block), ceil_div(max_k, block)
    terms, spread = count.new_empty(2 * M, B * H * L), count.new_empty(sequences * H, q_tiles)
    common = {"M": M, "D": D, "BD": padded_width(D), "BM": block, "SHIFTED": shifted, "SCALE": scales}
    terms_spec = LaunchSpec(
        query_terms, (q_tiles * sequences, H, 1), (*query.stride()[:3], terms.stride(0), H // HK), (H, L, q_tiles),
        common | {"TAU": tau_t is not None, "PACKED": cu_q is not None},
    )  # fmt: skip
    launch(terms_spec, (query, shift, scale_t, tau_t, cu_q, terms, spread), (scale, tau))
    mask = None if mask is None else mask.expand(B, H, L, S)
    counts_spec = LaunchSpec(
        count_components, (k_tiles * sequences, HK, 1),
        (*query.stride()[:3], *key_strides(keys.stride(), shifted), *leading_strides(mask, 4), terms.stride(0),
        H // HK),
        (H, L, S, key_tiles, q_tiles, k_tiles),
        common | {"BN": block, "CAUSAL": causal, "MASK": 0 if mask is None else 1 + mask.is_floating_point(),
        "PACKED": cu_q is not None, "PRECISION": precision_of(query)}, num_stages=2 if has_gemm else 1,
    )  # fmt: skip
    tensors = (query, keys, mask, scale_t, cu_q, cu_k, prepared, terms, spread, count, pairs)
    launch(counts_spec, tensors, (scale,))
    return count, pairs


@component_counts.register_fake
def _counts_fake(query: Any, keys: Any, shift: Any, *_: Any) -> tuple[Tensor, Tensor]:
    B, HK, S = keys.shape[0], keys.shape[1], keys.shape[-2]
    M = keys.shape[2] if shift is None else shift.shape[1]
    count = query.new_empty(B, HK, M, S, dtype=torch.float32)
    return count, count.new_empty(B, HK, S)
