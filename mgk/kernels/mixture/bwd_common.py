"""What the two backward passes share: the weights of a tile, and the gradients of its scores and exponents."""

# ruff: noqa: RUF005  (Triton has no starred tuples)
import triton
import triton.language as tl

from mgk.kernels.mixture.exp2 import accurate_exp2, accurate_weight
from mgk.kernels.mixture.tile import INTERPRETED, LOG2E, elementwise_max, exponents, mixture_sum


@triton.jit
def tie_weight_2(b_lead):
    """1 where the second component leads the first, 0 where it trails, a half where they tie: a multiply-add that
    saturates."""
    return tl.minimum(tl.maximum(b_lead * 1e30 + 0.5, 0.0), 1.0)


@triton.jit
def tie_weights(xs, b_top, M: tl.constexpr):
    """For r >= 1: 1 where x_r is b_top, the largest, and 0 where it is not; those that tie share evenly."""
    out = ()
    if M == 2:
        b_first = xs[0]
        if INTERPRETED:
            # Where both are masked this is -inf - -inf. The hardware's maximum takes the number, numpy's the NaN.
            b_first = tl.maximum(b_first, -1e30)
        out = (tie_weight_2(xs[1] - b_first),)
    elif M > 2:
        ties = tl.zeros_like(b_top)
        for r in tl.static_range(M):
            ties += tl.where(xs[r] == b_top, 1.0, 0.0)
        for r in tl.static_range(1, M):
            out = out + (tl.where(xs[r] == b_top, 1.0 / ties, 0.0),)
    return out


@triton.jit
def argmax_components(
    scores, alpha, rho, coef, lam, M: tl.constexpr, SHIFTED: tl.constexpr, UNEQUAL: tl.constexpr,
    DEFER_FACTOR: tl.constexpr,
):  # fmt: skip
    """Hard assignment: the largest l_ijr, and for r >= 1 the share of component r in it.
    DEFER_FACTOR (equal scales): the other side's term is a factor that is taken at the end of the walk;
    shifted keys have their own in alpha."""
    if SHIFTED and not UNEQUAL:
        # By how much a component leads the first does not depend on the product.
        b_top = scores[0] * (lam[0] * LOG2E) + alpha[0]
        if not DEFER_FACTOR:
            b_top = b_top + coef[0]
        leads = (tl.zeros_like(b_top),)
        for r in tl.static_range(1, M):
            leads = leads + (rho[r - 1] + coef[r],)
        if M == 2:
            b_share = tie_weight_2(leads[1])
            return b_top + leads[1] * b_share, (b_share,)
        else:
            b_lead = elementwise_max(leads, M)
            return b_top + b_lead, tie_weights(leads, b_lead, M)
    elif UNEQUAL:
        xs = exponents(scores, alpha, coef, lam, M, SHIFTED)
        b_top = elementwise_max(xs, M)
        return b_top, tie_weights(xs, b_top, M)
    else:
        xs = ()
        for r in tl.static_range(M):
            xs = xs + (scores[r] * (lam[0] * LOG2E) + coef[r],)
        b_top = elementwise_max(xs, M)
        return b_top if DEFER_FACTOR else b_top + alpha[0], tie_weights(xs, b_top, M)


@triton.jit
def factored_gradients(scores, b_g, alpha, b_mix, lam):
    """Factored form: weights, score gradient, and what C_jr and A_ir / A_i0 make the gradients of c_jr and a_ir."""
    b_e = tl.exp2(scores[0] * (lam[0] * LOG2E) + alpha[0])
    b_ge = b_g * b_e
    return b_e * b_mix, (b_ge * b_mix,), b_ge


@triton.jit
def score_gradients(
    scores, b_g, alpha, rho, coef, lam,
    M: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr, EXACT: tl.constexpr, UNEQUAL: tl.constexpr,
    FIRST: tl.constexpr, ACCURATE: tl.constexpr, DEFER_FACTOR: tl.constexpr,
):  # fmt: skip
    """Weights p_ij, the score gradients (one tensor for shifted keys, M for independent ones) and, per component r >=
    FIRST,
    what sums along a row or a column to the gradient of a_ir or c_jr (up to A_ir / A_i0 or C_jr in the factored form;
    hard with equal
    scales: r = 0 is the sum over all components).
    alpha is a_ir - lse_i, less the reference of c; coef is C_jr in the factored form, c_j0 and c_jr - c_j0 for hard
    assignment of shifted keys, and c_jr otherwise."""
    parts = ()
    if not EXACT:
        b_p, b_ds, b_ge = factored_gradients(scores, b_g, alpha, mixture_sum(rho, coef, M), lam)
        for _ in tl.static_range(FIRST, M):
            parts = parts + (b_ge,)
    elif HARD:
        b_top, share = argmax_components(scores, alpha, rho, coef, lam, M, SHIFTED, UNEQUAL, DEFER_FACTOR)
        b_p = accurate_exp2(b_top) if ACCURATE else tl.exp2(b_top)
        b_all = b_p * b_g
        b_rest = b_all
        b_ds = ()
        total = tl.zeros_like(b_p)
        for r in tl.static_range(1, M):
            part = b_all * share[r - 1]
            b_rest -= part
            if UNEQUAL:
                total += part * lam[r]
            if r >= FIRST:
                parts = parts + (part,)
            if not SHIFTED:
                b_ds = b_ds + (part,)
        if FIRST == 0:
            parts = (b_rest if UNEQUAL else b_all,) + parts
        if SHIFTED:
            b_ds = (total + b_rest * lam[0] if UNEQUAL else b_all,)
        else:
            b_ds = (b_rest,) + b_ds
    else:
        xs = exponents(scores, alpha, coef, lam, M, SHIFTED)
        b_ds = ()
        for r in tl.static_range(M):
            if ACCURATE:
                b_pr = accurate_weight(scores[0 if SHIFTED else r], lam[r], alpha[r], coef[r], 0.0)
            else:
                b_pr = tl.exp2(xs[r])
            part = b_pr * b_g
            # Not from 0 on: adding the first to it is an addition that the compiler keeps, for the sign of 0.
            if r == 0:
                b_p = b_pr
                total = part * lam[r]
            else:
                b_p += b_pr
                total += part * lam[r]
            if r >= FIRST:
                parts = parts + (part,)
            if not SHIFTED:
                b_ds = b_ds + (part,)
        if SHIFTED:
            b_ds = (total if UNEQUAL else b_p * b_g,)
    return b_p, b_ds, parts


@triton.jit
def independent_gradients(
    scores, b_g, addends, factors, lam, M: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """As `gradients` for soft independent keys, of whose exponents only one side's term, `addends`, is added: the other
    side's is a factor of everything in its row and taken at the end of the walk. Where the components' factors differ
    (WEIGHED) the weights need them at once."""
    b_ds = ()
    for r in tl.static_range(M):
        b_e = tl.exp2(scores[r] * (lam[r] * LOG2E) + addends[r])
        b_ds = b_ds + (b_e * b_g,)
        b_pr = b_e * factors[r] if WEIGHED else b_e
        if r == 0:
            b_p = b_pr
        else:
            b_p += b_pr
    return b_p, b_ds, b_ds


@triton.jit
def mul_vectors(xs, columns_, FIRST: tl.constexpr, M: tl.constexpr):
    """x_r times a factor that is expanded to a column; 0 where that is 0, whatever x_r."""
    out = ()
    for r in tl.static_range(FIRST, M):
        b_factor = tl.sum(columns_[r - FIRST], 1)
        out = out + (tl.where(b_factor == 0.0, 0.0, xs[r - FIRST] * b_factor),)
    return out


@triton.jit
def mul_all(xs, factor, N: tl.constexpr):
    """x_r times one factor for all; 0 where that is 0, whatever x_r."""
    out = ()
    for r in tl.static_range(N):
        out = out + (tl.where(factor == 0.0, 0.0, xs[r] * factor),)
    return out


@triton.jit(do_not_specialize=["n_parts", "n_heads"])
def add_parts(
    parts_ptr, out_ptr, n_parts, n_heads, SHIFTS: tl.constexpr, M: tl.constexpr, SCALES: tl.constexpr,
    SUMS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Parts [n_parts, heads, SUMS] added up, in a fixed order. What belongs together then lies together: [heads,
    SHIFTS] of d shift, [heads] of d tau, [heads, M] of d scale (SCALES of them; the places of the others, which no part
    has written, are 0) and, where SUMS has room for it, [heads, M] of d log pi."""
    n_columns = n_heads * SUMS
    o_c = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    head, sort = o_c // SUMS, o_c % SUMS
    written = (o_c < n_columns) & ((sort <= SHIFTS + SCALES) | (sort > SHIFTS + M))
    acc = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for i in range(0, n_parts, BLOCK_ROWS):
        o_i = i + tl.arange(0, BLOCK_ROWS)
        p_part = parts_ptr + o_i[:, None].to(tl.int64) * n_columns + o_c[None, :]
        acc += tl.load(p_part, mask=(o_i < n_parts)[:, None] & written[None, :], other=0.0)
    place = head * SHIFTS + sort
    place = tl.where(sort >= SHIFTS, n_heads * SHIFTS + head, place)
    place = tl.where(sort > SHIFTS, n_heads * (SHIFTS + 1) + head * M + sort - (SHIFTS + 1), place)
    place = tl.where(sort > SHIFTS + M, n_heads * (SHIFTS + 1 + M) + head * M + sort - (SHIFTS + 1 + M), place)
    tl.store(out_ptr + place, tl.sum(acc, 0), mask=o_c < n_columns)


def summed_entries(components: int, shifts: int, with_prior: bool) -> int:
    """How many a head has: d shift, so many numbers, d tau, d scale and, if it is summed, d log pi."""
    return shifts + 1 + components + (components if with_prior else 0)
