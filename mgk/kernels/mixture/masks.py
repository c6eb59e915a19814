"""Masks of a tile of scores: attn_mask, the causal mask and dropout."""

# ruff: noqa: RUF005  (Triton has no starred tuples)
import triton
import triton.language as tl


@triton.jit
def apply_mask(scores, m_valid, M: tl.constexpr):
    out = ()
    for r in tl.static_range(M):
        out = out + (tl.where(m_valid, scores[r], -float("inf")),)
    return out


@triton.jit
def add_bias(scores, b_bias, lam, M: tl.constexpr):
    """Add a float mask to the scores before scaling, so that later steps do not depend on it."""
    out = ()
    for r in tl.static_range(M):
        out = out + (scores[r] + b_bias / lam[r],)
    return out


@triton.jit
def mask_scores(scores, mask_ptr, o_i, o_j, stride_l, stride_s, L, S, lam, NS: tl.constexpr, MASK: tl.constexpr):
    """Apply attn_mask to a tile. MASK: 1 bool, 2 float. o_i and o_j are expanded to the tile's orientation."""
    m_in = (o_i < L) & (o_j < S)
    p_mask = mask_ptr + o_i.to(tl.int64) * stride_l + o_j.to(tl.int64) * stride_s
    if MASK == 1:
        return apply_mask(scores, tl.load(p_mask, mask=m_in, other=0) != 0, NS)
    else:
        return add_bias(scores, tl.load(p_mask, mask=m_in, other=0.0).to(tl.float32), lam, NS)


@triton.jit
def mask_tile(
    scores, mask_ptr, o_i, o_n, causal_offset, stride_ml, stride_mj, L, S, lam,
    NS: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Apply attn_mask and the causal mask to the scores of a tile."""
    if MASK:
        scores = mask_scores(scores, mask_ptr, o_i[:, None], o_n[None, :], stride_ml, stride_mj, L, S, lam, NS, MASK)
    if MASKED and CAUSAL:
        scores = apply_mask(scores, o_i[:, None] + causal_offset >= o_n[None, :], NS)
    return scores


@triton.jit
def dropout_mask(seed, i_bh, o_i, o_j, dropout_p):
    """Return which weights dropout keeps: one draw per (batch and head, i, j), independent of the tiling.

    The indices are separate counters of the generator: i * S + j would exceed 32 bits.
    """
    row, column = tl.broadcast(o_i, o_j)
    bits, _, _, _ = tl.philox(seed, column, row, row * 0 + i_bh, row * 0)
    return tl.uint_to_uniform_float(bits) >= dropout_p
