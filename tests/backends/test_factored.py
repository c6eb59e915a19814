"""The factored CPU backend: blocks, sums of components that underflow, masks of keys, and what it does not support."""

import math

import pytest
import torch

import mgk
from mgk._core.calls import mixture_call
from mgk.backends import cpu_factored
from tests.support.padding_cases import SIMILARITIES, check_unchanged

B, H, HK, M, L, S, D, E = 2, 4, 2, 3, 21, 17, 5, 4


def draw(queries=L, keys=S):
    """Return query, key, value, shift and log prior as float64 leaves."""
    sizes = (B, H, queries, D), (B, HK, keys, D), (B, HK, keys, E), (HK, M, D), (HK, M, 1)
    return [torch.randn(*size, dtype=torch.float64).requires_grad_() for size in sizes]


def results(backend, inputs, **options):
    """Return output, lse and all gradients of a call with a gradient of each result."""
    query, key, value, shift, prior = inputs
    out, lse = mgk.smgk_attention(
        query, key, value, shift, log_prior=prior, backend=backend, return_lse=True, **options
    )
    lse_or_zero = lse.masked_fill(lse == -math.inf, 0)
    loss = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() + (lse_or_zero * lse.detach().sin()).nansum()
    return out, lse, *torch.autograd.grad(loss, inputs)


def check_equals_eager(inputs, **options):
    actual, expected = (results(backend, inputs, **options) for backend in ("factored", "eager"))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True, "bottom-right"])
@pytest.mark.parametrize(
    ("tile", "rows"), [(1, 1), (2 * S, 2), (3 * 4 * S, 4), (cpu_factored.TILE, cpu_factored.MIN_ROWS)], ids=str
)
def test_blocks_of_rows_and_heads(tile, rows, causal, monkeypatch):
    """One row at a time, rows of one head, and rows of several heads."""
    monkeypatch.setattr(cpu_factored, "TILE", tile)
    monkeypatch.setattr(cpu_factored, "MIN_ROWS", rows)
    check_equals_eager(draw(), is_causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_sums_that_underflow_use_every_component(causal, monkeypatch):
    """Queries that prefer another component than the keys, in some blocks and not in others."""
    monkeypatch.setattr(cpu_factored, "MIN_ROWS", 3)
    monkeypatch.setattr(cpu_factored, "TILE", 3 * S)
    query, key, value, shift, prior = inputs = draw()
    with torch.no_grad():
        # The first shift suits the queries from 9 on; the prior of the keys is that of the other components.
        shift[:, 0, 0], shift[:, 1, 0] = 40, -40
        query[:, :, 9:, 0] = 40
        prior[:, 0] = -700
    *_, sums = record_forward(query, key, value, shift, prior, monkeypatch, causal)
    assert (sums[:, :, :9] > 0).all()
    assert (sums[:, :, 9:] < 0).any()
    check_equals_eager(inputs, is_causal=causal)


def record_forward(query, key, value, shift, prior, monkeypatch, causal):
    """Return the results of the forward operator in a call."""
    recorded = []

    def record(*args):
        recorded.append(forward(*args))
        return recorded[-1]

    forward = cpu_factored.factored_forward
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(cpu_factored, "factored_forward", record)
        mgk.smgk_attention(query, key, value, shift, log_prior=prior, is_causal=causal, backend="factored")
    return recorded[0]


def test_weights_do_not_have_the_rounding_error_of_a_large_lse():
    """One key has weight 1, and its value the gradient of the output, where components underflow."""
    query, key, value, _, _ = (x.detach().float() for x in draw(1, 1))
    # Query and key lie far out between the two centres, of which the query and the key prefer opposite ones.
    query[..., 0] = key[..., 0] = 1000
    shift = torch.zeros(HK, 2, D)
    shift[:, 0, 0], shift[:, 1, 0] = 0.3, -0.3
    value.requires_grad_()
    out = mgk.smgk_attention(query, key, value, shift, backend="factored")
    gradient = torch.randn(out.shape)
    (actual,) = torch.autograd.grad(out, value, gradient)
    torch.testing.assert_close(actual, gradient.unflatten(1, (HK, -1)).sum(2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True, "bottom-right"])
def test_masked_keys_and_rows_without_keys(causal):
    mask = torch.rand(B, 1, 1, S) < 0.6
    mask[1] = False
    inputs = draw()
    out, lse, *gradients = results("factored", inputs, attn_mask=mask, is_causal=causal)
    assert not out[1].any()
    assert (lse[1] == -math.inf).all()
    assert not any(gradient[1].any() for gradient in gradients[:3])
    check_equals_eager(inputs, attn_mask=mask, is_causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_autocast_changes_no_product(causal):
    """The operators compute in fp32 also where their backward pass runs in a region of autocast."""
    inputs = [x.detach().float().requires_grad_() for x in draw()]
    query, key, value, shift, prior = inputs

    def gradients():
        out = mgk.smgk_attention(query, key, value, shift, log_prior=prior, is_causal=causal, backend="factored")
        return torch.autograd.grad(out.square().sum(), inputs)

    expected = gradients()
    with torch.autocast("cpu", torch.bfloat16):
        actual = gradients()
    # The inputs are rounded to bf16.
    torch.testing.assert_close(actual, expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("removed", ["a component", "a key", "all keys"])
def test_zero_priors(removed):
    inputs = draw()
    prior = torch.randn(HK, M, S, dtype=torch.float64)
    prior[{"a component": (slice(None), 1), "a key": (..., 4), "all keys": ...}[removed]] = -math.inf
    inputs[4] = prior.requires_grad_()
    check_equals_eager(inputs)


@pytest.mark.parametrize("similarity", SIMILARITIES, ids=str)
@pytest.mark.parametrize("mask", ["key", "causal"])
def test_large_padding_changes_nothing(mask, similarity):
    sizes = (1e20, 1e30) if mask == "causal" else (3e38, 3e38)
    for size, value_size, dtype in ((*sizes, torch.float32), (3e4, 3e4, torch.float16)):
        check_unchanged(
            "smgk", size, value_size=value_size, dtype=dtype, mask=mask, similarity=similarity, scales="equal",
            backend="factored",
        )  # fmt: skip


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(queries, keys):
    check_equals_eager(draw(queries, keys))


def make_call(**options):
    query, key, value, shift, prior = (x.detach().float() for x in draw())
    options = {"shift": shift, "shifted": True, "log_prior": prior} | options
    return mixture_call(query, key, value, **options)


UNSUPPORTED = {
    "hard assignment": {"assignment": "hard"},
    "attention weights": {"return_weights": True},
    "dropout": {"dropout_p": 0.1},
    "different scales": {"scale": torch.rand(HK, M)},
    "boolean masks of keys": {"attn_mask": torch.ones(B, 1, L, S, dtype=torch.bool)},
    r"boolean masks of keys, \[B": {"attn_mask": torch.zeros(B, 1, 1, S)},
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_unsupported_calls(reason):
    with pytest.raises(ValueError, match=f"'factored' does not support this call: .*{reason}"):
        mgk.backends.select_backend(make_call(**UNSUPPORTED[reason]), "factored")


def test_auto_selects_it_for_several_components_with_shifts():
    def selected(components, **options):
        query, key, value, shift, _ = (x.detach().float() for x in draw())
        return mgk.explain_backend("smgk_attention", query, key, value, shift[:, :components], **options)

    assert selected(M).backend == "factored"
    assert selected(M, is_causal=True).backend == "factored"
    single = selected(1)
    assert single.backend == "sdpa"
    assert "one component" in single.reasons["factored"]
    assert selected(M, attn_mask=torch.ones(L, S, dtype=torch.bool)).backend == "sdpa"
