"""The linear kernels against the oracle by the 2x rule.

Without a GPU under Triton's interpreter (fp32, fp16), on a GPU in bf16, fp16 and fp32.
"""

import pytest
import torch
import torch._dynamo.testing

import mgk
from mgk._core.calls import linear_call
from mgk.backends import eager, triton
from tests.support import operator_cases
from tests.support.operator_cases import Shape

pytest.importorskip("triton")

from mgk.kernels.linear import ops as ops

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if GPU else [])
pytestmark = [pytest.mark.gpu] if GPU else []


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Use several chunks and tiles at the lengths of the tests; on a GPU the block sizes that users get."""
    if not GPU:
        monkeypatch.setattr(ops, "select_block", lambda *_: ops.BlockConfig(32, 16, 4, 1))
        monkeypatch.setattr(ops, "FULL_CHUNK", 32)


@pytest.fixture
def on_this_device(monkeypatch):
    """Run the table of operators on this device; it makes its inputs and compares on the CPU."""

    def run_there(backend, op, shape, inputs, constants, options, run=operator_cases.run_package):
        moved = [{name: x.to(DEVICE) for name, x in group.items()} for group in (inputs, constants)]
        return run(backend, op, shape, *moved, options)[0].cpu(), None

    monkeypatch.setattr(operator_cases, "run_package", run_there)


SHAPES = {name: shape for name, shape in operator_cases.LINEAR_SHAPES.items() if shape.causal or not shape.packed} | {
    "slots": Shape(B=1, H=2, Hk=1, L=75, S=75, D=24, E=20, causal="top-left", prior="position"),
    "slots-mask": Shape(B=2, H=1, Hk=1, L=70, S=70, M=3, D=16, E=16, mask="key", causal="top-left", prior=None),
    "full-slots": Shape(B=2, H=4, Hk=2, L=40, S=75, D=24, E=20, mask="key", prior="position"),
    "slots-packed": Shape(
        B=1, H=2, Hk=1, L=90, S=90, D=16, E=16, packed=((33, 0, 1, 56),) * 2, causal="top-left", prior="position"
    ),
}
LONG = {
    "full": Shape(B=2, H=2, Hk=1, L=700, S=1300, D=64, E=64),
    "full-narrow": Shape(B=2, H=2, Hk=2, L=1100, S=1100, D=32, E=32, mask="key"),
    "full-widest": Shape(B=1, H=1, Hk=1, L=530, S=530, D=256, E=256, prior="position"),
    "long": Shape(B=1, H=2, Hk=1, L=1100, S=1100, D=64, E=64, causal="top-left"),
    "long-wide": Shape(B=1, H=1, Hk=1, L=530, S=530, D=128, E=96, causal="top-left", prior="position"),
    "long-widest": Shape(B=1, H=1, Hk=1, L=530, S=530, D=256, E=256, causal="top-left", mask="key"),
    "long-packed": Shape(B=1, H=2, Hk=1, L=900, S=900, D=64, E=32, packed=((257, 0, 1, 642),) * 2, causal="top-left"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature_map", ["elu", "relu"])
@pytest.mark.parametrize("op", ["mlk", "smlk"])
@pytest.mark.parametrize("name", SHAPES)
def test_two_times_rule(name, op, feature_map, dtype, on_this_device, poisoned):
    if not GPU and (name, op, feature_map) not in CHOSEN:
        pytest.skip("the interpreter is slow and runs a part")
    operator_cases.compare(op, "triton", SHAPES[name], dtype, {"feature_map": feature_map})


# The cases for the interpreter: every feature, with alternating operators and feature maps.
CHOSEN = {
    ("cross-m3", "mlk", "elu"),
    ("d1-m8", "smlk", "relu"),
    ("d3", "mlk", "relu"),
    ("full-slots", "smlk", "elu"),
    ("causal", "smlk", "relu"),
    ("causal-gqa-m8", "smlk", "elu"),
    ("causal-zero-priors", "mlk", "elu"),
    ("slots", "smlk", "elu"),
    ("slots-mask", "mlk", "relu"),
    ("slots-packed", "mlk", "elu"),
}


@pytest.mark.skipif(not GPU, reason="the block sizes that users get are too large for the interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LONG)
def test_long_two_times_rule(name, dtype, on_this_device, poisoned):
    operator_cases.compare("smlk", "triton", LONG[name], dtype, {"feature_map": "elu"})


def inputs(S=50, B=1, H=2, Hk=1, M=2, D=16, E=16, dtype=torch.float32, shifted=True, std=1.0):
    """Return the tensors of smlk_attention or mlk_attention by name."""
    g = torch.Generator().manual_seed(0)

    def randn(*shape):
        return (std * torch.randn(*shape, generator=g)).to(DEVICE, dtype).requires_grad_()

    x = {"query": randn(B, H, S, D), "value": randn(B, Hk, S, E)}
    if shifted:
        return x | {"key": randn(B, Hk, S, D), "shift": randn(Hk, M, D)}
    return x | {"keys": randn(B, Hk, M, S, D)}


@pytest.mark.parametrize("is_causal", [True, False])
def test_initial_and_final_states_have_gradients(is_causal, poisoned):
    x = inputs(S=70)
    state = [torch.rand(1, 1, 16, *shape).to(DEVICE).requires_grad_() for shape in ((16,), ())]

    def run(backend, dtype):
        leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in x.items()}
        start = tuple(t.detach().to(dtype).requires_grad_() for t in state)
        out, final = mgk.smlk_attention(
            **leaves, is_causal=is_causal, initial_state=start, return_state=True, backend=backend
        )
        g = torch.Generator().manual_seed(1)
        outputs = (out, *final)
        weights = [torch.randn(t.shape, generator=g).to(DEVICE, dtype) for t in outputs]
        return *outputs, *torch.autograd.grad(outputs, [*leaves.values(), *start], weights)

    for got, want in zip(run("triton", torch.float32), run("eager", torch.float64), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5 * want.abs().max().item())


def test_continuing_from_a_state_equals_one_call():
    x = inputs(S=70, shifted=False)
    whole = mgk.mlk_attention(**x, is_causal=True, backend="triton")
    first, last = ({name: t.split([41, 29], -2)[n] for name, t in x.items()} for n in (0, 1))
    _, state = mgk.mlk_attention(**first, is_causal=True, return_state=True, backend="triton")
    continued = mgk.mlk_attention(**last, is_causal=True, initial_state=state, backend="triton")
    torch.testing.assert_close(continued, whole[:, :, 41:], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="another feature_map"):
        mgk.mlk_attention(**last, is_causal=True, initial_state=(*state, state[1][..., 0]), backend="triton")


@pytest.mark.parametrize("is_causal", [True, False])
def test_unnormalized_attention_matches_eager(is_causal):
    x = inputs(S=70, dtype=torch.float32)
    x["keys"] = x.pop("key")
    call = linear_call(**x, shifted=True, is_causal=is_causal, normalise=False)
    g = torch.randn(1, 2, 70, 16, device=DEVICE)
    results = [
        (out, *torch.autograd.grad(out, list(x.values()), g))
        for out in (triton.run_linear(call)[0], eager.run_linear(call)[0])
    ]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("position", [20, 40])
def test_future_does_not_change_the_past(position):
    """Within and across chunks, bit for bit. Outputs of the past have no gradients with respect to the future."""
    x = inputs(S=75)
    other = {name: t.detach().clone() for name, t in x.items()}
    for name in ("query", "key", "value"):
        other[name][:, :, position:] = 1e4
    out, changed = (mgk.smlk_attention(**t, is_causal=True, backend="triton") for t in (x, other))
    assert torch.equal(out[:, :, :position], changed[:, :, :position])
    assert not torch.equal(out[:, :, position], changed[:, :, position])
    grad = torch.zeros_like(out)
    grad[:, :, :position] = 1
    for gradient in torch.autograd.grad(out, [x[name] for name in ("query", "key", "value")], grad):
        assert gradient[:, :, :position].any()
        assert not gradient[:, :, position:].any()


def test_rows_without_weight_are_zero():
    x = inputs(S=50)
    mask = torch.ones(1, 50, dtype=torch.bool, device=DEVICE)
    mask[:, :40] = False
    out = mgk.smlk_attention(**x, key_mask=mask, is_causal=True, backend="triton")
    assert not out[:, :, :40].any()
    assert out[:, :, 40:].all()
    grads = torch.autograd.grad(out.sum(), list(x.values()))
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][:, :, :40].any()


@pytest.mark.parametrize("is_causal", [True, False])
def test_sums_may_exceed_the_range_of_fp16(is_causal):
    x = inputs(S=70, dtype=torch.float16, std=50.0)
    prior = torch.full((1, 2, 1), 8.0, dtype=torch.float16, device=DEVICE)
    exact = {name: t.detach().double().requires_grad_() for name, t in x.items()}
    results = []
    for leaves, log_prior, backend in ((x, prior, "triton"), (exact, prior.double(), "eager")):
        out = mgk.smlk_attention(**leaves, log_prior=log_prior, is_causal=is_causal, backend=backend)
        results.append((out, *torch.autograd.grad(out.sum(), list(leaves.values()))))
    for got, want in zip(*results, strict=True):
        assert (got.double() - want).norm() <= 4e-3 * want.norm()


@pytest.mark.parametrize("is_causal", [True, False])
def test_results_are_bitwise_reproducible(is_causal):
    x = inputs(S=300 if GPU else 50, H=4, Hk=2, dtype=torch.float16)
    runs = []
    for _ in range(1000 if GPU else 2):
        out = mgk.smlk_attention(**x, is_causal=is_causal, backend="triton")
        runs.append((out, *torch.autograd.grad(out.sum(), list(x.values()))))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


SUPPORTED = {
    "plain": {},
    "prior": {"log_prior": torch.zeros(1, 2, 50)},
    "relu": {"feature_map": "relu"},
    "mask": {"key_mask": torch.ones(1, 50, dtype=torch.bool)},
    "packed": {"cu_seqlens": torch.tensor([0, 20, 50], dtype=torch.int32)},
    "return_state": {"return_state": True},
    "initial_state": {"initial_state": (torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 16))},
}
UNSUPPORTED = {
    "weights": ({"return_weights": True}, "weights are never formed"),
    "full-packed": (
        {"is_causal": False, "cu_seqlens": torch.tensor([0, 20, 50], dtype=torch.int32)},
        "is_causal=True only",
    ),
    "callable": ({"feature_map": mgk.DPFP()}, "only the feature maps"),
    "double": ({"dtype": torch.float64}, "float64"),
    "wide": ({"D": 257}, "256"),
    "no-values": ({"E": 0}, "value dimension of 0"),
    "many-heads": ({"B": 32_768, "S": 1}, "number of heads above 65,535"),
}


def on_device(x):
    if isinstance(x, tuple):
        return tuple(map(on_device, x))
    return x.to(DEVICE) if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("name", SUPPORTED)
def test_auto_selects_the_kernels(name):
    options = {option: on_device(x) for option, x in SUPPORTED[name].items()}
    for dtype in DTYPES:
        choice = mgk.explain_backend("smlk_attention", **inputs(dtype=dtype), is_causal=True, **options)
        assert choice.backend == "triton", choice


def test_auto_selects_the_kernels_without_causality():
    assert mgk.explain_backend("smlk_attention", **inputs(), is_causal=False).backend == "triton"


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_calls_raise_with_the_reason(name):
    options, reason = UNSUPPORTED[name]
    options = {"is_causal": True, **{option: on_device(x) for option, x in options.items()}}
    x = inputs(**{key: options.pop(key) for key in ("dtype", "D", "E", "B", "S") if key in options})
    assert mgk.explain_backend("smlk_attention", **x, **options).backend in ("chunked", "eager")
    with pytest.raises(ValueError, match=reason):
        mgk.smlk_attention(**x, **options, backend="triton")


@pytest.mark.parametrize("is_causal", [True, False])
def test_strided_inputs_give_the_same_bits(is_causal):
    """Inputs in the layout of projections, and an expanded gradient."""
    x = inputs(S=50)
    strided = {
        name: t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() if t.dim() == 4 else t
        for name, t in x.items()
    }
    results = []
    for leaves in (x, strided):
        out = mgk.smlk_attention(**leaves, is_causal=is_causal, backend="triton")
        results.append((out, *torch.autograd.grad(out.sum(), list(leaves.values()))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("is_causal", [True, False])
def test_empty_sequence(is_causal):
    out, state = mgk.smlk_attention(**inputs(S=0), is_causal=is_causal, return_state=True, backend="triton")
    assert out.shape == (1, 2, 0, 16)
    assert not any(x.any() for x in state)
    out.sum().backward()


@pytest.mark.parametrize(("queries", "keys"), [(5, 0), (0, 7)])
def test_no_keys_or_no_queries(queries, keys, poisoned):
    """Queries without keys read the state; keys without queries get the gradient of the final state."""
    x = inputs(S=max(queries, keys))
    x = {name: t.detach()[:, :, : queries if name == "query" else keys] if t.dim() == 4 else t for name, t in x.items()}
    state = tuple(torch.rand(1, 1, 16, *shape, device=DEVICE) for shape in ((16,), ()))

    def run(backend, dtype):
        leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in x.items()}
        start = tuple(t.to(dtype).requires_grad_() for t in state)
        out, final = mgk.smlk_attention(**leaves, initial_state=start, return_state=True, backend=backend)
        loss = out.square().sum() + sum(t.square().sum() for t in final)
        return out, *final, *torch.autograd.grad(loss, [*leaves.values(), *start])

    for got, want in zip(run("triton", torch.float32), run("eager", torch.float64), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)


def operator_arguments(causal, batch):
    x = inputs(S=40, B=batch)
    mask = torch.ones(batch, 40, dtype=torch.uint8, device=DEVICE)
    prior, state = torch.zeros(1, 1, 2, 1, device=DEVICE), torch.ones(batch, 1, 16 * 17, device=DEVICE)
    tensors = (x["query"], x["key"], x["value"], x["shift"], prior.requires_grad_(), mask, state.requires_grad_())
    return (*tensors, None, 0, True, causal)


@pytest.mark.parametrize("batch", [2, 0])
@pytest.mark.parametrize("causal", [True, False])
def test_operator_is_registered(causal, batch):
    tests = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(ops.forward_op, operator_arguments(causal, batch), test_utils=tests[:3] if not GPU else tests)


@pytest.mark.parametrize("is_causal", [True, False])
def test_compiles_once_for_all_lengths(is_causal):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def attend(x):
        return mgk.smlk_attention(**x, is_causal=is_causal, backend="triton").sum()

    for length in range(34, 54 if GPU else 38):
        x = inputs(S=length)
        want, got = mgk.smlk_attention(**x, is_causal=is_causal, backend="triton").sum(), attend(x)
        torch.testing.assert_close(got, want)
        torch.autograd.grad(got, list(x.values()))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("is_causal", [True, False])
def test_flops_equal_those_of_the_meta_device(is_causal):
    def count(x, backend):
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            mgk.smlk_attention(**x, is_causal=is_causal, backend=backend)
        return counter.get_total_flops()

    x = inputs(S=40, H=4, Hk=2, E=24)
    assert count(x, "triton") == count({name: t.to("meta") for name, t in x.items()}, "auto")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_host_is_not_synchronized():
    x = inputs(S=600, dtype=torch.bfloat16)
    cu = torch.tensor([0, 300, 600], dtype=torch.int32, device=DEVICE)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for options in ({}, {"cu_seqlens": cu}, {"return_state": True}, {"is_causal": False}):
            out = mgk.smlk_attention(**x, **{"is_causal": True, **options}, backend="triton")
            (out[0] if isinstance(out, tuple) else out).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


DECODE_CASES = {
    "shifted": ("smlk", {"B": 2, "H": 2, "Hk": 2, "D": 16, "E": 16}),
    "groups-wide": ("mlk", {"B": 2, "H": 4, "Hk": 2, "M": 3, "D": 24, "E": 70, "prior": "position"}),
    "one": ("mlk", {"B": 1, "H": 1, "Hk": 1, "M": 1, "D": 5, "E": 3, "prior": None}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("feature_map", ["elu", "relu"])
@pytest.mark.parametrize("name", DECODE_CASES)
def test_single_token_uses_the_decode_kernel(name, feature_map, normalise, dtype, monkeypatch, poisoned):
    """Without gradients, from any state."""
    op, sizes = DECODE_CASES[name]
    B, H, Hk, D, E, M = (sizes.get(key, 2) for key in ("B", "H", "Hk", "D", "E", "M"))
    prior = None if sizes.get("prior", "head") is None else torch.randn(1, Hk, M, 1).log_softmax(2)
    shift = torch.randn(Hk, M, D) if op == "smlk" else None
    launched = []
    launch = ops._launch
    monkeypatch.setattr(ops, "_launch", lambda *args: (launched.append(args[0].__name__), launch(*args)))
    state = None
    for length in (3, 1, 1):
        keys = torch.randn(B, Hk, length, D) if op == "smlk" else torch.randn(B, Hk, M, length, D)
        tensors = {
            "query": torch.randn(B, length, H, D).transpose(1, 2), "keys": keys, "value": torch.randn(B, Hk, length, E),
            "shift": shift, "log_prior": prior,
        }  # fmt: skip
        moved = {name: x if x is None else x.to(DEVICE, dtype) for name, x in tensors.items()}
        exact = {name: x if x is None else x.double() for name, x in moved.items()}
        options = {"shifted": op == "smlk", "feature_map": feature_map, "is_causal": True, "return_state": True}
        with torch.no_grad():
            out, new_state, _ = triton.run_linear(
                linear_call(**moved, **options, initial_state=state, normalise=normalise)
            )
            before = None if state is None else tuple(x.double() for x in state)
            call = linear_call(**exact, **options, initial_state=before, normalise=normalise)
            exact_out, exact_state, _ = eager.run_linear(call)
        tolerance = 20 * torch.finfo(dtype).eps
        for x, y in ((out, exact_out), *zip(new_state, exact_state, strict=True)):
            assert x.shape == y.shape
            assert (x.double() - y).abs().max() <= tolerance * y.abs().max()
        state = new_state
    assert launched[-2:] == ["decode_token"] * 2
    assert launched.count("decode_token") == 2


def test_single_token_has_gradients():
    x = {"query": (1, 1, 1, 4), "keys": (1, 1, 2, 1, 4), "value": (1, 1, 1, 4)}
    tensors = {name: torch.randn(shape, device=DEVICE).requires_grad_() for name, shape in x.items()}
    state = (torch.rand(1, 1, 4, 4, device=DEVICE), torch.rand(1, 1, 4, device=DEVICE))
    out, _, _ = triton.run_linear(linear_call(**tensors, is_causal=True, initial_state=state, return_state=True))
    assert all(g.any() for g in torch.autograd.grad(out.square().sum(), list(tensors.values())))
