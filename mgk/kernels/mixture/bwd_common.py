"""Functions shared by the two backward kernels: weights, score gradients, and the sum of partial gradients."""

# ruff: noqa: RUF005  (Triton has no starred tuples)
import triton
import triton.language as tl

from mgk.kernels.mixture.exp2 import accurate_exp2, accurate_weight
from mgk.kernels.mixture.tile import INTERPRETED, LOG2E, MASK_VALUE, elementwise_max, exponents, mixture_sum


@triton.jit
def tie_weight_2(b_lead):
    """Return the weight of component 1 of 2: 1 where it leads component 0, 0 where it trails, 0.5 in a tie.

    Compiles to one saturating multiply-add.
    """
    return tl.minimum(tl.maximum(b_lead * 1e30 + 0.5, 0.0), 1.0)


@triton.jit
def tie_weights(xs, b_top, M: tl.constexpr):
    """Return for each r >= 1 the weight of x_r in the maximum b_top: 0 if below it, else 1 / (number of ties)."""
    out = ()
    if M == 2:
        b_first = xs[0]
        if INTERPRETED:
            # If both are masked this is -inf - -inf. The hardware's maximum drops the NaN, numpy's keeps it.
            b_first = tl.maximum(b_first, MASK_VALUE)
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
    """Return max_r l_ijr and for r >= 1 the weight of component r in it (hard assignment).

    DEFER_FACTOR (equal scales): only one side's term is added; the caller multiplies by the other side's factor after
    the loop. For shifted keys, alpha holds the term that is added.
    """
    if SHIFTED and not UNEQUAL:
        # The lead of a component over component 0 does not depend on the score.
        b_top = scores[0] * (lam[0] * LOG2E) + alpha[0]
        if not DEFER_FACTOR:
            b_top = b_top + coef[0]
        leads = (tl.zeros_like(b_top),)
        for r in tl.static_range(1, M):
            leads = leads + (rho[r - 1] + coef[r],)
        if M == 2:
            b_weight = tie_weight_2(leads[1])
            return b_top + leads[1] * b_weight, (b_weight,)
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
    """Return weights, score gradient, and dS over the mixture sum (factored form).

    The third result times A_ir / A_i0 (C_jr), summed along a column (row), is the gradient of c_jr (a_ir) up to a
    factor.
    """
    b_e = tl.exp2(scores[0] * (lam[0] * LOG2E) + alpha[0])
    b_ge = b_g * b_e
    return b_e * b_mix, (b_ge * b_mix,), b_ge


@triton.jit
def score_gradients(
    scores, b_g, alpha, rho, coef, lam,
    M: tl.constexpr, SHIFTED: tl.constexpr, HARD: tl.constexpr, EXACT: tl.constexpr, UNEQUAL: tl.constexpr,
    FIRST: tl.constexpr, ACCURATE: tl.constexpr, DEFER_FACTOR: tl.constexpr,
):  # fmt: skip
    """Return weights p_ij, score gradients and, for r >= FIRST, terms of the gradients of a_ir and c_jr.

    There is one score gradient for shifted keys and M for independent keys. The terms sum along a row to d a_ir and
    along a column to d c_jr, up to A_ir / A_i0 or C_jr in the factored form. Hard assignment with equal scales: term 0
    is the sum over all components.

    Args:
        alpha: a_ir - lse_i, relative to the reference of c.
        rho: A_ir / A_i0 for r >= 1; for hard assignment a_ir - a_i0.
        coef: C_jr in the factored form; c_j0 and c_jr - c_j0 for hard assignment of shifted keys; otherwise c_jr.
    """
    parts = ()
    if not EXACT:
        b_p, b_ds, b_ge = factored_gradients(scores, b_g, alpha, mixture_sum(rho, coef, M), lam)
        for _ in tl.static_range(FIRST, M):
            parts = parts + (b_ge,)
    elif HARD:
        b_top, weights = argmax_components(scores, alpha, rho, coef, lam, M, SHIFTED, UNEQUAL, DEFER_FACTOR)
        b_p = accurate_exp2(b_top) if ACCURATE else tl.exp2(b_top)
        b_all = b_p * b_g
        b_part_0 = b_all
        b_ds = ()
        total = tl.zeros_like(b_p)
        for r in tl.static_range(1, M):
            part = b_all * weights[r - 1]
            b_part_0 -= part
            if UNEQUAL:
                total += part * lam[r]
            if r >= FIRST:
                parts = parts + (part,)
            if not SHIFTED:
                b_ds = b_ds + (part,)
        if FIRST == 0:
            parts = (b_part_0 if UNEQUAL else b_all,) + parts
        if SHIFTED:
            b_ds = (total + b_part_0 * lam[0] if UNEQUAL else b_all,)
        else:
            b_ds = (b_part_0,) + b_ds
    else:
        xs = exponents(scores, alpha, coef, lam, M, SHIFTED)
        b_ds = ()
        for r in tl.static_range(M):
            if ACCURATE:
                b_pr = accurate_weight(scores[0 if SHIFTED else r], lam[r], alpha[r], coef[r], 0.0)
            else:
                b_pr = tl.exp2(xs[r])
            part = b_pr * b_g
            # Initialized with the first term: the compiler keeps an addition to 0, because of the sign of 0.
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
    """Return the same as `score_gradients` for soft independent keys in the fast form.

    Only one side's term of the exponents, `addends`, is added; the caller multiplies by the other side's factor after
    the loop. WEIGHED: the factors differ between components, so the weights are multiplied here.
    """
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
def mul_vectors(xs, factors, FIRST: tl.constexpr, M: tl.constexpr):
    """Return vectors x_r times factors given as columns; 0 where the factor is 0, even if x_r is not finite."""
    out = ()
    for r in tl.static_range(FIRST, M):
        b_factor = tl.sum(factors[r - FIRST], 1)
        out = out + (tl.where(b_factor == 0.0, 0.0, xs[r - FIRST] * b_factor),)
    return out


@triton.jit
def mul_all(xs, factor, N: tl.constexpr):
    """Return x_r times one factor; 0 where the factor is 0, even if x_r is not finite."""
    out = ()
    for r in tl.static_range(N):
        out = out + (tl.where(factor == 0.0, 0.0, xs[r] * factor),)
    return out


@triton.jit
def mul_columns(xs, columns, M: tl.constexpr):
    """Return x_r times column r; 0 where the column is 0, even if x_r is not finite."""
    out = ()
    for r in tl.static_range(M):
        out = out + (tl.where(columns[r] == 0.0, 0.0, xs[r] * columns[r]),)
    return out


@triton.jit
def subtract_rest(xs, M: tl.constexpr):
    """Subtract x_1, x_2, ... from x_0, which holds the sum of all."""
    x_0 = xs[0]
    out = ()
    for r in tl.static_range(1, M):
        x_0 -= xs[r]
        out = out + (xs[r],)
    return (x_0,) + out


@triton.jit
def take(xs, FIRST: tl.constexpr, COUNT: tl.constexpr):
    out = ()
    for r in tl.static_range(FIRST, FIRST + COUNT):
        out = out + (xs[r],)
    return out


@triton.jit(do_not_specialize=["n_parts", "n_heads"])
def add_parts(
    parts_ptr, out_ptr, n_parts, n_heads, SHIFTS: tl.constexpr, M: tl.constexpr, SCALES: tl.constexpr,
    SUMS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Sum the partial gradients [n_parts, heads, SUMS] over the parts, in a fixed order.

    The output has d shift [heads, SHIFTS], d tau [heads], d scale [heads, M] (0 beyond the first SCALES, which no part
    writes) and, if SUMS includes it, d log pi [heads, M], one after another.
    """
    n_columns = n_heads * SUMS
    o_c = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    head, entry = o_c // SUMS, o_c % SUMS
    written = (o_c < n_columns) & ((entry <= SHIFTS + SCALES) | (entry > SHIFTS + M))
    acc = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for i in range(0, n_parts, BLOCK_ROWS):
        o_i = i + tl.arange(0, BLOCK_ROWS)
        p_part = parts_ptr + o_i[:, None].to(tl.int64) * n_columns + o_c[None, :]
        acc += tl.load(p_part, mask=(o_i < n_parts)[:, None] & written[None, :], other=0.0)
    o_out = head * SHIFTS + entry
    o_out = tl.where(entry >= SHIFTS, n_heads * SHIFTS + head, o_out)
    o_out = tl.where(entry > SHIFTS, n_heads * (SHIFTS + 1) + head * M + entry - (SHIFTS + 1), o_out)
    o_out = tl.where(entry > SHIFTS + M, n_heads * (SHIFTS + 1 + M) + head * M + entry - (SHIFTS + 1 + M), o_out)
    tl.store(out_ptr + o_out, tl.sum(acc, 0), mask=o_c < n_columns)


def summed_entries(components: int, shifts: int, with_prior: bool) -> int:
    """Return the number of summed gradient entries per head: d shift, d tau, d scale and, if summed, d log pi."""
    return shifts + 1 + components + (components if with_prior else 0)
