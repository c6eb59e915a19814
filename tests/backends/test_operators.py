"""Compare every backend x variant x dtype x shape with the oracle: the output and every gradient."""

import pytest
import torch

import mgk
from tests.support.operator_cases import (
    DTYPES,
    LINEAR_SHAPES,
    MIXTURE_SHAPES,
    SIMILARITIES,
    Shape,
    arguments,
    compare,
    draw,
)


def sdpa_unsupported_reason(op, shape: Shape, options) -> str | None:
    """Return a word of the reason why the sdpa backend does not support a case, or None: then it must run it."""
    if options["assignment"] == "hard":
        return "hard"
    if shape.mask == "float":
        return "mask"
    if shape.scale == "position":
        return "scale"
    return None


def factored_unsupported_reason(op, shape: Shape, options) -> str | None:
    """Return a word of the reason why the factored backend does not support a case, or None."""
    if op == "mgk":
        return "independent keys"
    if options["assignment"] == "hard":
        return "hard"
    if shape.scale in ("component", "position"):
        return "scales"
    if shape.mask not in (None, "key"):
        return "mask"
    return None if shape.packed is None else "packed"


UNSUPPORTED = {
    "eager": lambda op, shape, options: None,
    "sdpa": sdpa_unsupported_reason,
    "factored": factored_unsupported_reason,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("assignment", ["soft", "hard"])
@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("shape", MIXTURE_SHAPES.values(), ids=MIXTURE_SHAPES)
@pytest.mark.parametrize("op", ["mgk", "smgk"])
@pytest.mark.parametrize("backend", UNSUPPORTED)
def test_mixture(backend, op, shape, similarity, assignment, dtype, poisoned, oracle_case):
    options = {"similarity": similarity, "assignment": assignment}
    reason = UNSUPPORTED[backend](op, shape, options)
    if reason:
        with pytest.raises(ValueError, match=reason):
            compare(op, backend, shape, dtype, options)
        return
    compare(op, backend, shape, dtype, options)
    oracle_case(backend, op + ("-hard" if assignment == "hard" else ""), dtype)


SOFTMAX_SHAPES = {
    "self": Shape(M=1, L=17, S=17, prior=None),
    "cross": Shape(M=1, L=13, S=31, D=33, E=7, prior=None, scale="number"),
    "causal": Shape(M=1, L=37, S=37, D=64, E=64, prior=None, causal="top-left"),
    "one-query": Shape(M=1, H=6, L=1, S=33, D=64, E=64, prior=None, causal="bottom-right"),
    "gqa": Shape(M=1, H=4, L=15, S=18, D=3, E=4, prior=None),
    "bool": Shape(M=1, L=14, S=11, mask="bool", prior=None),
    "rows": Shape(M=1, L=7, S=12, mask="rows", prior=None),
    "key-mask": Shape(M=1, H=4, L=13, S=29, mask="key", prior=None),
    "float": Shape(M=1, L=12, S=15, mask="float", prior=None),
    "float-constant": Shape(M=1, H=4, L=9, S=13, D=3, mask="float-head", prior=None),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SOFTMAX_SHAPES.values(), ids=SOFTMAX_SHAPES)
def test_softmax(shape, dtype, poisoned, oracle_case):
    """Compare one component with "dot", which torch's own attention runs."""
    compare("mgk", "plain", shape, dtype, {"similarity": "dot", "assignment": "soft"})
    oracle_case("plain", "softmax", dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature_map", ["elu", "relu"])
@pytest.mark.parametrize("shape", LINEAR_SHAPES.values(), ids=LINEAR_SHAPES)
@pytest.mark.parametrize("op", ["mlk", "smlk"])
@pytest.mark.parametrize("backend", ["eager", "chunked"])
def test_linear(backend, op, shape, feature_map, dtype, poisoned, oracle_case):
    compare(op, backend, shape, dtype, {"feature_map": feature_map})
    oracle_case(backend, op, dtype)


# Small, because second derivatives are slow; only the eager backend is differentiable twice.
SMALL = {
    "mask": Shape(
        B=1, H=2, Hk=1, L=3, S=4, D=2, E=2, M=2, mask="float", causal="top-left", prior="position", scale="component"
    ),
    "rows": Shape(B=1, H=1, Hk=1, L=3, S=3, D=2, E=1, M=3, mask="rows", prior="batch", lse=True),
    "zero-priors": Shape(B=1, H=1, Hk=1, L=2, S=4, D=2, E=2, M=2, prior="zeros"),
}


def check_derivatives(function, inputs):
    """Compare first and second derivatives with finite differences; inputs that hold -inf are constant."""
    inputs = {n: x for n, x in inputs.items() if x.isfinite().all()}
    tensors = tuple(x.requires_grad_() for x in inputs.values())

    def by_position(*tensors):
        return tuple(x for x in function(dict(zip(inputs, tensors, strict=True))) if x is not None and x.requires_grad)

    assert torch.autograd.gradcheck(by_position, tensors)
    assert torch.autograd.gradgradcheck(by_position, tensors)


@pytest.mark.parametrize("assignment", ["soft", "hard"])
@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("op", ["mgk", "smgk"])
def test_mixture_derivatives(op, shape, similarity, assignment):
    inputs, constants = draw(shape, op, torch.float64, 0)
    fixed = {} if similarity == "per-head" else {"tau": inputs.pop("tau")}
    fixed |= {n: x for n, x in inputs.items() if not x.isfinite().all()}
    if assignment == "hard":
        fixed["log_prior"] = inputs.pop("log_prior")

    def function(x):
        options = {"similarity": similarity, "assignment": assignment}
        args, kwargs = arguments(op, shape, fixed | x, constants, options)
        kwargs |= {"return_weights": True, "return_lse": shape.mask != "rows"}
        return getattr(mgk, f"{op}_attention")(*args, **kwargs, backend="eager")

    check_derivatives(function, inputs)


@pytest.mark.parametrize("causal", [None, "top-left"])
@pytest.mark.parametrize("feature_map", ["elu", "relu"])
@pytest.mark.parametrize("op", ["mlk", "smlk"])
def test_linear_derivatives(op, feature_map, causal):
    shape = Shape(B=1, H=2, Hk=1, L=4, S=4, D=2, E=2, M=2, prior="position", causal=causal)
    inputs, constants = draw(shape, op, torch.float64, 1)
    del inputs["tau"]

    def function(x):
        args, kwargs = arguments(op, shape, x, constants, {"feature_map": feature_map})
        kwargs |= {"return_weights": True, "return_state": True}
        out, weights, (numerator, denominator) = getattr(mgk, f"{op}_attention")(*args, **kwargs, backend="eager")
        return out, weights, numerator, denominator

    check_derivatives(function, inputs)


@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_prior_of_hard_assignment_has_zero_gradient(backend):
    """The prior is ignored, but its gradient is 0, not None."""
    query, key, value = torch.randn(3, 1, 2, 5, 4).unbind()
    prior = torch.tensor([[0.3], [-torch.inf]]).expand(2, 2, 1).contiguous().requires_grad_()
    shift = torch.randn(2, 2, 4)
    out = mgk.smgk_attention(query, key, value, shift, log_prior=prior, assignment="hard", backend=backend)
    assert torch.equal(out, mgk.smgk_attention(query, key, value, shift, assignment="hard", backend=backend))
    assert torch.equal(torch.autograd.grad(out.sum(), prior)[0], torch.zeros_like(prior))
