"""The fused kernels against the oracle by the 2x rule: under Triton's interpreter (fp32, fp16) without a GPU, on one in bf16, fp16 and fp32."""

import os

import pytest
import torch

import oracle

GPU = torch.cuda.is_available()
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from mgk.arguments import MixtureCall, Packed  # noqa: E402
from mgk.kernels import fused, triton_launch  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if GPU else [])
pytestmark = [pytest.mark.gpu] if GPU else []


@pytest.fixture(autouse=True)
def small_blocks(request, monkeypatch):
    """Several tiles in each direction at the lengths of the tests; `real_blocks` keeps the sizes that users get."""
    if "real_blocks" not in request.keywords and not GPU:
        monkeypatch.setattr(triton_launch, "blocks", lambda kind, *_: (16, 32, 4, 1, None, 1) if kind != "keys" else (32, 16, 4, 1, None, 0))


def case(variant="smgk", B=1, H=2, Hk=2, M=2, L=37, S=37, D=16, E=16, std=1.0, prior=True, seed=0, **options):
    """float64 leaves of a call, as a dict by argument name, and the options that are not tensors."""
    g = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    leaves = {"query": std * randn(B, H, L, D), "value": randn(B, Hk, S, E)}
    leaves["keys"] = std * (randn(B, Hk, S, D) if variant == "smgk" else randn(B, Hk, M, S, D))
    if variant == "smgk":
        leaves["shift"] = 0.7 * randn(Hk, M, D)
    if prior:
        leaves["log_prior"] = torch.log_softmax(randn(*(prior if isinstance(prior, tuple) else (1, Hk, M, 1))), 2)
    for name, shape in (("scale", options.pop("scale_shape", None)), ("tau", options.pop("tau_shape", None))):
        if shape:
            leaves[name] = 0.2 + torch.rand(*shape, generator=g, dtype=torch.float64)
    mask = options.pop("mask_shape", None)
    if mask and options.pop("bool_mask", False):
        options["attn_mask"] = torch.rand(*mask, generator=g) > 0.3
    elif mask:
        leaves["attn_mask"] = randn(*mask)
    return leaves, options


def truth(leaves, dtype, causal=None, hard=False, attn_mask=None, **_):
    x = {name: t.to(dtype) for name, t in leaves.items()}
    keys = x["keys"]
    if "shift" in x:
        keys = keys.unsqueeze(2) + x["shift"].unsqueeze(-2)
    tau = x.get("tau", 1.0)
    mask = x.get("attn_mask", attn_mask)
    out, _, lse = oracle.mixture(
        x["query"], keys, x["value"], log_prior=x.get("log_prior"), scale=x.get("scale"), tau=tau, mask=mask, causal=causal, hard=hard
    )
    return out, lse


def make_call(x, causal=None, hard=False, attn_mask=None, dropout_p=0.0, packed=None, return_lse=True):
    attn_mask = x.get("attn_mask", attn_mask)
    return MixtureCall(
        query=x["query"], keys=x["keys"], value=x["value"], shift=x.get("shift"), attn_mask=attn_mask if attn_mask is None else attn_mask.to(DEVICE),
        causal=causal, dropout_p=dropout_p, scale=x.get("scale", x["query"].shape[-1] ** -0.5), log_prior=x.get("log_prior"), tau=x.get("tau", 1.0),
        hard=hard, packed=packed, return_weights=False, return_lse=return_lse,
    )  # fmt: skip


def gradients(function, leaves, weights):
    """Output, lse and the gradient of every leaf for a loss that uses both."""
    x = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
    out, lse = function(x)
    finite = torch.isfinite(lse)
    loss = (out * weights[0].to(out)).sum() + (torch.where(finite, lse, 0) * weights[1].to(lse)).sum()
    grads = torch.autograd.grad(loss, list(x.values()), allow_unused=True)
    return {"out": out.detach(), "lse": lse.detach(), **{name: g for name, g in zip(x, grads, strict=True)}}


def check(leaves, options, dtype, lse_weight=0.3):
    """The 2x rule for the output, lse and each gradient: error at most twice the oracle's own in that dtype, plus one rounding."""
    rounded = {name: t.to(dtype).double() for name, t in leaves.items()}
    out, lse = truth(rounded, torch.float64, **options)
    g = torch.Generator().manual_seed(1)
    weights = torch.randn(out.shape, generator=g).to(dtype), lse_weight * torch.randn(lse.shape, generator=g).to(dtype)
    exact = gradients(lambda x: truth(x, torch.float64, **options), rounded, weights)
    yardstick = gradients(lambda x: truth(x, dtype, **options), {n: t.to(dtype) for n, t in rounded.items()}, weights)

    def ours(x):
        call = make_call(x, **options)
        assert fused.refuses(call) is None
        return fused.run(call)[:2]

    got = gradients(ours, {n: t.to(DEVICE, dtype) for n, t in rounded.items()}, weights)
    for name, want in exact.items():
        if want is None:
            assert got[name] is None or not got[name].any(), name
            continue
        finite = torch.isfinite(want)
        actual = got[name].cpu().double()
        assert torch.equal(torch.isfinite(actual), finite), f"{name}: not finite"
        error = (actual - want)[finite].abs().max() if finite.any() else 0.0
        allowed = 2 * (yardstick[name].double() - want)[finite].abs().max() + torch.finfo(dtype).eps * want[finite].abs().max() if finite.any() else 0.0
        assert error <= allowed, f"{name}: error {error:.3e} > {allowed:.3e}"


CASES = {
    "smgk": dict(),
    "smgk-causal-gqa": dict(H=4, Hk=2, causal="top-left", D=24, E=20, B=2),
    "smgk-cross": dict(L=21, S=67, prior=(2, 1, 2, 67), B=2),
    "smgk-bottom-right": dict(L=21, S=50, causal="bottom-right"),
    "smgk-empty-rows": dict(L=50, S=21, causal="bottom-right"),
    "smgk-m1": dict(M=1),
    "smgk-m4-tau-scale": dict(M=4, tau_shape=(2,), scale_shape=(1, 2, 1, 1)),
    "smgk-unequal": dict(M=3, tau_shape=(2,), scale_shape=(1, 2, 3, 1), causal="top-left"),
    "smgk-hard": dict(hard=True, prior=False, causal="top-left"),
    "smgk-hard-m3-unequal": dict(hard=True, prior=False, M=3, scale_shape=(1, 1, 3, 1)),
    "smgk-key-padding": dict(B=2, mask_shape=(2, 1, 1, 37), bool_mask=True),
    "smgk-key-bias": dict(B=2, mask_shape=(2, 1, 1, 37)),
    "smgk-bool": dict(B=2, H=4, mask_shape=(1, 4, 37, 37), bool_mask=True, causal="top-left"),
    "smgk-bias": dict(B=2, H=4, mask_shape=(1, 4, 37, 37), causal="top-left"),
    "smgk-large": dict(std=8.0),
    "mgk": dict(variant="mgk"),
    "mgk-causal-gqa": dict(variant="mgk", H=4, Hk=2, causal="top-left", D=24, E=20, L=40, S=50),
    "mgk-m3-unequal-tau": dict(variant="mgk", M=3, tau_shape=(2,), scale_shape=(1, 2, 3, 1)),
    "mgk-scale-tau": dict(variant="mgk", tau_shape=(2,), scale_shape=(1, 1, 1, 1), prior=(1, 2, 2, 37)),
    "mgk-hard": dict(variant="mgk", hard=True, prior=False),
    "mgk-hard-bias": dict(variant="mgk", hard=True, prior=False, mask_shape=(1, 1, 37, 37), causal="top-left"),
    "mgk-bool-padding": dict(variant="mgk", B=2, mask_shape=(2, 1, 1, 37), bool_mask=True, std=6.0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_two_times_rule(name, dtype, poisoned):
    leaves, options = case(**CASES[name])
    check(leaves, options, dtype)
