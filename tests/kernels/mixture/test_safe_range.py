"""Exponents near the limits of the fast form, causal bounds of decoding, and τ of grouped heads."""

import pytest
import torch

pytest.importorskip("triton")

import mgk
from mgk.kernels.mixture import launch
from tests.kernels.mixture.test_kernels import DEVICE, GPU, small_blocks  # noqa: F401

pytestmark = [pytest.mark.gpu] if GPU else []


def inputs(op, exponent, sign):
    """Return inputs whose scores are about sign · exponent (base 2), for a scale of 1 and similarity "dot"."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    size = (exponent * 0.6931) ** 0.5
    query, keys, value, shift = 0.01 * randn(1, 1, 20, 4), 0.01 * randn(1, 1, 2, 20, 4), randn(1, 1, 20, 4), None
    query[..., 0], keys[..., 0] = size, sign * size
    keys[:, :, 1, :, 0] *= 0.98  # the assignment of a key is not near a tie
    if op == "smgk":
        keys, shift = keys[:, :, 0].clone(), 0.1 * randn(1, 2, 4)
    return [None if x is None else x.to(DEVICE).requires_grad_() for x in (query, keys, value, shift)]


def run(op, tensors, assignment, backend):
    leaves = [x for x in tensors if x is not None]
    out = getattr(mgk, f"{op}_attention")(*leaves, scale=1.0, similarity="dot", assignment=assignment, backend=backend)
    weights = torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out)
    return out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)


@pytest.mark.parametrize("exponent, sign", [(75, -1), (140, 1)], ids=["bound", "overflow"])
@pytest.mark.parametrize("op, assignment", [("smgk", "soft"), ("smgk", "hard"), ("mgk", "soft"), ("mgk", "hard")])
def test_tiles_outside_the_safe_range_use_the_fallback(op, assignment, exponent, sign, monkeypatch):
    """Outside of it, weights underflow relative to the bound of a row, or powers of two overflow."""
    monkeypatch.setattr(launch, "BOUNDED", (torch.float32,))
    tensors = inputs(op, exponent, sign)
    for x, y in zip(run(op, tensors, assignment, "triton"), run(op, tensors, assignment, "eager"), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("causal", [True, "bottom-right"])
def test_decoding_attends_up_to_the_causal_bound(causal, queries):
    query, key, value = (torch.randn(1, 2, n, 4, device=DEVICE) for n in (queries, 40, 40))
    shift = torch.randn(2, 2, 4, device=DEVICE)
    with torch.no_grad():
        out = mgk.smgk_attention(query, key, value, shift, is_causal=causal, backend="triton")
    expected = mgk.smgk_attention(query, key, value, shift, is_causal=causal, backend="eager")
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("scales", ["equal", "unequal"])
def test_lse_of_grouped_heads_has_the_tau_of_their_key_head(scales, with_gradients):
    query, key, value = (torch.randn(1, n, 9, 4, device=DEVICE) for n in (4, 2, 2))
    options = {
        "shift": torch.randn(2, 2, 4, device=DEVICE), "similarity": torch.tensor([0.3, 0.9], device=DEVICE),
        "scale": torch.tensor([[0.5], [1.5]] if scales == "equal" else [[0.5, 0.8], [1.5, 1.1]], device=DEVICE),
        "return_lse": True,
    }  # fmt: skip
    query.requires_grad_(with_gradients)
    _, lse = mgk.smgk_attention(query, key, value, **options, backend="triton")
    torch.testing.assert_close(lse, mgk.smgk_attention(query, key, value, **options, backend="eager")[1])
