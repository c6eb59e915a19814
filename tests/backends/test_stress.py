"""Extreme numbers, empty and degenerate shapes: results are finite, normalized, and match the oracle."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mgk
from tests.support import oracle

BACKENDS = ["eager", "sdpa"]
SOFT_AND_HARD = [("eager", "soft"), ("eager", "hard"), ("sdpa", "soft")]
# Operator, backend and assignment. tests/backends/test_factored.py has the cases that only "factored" does not support.
EVERY_BACKEND = [(op, *pair) for op in ("mgk", "smgk") for pair in SOFT_AND_HARD] + [("smgk", "factored", "soft")]
LINEAR_BACKENDS = ["eager", "chunked"]


def call(op, query, keys, value, shift, **options):
    """Call any of the four operators; the shifted ones take the first component and the shifts."""
    args = (query, keys[:, :, 0], value, shift) if op[0] == "s" else (query, keys, value)
    return getattr(mgk, f"{op}_attention")(*args, **options)


def with_norm(x, norm):
    return norm * x / x.norm(dim=-1, keepdim=True)


def finite_gradients(out, tensors):
    grads = torch.autograd.grad(out.sum(), tensors, allow_unused=True, materialize_grads=True)
    return all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("similarity", ["gaussian", "dot", 0.5])
@pytest.mark.parametrize("dtype, norm", [(torch.float32, 1e4), (torch.float32, 1e2), (torch.bfloat16, 1e2)], ids=str)
@pytest.mark.parametrize("op, backend, assignment", EVERY_BACKEND)
def test_large_inputs_stay_finite_and_normalized(backend, assignment, dtype, norm, similarity, op, causal):
    tensors = [with_norm(torch.randn(*size, 16), norm) for size in ((2, 4, 19), (2, 2, 3, 19))]
    tensors += [torch.randn(2, 2, 19, 8), with_norm(torch.randn(2, 3, 16), norm / 5)]
    query, keys, value, shift = tensors = [x.to(dtype).requires_grad_() for x in tensors]
    options = {"similarity": similarity, "assignment": assignment, "is_causal": causal}
    out = call(op, query, keys, value, shift, **options, backend=backend)
    assert out.isfinite().all()
    assert finite_gradients(out, tensors)
    # The output is a mean of values: if all values are 1 and the weights are normalized, it is 1.
    ones = call(op, query, keys, torch.ones_like(value), shift, **options, backend=backend)
    torch.testing.assert_close(ones, torch.ones_like(ones), rtol=0, atol=8 * torch.finfo(dtype).eps)
    if backend == "eager":
        weights = call(op, query, keys, value, shift, **options, return_weights=True)[1].double()
        assert (weights.sum(-1) - 1).abs().max() < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("similarity", ["gaussian", "dot"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_large_equal_components_share_the_weight(backend, similarity):
    """A sum over components through their logsumexps must not lose log M by rounding."""
    query, key = with_norm(torch.randn(2, 2, 9, 16), 1e4), with_norm(torch.randn(2, 2, 1, 13, 16), 1e4)
    out = mgk.mgk_attention(
        query, key.expand(2, 2, 3, 13, 16), torch.ones(2, 2, 13, 4), similarity=similarity, backend=backend
    )
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype, norm", [(torch.float32, 1e4), (torch.bfloat16, 1e2), (torch.float16, 1e2)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("op", ["mlk", "smlk"])
@pytest.mark.parametrize("backend", LINEAR_BACKENDS)
def test_large_inputs_of_linear_attention_stay_finite_and_normalized(backend, op, causal, dtype, norm):
    tensors = [with_norm(torch.randn(*size, 16), norm) for size in ((2, 4, 19), (2, 2, 3, 19))]
    tensors += [torch.randn(2, 2, 19, 8), with_norm(torch.randn(2, 3, 16), norm / 5)]
    query, keys, value, shift = tensors = [x.to(dtype).requires_grad_() for x in tensors]
    out = call(op, query, keys, value, shift, is_causal=causal, backend=backend)
    assert out.isfinite().all()
    assert finite_gradients(out, tensors)
    ones = call(op, query, keys, torch.ones_like(value), shift, is_causal=causal, backend=backend)
    torch.testing.assert_close(ones, torch.ones_like(ones), rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_gradient_of_a_large_lse_sums_to_one():
    logits = (1e5 + torch.randn(3, 20)).requires_grad_()
    _, lse = mgk.equations.safe_softmax(logits, -1)
    (gradient,) = torch.autograd.grad(lse.sum(), logits)
    torch.testing.assert_close(gradient.sum(-1), torch.ones(3), rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", ["factored", "sdpa"])
def test_gradients_in_bf16_are_rounded_once(backend):
    """The parts of the gradient of key and scale are larger than their sums."""
    tensors = [20 + torch.randn(2, 2, 6, 3) for _ in range(3)] + [torch.randn(2, 2, 3), torch.rand(2, 1)]

    def gradients(backend):
        query, key, value, shift, scale = inputs = [x.bfloat16().requires_grad_() for x in tensors]
        out = mgk.smgk_attention(query, key, value - 20, shift, scale=scale, backend=backend)
        return torch.autograd.grad(out, inputs, torch.linspace(-1, 1, out.numel()).view_as(out).bfloat16())

    for actual, expected in zip(gradients(backend), gradients("eager"), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


def test_softmax_of_nothing():
    weights, lse = mgk.equations.safe_softmax(torch.zeros(2, 0), -1)
    assert weights.shape == (2, 0)
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("denormals", ["kept", "flushed"])
@pytest.mark.parametrize("backend", [*BACKENDS, "factored"])
def test_best_key_survives_underflowing_factors(backend, denormals):
    """The product of factors of the best key underflows, but its weight is 0.114."""
    e1, e2 = torch.eye(32)[:2]
    query = (60 * e1).view(1, 1, 1, 32)
    key = torch.stack([60 * e1 + 55.3 * e2] + [-0.01 * e1] * 4096).view(1, 1, 4097, 32)
    shift = torch.stack([4 * e1, -4 * e1]).view(1, 2, 32)
    value = torch.eye(4097, 1).view(1, 1, 4097, 1)
    truth = oracle.mixture(query.double(), oracle.shifted(key, shift).double(), value.double())[0].item()
    assert round(truth, 3) == 0.114
    torch.set_flush_denormal(denormals == "flushed")
    try:
        tensors = [x.clone().requires_grad_() for x in (query, key, value, shift)]
        out = mgk.smgk_attention(*tensors, backend=backend)
        assert abs(out.item() - truth) < 1e-3
        assert finite_gradients(out, tensors)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("std", [20, 50])
@pytest.mark.parametrize("similarity", ["gaussian", "dot", 0.3])
@pytest.mark.parametrize("op, backend, assignment", EVERY_BACKEND)
def test_inputs_of_large_variance_match_the_oracle(backend, assignment, similarity, op, std):
    """The limit is the error of any algorithm whose logits, of this size, are rounded to float32."""
    sizes = ((2, 4, 21, 32), (2, 2, 3, 40, 32), (2, 2, 40, 16), (2, 3, 32))
    tensors = [x * torch.randn(*size) for x, size in zip((std, std, 1, std / 5), sizes, strict=True)]
    tau = {"gaussian": 1.0, "dot": 0.0}.get(similarity, similarity)
    exact = [x.double().requires_grad_() for x in tensors]
    keys = oracle.shifted(exact[1][:, :, 0], exact[3]) if op == "smgk" else exact[1]
    truth, _, _ = oracle.mixture(exact[0], keys, exact[2], tau=tau, hard=assignment == "hard")
    rounded = [x.requires_grad_() for x in tensors]
    out = call(op, *rounded, similarity=similarity, assignment=assignment, backend=backend)
    norms = exact[0].norm(dim=-1).max() ** 2 + keys.norm(dim=-1).max() ** 2
    unit = (torch.finfo(torch.float32).eps * norms / 32**0.5).item()  # error of a logit, and so of a weight
    assert (out - truth).abs().max() < unit * tensors[2].abs().max()
    upstream = torch.randn(out.shape)
    gradients = torch.autograd.grad((out * upstream).sum(), rounded, allow_unused=True, materialize_grads=True)
    expected = torch.autograd.grad((truth * upstream).sum(), exact, allow_unused=True, materialize_grads=True)
    # The size of a gradient if nothing cancelled.
    size = (upstream.norm(dim=-1).max() * tensors[2].norm(dim=-1).max()).item()
    widest = max(exact[0].abs().max(), keys.abs().max()).item() / 32**0.5
    for gradient, true, scale in zip(
        gradients, expected, (size * widest, size * widest, 8.0, size * widest), strict=True
    ):
        assert (gradient - true).abs().max() < unit * scale


@pytest.mark.parametrize("op", ["mgk", "smgk"])
@pytest.mark.parametrize("backend, assignment", SOFT_AND_HARD)
@pytest.mark.parametrize("mask", ["bool", "float"])
def test_fully_masked_rows_give_zeros_and_zero_gradients(backend, assignment, op, mask):
    tensors = [torch.randn(2, 4, 7, 5), torch.randn(2, 2, 3, 9, 5), torch.randn(2, 2, 9, 4), torch.randn(2, 3, 5)]
    query, keys, value, shift = tensors = [x.requires_grad_() for x in tensors]
    attend = torch.ones(2, 1, 7, 9, dtype=torch.bool)
    attend[0, :, 2] = attend[1] = False
    attn_mask = attend if mask == "bool" else torch.zeros(2, 1, 7, 9).masked_fill(~attend, -math.inf)
    options = {"attn_mask": attn_mask, "assignment": assignment, "backend": backend}
    out, lse = call(op, query, keys, value, shift, return_lse=True, **options)
    empty = ~attend.any(-1).expand(2, 4, 7)
    assert not out[empty].any()
    assert (lse[empty] == -math.inf).all()
    assert out[~empty].abs().min() > 0
    assert lse[~empty].isfinite().all()
    (grad_of_lse,) = torch.autograd.grad(lse, query, torch.ones_like(lse))
    assert not grad_of_lse[empty].any()
    assert grad_of_lse[~empty].any()
    out = call(op, query, keys, value, shift, **options)
    grads = torch.autograd.grad(out.square().sum(), tensors, allow_unused=True, materialize_grads=True)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][empty].any()
    assert grads[0][~empty].any()
    assert not grads[1][1].any()
    assert not grads[2][1].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("op", ["mlk", "smlk"])
@pytest.mark.parametrize("backend", LINEAR_BACKENDS)
def test_linear_rows_without_weight_give_zeros_and_zero_gradients(backend, op, causal):
    tensors = [torch.randn(2, 4, 9, 5), torch.randn(2, 2, 3, 9, 5), torch.randn(2, 2, 9, 4), torch.randn(2, 3, 5)]
    key_mask = torch.ones(2, 9, dtype=torch.bool)
    key_mask[0, :3] = key_mask[1] = False
    for dead, options in (("mask", {"key_mask": key_mask}), ("relu", {"feature_map": "relu"})):
        query, keys, value, shift = tensors = [x.detach().clone() for x in tensors]
        if dead == "relu":
            query[1] = -query[1].abs()  # relu(q) = 0: the denominator of an unmasked row is 0
        for x in tensors:
            x.requires_grad_()
        out = call(op, query, keys, value, shift, is_causal=causal, backend=backend, **options)
        assert not out[1].any()
        assert out[0].any()
        if dead == "mask" and causal:
            assert not out[0, :, :3].any()
        grads = torch.autograd.grad(out.square().sum(), tensors, allow_unused=True, materialize_grads=True)
        assert all(grad.isfinite().all() for grad in grads)
        assert not grads[0][1].any()
        assert grads[0][0].any()


@pytest.mark.parametrize("op", ["mgk", "smgk", "mlk", "smlk"])
@pytest.mark.parametrize("all_of", ["one component", "one key", "all keys"])
@pytest.mark.parametrize("backend", ["eager", "fast"])
def test_zero_prior_removes_component_or_key(op, all_of, backend):
    """A log prior of -inf removes a component, masks a key, or masks all keys."""
    backend = {"eager": "eager", "fast": "chunked" if op.endswith("mlk") else "sdpa"}[backend]
    query, keys, value, shift = (
        torch.randn(*size, dtype=torch.float64) for size in ((2, 2, 6, 5), (2, 2, 3, 8, 5), (2, 2, 8, 4), (2, 3, 5))
    )
    prior = torch.randn(2, 3, 8, dtype=torch.float64)
    where = {"one component": (slice(None), 1), "one key": (slice(None), slice(None), 4), "all keys": ...}[all_of]
    prior[where] = -math.inf
    tensors = [x.requires_grad_() for x in (query, keys, value, shift, prior)]
    out = call(op, query, keys, value, shift, log_prior=prior, backend=backend)
    grads = torch.autograd.grad(out.square().sum(), tensors, allow_unused=True, materialize_grads=True)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[4][where].any()
    with torch.no_grad():
        if all_of == "one component":
            r = [0, 2]
            expected = call(op, query, keys[:, :, r], value, shift[:, r], log_prior=prior[:, r], backend=backend)
        elif all_of == "one key":
            j = [0, 1, 2, 3, 5, 6, 7]
            expected = call(
                op, query, keys[:, :, :, j], value[:, :, j], shift, log_prior=prior[:, :, j], backend=backend
            )
        else:
            expected = torch.zeros_like(out)
    torch.testing.assert_close(out.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", ["mgk", "smgk", "mlk", "smlk"])
@pytest.mark.parametrize("backend", ["auto", "eager", "fast"])
def test_empty_batch_gives_empty_output(op, backend):
    backend = {"fast": "chunked" if op.endswith("mlk") else "sdpa"}.get(backend, backend)
    sizes = (0, 2, 6, 5), (0, 2, 3, 6, 5), (0, 2, 6, 4), (2, 3, 5)
    tensors = [torch.randn(*size).requires_grad_() for size in sizes]
    for causal in (False, True):
        out = call(op, *tensors, is_causal=causal, backend=backend)
        assert out.shape == (0, 2, 6, 4)
        assert out.dtype == torch.float32
        assert finite_gradients(out, tensors)


@pytest.mark.parametrize(("heads", "width"), [(0, 4), (2, 0)], ids=["no heads", "values of width 0"])
@pytest.mark.parametrize("backend", ["factored", "sdpa", "eager"])
def test_empty_output_has_lse_and_zero_gradients(backend, heads, width):
    sizes = (2, heads, 3, 5), (2, 2, 6, 5), (2, 2, 6, width), (2, 3, 5)
    query, key, value, shift = tensors = [torch.randn(*size).requires_grad_() for size in sizes]
    out, lse = mgk.smgk_attention(query, key, value, shift, backend=backend, return_lse=True)
    assert out.shape == (2, heads, 3, width)
    weights = torch.ones(2, 2, 6, 4)
    _, expected = mgk.smgk_attention(query, key, weights, shift, backend="eager", return_lse=True)
    torch.testing.assert_close(lse, expected)
    assert finite_gradients(lse + out.sum(-1), tensors)


@pytest.mark.parametrize("mask", ["key", "pair", "float", "causal"])
@pytest.mark.parametrize("similarity", ["dot", "tau", "gaussian", 0.5], ids=str)
@pytest.mark.parametrize("backend, assignment", SOFT_AND_HARD)
@pytest.mark.parametrize("op", ["mgk", "smgk"])
def test_large_masked_keys_change_nothing(op, backend, assignment, similarity, mask):
    """Keys whose squared norm overflows in fp32 and which no query attends to: equal outputs and gradients."""
    sizes = (2, 2, 7, 5), (2, 2, 3, 9, 5), (2, 2, 9, 4), (2, 3, 5)
    tensors = [torch.randn(*size) for size in sizes]
    tau = torch.zeros(2) if similarity == "tau" else similarity
    parameters = [torch.randn(2, 3, 1), 0.2 + torch.rand(2, 3), *([tau] if similarity == "tau" else [])]
    attend = (torch.arange(9) < 7).expand(2, 2, 1 if mask == "key" else 7, 9)
    attn_mask = torch.zeros(attend.shape).masked_fill(~attend, -torch.inf) if mask == "float" else attend
    options = {"is_causal": True} if mask == "causal" else {"attn_mask": attn_mask}
    results = []
    for size in (0.0, 1e20):
        inputs = [x.clone() for x in tensors]
        inputs[1][..., 7:, :] = size
        leaves = [x.clone().requires_grad_() for x in (*inputs, *parameters)]
        out, lse = call(
            op, *leaves[:4], log_prior=leaves[4], scale=leaves[5], similarity=leaves[6] if similarity == "tau" else tau,
            assignment=assignment, backend=backend, return_lse=True, **options,
        )  # fmt: skip
        grads = torch.autograd.grad(
            (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() + lse.sum(), leaves, materialize_grads=True,
            allow_unused=True,
        )  # fmt: skip
        results.append((out, lse, *grads))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend, assignment", SOFT_AND_HARD)
@pytest.mark.parametrize("op", ["mgk", "smgk"])
def test_no_keys_give_zeros_and_zero_gradients(op, backend, assignment):
    """Every input is connected to each result, with the gradient that a fully masked row has."""
    sizes = (2, 4, 5, 3), (2, 2, 3, 0, 3), (2, 2, 0, 6), (2, 3, 3)
    tensors = [torch.randn(*size).requires_grad_() for size in sizes]
    tensors[0].data[0, 0, 0, 0] = torch.inf
    prior, scale, tau = (torch.rand(*size).requires_grad_() for size in ((2, 3, 1), (2, 3), (2,)))
    prior.data[0, 0] = -torch.inf
    options = {"log_prior": prior, "scale": scale, "similarity": tau, "assignment": assignment, "backend": backend}
    inputs = [*(tensors if op == "smgk" else tensors[:3]), prior, scale, tau]
    if backend == "eager":
        options["attn_mask"] = torch.zeros(2, 1, 5, 1).requires_grad_()
        inputs.append(options["attn_mask"])
    out, lse = call(op, *tensors, return_lse=True, **options)
    assert out.shape == (2, 4, 5, 6)
    assert not out.any()
    assert (lse == -torch.inf).all()
    for result in (out, lse):
        for grad in torch.autograd.grad(result, inputs, torch.ones_like(result), retain_graph=True):
            assert not grad.any()


@pytest.mark.parametrize("op, backend, assignment", EVERY_BACKEND)
def test_single_key_gives_its_value(op, backend, assignment):
    sizes = (2, 2, 5, 3), (2, 2, 3, 1, 3), (2, 2, 1, 4), (2, 3, 3)
    tensors = [torch.randn(*size).requires_grad_() for size in sizes]
    out = call(op, *tensors, assignment=assignment, backend=backend)
    torch.testing.assert_close(out, tensors[2].expand(2, 2, 5, 4))
    grads = torch.autograd.grad(out.sum(), tensors, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(grads[2], torch.full((2, 2, 1, 4), 5.0))
    for n in (0, 1, 3):
        torch.testing.assert_close(grads[n], torch.zeros(sizes[n]), rtol=0, atol=1e-5)


@st.composite
def cases(draw):
    number = st.integers
    sizes = {"B": draw(number(0, 2)), "Hk": draw(number(1, 2)), "group": draw(number(1, 3)), "M": draw(number(1, 4))}
    sizes |= {"L": draw(number(0, 9)), "S": draw(number(0, 9)), "D": draw(number(1, 7)), "E": draw(number(1, 5))}
    return sizes | {
        "seed": draw(number(0, 2**31)),
        "magnitude": 10.0 ** draw(number(-3, 2)),
        "mask": draw(st.sampled_from([None, "bool", "float"])),
        "density": draw(st.sampled_from([0.1, 0.5, 0.9])),
        "causal": draw(st.sampled_from([None, "top-left", "bottom-right"])),
        "prior": draw(st.sampled_from([None, "shared", "position", "zeros"])),
        "scale": draw(st.sampled_from([None, 0.7, "component"])),
        "tau": draw(st.sampled_from([1.0, 0.0, 0.3, "tensor"])),
        "shifted": draw(st.booleans()),
    }


def drawn(case):
    """Return query, keys, value, shift and the options of the mixture operators for a hypothesis case."""
    g = torch.Generator().manual_seed(case["seed"])
    B, Hk, M, L, S, D, E = (case[n] for n in ("B", "Hk", "M", "L", "S", "D", "E"))

    def randn(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64)

    query, keys = case["magnitude"] * randn(B, Hk * case["group"], L, D), case["magnitude"] * randn(B, Hk, M, S, D)
    value, shift = randn(B, Hk, S, E), case["magnitude"] * randn(Hk, M, D)
    prior = {None: None, "shared": randn(Hk, M, 1), "position": randn(Hk, M, S), "zeros": randn(B, Hk, M, S)}[
        case["prior"]
    ]
    if case["prior"] == "zeros":
        prior = prior.masked_fill(prior > case["density"], -math.inf)
    mask = randn(B, 1, L, S)
    mask = {None: None, "bool": mask < case["density"], "float": mask}[case["mask"]]
    scale = 0.1 + randn(Hk, M).sigmoid() if case["scale"] == "component" else case["scale"]
    tau = randn(Hk).sigmoid() if case["tau"] == "tensor" else case["tau"]
    return query, keys, value, shift, {"log_prior": prior, "scale": scale, "tau": tau, "mask": mask}


@pytest.mark.parametrize("backend, assignment", SOFT_AND_HARD)
@settings(deadline=None, max_examples=150, derandomize=True)
@given(case=cases())
def test_drawn_cases_match_the_oracle(backend, assignment, case):
    query, keys, value, shift, options = drawn(case)
    mixed = oracle.shifted(keys[:, :, 0], shift) if case["shifted"] else keys
    out, _, lse = oracle.mixture(query, mixed, value, causal=case["causal"], hard=assignment == "hard", **options)
    causal = {None: False, "top-left": True}.get(case["causal"], case["causal"])
    options = {"log_prior": options["log_prior"], "scale": options["scale"], "attn_mask": options["mask"]} | {
        "similarity": options["tau"], "is_causal": causal, "assignment": assignment, "backend": backend,
    }  # fmt: skip
    actual = call("smgk" if case["shifted"] else "mgk", query, keys, value, shift, return_lse=True, **options)
    torch.testing.assert_close(actual, (out, lse), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("backend", LINEAR_BACKENDS)
@settings(deadline=None, max_examples=100, derandomize=True)
@given(case=cases(), feature_map=st.sampled_from(["elu", "relu"]))
def test_drawn_cases_of_linear_attention_match_the_oracle(backend, case, feature_map):
    causal = case["causal"] is not None
    query, keys, value, shift, options = drawn(case | ({"L": case["S"]} if causal else {}))
    mixed = oracle.shifted(keys[:, :, 0], shift) if case["shifted"] else keys
    mask = options["mask"][:, 0].any(1) if case["mask"] == "bool" else None
    common = {"log_prior": options["log_prior"], "feature_map": feature_map, "key_mask": mask}
    out, _ = oracle.linear(query, mixed, value, causal="top-left" if causal else None, **common)
    actual = call(
        "smlk" if case["shifted"] else "mlk", query, keys, value, shift, is_causal=causal, backend=backend, **common
    )
    torch.testing.assert_close(actual, out, rtol=1e-8, atol=1e-8)
