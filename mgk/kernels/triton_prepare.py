"""What depends on the keys alone: c_jr = log pi_jr - tau lambda_r |k_jr|^2 / 2, in base 2, and C_jr = 2^(c_jr - c of the tile)."""

import triton
import triton.language as tl

from .triton_tiles import LOG2E, TILE, extent, load_scales


@triton.jit(do_not_specialize=["S", "n_slots"])
def prepare_keys(
    k_ptr, shift_ptr, bias_ptr, scale_ptr, tau_ptr, cu_k_ptr, c_ptr, coef_ptr, stats_ptr, scale, tau, constant,
    stride_kb, stride_kh, stride_km, stride_ks, stride_bb, stride_bh, stride_bm, stride_bs, S, n_slots,
    M: tl.constexpr, D: tl.constexpr, BC: tl.constexpr, SHIFTED: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, TAU: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Writes c and C [Hk, M, slots * TILE] (-inf and 0 beyond the keys) and per tile [max c, min finite c, max |k|, 0]."""
    i_t, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, start, n_keys, slot = extent(cu_k_ptr, i_b, S, PACKED)
    if i_t * TILE >= n_keys:
        return
    slot += i_t
    o_j = i_t * TILE + tl.arange(0, TILE)
    m_j = o_j < n_keys
    lam = load_scales(scale_ptr, scale, i_h, M, SCALE)
    if TAU:
        tau = tl.load(tau_ptr + i_h)
    k_ptr += i_b.to(tl.int64) * stride_kb + i_h.to(tl.int64) * stride_kh + start.to(tl.int64) * stride_ks
    norm = tl.zeros([TILE], tl.float32)
    norms = ()
    for r in tl.static_range(M):
        norms = norms + (norm,)
    for d in tl.static_range(0, D, BC):
        o_d = d + tl.arange(0, BC)
        m_jd = m_j[:, None] & (o_d < D)[None, :]
        p_k = k_ptr + o_j[:, None].to(tl.int64) * stride_ks + o_d[None, :]
        if SHIFTED:
            b_k = tl.load(p_k, mask=m_jd, other=0.0).to(tl.float32)
            norm += tl.sum(b_k * b_k, 1)
        updated = ()
        for r in tl.static_range(M):
            if SHIFTED:
                b_kr = b_k + tl.load(shift_ptr + (i_h * M + r) * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
            else:
                b_kr = tl.load(p_k + r * stride_km, mask=m_jd, other=0.0).to(tl.float32)
            updated = updated + (norms[r] + tl.sum(b_kr * b_kr, 1),)
        norms = updated
    if BIAS:
        bias_ptr += i_b.to(tl.int64) * stride_bb + i_h * stride_bh + (start + o_j) * stride_bs
    high = -float("inf")
    low = float("inf")
    cs = ()
    for r in tl.static_range(M):
        b_c = constant - 0.5 * tau * lam[r] * norms[r]
        if BIAS:
            b_c += tl.load(bias_ptr + r * stride_bm, mask=m_j, other=0.0).to(tl.float32)
        b_c = tl.where(m_j, b_c * LOG2E, -float("inf"))
        high = tl.maximum(high, tl.max(b_c, 0))
        low = tl.minimum(low, tl.min(tl.where(b_c == -float("inf"), float("inf"), b_c), 0))
        if not SHIFTED:
            norm = tl.maximum(norm, norms[r])
        cs = cs + (b_c,)
    ref = tl.where(high == -float("inf"), 0.0, high)
    o_c = (i_h * M).to(tl.int64) * n_slots * TILE + slot * TILE + tl.arange(0, TILE)
    for r in tl.static_range(M):
        tl.store(c_ptr + o_c + r * n_slots * TILE, cs[r])
        tl.store(coef_ptr + o_c + r * n_slots * TILE, tl.exp2(cs[r] - ref))
    p_stats = stats_ptr + (i_h * n_slots + slot) * 4
    tl.store(p_stats, high)
    tl.store(p_stats + 1, low)
    tl.store(p_stats + 2, tl.sqrt(tl.max(tl.where(m_j, norm, 0.0), 0)))
