"""Triton kernels of linear attention (Eq. 14) on mixed key features, forward and backward, linear in the length.

The rows of a sequence are split into chunks. A state is Z = Σ φ̃ vᵀ (D·E numbers) and z = Σ φ̃ (D numbers) in one row.

CAUSAL: `sum_chunks` computes the state of each chunk and `scan_states` their prefix sums. Of n_chunks + 1 rows, row n
is the state before chunk n; within a chunk, weights are formed tile by tile. The backward uses suffix sums: row n + 1
is the state after chunk n. Not causal: all keys are one state, the sum over all chunks, and no weights are formed.

States belong to pair heads, of which KEY_REPEAT share a key head and VALUE_REPEAT a value head; both are 1 unless the
numbers of key and value heads differ. In kernels over states, HK and GROUP count pair heads.

S is the number of rows that the programs of a kernel cover: queries or keys. Every sum is taken by one program in a
fixed order. TYPE is the input type of the GEMMs: bf16 for bf16, else fp32, because the sums exceed the range of fp16.
"""

import triton
import triton.language as tl

from mgk.kernels.heads import shared_head

ELU = tl.constexpr(0)  # elu + 1; anything else is relu


@triton.jit
def feature(x, MAP: tl.constexpr):
    if MAP == ELU:
        return tl.where(x > 0, x + 1, tl.exp(tl.minimum(x, 0.0)))
    return tl.where(x <= 0, 0.0, x)


@triton.jit
def feature_slope(x, MAP: tl.constexpr):
    if MAP == ELU:
        return tl.where(x > 0, 1.0, tl.exp(tl.minimum(x, 0.0)))
    return tl.where(x > 0, 1.0, 0.0)


@triton.jit
def load_rows(base, rows, stride, columns, end, width):
    """Load [rows, columns], with zeros for rows from `end` on and columns from `width` on."""
    inside = (rows[:, None] < end) & (columns[None, :] < width)
    return tl.load(base + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(base, rows, stride, columns, end, width, x):
    inside = (rows[:, None] < end) & (columns[None, :] < width)
    tl.store(base + rows[:, None].to(tl.int64) * stride + columns[None, :], x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def chunk_bounds(table, chunk, S, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Return first row and end of a chunk, and whether it is the first or the last of a packed sequence."""
    if PACKED:
        entry = table + 4 * chunk
        return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    begin = chunk * CHUNK
    return begin, tl.minimum(begin + CHUNK, S), begin * 0, begin * 0


@triton.jit
def head_pointer(x, batch, head, stride_b, stride_h):
    return x + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h


@triton.jit
def precise_dot(x, y, total, TRANSPOSED: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Return total + x·y (TRANSPOSED: xᵀ·y) without rounding x to bf16: a second GEMM adds its low part.

    The gradients of the weights nearly cancel in the gradient of the prior: bf16 alone would lose their difference.
    """
    high = x.to(TYPE)
    total = tl.dot(tl.trans(high) if TRANSPOSED else high, y, total, input_precision=PRECISION)
    if tl.bfloat16 == TYPE:
        low = (x - high.to(tl.float32)).to(TYPE)
        total = tl.dot(tl.trans(low) if TRANSPOSED else low, y, total, input_precision=PRECISION)
    return total


@triton.jit
def state_dot(
    x, state, total, TRANSPOSED: tl.constexpr, CAUSAL: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return total + x·state (TRANSPOSED: x·stateᵀ).

    If not CAUSAL, the output depends on the state alone: a second GEMM adds its low part instead of rounding to bf16.
    """
    high = state.to(TYPE)
    total = tl.dot(x, tl.trans(high) if TRANSPOSED else high, total, input_precision=PRECISION)
    if tl.bfloat16 == TYPE and not CAUSAL:
        low = (state - high.to(tl.float32)).to(TYPE)
        total = tl.dot(x, tl.trans(low) if TRANSPOSED else low, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["S"])
def mix_features(
    keys, shift, prior, mask, mixed, k_b, k_h, k_r, k_s, p_b, p_h, p_r, p_s, uniform, HK, S, M,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, MAP: tl.constexpr, SHIFTED: tl.constexpr,
    PRIOR: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Write φ̃_j = Σ_r π_jr φ(k_jr), [B, HK, S, D], zero for masked keys."""
    head, batch = tl.program_id(1) % HK, tl.program_id(1) // HK
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BD)
    base = head_pointer(keys, batch, head, k_b, k_h)
    total = tl.zeros([ROWS, BD], tl.float32)
    weight = tl.zeros([ROWS], tl.float32) + uniform
    for r in range(M):
        k = load_rows(base + r * k_r, rows, k_s, columns, S, D).to(tl.float32)
        if SHIFTED:
            k += tl.load(shift + (head * M + r) * D + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
        if PRIOR:
            p_prior = head_pointer(prior, batch, head, p_b, p_h) + r * p_r + rows.to(tl.int64) * p_s
            weight = tl.exp(tl.load(p_prior, mask=rows < S, other=0.0).to(tl.float32))
        total += weight[:, None] * feature(k, MAP)
    if MASK:
        attend = tl.load(mask + batch.to(tl.int64) * S + rows, mask=rows < S, other=0)
        total = tl.where(attend[:, None] != 0, total, 0.0)
    store_rows(mixed + tl.program_id(1).to(tl.int64) * S * D, rows, D, columns, S, D, total)


@triton.jit(do_not_specialize=["S"])
def unmix_gradients(
    grad, keys, shift, prior, mask, dkeys, dshift, dprior, k_b, k_h, k_r, k_s, p_b, p_h, p_r, p_s, uniform, HK, S, M,
    d_b, d_h, d_r, d_s,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, MAP: tl.constexpr, SHIFTED: tl.constexpr,
    PRIOR: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of keys, log prior [B, HK, M, S] and shifts from that of φ̃.

    The gradient of the shifts is summed over the rows of a program.
    """
    i_bh = tl.program_id(1)
    head, batch = i_bh % HK, i_bh // HK
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BD)
    base = head_pointer(keys, batch, head, k_b, k_h)
    base_d = head_pointer(dkeys, batch, head, d_b, d_h)
    g = load_rows(grad + i_bh.to(tl.int64) * S * D, rows, D, columns, S, D)
    if MASK:
        attend = tl.load(mask + batch.to(tl.int64) * S + rows, mask=rows < S, other=0)
        g = tl.where(attend[:, None] != 0, g, 0.0)
    dk_sum = tl.zeros([ROWS, BD], tl.float32)
    weight = tl.zeros([ROWS], tl.float32) + uniform
    for r in range(M):
        k = load_rows(base + r * k_r, rows, k_s, columns, S, D).to(tl.float32)
        if SHIFTED:
            k += tl.load(shift + (head * M + r) * D + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
        if PRIOR:
            p_prior = head_pointer(prior, batch, head, p_b, p_h) + r * p_r + rows.to(tl.int64) * p_s
            weight = tl.exp(tl.load(p_prior, mask=rows < S, other=0.0).to(tl.float32))
            dprior_r = weight * tl.sum(g * feature(k, MAP), 1)
            tl.store(dprior + (i_bh.to(tl.int64) * M + r) * S + rows, dprior_r, mask=rows < S)
        dk = weight[:, None] * feature_slope(k, MAP) * g
        if SHIFTED:
            dk_sum += dk
            p_dshift = dshift + ((tl.program_id(0) * tl.num_programs(1) + i_bh).to(tl.int64) * M + r) * D + columns
            tl.store(p_dshift, tl.sum(dk, 0), mask=columns < D)
        else:
            store_rows(base_d + r * d_r, rows, d_s, columns, S, D, dk)
    if SHIFTED:
        store_rows(base_d, rows, d_s, columns, S, D, dk_sum)


@triton.jit(do_not_specialize=["S", "n_chunks"])
def sum_chunks(
    features, value, inverse, factor, states, table, f_b, f_h, f_s, v_b, v_h, v_s, HK, GROUP, S, n_chunks, FIRST,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    MAP: tl.constexpr, REVERSE: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr, KEY_REPEAT: tl.constexpr, VALUE_REPEAT: tl.constexpr,
):  # fmt: skip
    """Write Σ f xᵀ and Σ f of a chunk into row chunk + FIRST, for a pair head.

    Forward: f = φ̃ and x = v. REVERSE (backward): f = φ(q)/d and x = dO over the heads of a group, and Σ factor·φ(q)
    instead of Σ f.
    """
    chunk, i_bh, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head, batch = i_bh % HK, i_bh // HK
    parts: tl.constexpr = (E + BE - 1) // BE
    columns_d = (part // parts) * BD + tl.arange(0, BD)
    columns_e = (part % parts) * BE + tl.arange(0, BE)
    begin, end, _, _ = chunk_bounds(table, chunk, S, CHUNK, PACKED)
    total, norm = tl.zeros([BD, BE], tl.float32), tl.zeros([BD], tl.float32)
    for g in range(GROUP):
        q_head = head * GROUP + g
        f_head = q_head if REVERSE else shared_head(q_head, KEY_REPEAT)
        v_head = q_head if REVERSE else shared_head(q_head, VALUE_REPEAT)
        base_f, base_v = head_pointer(features, batch, f_head, f_b, f_h), head_pointer(value, batch, v_head, v_b, v_h)
        o_rows = (batch * HK * GROUP + q_head).to(tl.int64) * S
        for start in range(begin, end, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            f = load_rows(base_f, rows, f_s, columns_d, end, D)
            if REVERSE:
                f = feature(f.to(tl.float32), MAP).to(TYPE).to(tl.float32)
                scale = tl.load(inverse + o_rows + rows, mask=rows < end, other=0.0)
                norm += tl.sum(f * tl.load(factor + o_rows + rows, mask=rows < end, other=0.0)[:, None], 0)
                f *= scale[:, None]
            else:
                norm += tl.sum(f.to(tl.float32), 0)
            x = load_rows(base_v, rows, v_s, columns_e, end, E).to(TYPE)
            if REVERSE and not CAUSAL:
                total = precise_dot(f, x, total, True, TYPE, PRECISION)
            else:
                total = tl.dot(tl.trans(f.to(TYPE)), x, total, input_precision=PRECISION)
    state = states + (i_bh.to(tl.int64) * (n_chunks + 1) + chunk + FIRST) * (D * (E + 1))
    store_rows(state, columns_d, E, columns_e, D, E, total)
    if part % parts == 0:
        tl.store(state + D * E + columns_d, norm, mask=columns_d < D)


@triton.jit
def join(a, new_a, b, new_b):
    return tl.where(new_b != 0, b, a + b), new_a | new_b


@triton.jit(do_not_specialize=["n_chunks"])
def scan_states(
    states, table, width, n_chunks,
    STEP: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Replace the rows of the chunks by their prefix sums (REVERSE: suffix sums), in place.

    The first (last) row holds the initial state. A packed sequence starts from zero.
    """
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    base = states + tl.program_id(1).to(tl.int64) * (n_chunks + 1) * width + columns
    steps = tl.arange(0, STEP)
    carry = tl.load(base + (n_chunks.to(tl.int64) * width if REVERSE else 0), mask=columns < width, other=0.0)
    for first in range(0, n_chunks, STEP):
        n = first + steps
        chunk = n_chunks - 1 - n if REVERSE else n
        row = chunk if REVERSE else chunk + 1
        p_x, inside = base[None, :] + row[:, None].to(tl.int64) * width, (n < n_chunks)[:, None] & (columns < width)
        x = tl.load(p_x, mask=inside, other=0.0)
        if PACKED:
            new = tl.load(table + 4 * chunk + (3 if REVERSE else 2), mask=n < n_chunks, other=0)
            x, started = tl.associative_scan((x, tl.broadcast_to(new[:, None], [STEP, BLOCK])), 0, join)
            x = tl.where(started != 0, x, x + carry)
        else:
            x = tl.cumsum(x, 0) + carry
        tl.store(p_x, x, mask=inside)
        carry = tl.sum(tl.where(steps[:, None] == STEP - 1, x, 0.0), 0)


@triton.jit(do_not_specialize=["S", "n_chunks"])
def linear_forward(
    query, key, value, states, table, out, inverse, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_s, H,
    GROUP, S, n_chunks,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, MAP: tl.constexpr, NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    TYPE: tl.constexpr, PRECISION: tl.constexpr, KEY_REPEAT: tl.constexpr, VALUE_REPEAT: tl.constexpr,
):  # fmt: skip
    """Write the output of a tile of queries, and 1/d (0 where d is 0).

    Adds the state before the tile's chunk (not causal: of all keys) and the keys of the chunk up to each query.
    """
    TILES: tl.constexpr = CHUNK // BLOCK
    chunk, i_bh = tl.program_id(0) // TILES, tl.program_id(1)
    head, batch = i_bh % H, i_bh // H
    begin, end, is_first, _ = chunk_bounds(table, chunk, S, CHUNK, PACKED)
    start = begin + (tl.program_id(0) % TILES) * BLOCK
    if start >= end:
        return
    rows, columns_d, columns_e = start + tl.arange(0, BLOCK), tl.arange(0, BD), tl.arange(0, BE)
    base_q = head_pointer(query, batch, head, q_b, q_h)
    base_k = head_pointer(key, batch, shared_head(head // GROUP, KEY_REPEAT), k_b, k_h)
    base_v = head_pointer(value, batch, shared_head(head // GROUP, VALUE_REPEAT), v_b, v_h)
    row = chunk if CAUSAL else 0
    state = states + ((i_bh // GROUP).to(tl.int64) * (n_chunks + 1) + row) * (D * (E + 1))
    state_width = tl.where(is_first == 0, D, 0)
    total, norm = tl.zeros([BLOCK, BE], tl.float32), tl.zeros([BLOCK], tl.float32)
    for c in tl.static_range(0, BD, PART):
        part_columns = c + tl.arange(0, PART)
        q = feature(load_rows(base_q, rows, q_s, part_columns, end, D).to(tl.float32), MAP).to(TYPE)
        Z = load_rows(state, part_columns, E, columns_e, state_width, E)
        total = state_dot(q, Z, total, False, CAUSAL, TYPE, PRECISION)
        z = tl.load(state + D * E + part_columns, mask=part_columns < state_width, other=0.0)
        norm += tl.sum(q.to(tl.float32) * z[None, :], 1)
    if CAUSAL:
        q = feature(load_rows(base_q, rows, q_s, columns_d, end, D).to(tl.float32), MAP).to(TYPE)
        for key_start in range(begin, start + BLOCK, BLOCK):
            key_rows = key_start + tl.arange(0, BLOCK)
            k = load_rows(base_k, key_rows, k_s, columns_d, end, D).to(TYPE)
            v = load_rows(base_v, key_rows, v_s, columns_e, end, E).to(TYPE)
            weights = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            weights = tl.where(rows[:, None] >= key_rows[None, :], weights, 0.0)
            norm += tl.sum(weights, 1)
            total = tl.dot(weights.to(TYPE), v, total, input_precision=PRECISION)
    if NORMALISE:
        scale = tl.where(norm == 0, 0.0, 1 / tl.where(norm == 0, 1.0, norm))
        tl.store(inverse + i_bh.to(tl.int64) * S + rows, scale, mask=rows < end)
        total *= scale[:, None]
    store_rows(head_pointer(out, batch, head, o_b, o_h), rows, o_s, columns_e, end, E, total)


@triton.jit(do_not_specialize=["S", "n_chunks"])
def linear_backward_dq(
    grad, query, key, value, states, inverse, table, dquery, factor, g_b, g_h, g_s, q_b, q_h, q_s, k_b, k_h, k_s, v_b,
    v_h, v_s, d_b, d_h, d_s, H, GROUP, S, n_chunks,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, MAP: tl.constexpr, NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    TYPE: tl.constexpr, PRECISION: tl.constexpr, KEY_REPEAT: tl.constexpr, VALUE_REPEAT: tl.constexpr,
):  # fmt: skip
    """Write dq of a tile of queries, and −δ/d (`factor`) for `linear_backward_dkdv`.

    dφ(q) = (a − δ z)/d with a = Σ_j (dO·v_j) φ̃_j, z = Σ_j φ̃_j and δ = φ(q)·a/d, which is dO·O without the rounding
    of O.
    """
    TILES: tl.constexpr = CHUNK // BLOCK
    chunk, i_bh = tl.program_id(0) // TILES, tl.program_id(1)
    head, batch = i_bh % H, i_bh // H
    begin, end, is_first, _ = chunk_bounds(table, chunk, S, CHUNK, PACKED)
    start = begin + (tl.program_id(0) % TILES) * BLOCK
    if start >= end:
        return
    rows, columns_d, columns_e = start + tl.arange(0, BLOCK), tl.arange(0, BD), tl.arange(0, BE)
    base_q, base_g = head_pointer(query, batch, head, q_b, q_h), head_pointer(grad, batch, head, g_b, g_h)
    base_k = head_pointer(key, batch, shared_head(head // GROUP, KEY_REPEAT), k_b, k_h)
    base_v = head_pointer(value, batch, shared_head(head // GROUP, VALUE_REPEAT), v_b, v_h)
    row = chunk if CAUSAL else 0
    state = states + ((i_bh // GROUP).to(tl.int64) * (n_chunks + 1) + row) * (D * (E + 1))
    state_width = tl.where(is_first == 0, D, 0)
    total = tl.zeros([BLOCK, BD], tl.float32)
    for c in tl.static_range(0, BE, PART):
        part_columns = c + tl.arange(0, PART)
        g = load_rows(base_g, rows, g_s, part_columns, end, E).to(TYPE)
        Z = load_rows(state, columns_d, E, part_columns, state_width, E)
        total = state_dot(g, Z, total, True, CAUSAL, TYPE, PRECISION)
    norm = tl.load(state + D * E + columns_d, mask=columns_d < state_width, other=0.0)
    if CAUSAL:
        g = load_rows(base_g, rows, g_s, columns_e, end, E).to(TYPE)
        for key_start in range(begin, start, BLOCK):
            key_rows = key_start + tl.arange(0, BLOCK)
            k = load_rows(base_k, key_rows, k_s, columns_d, end, D).to(TYPE)
            v = load_rows(base_v, key_rows, v_s, columns_e, end, E).to(TYPE)
            dweights = tl.dot(g, tl.trans(v), input_precision=PRECISION)
            total = precise_dot(dweights, k, total, False, TYPE, PRECISION)
            norm += tl.sum(k.to(tl.float32), 0)
        k = load_rows(base_k, rows, k_s, columns_d, end, D).to(TYPE)
        v = load_rows(base_v, rows, v_s, columns_e, end, E).to(TYPE)
        visible = rows[:, None] >= rows[None, :]
        dweights = tl.where(visible, tl.dot(g, tl.trans(v), input_precision=PRECISION), 0.0)
        total = precise_dot(dweights, k, total, False, TYPE, PRECISION)
    q = load_rows(base_q, rows, q_s, columns_d, end, D).to(tl.float32)
    if NORMALISE:
        o_rows = i_bh.to(tl.int64) * S + rows
        scale = tl.load(inverse + o_rows, mask=rows < end, other=0.0)
        delta = tl.sum(total * feature(q, MAP).to(TYPE).to(tl.float32), 1) * scale
        z = norm[None, :]
        if CAUSAL:
            z += tl.dot(tl.where(visible, 1.0, 0.0).to(TYPE), k, input_precision=PRECISION)
        total = (total - delta[:, None] * z) * scale[:, None]
        tl.store(factor + o_rows, -delta * scale, mask=rows < end)
    store_rows(head_pointer(dquery, batch, head, d_b, d_h), rows, d_s, columns_d, end, D, total * feature_slope(q, MAP))


@triton.jit(do_not_specialize=["S", "n_chunks"])
def linear_backward_dkdv(
    grad, query, key, value, states, inverse, factor, table, dkey, dvalue, g_b, g_h, g_s, q_b, q_h, q_s, k_b, k_h, k_s,
    v_b, v_h, v_s, d_b, d_h, d_s, HK, GROUP, S, n_chunks,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr, KEY_REPEAT: tl.constexpr, VALUE_REPEAT: tl.constexpr,
):  # fmt: skip
    """Write dφ̃ and dv of a tile of keys, for a pair head.

    Adds the state after the tile's chunk (not causal: of all queries) and the queries of the chunk from each key on.
    """
    TILES: tl.constexpr = CHUNK // BLOCK
    chunk, i_bh = tl.program_id(0) // TILES, tl.program_id(1)
    head, batch = i_bh % HK, i_bh // HK
    begin, end, _, is_last = chunk_bounds(table, chunk, S, CHUNK, PACKED)
    start = begin + (tl.program_id(0) % TILES) * BLOCK
    if start >= end:
        return
    rows, columns_d, columns_e = start + tl.arange(0, BLOCK), tl.arange(0, BD), tl.arange(0, BE)
    base_k = head_pointer(key, batch, shared_head(head, KEY_REPEAT), k_b, k_h)
    base_v = head_pointer(value, batch, shared_head(head, VALUE_REPEAT), v_b, v_h)
    row = chunk + 1 if CAUSAL else 0
    state = states + (i_bh.to(tl.int64) * (n_chunks + 1) + row) * (D * (E + 1))
    state_width = tl.where(is_last == 0, D, 0)
    dk, dv = tl.zeros([BLOCK, BD], tl.float32), tl.zeros([BLOCK, BE], tl.float32)
    for c in tl.static_range(0, BD, PART):
        part_columns = c + tl.arange(0, PART)
        R = load_rows(state, part_columns, E, columns_e, state_width, E)
        k = load_rows(base_k, rows, k_s, part_columns, end, D).to(TYPE)
        dv = state_dot(k, R, dv, False, CAUSAL, TYPE, PRECISION)
    for c in tl.static_range(0, BE, PART):
        part_columns = c + tl.arange(0, PART)
        R = load_rows(state, columns_d, E, part_columns, state_width, E)
        v = load_rows(base_v, rows, v_s, part_columns, end, E).to(TYPE)
        dk = state_dot(v, R, dk, True, CAUSAL, TYPE, PRECISION)
    dk += tl.load(state + D * E + columns_d, mask=columns_d < state_width, other=0.0)[None, :]
    if CAUSAL:
        k = load_rows(base_k, rows, k_s, columns_d, end, D).to(TYPE)
        v = load_rows(base_v, rows, v_s, columns_e, end, E).to(TYPE)
        for h in range(GROUP):
            q_head = head * GROUP + h
            base_q, base_g = head_pointer(query, batch, q_head, q_b, q_h), head_pointer(grad, batch, q_head, g_b, g_h)
            o_rows = (batch * HK * GROUP + q_head).to(tl.int64) * S
            for query_start in range(start, end, BLOCK):
                query_rows = query_start + tl.arange(0, BLOCK)
                q = feature(load_rows(base_q, query_rows, q_s, columns_d, end, D).to(tl.float32), MAP).to(TYPE)
                g = load_rows(base_g, query_rows, g_s, columns_e, end, E).to(TYPE)
                scale = tl.load(inverse + o_rows + query_rows, mask=query_rows < end, other=0.0)
                row_factor = tl.load(factor + o_rows + query_rows, mask=query_rows < end, other=0.0)
                visible = query_rows[:, None] >= rows[None, :]
                weights = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale[:, None]
                dv = tl.dot(tl.trans(tl.where(visible, weights, 0.0).to(TYPE)), g, dv, input_precision=PRECISION)
                dweights = tl.dot(g, tl.trans(v), input_precision=PRECISION) * scale[:, None] + row_factor[:, None]
                dk = precise_dot(tl.where(visible, dweights, 0.0), q, dk, True, TYPE, PRECISION)
    store_rows(dkey + i_bh.to(tl.int64) * S * D, rows, D, columns_d, end, D, dk)
    store_rows(head_pointer(dvalue, batch, head, d_b, d_h), rows, d_s, columns_e, end, E, dv)
