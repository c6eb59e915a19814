"""Triton kernels of linear attention (Eq. 14) on mixed key features, forward and backward, linear in the length.

The rows of a sequence are cut into slots. CAUSAL: within a slot weights are formed tile by tile; what lies before a
slot enters through the sums Z = Σ φ̃ vᵀ and z = Σ φ̃ over it, which `slot_sums` takes for each slot and `running_sums`
adds up. The backward has the same shape with the sums over what lies behind. A state is D·E numbers of Z and D of z in
one row; of slots + 1 rows, row n is what slot n starts from (backward: row n + 1 what comes behind it). Otherwise all
keys are one state and no weights are formed: its one row is the sum of all slots'.

B batch, H query heads, HK key heads, S length (of queries or keys, where they differ), D feature width, E value width.
Every sum is taken by one program in a fixed order. TYPE is what products read: bf16 for bf16, else fp32, whose range
the sums need.
"""

import triton
import triton.language as tl

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
    """[rows, columns], zeros beyond the end and the width."""
    inside = (rows[:, None] < end) & (columns[None, :] < width)
    return tl.load(base + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(base, rows, stride, columns, end, width, x):
    inside = (rows[:, None] < end) & (columns[None, :] < width)
    tl.store(base + rows[:, None].to(tl.int64) * stride + columns[None, :], x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def chunk_bounds(table, slot, S, SLOT: tl.constexpr, PACKED: tl.constexpr):
    """The slot's first row and end, and whether it is the first or the last of a packed sequence."""
    if PACKED:
        entry = table + 4 * slot
        return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    begin = slot * SLOT
    return begin, tl.minimum(begin + SLOT, S), begin * 0, begin * 0


@triton.jit
def head_pointer(x, batch, head, stride_b, stride_h):
    return x + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h


@triton.jit
def precise_dot(x, y, total, TRANSPOSED: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr):
    """total + x·y (TRANSPOSED: xᵀ·y) without rounding x to bf16: its rest is a second product. The gradients' weights
    nearly cancel in the sum that is the prior's gradient, which bf16 alone loses."""
    high = x.to(TYPE)
    total = tl.dot(tl.trans(high) if TRANSPOSED else high, y, total, input_precision=PRECISION)
    if tl.bfloat16 == TYPE:
        rest = (x - high.to(tl.float32)).to(TYPE)
        total = tl.dot(tl.trans(rest) if TRANSPOSED else rest, y, total, input_precision=PRECISION)
    return total


@triton.jit
def state_dot(
    x, state, total, TRANSPOSED: tl.constexpr, CAUSAL: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """total + x·state (TRANSPOSED: x·stateᵀ). Where states are all there is, they are not rounded to bf16: their rest
    is a second product."""
    high = state.to(TYPE)
    total = tl.dot(x, tl.trans(high) if TRANSPOSED else high, total, input_precision=PRECISION)
    if tl.bfloat16 == TYPE and not CAUSAL:
        rest = (state - high.to(tl.float32)).to(TYPE)
        total = tl.dot(x, tl.trans(rest) if TRANSPOSED else rest, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["S"])
def mix_features(
    keys, shift, prior, mask, mixed,
    k_b, k_h, k_r, k_s, p_b, p_h, p_r, p_s, uniform, HK, S, M,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, MAP: tl.constexpr, SHIFTED: tl.constexpr,
    PRIOR: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """φ̃_j = Σ_r π_jr φ(k_jr), zeros where masked: [B, HK, S, D]."""
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
            place = head_pointer(prior, batch, head, p_b, p_h) + r * p_r + rows.to(tl.int64) * p_s
            weight = tl.exp(tl.load(place, mask=rows < S, other=0.0).to(tl.float32))
        total += weight[:, None] * feature(k, MAP)
    if MASK:
        kept = tl.load(mask + batch.to(tl.int64) * S + rows, mask=rows < S, other=0)
        total = tl.where(kept[:, None] != 0, total, 0.0)
    store_rows(mixed + tl.program_id(1).to(tl.int64) * S * D, rows, D, columns, S, D, total)


@triton.jit(do_not_specialize=["S"])
def unmix_gradients(
    grad, keys, shift, prior, mask, dkeys, dshift, dprior,
    k_b, k_h, k_r, k_s, p_b, p_h, p_r, p_s, uniform, HK, S, M, d_b, d_h, d_r, d_s,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, MAP: tl.constexpr, SHIFTED: tl.constexpr,
    PRIOR: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """From the gradient of φ̃ those of keys, log prior [B, HK, M, S] and, summed over a program's rows, the shifts."""
    place = tl.program_id(1)
    head, batch = place % HK, place // HK
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BD)
    base = head_pointer(keys, batch, head, k_b, k_h)
    into = head_pointer(dkeys, batch, head, d_b, d_h)
    g = load_rows(grad + place.to(tl.int64) * S * D, rows, D, columns, S, D)
    if MASK:
        kept = tl.load(mask + batch.to(tl.int64) * S + rows, mask=rows < S, other=0)
        g = tl.where(kept[:, None] != 0, g, 0.0)
    shared = tl.zeros([ROWS, BD], tl.float32)
    weight = tl.zeros([ROWS], tl.float32) + uniform
    for r in range(M):
        k = load_rows(base + r * k_r, rows, k_s, columns, S, D).to(tl.float32)
        if SHIFTED:
            k += tl.load(shift + (head * M + r) * D + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
        if PRIOR:
            entry = head_pointer(prior, batch, head, p_b, p_h) + r * p_r + rows.to(tl.int64) * p_s
            weight = tl.exp(tl.load(entry, mask=rows < S, other=0.0).to(tl.float32))
            answered = weight * tl.sum(g * feature(k, MAP), 1)
            tl.store(dprior + (place.to(tl.int64) * M + r) * S + rows, answered, mask=rows < S)
        dk = weight[:, None] * feature_slope(k, MAP) * g
        if SHIFTED:
            shared += dk
            entry = dshift + ((tl.program_id(0) * tl.num_programs(1) + place).to(tl.int64) * M + r) * D + columns
            tl.store(entry, tl.sum(dk, 0), mask=columns < D)
        else:
            store_rows(into + r * d_r, rows, d_s, columns, S, D, dk)
    if SHIFTED:
        store_rows(into, rows, d_s, columns, S, D, shared)


@triton.jit(do_not_specialize=["S", "slots"])
def sum_chunks(
    features, value, inverse, factor, states, table,
    f_b, f_h, f_s, v_b, v_h, v_s, HK, GROUP, S, slots, FIRST,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr,
    MAP: tl.constexpr, BEHIND: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A slot's Σ f xᵀ and Σ f into row slot + FIRST. BEHIND: f = φ(q)/d and x = dO over a group's heads, and Σ of
    factor·φ(q)."""
    slot, place, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head, batch = place % HK, place // HK
    parts: tl.constexpr = (E + BE - 1) // BE
    columns_d = (part // parts) * BD + tl.arange(0, BD)
    columns_e = (part % parts) * BE + tl.arange(0, BE)
    begin, end, _, _ = chunk_bounds(table, slot, S, SLOT, PACKED)
    total, norm = tl.zeros([BD, BE], tl.float32), tl.zeros([BD], tl.float32)
    for g in range(GROUP):
        own = head * GROUP + g
        base_f, base_v = head_pointer(features, batch, own, f_b, f_h), head_pointer(value, batch, own, v_b, v_h)
        along = (batch * HK * GROUP + own).to(tl.int64) * S
        for start in range(begin, end, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            f = load_rows(base_f, rows, f_s, columns_d, end, D)
            if BEHIND:
                f = feature(f.to(tl.float32), MAP).to(TYPE).to(tl.float32)
                scale = tl.load(inverse + along + rows, mask=rows < end, other=0.0)
                norm += tl.sum(f * tl.load(factor + along + rows, mask=rows < end, other=0.0)[:, None], 0)
                f *= scale[:, None]
            else:
                norm += tl.sum(f.to(tl.float32), 0)
            x = load_rows(base_v, rows, v_s, columns_e, end, E).to(TYPE)
            if BEHIND and not CAUSAL:
                total = precise_dot(f, x, total, True, TYPE, PRECISION)
            else:
                total = tl.dot(tl.trans(f.to(TYPE)), x, total, input_precision=PRECISION)
    state = states + (place.to(tl.int64) * (slots + 1) + slot + FIRST) * (D * (E + 1))
    store_rows(state, columns_d, E, columns_e, D, E, total)
    if part % parts == 0:
        tl.store(state + D * E + columns_d, norm, mask=columns_d < D)


@triton.jit
def join(a, new_a, b, new_b):
    return tl.where(new_b != 0, b, a + b), new_a | new_b


@triton.jit(do_not_specialize=["slots"])
def scan_states(
    states, table, width, slots,
    STEP: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The rows of the slots replaced by their sums from the start on (REVERSE: from the end), in place. The outermost
    row holds what to start from; a packed sequence starts from nothing."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    base = states + tl.program_id(1).to(tl.int64) * (slots + 1) * width + columns
    steps = tl.arange(0, STEP)
    carry = tl.load(base + (slots.to(tl.int64) * width if REVERSE else 0), mask=columns < width, other=0.0)
    for first in range(0, slots, STEP):
        n = first + steps
        slot = slots - 1 - n if REVERSE else n
        row = slot if REVERSE else slot + 1
        place, inside = base[None, :] + row[:, None].to(tl.int64) * width, (n < slots)[:, None] & (columns < width)
        x = tl.load(place, mask=inside, other=0.0)
        if PACKED:
            new = tl.load(table + 4 * slot + (3 if REVERSE else 2), mask=n < slots, other=0)
            x, started = tl.associative_scan((x, tl.broadcast_to(new[:, None], [STEP, BLOCK])), 0, join)
            x = tl.where(started != 0, x, x + carry)
        else:
            x = tl.cumsum(x, 0) + carry
        tl.store(place, x, mask=inside)
        carry = tl.sum(tl.where(steps[:, None] == STEP - 1, x, 0.0), 0)


@triton.jit(do_not_specialize=["S", "slots"])
def linear_forward(
    query, key, value, states, table, out, inverse,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_s, H, GROUP, S, slots,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    SLOT: tl.constexpr, MAP: tl.constexpr, NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries: the state before its slot (or of all keys), then the keys of its slot up to each query. Also
    1/d, or 0."""
    TILES: tl.constexpr = SLOT // BLOCK
    slot, place = tl.program_id(0) // TILES, tl.program_id(1)
    head, batch = place % H, place // H
    begin, end, is_first, _ = chunk_bounds(table, slot, S, SLOT, PACKED)
    start = begin + (tl.program_id(0) % TILES) * BLOCK
    if start >= end:
        return
    rows, columns_d, columns_e = start + tl.arange(0, BLOCK), tl.arange(0, BD), tl.arange(0, BE)
    base_q = head_pointer(query, batch, head, q_b, q_h)
    base_k, base_v = (
        head_pointer(key, batch, head // GROUP, k_b, k_h),
        head_pointer(value, batch, head // GROUP, v_b, v_h),
    )
    row = slot if CAUSAL else 0
    state = states + ((place // GROUP).to(tl.int64) * (slots + 1) + row) * (D * (E + 1))
    known = tl.where(is_first == 0, D, 0)
    total, norm = tl.zeros([BLOCK, BE], tl.float32), tl.zeros([BLOCK], tl.float32)
    for c in tl.static_range(0, BD, PART):
        some = c + tl.arange(0, PART)
        q = feature(load_rows(base_q, rows, q_s, some, end, D).to(tl.float32), MAP).to(TYPE)
        Z = load_rows(state, some, E, columns_e, known, E)
        total = state_dot(q, Z, total, False, CAUSAL, TYPE, PRECISION)
        z = tl.load(state + D * E + some, mask=some < known, other=0.0)
        norm += tl.sum(q.to(tl.float32) * z[None, :], 1)
    if CAUSAL:
        q = feature(load_rows(base_q, rows, q_s, columns_d, end, D).to(tl.float32), MAP).to(TYPE)
        for behind in range(begin, start + BLOCK, BLOCK):
            others = behind + tl.arange(0, BLOCK)
            k = load_rows(base_k, others, k_s, columns_d, end, D).to(TYPE)
            v = load_rows(base_v, others, v_s, columns_e, end, E).to(TYPE)
            weights = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            weights = tl.where(rows[:, None] >= others[None, :], weights, 0.0)
            norm += tl.sum(weights, 1)
            total = tl.dot(weights.to(TYPE), v, total, input_precision=PRECISION)
    if NORMALISE:
        scale = tl.where(norm == 0, 0.0, 1 / tl.where(norm == 0, 1.0, norm))
        tl.store(inverse + place.to(tl.int64) * S + rows, scale, mask=rows < end)
        total *= scale[:, None]
    store_rows(head_pointer(out, batch, head, o_b, o_h), rows, o_s, columns_e, end, E, total)


@triton.jit(do_not_specialize=["S", "slots"])
def linear_backward_dq(
    grad, query, key, value, states, inverse, table, dquery, factor,
    g_b, g_h, g_s, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, d_b, d_h, d_s, H, GROUP, S, slots,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    SLOT: tl.constexpr, MAP: tl.constexpr, NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries: dφ(q) = (a − δ z)/d with a = Σ_j (dO·v_j) φ̃_j, z = Σ_j φ̃_j and δ = φ(q)·a/d, which is dO·O
    without the rounding of O. Stores −δ/d for the keys."""
    TILES: tl.constexpr = SLOT // BLOCK
    slot, place = tl.program_id(0) // TILES, tl.program_id(1)
    head, batch = place % H, place // H
    begin, end, is_first, _ = chunk_bounds(table, slot, S, SLOT, PACKED)
    start = begin + (tl.program_id(0) % TILES) * BLOCK
    if start >= end:
        return
    rows, columns_d, columns_e = start + tl.arange(0, BLOCK), tl.arange(0, BD), tl.arange(0, BE)
    base_q, base_g = head_pointer(query, batch, head, q_b, q_h), head_pointer(grad, batch, head, g_b, g_h)
    base_k, base_v = (
        head_pointer(key, batch, head // GROUP, k_b, k_h),
        head_pointer(value, batch, head // GROUP, v_b, v_h),
    )
    row = slot if CAUSAL else 0
    state = states + ((place // GROUP).to(tl.int64) * (slots + 1) + row) * (D * (E + 1))
    known = tl.where(is_first == 0, D, 0)
    total = tl.zeros([BLOCK, BD], tl.float32)
    for c in tl.static_range(0, BE, PART):
        some = c + tl.arange(0, PART)
        g = load_rows(base_g, rows, g_s, some, end, E).to(TYPE)
        Z = load_rows(state, columns_d, E, some, known, E)
        total = state_dot(g, Z, total, True, CAUSAL, TYPE, PRECISION)
    norm = tl.load(state + D * E + columns_d, mask=columns_d < known, other=0.0)
    if CAUSAL:
        g = load_rows(base_g, rows, g_s, columns_e, end, E).to(TYPE)
        for behind in range(begin, start, BLOCK):
            others = behind + tl.arange(0, BLOCK)
            k = load_rows(base_k, others, k_s, columns_d, end, D).to(TYPE)
            v = load_rows(base_v, others, v_s, columns_e, end, E).to(TYPE)
            products = tl.dot(g, tl.trans(v), input_precision=PRECISION)
            total = precise_dot(products, k, total, False, TYPE, PRECISION)
            norm += tl.sum(k.to(tl.float32), 0)
        k = load_rows(base_k, rows, k_s, columns_d, end, D).to(TYPE)
        v = load_rows(base_v, rows, v_s, columns_e, end, E).to(TYPE)
        seen = rows[:, None] >= rows[None, :]
        products = tl.where(seen, tl.dot(g, tl.trans(v), input_precision=PRECISION), 0.0)
        total = precise_dot(products, k, total, False, TYPE, PRECISION)
    q = load_rows(base_q, rows, q_s, columns_d, end, D).to(tl.float32)
    if NORMALISE:
        along = place.to(tl.int64) * S + rows
        scale = tl.load(inverse + along, mask=rows < end, other=0.0)
        delta = tl.sum(total * feature(q, MAP).to(TYPE).to(tl.float32), 1) * scale
        z = norm[None, :]
        if CAUSAL:
            z += tl.dot(tl.where(seen, 1.0, 0.0).to(TYPE), k, input_precision=PRECISION)
        total = (total - delta[:, None] * z) * scale[:, None]
        tl.store(factor + along, -delta * scale, mask=rows < end)
    store_rows(head_pointer(dquery, batch, head, d_b, d_h), rows, d_s, columns_d, end, D, total * feature_slope(q, MAP))


@triton.jit(do_not_specialize=["S", "slots"])
def linear_backward_dkdv(
    grad, query, key, value, states, inverse, factor, table, dkey, dvalue,
    g_b, g_h, g_s, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, d_b, d_h, d_s, HK, GROUP, S, slots,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    SLOT: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys: dφ̃ and dv from the state behind its slot (or of all queries) and the queries of its slot from
    each key on."""
    TILES: tl.constexpr = SLOT // BLOCK
    slot, place = tl.program_id(0) // TILES, tl.program_id(1)
    head, batch = place % HK, place // HK
    begin, end, _, is_last = chunk_bounds(table, slot, S, SLOT, PACKED)
    start = begin + (tl.program_id(0) % TILES) * BLOCK
    if start >= end:
        return
    rows, columns_d, columns_e = start + tl.arange(0, BLOCK), tl.arange(0, BD), tl.arange(0, BE)
    base_k, base_v = head_pointer(key, batch, head, k_b, k_h), head_pointer(value, batch, head, v_b, v_h)
    row = slot + 1 if CAUSAL else 0
    state = states + (place.to(tl.int64) * (slots + 1) + row) * (D * (E + 1))
    known = tl.where(is_last == 0, D, 0)
    dk, dv = tl.zeros([BLOCK, BD], tl.float32), tl.zeros([BLOCK, BE], tl.float32)
    for c in tl.static_range(0, BD, PART):
        some = c + tl.arange(0, PART)
        R = load_rows(state, some, E, columns_e, known, E)
        k = load_rows(base_k, rows, k_s, some, end, D).to(TYPE)
        dv = state_dot(k, R, dv, False, CAUSAL, TYPE, PRECISION)
    for c in tl.static_range(0, BE, PART):
        some = c + tl.arange(0, PART)
        R = load_rows(state, columns_d, E, some, known, E)
        v = load_rows(base_v, rows, v_s, some, end, E).to(TYPE)
        dk = state_dot(v, R, dk, True, CAUSAL, TYPE, PRECISION)
    dk += tl.load(state + D * E + columns_d, mask=columns_d < known, other=0.0)[None, :]
    if CAUSAL:
        k = load_rows(base_k, rows, k_s, columns_d, end, D).to(TYPE)
        v = load_rows(base_v, rows, v_s, columns_e, end, E).to(TYPE)
        for h in range(GROUP):
            own = head * GROUP + h
            base_q, base_g = head_pointer(query, batch, own, q_b, q_h), head_pointer(grad, batch, own, g_b, g_h)
            along = (batch * HK * GROUP + own).to(tl.int64) * S
            for ahead in range(start, end, BLOCK):
                others = ahead + tl.arange(0, BLOCK)
                q = feature(load_rows(base_q, others, q_s, columns_d, end, D).to(tl.float32), MAP).to(TYPE)
                g = load_rows(base_g, others, g_s, columns_e, end, E).to(TYPE)
                scale = tl.load(inverse + along + others, mask=others < end, other=0.0)
                shared = tl.load(factor + along + others, mask=others < end, other=0.0)
                seen = others[:, None] >= rows[None, :]
                weights = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale[:, None]
                dv = tl.dot(tl.trans(tl.where(seen, weights, 0.0).to(TYPE)), g, dv, input_precision=PRECISION)
                products = tl.dot(g, tl.trans(v), input_precision=PRECISION) * scale[:, None] + shared[:, None]
                dk = precise_dot(tl.where(seen, products, 0.0), q, dk, True, TYPE, PRECISION)
    store_rows(dkey + place.to(tl.int64) * S * D, rows, D, columns_d, end, D, dk)
    store_rows(head_pointer(dvalue, batch, head, d_b, d_h), rows, d_s, columns_e, end, E, dv)
