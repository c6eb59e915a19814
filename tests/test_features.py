"""Feature maps of linear attention: values, approximation errors, large inputs."""

import math

import pytest
import torch

import mgk
from mgk import DPFP, FAVOR
from mgk.features import FEATURE_MAPS, elu_plus_one
from mgk.rotary import Rotary
from tests.support import oracle
from tests.support.exact import F64, close

B, H, HK, M, D, E = 2, 4, 2, 3, 8, 5
BACKENDS = ["eager", "chunked"]


def randn(*size, dtype=F64):
    return torch.randn(*size, dtype=dtype)


def inputs(length=9, size=None, batch=B, dtype=F64):
    """Return query, keys, value, and a prior per position."""
    size = length if size is None else size
    prior = randn(HK, M, size, dtype=dtype).log_softmax(1)
    return (
        randn(batch, H, length, D, dtype=dtype),
        randn(batch, HK, M, size, D, dtype=dtype),
        randn(batch, HK, size, E, dtype=dtype),
        prior,
    )


@pytest.mark.parametrize("dtype, x", [(torch.float32, -20.0), (torch.bfloat16, -8.0), (torch.float16, -10.0)])
def test_elu_plus_one_is_positive(dtype, x):
    x = torch.tensor(x, dtype=dtype, requires_grad=True)
    assert torch.nn.functional.elu(x) + 1 == 0
    actual = elu_plus_one(x)
    torch.testing.assert_close(actual.double(), x.detach().double().exp(), rtol=0.02, atol=0)
    assert torch.autograd.grad(actual, x)[0] > 0


def test_elu_plus_one_has_slope_one_at_zero():
    """Check the slope at 0, where a clamp has slope 0 from torch 2.15 on."""
    x = torch.zeros(2, dtype=F64, requires_grad=True)
    assert torch.autograd.grad(elu_plus_one(x).sum(), x)[0].tolist() == [1, 1]


def test_elu_plus_one_and_its_gradient():
    x = torch.tensor([-200.0, -3.0, -0.0, 0.5, 200.0], requires_grad=True)
    close(elu_plus_one(x), torch.tensor([0.0, math.exp(-3), 1.0, 1.5, 201.0]), 1e-6)
    close(torch.autograd.grad(elu_plus_one(x).sum(), x)[0], torch.tensor([0.0, math.exp(-3), 1.0, 1.0, 1.0]), 1e-6)
    assert set(FEATURE_MAPS) == {"elu", "relu"}


def favor_kernel(favor, query, keys):
    """Return phi(q).phi(k) by Performer's definition, [B, H, M, L, S]."""

    def phi(x, norm):
        x = x * favor.scale**0.5
        return (x @ favor.directions.to(x.dtype).T - norm * x.square().sum(-1, keepdim=True)).exp()

    keys = keys.repeat_interleave(H // HK, 1)
    key_norm = 1.0 if favor.similarity == "gaussian" else 0.5
    return phi(query, 0.5)[:, :, None] @ phi(keys, key_norm).mT / favor.directions.shape[0]


def mixed_weights(kernel, query, keys, prior, causal=None):
    """Return the weights of Eq. 14, which mixes after the feature map."""
    kernel = (oracle.full_prior(prior, query, keys).exp()[..., None, :] * kernel).sum(2)
    kernel = kernel * oracle.allowed(*kernel.shape[-2:], causal)
    return kernel / kernel.sum(-1, keepdim=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("similarity", ["dot", "gaussian"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_favor_mixes_after_the_map(backend, similarity, causal):
    favor, (query, keys, value, prior) = FAVOR(D, 30, similarity=similarity), inputs(70)
    kernel = favor_kernel(favor, query, keys)
    weights = mixed_weights(kernel, query, keys, prior, "top-left" if causal else None)
    options = {"log_prior": prior, "feature_map": favor, "is_causal": causal}
    out = mgk.mlk_attention(query, keys, value, backend=backend, **options)
    close(out, weights @ value.repeat_interleave(H // HK, 1))
    if backend == "eager":
        close(mgk.mlk_attention(query, keys, value, return_weights=True, **options)[1], weights)
    # This differs from the feature of the mixed key.
    mixed = (prior.exp()[..., None] * keys).sum(2, keepdim=True)
    other = mgk.mlk_attention(query, mixed, value, feature_map=favor, is_causal=causal)
    assert (other - out).abs().max() > 1e-3


@pytest.mark.parametrize("similarity", ["dot", "gaussian"])
def test_favor_approximates_softmax_better_with_more_features(similarity):
    """Check that the error falls as the inverse square root of the number of features."""
    query, keys, value, prior = inputs(12)
    tau = 1.0 if similarity == "gaussian" else 0.0
    _, expected, _ = oracle.mixture(query, keys, value, log_prior=prior, scale=0.15, tau=tau)

    def error(features):
        draws = []
        for _ in range(5):
            favor = FAVOR(D, features, scale=0.15, similarity=similarity)
            actual = mgk.mlk_attention(query, keys, value, log_prior=prior, feature_map=favor, return_weights=True)[1]
            draws.append((actual - expected).abs().mean())
        return torch.stack(draws).mean() / expected.mean()

    few, more, many = error(32), error(512), error(8192)
    assert more < 0.5 * few
    assert many < 0.5 * more
    assert many < 0.1
    other = mgk.mlk_attention(
        query, keys, value, log_prior=prior, feature_map=FAVOR(D, 8192, scale=0.15), return_weights=True
    )
    assert similarity == "dot" or (other[1] - expected).abs().mean() / expected.mean() > 2 * many


def test_favor_default_scale_and_orthogonal_directions():
    favor = FAVOR(D, 20)
    assert favor.scale == pytest.approx(D**-0.5)
    first, second = favor.directions[:D], favor.directions[D : 2 * D]
    for block in (first, second):
        products = block @ block.T
        close(products - products.diag().diag(), torch.zeros(D, D), 1e-4)
    norms = torch.cat([FAVOR(D, 64).directions.norm(dim=-1) for _ in range(20)])
    assert abs(norms.square().mean() - D) < 0.5
    assert norms.std() > 0.3
    before = favor.directions.clone()
    favor.redraw()
    assert not torch.equal(favor.directions, before)
    assert list(favor.state_dict()) == ["directions"]
    with pytest.raises(ValueError, match="similarity must be one of 'dot', 'gaussian'"):
        FAVOR(D, similarity="linear")


@pytest.mark.parametrize("similarity", ["dot", "gaussian"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_favor_with_large_keys(dtype, backend, causal, similarity):
    """Check keys of norm 50: finite outputs and gradients, and no row without weight."""
    query, keys, value, prior = inputs(150, dtype=dtype)
    keys = (50 * keys / keys.norm(dim=-1, keepdim=True)).requires_grad_()
    query.requires_grad_()
    favor = FAVOR(D, similarity=similarity)
    options = {"log_prior": prior, "feature_map": favor, "is_causal": causal, "backend": backend}
    total = mgk.mlk_attention(query, keys, torch.ones_like(value), **options)
    close(total, torch.ones_like(total), 4 * torch.finfo(dtype).eps)
    out = mgk.mlk_attention(query, keys, value, **options)
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.square().sum(), (query, keys)))


@pytest.mark.parametrize("change", [1, 63, 64, 100])
@pytest.mark.parametrize("similarity", ["dot", "gaussian"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_large_later_key_does_not_change_earlier_outputs(backend, similarity, change):
    query, keys, value, prior = inputs(150, dtype=torch.float32)
    favor, outs = FAVOR(D, similarity=similarity), []
    for size in (1.0, 300.0):
        keys = torch.cat([keys[..., :change, :], size * keys[..., change:, :]], 3)
        outs.append(
            mgk.mlk_attention(query, keys, value, log_prior=prior, feature_map=favor, is_causal=True, backend=backend)
        )
    close(outs[1][:, :, :change], outs[0][:, :, :change], 1e-6)
    assert not torch.equal(outs[1][:, :, change:], outs[0][:, :, change:])


MAPS = {"favor": lambda: FAVOR(D, 20), "gaussian": lambda: FAVOR(D, 20, similarity="gaussian"), "dpfp": lambda: DPFP(2)}
OPTIONS = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "mask": {"key_mask": torch.arange(150).expand(B, -1) % 4 > 0},
    "causal-mask": {"is_causal": True, "key_mask": torch.arange(150).expand(B, -1) > torch.tensor([[3], [70]])},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("feature_map", MAPS.values(), ids=MAPS)
def test_chunked_equals_eager(feature_map, options):
    feature_map, tensors = feature_map(), [x.requires_grad_() for x in inputs(150)]
    query, keys, value, prior = tensors
    outs = [
        mgk.mlk_attention(query, keys, value, log_prior=prior, feature_map=feature_map, backend=backend, **options)
        for backend in BACKENDS
    ]
    close(*outs)
    upstream = randn(*outs[0].shape)
    close(*(torch.autograd.grad((out * upstream).sum(), tensors) for out in outs))


@pytest.mark.parametrize("large", [slice(0, 30), slice(31, 80)], ids=["first", "last"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature_map", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_are_independent(backend, feature_map, causal, large):
    """Check sequences whose features differ by many orders of magnitude."""
    query, keys, value, prior = (x.float() for x in inputs(80, batch=1))
    keys[..., large, :] *= 40
    feature_map, cu = feature_map(), torch.tensor([0, 30, 31, 80], dtype=torch.int32)
    options = {"feature_map": feature_map, "is_causal": causal, "backend": backend}
    out = mgk.mlk_attention(query, keys, value, log_prior=prior, cu_seqlens=cu, **options)
    for start, stop in ((0, 30), (30, 31), (31, 80)):
        i = slice(start, stop)
        expected = mgk.mlk_attention(
            query[:, :, i], keys[..., i, :], value[:, :, i], log_prior=prior[..., i], **options
        )
        close(out[:, :, i], expected, 2e-5)


@pytest.mark.parametrize("feature_map", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_state_with_growing_and_shrinking_keys(backend, feature_map):
    """Check that the state is rescaled for larger keys."""
    query, keys, value, prior = inputs(150)
    keys = keys * torch.tensor([1.0, 12.0, 0.1], dtype=F64).repeat_interleave(50)[:, None]
    feature_map = feature_map()
    options = {"feature_map": feature_map, "is_causal": True, "backend": backend, "return_state": True}
    expected, end = mgk.mlk_attention(query, keys, value, log_prior=prior, **options)
    outs, state, start = [], None, 0
    for n in (40, 1, 30, 79):
        i = slice(start, start + n)
        out, state = mgk.mlk_attention(
            query[:, :, i], keys[..., i, :], value[:, :, i], log_prior=prior[..., i], initial_state=state, **options
        )
        outs.append(out)
        start += n
    close(torch.cat(outs, 2), expected)
    close(state, end)


@pytest.mark.parametrize("nu", [1, 2, 3])
def test_dpfp(nu):
    x = randn(3, D)
    rectified = [*x.relu().unbind(-1), *(-x).relu().unbind(-1)]
    expected = [rectified[i] * rectified[(i - shift) % (2 * D)] for shift in range(1, nu + 1) for i in range(2 * D)]
    actual = DPFP(nu)(x)
    assert actual.shape == (3, 2 * D * nu)
    close(actual, torch.stack(expected, -1))
    assert (actual >= 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_dpfp_mixes_after_the_map(backend):
    query, keys, value, prior = inputs()
    expected, _ = oracle.linear(query, keys, value, log_prior=prior, feature_map=DPFP(2))
    close(mgk.mlk_attention(query, keys, value, log_prior=prior, feature_map=DPFP(2), backend=backend), expected)


def test_callable_as_feature_map():
    query, keys, value, prior = inputs()
    expected, _ = oracle.linear(query, keys, value, log_prior=prior, feature_map=torch.exp)
    close(mgk.mlk_attention(query, keys, value, log_prior=prior, feature_map=torch.exp), expected)
    for wrong in (lambda x: x.sum(-1), lambda x: x[:, :1]):
        with pytest.raises(ValueError, match="feature_map"):
            mgk.mlk_attention(query, keys, value, feature_map=wrong)
    with pytest.raises(ValueError, match="nu must be a positive integer"):
        DPFP(0)


@pytest.mark.parametrize("feature_map", ["elu", mgk.FAVOR(4)], ids=["elu", "favor"])
def test_long_causal_call_in_blocks(monkeypatch, feature_map):
    torch.manual_seed(0)
    query, keys, value = torch.randn(1, 4, 100, 4), torch.randn(1, 2, 3, 100, 4), torch.randn(1, 2, 100, 5)
    options = {
        "log_prior": torch.randn(2, 3, 100).log_softmax(1),
        "key_mask": torch.rand(1, 100) > 0.2,
        "is_causal": True,
        "feature_map": feature_map,
        "return_state": True,
        "backend": "chunked",
    }

    def run():
        tensors = [x.clone().requires_grad_() for x in (query, keys, value)]
        output, state = mgk.mlk_attention(*tensors, **options)
        return [output, *state, *torch.autograd.grad(output.square().sum(), tensors)]

    whole = run()
    monkeypatch.setattr("mgk.backends.chunked.BLOCK", 33)
    for actual, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: FAVOR(0), "head_dim"),
        (lambda: FAVOR(4, -1), "num_features"),
        (lambda: FAVOR(4, 2.5), "num_features"),
        (lambda: FAVOR(4, scale=-1.0), "scale"),
        (lambda: FAVOR(4, similarity="cosine"), "similarity"),
        (lambda: DPFP(1.5), "nu"),
        (lambda: Rotary("8"), "head_dim"),
        (lambda: Rotary(8, base=0.0), "base"),
        (lambda: Rotary(8)(randn(1, 1, 3, 4), torch.arange(3)), "x"),
    ],
)
def test_errors_name_the_argument(make, name):
    with pytest.raises(ValueError, match=rf"^{name} "):
        make()


def test_rotary_precision():
    x, positions = randn(1, 1, 2, 6), torch.tensor([30_000, 7])
    angles = positions[:, None].double() * 10_000.0 ** (-torch.arange(3, dtype=F64) / 3)
    first, second = x.split(3, -1)
    expected = torch.cat(
        [first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1
    )
    torch.testing.assert_close(Rotary(6)(x, positions), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["eager", "chunked"])
@pytest.mark.parametrize("feature_map", [mgk.FAVOR(5), mgk.FAVOR(5, similarity="gaussian"), mgk.DPFP(), "elu"], ids=str)
def test_empty_sequence(feature_map, backend, causal):
    """A call without positions returns the state that it received, and gradients of no elements."""
    query, keys, value = (torch.zeros(size).requires_grad_() for size in ((2, 4, 0, 5), (2, 2, 3, 0, 5), (2, 2, 0, 6)))
    options = {"feature_map": feature_map, "is_causal": causal, "backend": backend}
    former = mgk.mlk_attention(
        torch.randn(2, 4, 7, 5), torch.randn(2, 2, 3, 7, 5), torch.randn(2, 2, 7, 6), return_state=True, **options
    )[1]
    for state in (None, former):
        out, new = mgk.mlk_attention(query, keys, value, initial_state=state, return_state=True, **options)
        assert out.shape == (2, 4, 0, 6)
        torch.autograd.grad(out.sum(), (query, keys, value))
    torch.testing.assert_close(new, former)
    packed = {"cu_seqlens": torch.zeros(3, dtype=torch.int32)}
    assert mgk.mlk_attention(query[:1], keys[:1], value[:1], **options, **packed).shape == (1, 4, 0, 6)
