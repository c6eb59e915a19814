"""The gradients that are sums over everything, of shift, tau, scale and log pi, from the parts that the programs of the
backward passes leave."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_parts", "n_heads"])
def add_parts(
    parts_ptr, out_ptr, n_parts, n_heads, SHIFTS: tl.constexpr, M: tl.constexpr, SCALES: tl.constexpr,
    SUMS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """Parts [n_parts, heads, SUMS] added up, in a fixed order. What belongs together then lies together: [heads,
    SHIFTS] of d shift, [heads] of d tau, [heads, M] of d scale (SCALES of them; the places of the others, which no part
    has written, are 0) and, where SUMS has room for it, [heads, M] of d log pi."""
    n_columns = n_heads * SUMS
    o_c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    head, sort = o_c // SUMS, o_c % SUMS
    written = (o_c < n_columns) & ((sort <= SHIFTS + SCALES) | (sort > SHIFTS + M))
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for i in range(0, n_parts, ROWS):
        o_i = i + tl.arange(0, ROWS)
        p_part = parts_ptr + o_i[:, None].to(tl.int64) * n_columns + o_c[None, :]
        acc += tl.load(p_part, mask=(o_i < n_parts)[:, None] & written[None, :], other=0.0)
    place = head * SHIFTS + sort
    place = tl.where(sort >= SHIFTS, n_heads * SHIFTS + head, place)
    place = tl.where(sort > SHIFTS, n_heads * (SHIFTS + 1) + head * M + sort - (SHIFTS + 1), place)
    place = tl.where(sort > SHIFTS + M, n_heads * (SHIFTS + 1 + M) + head * M + sort - (SHIFTS + 1 + M), place)
    tl.store(out_ptr + place, tl.sum(acc, 0), mask=o_c < n_columns)


def sums_of(components: int, shifts: int, with_prior: bool) -> int:
    """How many a head has: d shift, so many numbers, d tau, d scale and, if it is summed, d log pi."""
    return shifts + 1 + components + (components if with_prior else 0)
