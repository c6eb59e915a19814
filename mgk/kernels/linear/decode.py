"""Decode kernel of causal linear attention: one token on the state of the previous ones, forward only.

It is a single launch; the kernels for many tokens take four launches and four copies. Everything is computed in fp32.
"""

import triton
import triton.language as tl

from mgk.kernels.heads import shared_head
from mgk.kernels.linear.kernels import feature, head_pointer


@triton.jit
def decode_token(
    query, keys, value, shift, prior, total, norm, out, new_total, new_norm, q_b, q_h, k_b, k_h, k_r, v_b, v_h, p_b,
    p_h, p_r, t_b, t_h, t_d, n_b, n_h, uniform, HP, GROUP, M,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, MAP: tl.constexpr, SHIFTED: tl.constexpr,
    PRIOR: tl.constexpr, NORMALISE: tl.constexpr, KEY_REPEAT: tl.constexpr, VALUE_REPEAT: tl.constexpr,
):  # fmt: skip
    """Add the token to Z and z, and write φ(q)·Z / φ(q)·z for the query heads of a pair head.

    A program handles BE columns of Z. HP pair heads, of which KEY_REPEAT share a key head and z, and VALUE_REPEAT a
    value head.
    """
    pair, batch = tl.program_id(1), tl.program_id(2)
    head, v_head = shared_head(pair, KEY_REPEAT), shared_head(pair, VALUE_REPEAT)
    o_d, o_e = tl.arange(0, BD), tl.program_id(0) * BE + tl.arange(0, BE)
    m_d, m_e = o_d < D, o_e < E
    b_mixed = tl.zeros([BD], tl.float32)
    weight = uniform
    for r in range(M):
        b_k = tl.load(head_pointer(keys, batch, head, k_b, k_h) + r * k_r + o_d, mask=m_d, other=0.0).to(tl.float32)
        if SHIFTED:
            b_k += tl.load(shift + (head * M + r) * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        if PRIOR:
            weight = tl.exp(tl.load(head_pointer(prior, batch, head, p_b, p_h) + r * p_r).to(tl.float32))
        b_mixed += tl.where(m_d, weight * feature(b_k, MAP), 0.0)
    b_v = tl.load(head_pointer(value, batch, v_head, v_b, v_h) + o_e, mask=m_e, other=0.0).to(tl.float32)
    inside = m_d[:, None] & m_e[None, :]
    p_total = head_pointer(total, batch, pair, t_b, t_h) + o_d[:, None] * t_d + o_e[None, :]
    b_total = tl.load(p_total, mask=inside, other=0.0) + b_mixed[:, None] * b_v[None, :]
    b_norm = tl.load(head_pointer(norm, batch, head, n_b, n_h) + o_d, mask=m_d, other=0.0) + b_mixed
    i_state = (batch * HP + pair).to(tl.int64) * D
    tl.store(new_total + (i_state + o_d[:, None]) * E + o_e[None, :], b_total, mask=inside)
    if tl.program_id(0) == 0:
        if KEY_REPEAT == 1:
            tl.store(new_norm + i_state + o_d, b_norm, mask=m_d)
        elif pair % KEY_REPEAT == 0:
            i_norm = (batch * (HP // KEY_REPEAT) + head).to(tl.int64) * D
            tl.store(new_norm + i_norm + o_d, b_norm, mask=m_d)
    for g in range(GROUP):
        i_h = pair * GROUP + g
        b_q = tl.load(head_pointer(query, batch, i_h, q_b, q_h) + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_f = tl.where(m_d, feature(b_q, MAP), 0.0)
        b_out = tl.sum(b_f[:, None] * b_total, 0)
        if NORMALISE:
            b_sum = tl.sum(b_f * b_norm, 0)
            b_out = tl.where(b_sum == 0, 0.0, b_out / tl.where(b_sum == 0, 1.0, b_sum))
        p_out = out + ((batch * HP * GROUP) + i_h).to(tl.int64) * E + o_e
        tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_e)
