"""The mixture kernels as torch operators: registration, torch.compile, FLOP counts and backend selection."""

import contextlib
import warnings

import pytest
import torch
import torch._dynamo.testing
from torch.autograd import forward_ad

pytest.importorskip("triton")

import mgk
from mgk.backends import triton
from mgk.kernels.mixture import ops
from tests.kernels.mixture.test_kernels import DEVICE, GPU, case, make_call, small_blocks  # noqa: F401  (for every test)

pytestmark = [pytest.mark.gpu] if GPU else []


@contextlib.contextmanager
def synchronization_raises():
    """Raise on host synchronization. Setting the mode for the first time warns that it is a prototype."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("variant", ["smgk", "mgk"])
def test_host_is_not_synchronized(variant, hard):
    """Neither training with all parameters learned nor decoding synchronizes the host."""
    leaves, _ = case(variant, prior=not hard, tau_shape=(1,), scale_shape=(1, 1, 1, 1))
    x = {name: t.to(DEVICE, torch.bfloat16).requires_grad_() for name, t in leaves.items()}
    weights = torch.ones(1, 1, 37, 16, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    with synchronization_raises():
        out = triton.run_mixture(make_call(x, causal="top-left", hard=hard, dropout_p=0.1))[0]
        torch.autograd.grad(out, list(x.values()), weights)
        with torch.no_grad():
            triton.run_mixture(make_call({**x, "query": x["query"][:, :, :1]}, hard=hard))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "operator"])
@pytest.mark.parametrize("variant", ["smgk", "mgk"])
def test_outputs_have_the_layout_of_projections(variant, compiled, monkeypatch):
    """Positions come before heads in the output and in gradients, so that a layer copies neither."""
    monkeypatch.setattr("mgk.kernels.autograd.needs_dispatcher", lambda: compiled)
    leaves, _ = case(variant, B=2, H=4, Hk=2)
    x = {name: t.to(DEVICE, torch.float32).requires_grad_() for name, t in leaves.items()}
    out = triton.run_mixture(make_call(x))[0]
    large = [name for name in x if name in ("query", "keys", "value")]
    gradients = dict(zip(x, torch.autograd.grad(out.sum(), list(x.values())), strict=True))
    results = [out, *(gradients.pop(name) for name in large)]
    assert all(t.movedim(-2, 1).is_contiguous() and not t.is_contiguous() for t in results)
    # Gradients of parameters have their layout, as fused optimizers require.
    assert all(gradient.stride() == x[name].stride() for name, gradient in gradients.items())
    # Users may change a result in place, also without gradients.
    with torch.no_grad():
        out = triton.run_mixture(make_call(x))[0]
    out += x["value"][:, :, :1].mean()


PADDING = torch.arange(20).view(1, 1, 1, 20) < 17
STARTS = torch.tensor([0, 7, 20], dtype=torch.int32)
SUPPORTED = {
    "nothing": {},
    "causal": {"is_causal": True},
    "bottom-right": {"is_causal": "bottom-right", "L": 5},
    "padding": {"attn_mask": PADDING},
    "mask": {"attn_mask": PADDING.expand(1, 2, 20, 20).contiguous()},
    "bias": {"attn_mask": torch.zeros(1, 2, 20, 20, requires_grad=True)},
    "packed": {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 13, "max_seqlen_k": 13},
    "grouped": {"Hk": 1},
    "cross": {"L": 7},
    "one-query": {"L": 1},
    "wide": {"D": 256},
    "odd-width": {"D": 23},
    "many-components": {"M": 8},
    "dropout": {"dropout_p": 0.1},
    "hard": {"assignment": "hard"},
    "dot": {"similarity": "dot", "M": 3},
    "between": {"similarity": 0.5},
    "scale": {"scale": torch.ones(1, 1, 1, 1)},
    "scales": {"scale": torch.ones(1, 2, 2, 1)},
    "prior": {"log_prior": torch.zeros(1, 2, 2, 1)},
    "prior-per-position": {"log_prior": torch.zeros(1, 1, 2, 20)},
    "lse": {"return_lse": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SUPPORTED)
def test_auto_selects_the_kernels(name, dtype):
    """Unsupported calls are in test_unsupported_calls_report_the_reason."""
    options = {key: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for key, x in SUPPORTED[name].items()}
    sizes = {"L": 20, "Hk": 2, "D": 16, "M": 2}
    sizes |= {key: options.pop(key) for key in sizes if key in options}
    L, Hk, D, M = sizes.values()

    def randn(*shape):
        return torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True)

    query, key, value = randn(1, 2, L, D), randn(1, Hk, 20, D), randn(1, Hk, 20, 16)
    chosen = mgk.explain_backend("smgk_attention", query, key, value, randn(Hk, M, D), **options)
    assert chosen.backend == "triton", chosen
    chosen = mgk.explain_backend("mgk_attention", query, randn(1, Hk, M, 20, D), value, **options)
    assert chosen.backend == "triton", chosen


@pytest.mark.parametrize("as_operator", [False, True], ids=["direct", "operator"])
@pytest.mark.parametrize("linear", [False, True], ids=["smgk", "smlk"])
def test_second_derivatives_raise(linear, as_operator, monkeypatch):
    """They are not silently 0, even if the gradient of the output is a constant."""
    monkeypatch.setattr("mgk.kernels.autograd.needs_dispatcher", lambda: as_operator)
    query, key, value = (torch.randn(1, 1, 20, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    attend = mgk.smlk_attention if linear else mgk.smgk_attention
    out = attend(query, key, value, torch.randn(1, 2, 16, device=DEVICE), is_causal=True, backend="triton")
    (gradient,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="use backend='eager'"):
        (out.sum() + gradient.square().sum()).backward()


FORWARD_MODE_WARNS = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


@FORWARD_MODE_WARNS
def test_unsupported_calls_report_the_reason():
    unsupported_reason = triton.mixture_unsupported_reason
    leaves, _ = case()
    x = {name: t.to(DEVICE) for name, t in leaves.items()}
    assert "float64" in unsupported_reason(make_call(x))
    wide = {**x, "query": torch.zeros(1, 1, 4, 300), "keys": torch.zeros(1, 1, 4, 300)}
    assert "256" in unsupported_reason(make_call({name: t.float().to(DEVICE) for name, t in wide.items()}))
    positional = {**x, "scale": torch.ones(1, 1, 2, 37)}
    assert "per position" in unsupported_reason(
        make_call({name: t.float().to(DEVICE) for name, t in positional.items()})
    )
    x = {name: t.float() for name, t in x.items()}
    scales, mask = {**x, "scale": torch.ones(1, 1, 2, 1, device=DEVICE)}, torch.zeros(1, 1, 37, 37, device=DEVICE)
    assert "scale per component" in unsupported_reason(make_call({**scales, "attn_mask": mask}))
    for allowed in (
        {**scales, "attn_mask": mask > 0},
        {**scales, "attn_mask": mask[:, :, :1]},
        {**x, "attn_mask": mask},
    ):
        assert unsupported_reason(make_call(allowed)) is None
    assert "value dimension of 0" in unsupported_reason(make_call({**x, "value": x["value"][..., :0]}))
    with forward_ad.dual_level():
        assert unsupported_reason(make_call(x)) is None
        moving = forward_ad.make_dual(x["query"], torch.ones_like(x["query"]))
        assert "forward-mode" in unsupported_reason(make_call({**x, "query": moving}))


@FORWARD_MODE_WARNS
def test_forward_mode_uses_another_backend():
    leaves, _ = case("mgk", prior=False)
    query, keys, value = (leaves[name].to(DEVICE, torch.float32) for name in ("query", "keys", "value"))
    tangents = []
    for backend in ("eager", "auto"):
        with forward_ad.dual_level():
            out = mgk.mgk_attention(forward_ad.make_dual(query, torch.ones_like(query)), keys, value, backend=backend)
            tangents.append(forward_ad.unpack_dual(out).tangent)
    torch.testing.assert_close(tangents[1], tangents[0])


def operator_arguments(dtype=torch.float32, requires_grad=True, length=33):
    leaves, _ = case(L=length, S=length)
    x = {name: t.to(DEVICE, dtype).requires_grad_(requires_grad) for name, t in leaves.items()}
    tensors = (x["query"], x["keys"], x["value"], x["shift"], x["log_prior"])
    return (*tensors, *(None,) * 6, 0.25, 1.0, 0.0, 0.0, 1, False, length, length)


def test_operator_is_registered():
    torch.library.opcheck(
        ops.forward_op,
        operator_arguments(),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_compiles_once_for_all_lengths():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def attend(x):
        return triton.run_mixture(make_call(x, causal="top-left", return_lse=False))[0].sum()

    for length in range(34, 54 if GPU else 39):
        leaves, _ = case(L=length, S=length)
        x = {name: t.to(DEVICE, torch.float32).requires_grad_() for name, t in leaves.items()}
        want = triton.run_mixture(make_call(x, causal="top-left"))[0].sum()
        got = attend(x)
        torch.testing.assert_close(got, want)
        torch.autograd.grad(got, list(x.values()))
    assert counter.frame_count <= 2


def test_flops_are_counted():
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        leaves, _ = case(L=8, S=32)
        triton.run_mixture(make_call({name: t.to(DEVICE, torch.float32) for name, t in leaves.items()}))
    assert counter.get_total_flops() == 2 * 8 * 32 * (16 + 16)


def test_softmax_uses_the_kernels_only_with_padding():
    x = torch.randn(2, 3, 9, 8, device=DEVICE)
    plain = {"query": x, "keys": x[:, :, None], "value": x, "similarity": "dot"}
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool, device=DEVICE)
    mask[1, ..., 5:] = False
    assert mgk.explain_backend("mgk_attention", **plain).backend == "plain"
    assert mgk.explain_backend("mgk_attention", **plain, attn_mask=mask).backend == "triton"
    # A mask of pairs is read pair by pair by both.
    assert mgk.explain_backend("mgk_attention", **plain, attn_mask=mask.expand(2, 1, 9, 9)).backend == "plain"
    by_name = mgk.mgk_attention(**plain, attn_mask=mask, backend="plain")
    torch.testing.assert_close(mgk.mgk_attention(**plain, attn_mask=mask), by_name, atol=1e-5, rtol=1e-5)


def test_softmax_decoding_uses_the_kernels(monkeypatch):
    """cuDNN plans again for every number of keys; calls that cuDNN does not support stay with torch."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))

    def chosen(dtype=torch.bfloat16, rows=1, keys=9, heads=3, **more):
        q, k = torch.randn(2, 3, rows, 8), torch.randn(2, heads, keys, 8)
        inputs = {"query": q, "keys": k[:, :, None], "value": k, "similarity": "dot", **more}
        inputs = {name: t.to(DEVICE, dtype) if isinstance(t, torch.Tensor) else t for name, t in inputs.items()}
        return mgk.explain_backend("mgk_attention", **inputs).backend

    assert chosen() == "triton"
    assert {chosen(torch.float32), chosen(rows=2), chosen(keys=1), chosen(heads=1)} == {"plain"}
    with torch.enable_grad():
        assert chosen(query=torch.randn(2, 3, 1, 8, requires_grad=True)) == "plain"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_batched_gradients_are_refused(dtype):
    """fp16 calls have a plan, fp32 calls none."""
    x = [torch.randn(1, 2, 20, 16, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3)]
    out = mgk.smgk_attention(*x, torch.randn(2, 2, 16, device=DEVICE), backend="triton")
    with pytest.raises(RuntimeError, match=r"does not support batched gradients .* use backend='eager'"):
        torch.autograd.grad(out, x, torch.ones(3, *out.shape, device=DEVICE, dtype=dtype), is_grads_batched=True)
