"""Identities of the operators that hold for all inputs."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import mgk
from mgk import equations
from tests.support import oracle

BACKENDS = ["eager", "sdpa"]
SOFT_AND_HARD = [("eager", "soft"), ("eager", "hard"), ("sdpa", "soft")]
LINEAR_BACKENDS = ["eager", "chunked"]
B, H, HK, M, L, S, D, E = 2, 4, 2, 3, 11, 14, 5, 6


def randn(*size):
    return torch.randn(*size, dtype=torch.float64)


def inputs(length=L, size=S, components=M, batch=B):
    """Return query, keys, value, a prior per position and a scale per component."""
    prior = randn(HK, components, size).log_softmax(-2)
    query, keys, value = randn(batch, H, length, D), randn(batch, HK, components, size, D), randn(batch, HK, size, E)
    return query, keys, value, prior, 0.2 + torch.rand(HK, components, dtype=torch.float64)


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.arange(L * S).reshape(L, S) % 3 > 0},
    "float": {"attn_mask": torch.linspace(-2, 2, L * S, dtype=torch.float64).sin().reshape(L, S)},
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_component_with_dot_equals_sdpa(backend, masks):
    query, keys, value, _, _ = inputs(components=1)
    expected = sdpa(query, keys[:, :, 0], value, enable_gqa=True, **masks)
    close(mgk.mgk_attention(query, keys, value, similarity="dot", backend=backend, **masks), expected)


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_dot_with_shifts_and_a_shared_prior_equals_sdpa(backend, masks):
    query, keys, value, _, _ = inputs()
    key, shift, prior = keys[:, :, 0], 3 * randn(HK, M, D), randn(HK, M, 1)
    out = mgk.smgk_attention(query, key, value, shift, similarity="dot", log_prior=prior, backend=backend, **masks)
    close(out, sdpa(query, key, value, enable_gqa=True, **masks))
    # With a prior per position the operator differs.
    other = mgk.smgk_attention(
        query, key, value, shift, similarity="dot", log_prior=randn(HK, M, S), backend=backend, **masks
    )
    assert (other - out).abs().max() > 1e-3


@pytest.mark.parametrize("backend, assignment", SOFT_AND_HARD)
def test_equal_components_equal_one_component(backend, assignment):
    query, keys, value, prior, _ = inputs()
    options = {"assignment": assignment, "backend": backend, "return_lse": True}
    many = mgk.mgk_attention(query, keys[:, :, :1].expand(-1, -1, M, -1, -1), value, log_prior=prior, **options)
    close(many, mgk.mgk_attention(query, keys[:, :, :1], value, **options))


@pytest.mark.parametrize("backend, assignment", SOFT_AND_HARD)
def test_order_of_components_does_not_matter(backend, assignment):
    query, keys, value, prior, scale = inputs()
    order = torch.tensor([2, 0, 1])
    options = {"assignment": assignment, "backend": backend, "return_lse": True}
    expected = mgk.mgk_attention(query, keys, value, log_prior=prior, scale=scale, **options)
    permuted = {"log_prior": prior[:, order], "scale": scale[:, order]}
    close(mgk.mgk_attention(query, keys[:, :, order], value, **permuted, **options), expected)
    shift = randn(HK, M, D)
    expected = mgk.smgk_attention(query, keys[:, :, 0], value, shift, log_prior=prior, scale=scale, **options)
    close(mgk.smgk_attention(query, keys[:, :, 0], value, shift[:, order], **permuted, **options), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_constant_added_to_log_prior_changes_only_the_lse(backend):
    query, keys, value, prior, _ = inputs()
    out, lse = mgk.mgk_attention(query, keys, value, log_prior=prior, backend=backend, return_lse=True)
    moved = mgk.mgk_attention(query, keys, value, log_prior=prior + 2.5, backend=backend, return_lse=True)
    close(moved, (out, lse + 2.5))


@pytest.mark.parametrize("backend, assignment", SOFT_AND_HARD)
def test_gaussian_keys_are_translation_invariant(backend, assignment):
    query, keys, value, prior, scale = inputs()
    offset, shift = 3 * randn(D), randn(HK, M, D)
    options = {"log_prior": prior, "assignment": assignment, "backend": backend, "return_lse": True}
    for extra in ({}, {"scale": scale}):
        expected = mgk.mgk_attention(query, keys, value, **options, **extra)
        close(mgk.mgk_attention(query + offset, keys + offset, value, **options, **extra), expected)
        expected = mgk.smgk_attention(query, keys[:, :, 0], value, shift, **options, **extra)
        close(mgk.smgk_attention(query + offset, keys[:, :, 0] + offset, value, shift, **options, **extra), expected)


@pytest.mark.parametrize("backend, assignment", SOFT_AND_HARD)
@pytest.mark.parametrize("similarity", ["gaussian", "dot", 0.4])
def test_smgk_equals_mgk_with_shifted_keys(backend, assignment, similarity):
    query, keys, value, prior, scale = inputs()
    key, shift = keys[:, :, 0], randn(HK, M, D)
    options = {
        "log_prior": prior,
        "scale": scale,
        "similarity": similarity,
        "assignment": assignment,
        "backend": backend,
    }
    options |= {"is_causal": "bottom-right", "return_lse": True}
    expected = mgk.mgk_attention(query, oracle.shifted(key, shift), value, **options)
    close(mgk.smgk_attention(query, key, value, shift, **options), expected)


def test_default_prior_is_uniform():
    query, keys, value, _, _ = inputs()
    uniform = torch.full((M, 1), -math.log(M), dtype=torch.float64)
    for backend in BACKENDS:
        expected = mgk.mgk_attention(query, keys, value, log_prior=uniform, backend=backend, return_lse=True)
        close(mgk.mgk_attention(query, keys, value, backend=backend, return_lse=True), expected)


def test_hard_ignores_the_prior_and_splits_ties_evenly():
    query, keys, value, prior, _ = inputs()
    prior.requires_grad_()
    out = mgk.mgk_attention(query, keys, value, log_prior=prior, assignment="hard")
    assert torch.equal(out, mgk.mgk_attention(query, keys, value, assignment="hard"))
    if out.requires_grad:
        assert not torch.autograd.grad(out.sum(), prior, materialize_grads=True, allow_unused=True)[0].any()
    equal = keys[:, :, :1].repeat(1, 1, M, 1, 1).requires_grad_()
    out = mgk.mgk_attention(query, equal, value, assignment="hard")
    (grad,) = torch.autograd.grad((out * randn(*out.shape)).sum(), equal)
    assert grad.abs().max() > 1e-3
    close(grad, grad[:, :, :1].expand_as(grad))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("assignment", ["soft", "hard"])
def test_weights_sum_to_one_and_give_the_output(assignment, dtype):
    query, keys, value, prior, scale = (x.to(dtype) for x in inputs())
    options = {"log_prior": prior, "scale": scale, "assignment": assignment, "return_weights": True, "return_lse": True}
    out, weights, lse = mgk.mgk_attention(query, keys, value, **options)
    assert weights.shape == (B, H, L, S)
    assert lse.shape == (B, H, L)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    eps = torch.finfo(dtype).eps
    close(weights.double().sum(-1), torch.ones(B, H, L, dtype=torch.float64), 4 * eps)
    close(weights.double() @ value.double().repeat_interleave(H // HK, 1), out.double(), 4 * eps)
    exact = {"log_prior": prior.double(), "scale": scale.double(), "hard": assignment == "hard"}
    expected = oracle.mixture(query.double(), keys.double(), value.double(), **exact)
    close(weights.double(), expected[1], 4 * eps)
    close(lse.double(), expected[2], 1e-5 if dtype != torch.float64 else 1e-12)


@pytest.mark.parametrize("backend", LINEAR_BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_mlk_weights_sum_to_one_and_give_the_output(backend, causal):
    query, keys, value, prior, _ = inputs(length=S)
    expected = oracle.linear(query, keys, value, log_prior=prior, causal="top-left" if causal else None)
    options = {"log_prior": prior, "is_causal": causal}
    close(mgk.mlk_attention(query, keys, value, **options, return_weights=True), expected)
    close(expected[1].sum(-1), torch.ones(B, H, S, dtype=torch.float64))
    close(
        mgk.mlk_attention(query, keys, value, **options, backend=backend), expected[1] @ value.repeat_interleave(2, 1)
    )


@pytest.mark.parametrize("op", ["mgk", "smgk"])
def test_dropout(op):
    """Check that the returned weights are those used, each dropped or divided by 1 - p."""
    query, keys, value, _, _ = inputs(length=64, size=48)
    args = (keys, value) if op == "mgk" else (keys[:, :, 0], value, randn(HK, M, D))
    operator = getattr(mgk, f"{op}_attention")
    full = operator(query, *args, return_weights=True)[1]
    out, weights = operator(query, *args, dropout_p=0.25, return_weights=True)
    close(weights @ value.repeat_interleave(H // HK, 1), out)
    nonzero = weights != 0
    close(weights[nonzero], full[nonzero] / 0.75)
    assert 0.74 < nonzero.double().mean() < 0.76
    torch.manual_seed(1)
    first = operator(query, *args, dropout_p=0.25)
    second = operator(query, *args, dropout_p=0.25)
    torch.manual_seed(1)
    assert torch.equal(operator(query, *args, dropout_p=0.25), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("backend", LINEAR_BACKENDS)
def test_mlk_equals_linear_attention_on_mixed_features(backend):
    query, keys, value, prior, _ = inputs()
    mixed = (prior.exp()[..., None] * oracle.elu(keys)).sum(2).repeat_interleave(H // HK, 1)  # [B, H, S, D]
    features, value_heads = oracle.elu(query), value.repeat_interleave(H // HK, 1)
    numerator, denominator = features @ (mixed.mT @ value_heads), features @ mixed.sum(2)[..., None]
    close(mgk.mlk_attention(query, keys, value, log_prior=prior, backend=backend), numerator / denominator)
    shift, key = randn(HK, M, D), keys[:, :, 0]
    expected = mgk.mlk_attention(query, oracle.shifted(key, shift), value, log_prior=prior, backend=backend)
    close(mgk.smlk_attention(query, key, value, shift, log_prior=prior, backend=backend), expected)


LENGTHS = (5, 1, 8)
CU = torch.tensor([0, 5, 6, 14], dtype=torch.int32)


def padded(x, dim):
    """Return the sequences of a packed tensor as a batch, padded with random numbers."""
    pieces = [x.narrow(dim, start, n) for start, n in zip(CU, LENGTHS, strict=False)]
    pad = [[*list(x.shape[:dim]), max(LENGTHS) - n, *list(x.shape[dim + 1 :])] for n in LENGTHS]
    return torch.cat([torch.cat([piece, randn(*size)], dim) for piece, size in zip(pieces, pad, strict=True)])


def unpadded(x):
    return torch.cat([x[n : n + 1, :, :length] for n, length in enumerate(LENGTHS)], 2)


KEY_MASK = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


@pytest.mark.parametrize("causal", [False, True, "bottom-right"])
@pytest.mark.parametrize("backend, assignment", SOFT_AND_HARD)
def test_packed_equals_padded(backend, assignment, causal):
    query, keys, value, prior, _ = inputs(length=S, batch=1)
    options = {"assignment": assignment, "backend": backend, "is_causal": causal}
    out = mgk.mgk_attention(
        query, keys, value, log_prior=prior, cu_seqlens_q=CU, cu_seqlens_k=CU, max_seqlen_q=8, max_seqlen_k=8, **options
    )
    batched = (padded(query, 2), padded(keys, 3), padded(value, 2))
    expected = mgk.mgk_attention(*batched, KEY_MASK[:, None, None], log_prior=padded(prior[None], 3), **options)
    close(out, unpadded(expected))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", LINEAR_BACKENDS)
def test_packed_mlk_equals_padded(backend, causal):
    query, keys, value, prior, _ = inputs(length=S, batch=1)
    options = {"backend": backend, "is_causal": causal}
    out = mgk.mlk_attention(query, keys, value, log_prior=prior, cu_seqlens=CU, **options)
    batched = (padded(query, 2), padded(keys, 3), padded(value, 2))
    expected = mgk.mlk_attention(*batched, log_prior=padded(prior[None], 3), key_mask=KEY_MASK, **options)
    close(out, unpadded(expected))


@pytest.mark.parametrize("backend, assignment", SOFT_AND_HARD)
def test_row_does_not_depend_on_other_rows_or_padding(backend, assignment):
    query, keys, value, prior, _ = inputs(batch=3)
    options = {"assignment": assignment, "backend": backend}
    expected = mgk.mgk_attention(query, keys, value, log_prior=prior, **options)
    for n in range(3):
        alone = mgk.mgk_attention(query[n : n + 1], keys[n : n + 1], value[n : n + 1], log_prior=prior, **options)
        close(alone, expected[n : n + 1])
    for padding in (1, 9):
        longer_keys = torch.cat([keys, 30 * randn(3, HK, M, padding, D)], 3)
        longer_value = torch.cat([value, 1e3 * randn(3, HK, padding, E)], 2)
        longer_prior = torch.cat([prior, randn(HK, M, padding)], 2)
        mask = (torch.arange(S + padding) < S)[None, None, None]
        close(mgk.mgk_attention(query, longer_keys, longer_value, mask, log_prior=longer_prior, **options), expected)


@pytest.mark.parametrize("backend", LINEAR_BACKENDS)
def test_mlk_row_does_not_depend_on_other_rows_or_padding(backend):
    query, keys, value, prior, _ = inputs(batch=3)
    expected = mgk.mlk_attention(query, keys, value, log_prior=prior, backend=backend)
    alone = mgk.mlk_attention(query[1:2], keys[1:2], value[1:2], log_prior=prior, backend=backend)
    close(alone, expected[1:2])
    longer = (torch.cat([keys, 30 * randn(3, HK, M, 7, D)], 3), torch.cat([value, 1e3 * randn(3, HK, 7, E)], 2))
    mask = (torch.arange(S + 7) < S).expand(3, -1)
    longer_prior = torch.cat([prior, randn(HK, M, 7)], 2)
    close(mgk.mlk_attention(query, *longer, log_prior=longer_prior, key_mask=mask, backend=backend), expected)


def futures(length, change):
    """Return two sets of float32 inputs that agree before position `change` only."""
    past = [x.float() for x in inputs(length=length, size=length)[:4]]
    future = [x.float() for x in inputs(length=length, size=length)[:4]]
    return past, [
        torch.cat([x.narrow(dim, 0, change), 5 * y.narrow(dim, change, length - change)], dim)
        for x, y, dim in zip(past, future, (2, 3, 2, 2), strict=True)
    ]


@pytest.mark.parametrize("change", [1, 16, 50, 129])
@pytest.mark.parametrize("causal", [True, "bottom-right"])
@pytest.mark.parametrize("op", ["mgk", "smgk"])
@pytest.mark.parametrize("backend, assignment", SOFT_AND_HARD)
def test_later_tokens_do_not_change_earlier_outputs(backend, assignment, op, causal, change):
    shift, options = torch.randn(HK, M, D), {"is_causal": causal, "assignment": assignment, "backend": backend}
    outs = []
    for query, keys, value, prior in futures(131, change):
        args = (keys, value) if op == "mgk" else (keys[:, :, 0], value, shift)
        outs.append(getattr(mgk, f"{op}_attention")(query, *args, log_prior=prior, **options))
    assert torch.equal(outs[0][:, :, :change], outs[1][:, :, :change])
    assert not torch.equal(outs[0][:, :, change:], outs[1][:, :, change:])


@pytest.mark.parametrize("change", [1, 16, 50, 129])
@pytest.mark.parametrize("backend", LINEAR_BACKENDS)
def test_later_tokens_do_not_change_earlier_outputs_of_mlk(backend, change):
    outs = [
        mgk.mlk_attention(query, keys, value, log_prior=prior, is_causal=True, backend=backend)
        for query, keys, value, prior in futures(131, change)
    ]
    assert torch.equal(outs[0][:, :, :change], outs[1][:, :, :change])
    assert not torch.equal(outs[0][:, :, change:], outs[1][:, :, change:])


@pytest.mark.parametrize("feature_map", ["elu", "relu"])
@pytest.mark.parametrize("pieces", [(7, 7), (1,) * 14, (5, 8, 1)], ids=str)
@pytest.mark.parametrize("backend", LINEAR_BACKENDS)
def test_mlk_in_chunks_equals_one_call(backend, pieces, feature_map):
    """Check output, final state and gradients of chunks that pass on a state."""
    tensors = [x.requires_grad_() for x in inputs(length=S)[:4]]
    query, keys, value, prior = tensors
    options = {"is_causal": True, "feature_map": feature_map, "backend": backend, "return_state": True}
    expected, end = mgk.mlk_attention(query, keys, value, log_prior=prior, **options)
    outs, state, start = [], None, 0
    for n in pieces:
        i = slice(start, start + n)
        out, state = mgk.mlk_attention(
            query[:, :, i], keys[:, :, :, i], value[:, :, i], log_prior=prior[..., i], initial_state=state, **options
        )
        outs.append(out)
        start += n
    actual = torch.cat(outs, 2)
    close(actual, expected)
    close(state, end)
    numerator, denominator = oracle.state(keys, value, log_prior=prior, feature_map=feature_map)
    close(end[0], numerator)
    close(end[1], denominator)
    upstream = randn(*actual.shape)
    close(
        torch.autograd.grad((actual * upstream).sum(), tensors),
        torch.autograd.grad((expected * upstream).sum(), tensors),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_mlk_state_is_float32(dtype):
    query, keys, value, prior = (x.to(dtype) for x in inputs(length=S)[:4])
    out, state = mgk.mlk_attention(query, keys, value, log_prior=prior, is_causal=True, return_state=True)
    assert out.dtype == dtype
    assert [x.dtype for x in state] == [torch.float32] * len(state)
    assert state[0].shape == (B, HK, D, E)
    assert state[1].shape == (B, HK, D)


def test_equations_4_to_6():
    query, key = randn(B, H, L, D), randn(B, H, S, D)
    close(equations.posterior(query, key), oracle.posterior(query, key))
    prior, variance = randn(H, S).log_softmax(-1), 0.5 + torch.rand(B, H, S, dtype=torch.float64)
    close(equations.posterior(query, key, prior, variance), oracle.posterior(query, key, prior, variance))
    unit_query, unit_key = (x / x.norm(dim=-1, keepdim=True) for x in (query, key))
    close(equations.normalised_posterior(query, key), (unit_query @ unit_key.mT / D**0.5).softmax(-1))


def test_equations_11_and_13():
    query, keys, _, prior, scale = inputs()
    query = query[:, :HK]
    gamma = equations.responsibilities(
        query, keys, prior[None], scale=scale[None, ..., None], tau=0.7
    )  # [B, H, L, M, S]
    expected = oracle.responsibilities(query, keys, log_prior=prior, scale=scale, tau=0.7)  # [B, H, M, L, S]
    close(gamma, expected.transpose(2, 3))
    actual = equations.m_step(query, gamma)
    means, variance = oracle.m_step(query[1, 1], expected[1, 1])
    close((actual.means[1, 1], actual.variance[1, 1], actual.prior), (means, variance, expected.mean(3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("components", [1, 2], ids=["softmax", "mgk"])
def test_least_number_masks_like_minus_infinity(components, dtype):
    """Check every backend, with a row that is fully masked."""
    query, value = torch.randn(1, 2, 5, 8, dtype=dtype), torch.randn(1, 2, 5, 8, dtype=dtype)
    keys = torch.randn(1, 2, components, 5, 8, dtype=dtype)
    mask = torch.zeros(5, 5, dtype=dtype)
    mask[1, 2:] = mask[3] = torch.finfo(dtype).min
    similarity = "dot" if components == 1 else "gaussian"
    by_infinity = mgk.mgk_attention(
        query, keys, value, mask.masked_fill(mask < 0, -torch.inf), similarity=similarity, backend="eager"
    )
    assert not by_infinity[:, :, 3].any()
    for backend in ("eager", "sdpa", "plain") if components == 1 else ("eager", "sdpa"):
        actual = mgk.mgk_attention(query, keys, value, mask, similarity=similarity, backend=backend)
        close(actual, by_infinity, 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("operator", [mgk.mgk_attention, mgk.mlk_attention])
def test_torch_func_transforms(operator):
    """Check that auto does not select a backend whose operators have no rule for them."""
    queries, keys, value = torch.randn(3, 1, 2, 20, 8), torch.randn(1, 2, 2, 20, 8), torch.randn(1, 2, 20, 8)

    def loss(query):
        return operator(query, keys, value, is_causal=True).square().sum()

    gradients = []
    for query in queries:
        query.requires_grad_()
        gradients += torch.autograd.grad(loss(query), query)
    close(torch.func.grad(loss)(queries[0].detach()), gradients[0], 1e-5)
    close(torch.func.vmap(torch.func.grad(loss))(queries.detach()), torch.stack(gradients), 1e-5)


def test_error_lists_all_similarities():
    x = torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"'gaussian', 'dot', or τ .* number or a tensor .*did you mean 'gaussian'"):
        mgk.mgk_attention(x, x[:, :, None], x, similarity="gausian")


def test_second_derivative_requires_eager():
    query, keys, value = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 2, 20, 8), torch.randn(1, 2, 20, 8)
    query.requires_grad_()

    def second(backend):
        out = mgk.smgk_attention(query, keys[:, :, 0], value, torch.ones(2, 2, 8), backend=backend)
        (first,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
        return torch.autograd.grad(first.square().sum(), query)[0]

    assert second("eager").abs().sum() > 0
    for backend in ("factored", "sdpa"):
        with pytest.raises(RuntimeError, match="use backend='eager'"):
            second(backend)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("operator", [mgk.mgk_attention, mgk.mlk_attention])
def test_forward_mode_derivatives_equal_the_equations(operator):
    """Check that auto does not select a backend without forward-mode derivatives."""
    torch.manual_seed(0)
    query, keys, value = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 2, 20, 8), torch.randn(1, 2, 20, 8)
    tangents = [
        torch.func.jvp(
            lambda q, b=b: operator(q, keys, value, is_causal=True, backend=b), (query,), (torch.ones_like(query),)
        )[1]
        for b in ("eager", "auto")
    ]
    torch.testing.assert_close(tangents[1], tangents[0])
