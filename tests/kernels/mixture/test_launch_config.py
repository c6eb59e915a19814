"""Cached launch configurations: equal calls share them, different calls do not."""

import pytest
import torch

pytest.importorskip("triton")

from mgk.backends import eager, triton
from mgk.kernels.jit_cache import launch
from mgk.kernels.linear import ops
from mgk.kernels.mixture import block_sizes, em_counts, launch_config
from mgk.kernels.mixture import launch as triton_launch
from mgk.kernels.mixture.block_config import BlockConfig
from tests.kernels.mixture.test_kernels import DEVICE, GPU, case, make_call, small_blocks  # noqa: F401  (for every test)

pytestmark = [pytest.mark.gpu] if GPU else []


@pytest.fixture
def tf32():
    """Return a function that allows or forbids TF32."""
    yield lambda allowed: setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture
def specs(monkeypatch):
    """The launch specs of all calls."""
    recorded = []

    def record(spec, *args):
        recorded.append(spec)
        launch(spec, *args)

    monkeypatch.setattr(triton_launch, "launch", record)
    return recorded


def tensors(**options):
    leaves, _ = case(L=20, S=20, **options)
    return {name: t.to(DEVICE, torch.float32) for name, t in leaves.items()}


def gradients(x, **options):
    x = {name: t.detach().requires_grad_() for name, t in x.items()}
    out = triton.run_mixture(make_call(x, **options))[0]
    torch.autograd.grad(out.sum(), list(x.values()))


def test_equal_calls_share_launch_specs(specs):
    x = tensors()
    gradients(x)
    first = specs.copy()
    specs.clear()
    gradients({name: t.clone() for name, t in x.items()})
    assert len(first) == 5
    assert all(a is b for a, b in zip(first, specs, strict=True))


def transposed(t):
    """Return the same numbers in the layout of a projection."""
    return t.transpose(1, -2).contiguous().transpose(1, -2)


CHANGES = {
    "strides": lambda x: {name: transposed(t) if t.dim() == 4 else t for name, t in x.items()},
    "shorter": lambda x: x | {"query": x["query"][:, :, :17]},
    "component": lambda x: x | {"shift": x["shift"][:, :1], "log_prior": x["log_prior"][:, :, :1]},
    "no-prior": lambda x: {name: t for name, t in x.items() if name != "log_prior"},
    "prior-of-keys": lambda x: x | {"log_prior": x["log_prior"].expand(-1, -1, -1, 20).contiguous()},
    "half": lambda x: {name: t.half() for name, t in x.items()},
    "scales": lambda x: x | {"scale": torch.linspace(0.2, 0.4, 4, device=DEVICE).view(1, 2, 2, 1)},
    "tau": lambda x: x | {"tau": torch.tensor([0.3, 0.6], device=DEVICE)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_different_layouts_get_different_specs(change, specs):
    """A call that differs in one layout gets the right result, and so does the first call after it."""
    x = tensors(H=2, Hk=2)
    changed = CHANGES[change](x)
    for inputs in (x, changed, x):
        leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
        call = make_call(leaves, causal="top-left")
        out, expected = triton.run_mixture(call)[0], eager.run_mixture(call)[0]
        limit = 1e-5 if out.dtype == torch.float32 else 5e-3
        torch.testing.assert_close(out, expected, atol=limit, rtol=limit)
        pairs = [torch.autograd.grad(y.sum(), list(leaves.values())) for y in (out, expected)]
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b, atol=20 * limit, rtol=20 * limit)
    assert len(specs) == 15
    assert all(a is b for a, b in zip(specs[:5], specs[10:], strict=True))
    assert not any(a is b for a, b in zip(specs[:5], specs[5:10], strict=True) if a.kernel.__name__ != "prepare_keys")


def test_different_settings_get_different_specs(specs, tf32, monkeypatch):
    x = tensors()
    gradients(x)
    assert {spec.constexprs.get("PRECISION", "ieee") for spec in specs} == {"ieee"}
    specs.clear()
    tf32(True)
    gradients(x)
    assert [spec.constexprs.get("PRECISION") for spec in specs] == [None, "tf32", "tf32", "tf32", None]
    specs.clear()
    tf32(False)
    monkeypatch.setattr(triton_launch, "BOUNDED", [torch.float32])
    gradients(x)
    assert [spec.paths for spec in specs] == [(None,), (1, 2), (1, 2), (1, 2), (None,)]
    specs.clear()
    monkeypatch.setattr(triton_launch, "_small_pairs", 1 << 20)
    gradients(x)
    assert [spec.paths for spec in specs] == [(None,), (0,), (0,), (0,), (None,)]
    specs.clear()
    monkeypatch.setattr(triton_launch, "_select_block", lambda *_: BlockConfig(32, 32, 2, 1))
    gradients(x)
    assert [spec.num_warps for spec in specs] == [4, 2, 2, 2, 8]


@pytest.mark.parametrize("D", [16, 64])
@pytest.mark.parametrize("M", [3, 4])
def test_small_call_of_many_components_takes_one_launch_per_pass(M, D, specs, monkeypatch):
    """Both paths are in it; no flags are allocated, which only a FALLBACK launch reads."""
    monkeypatch.setattr(triton_launch, "BOUNDED", [torch.float32])
    monkeypatch.setattr(triton_launch, "_small_pairs", 1 << 20)
    configs = []
    for name in ("forward_config", "backward_config"):
        config = getattr(triton_launch, name)
        monkeypatch.setattr(
            triton_launch, name, lambda *args, config=config: configs.append(config(*args)) or configs[-1]
        )
    gradients(tensors(M=M, D=D, E=D), causal="top-left")
    passes = {spec.kernel.__name__: spec.paths for spec in specs}
    assert len(passes) == len(specs) == 5
    assert [passes[name] for name in ("mixture_forward", "mixture_backward_dq", "mixture_backward_dkdv")] == [(3,)] * 3
    assert [config.num_flags for config in configs] == [0, 0]


@pytest.mark.parametrize(
    "change, capped",
    [({}, True), ({"dropout": True}, False), ({"mask": torch.bool}, False), ({"bounded": False}, False)],
    ids=["plain", "dropout", "mask", "general"],
)
def test_registers_are_limited_only_on_the_fast_path_of_plain_calls(change, capped):
    def layout(*shape, dtype=torch.bfloat16):
        return launch_config.layouts(torch.empty(*shape, dtype=dtype, device="meta"))[0]

    row, length = layout(8, 4, 4096, 32), 4096
    mask = layout(1, 1, length, length, dtype=change["mask"]) if "mask" in change else None
    layouts = (row, layout(8, 4, 2, 4096, 32), row, None, None, None, None, mask, None, None, None, row)
    dropout, bounded = change.get("dropout", False), change.get("bounded", True)
    flags = launch_config.LaunchFlags(
        0, False, dropout, length, length, 8 * 32, False, bounded, "tf32", block_sizes.select_block
    )  # fmt: skip
    forward = launch_config.forward_config(layouts, flags, True, True).attend
    backward = launch_config.backward_config(
        (*layouts[:11], row, row, None), flags, True, True, False, launch_config.NO_PRIOR_GRAD
    )
    for spec, rows, cols in ((forward, 64, 64), (backward.dq, 64, 64 if capped else 128)):
        assert (spec.maxnreg is not None) == capped
        assert (spec.constexprs["BM"], spec.constexprs["BN"]) == (rows, cols)


def test_gradients_depend_on_the_current_flags():
    """The same tensors with and without requires_grad, and in either mode."""
    x = tensors()
    for _ in range(2):
        call = make_call(x)
        assert not triton.run_mixture(call)[0].requires_grad
        x["shift"].requires_grad_()
        assert triton.run_mixture(call)[0].requires_grad
        with torch.no_grad():
            assert not triton.run_mixture(call)[0].requires_grad
        x["shift"].requires_grad_(False)


def test_preprocessing_with_an_operand_has_another_spec(monkeypatch):
    """A cached spec needs None in the same positions at every launch."""
    monkeypatch.setattr(triton_launch, "BOUNDED", (torch.float32,))
    specs = []
    monkeypatch.setattr(triton_launch, "launch", lambda spec, tensors, floats=(): specs.append((spec, tensors[-1])))
    for component_gemm in (False, True):
        block = BlockConfig(32, 32, 4, 1, operand_in_registers=True, component_gemm=component_gemm)
        monkeypatch.setattr(triton_launch, "_select_block", lambda *_, block=block: block)
        triton.run_mixture(make_call(tensors()))
    (plain, nothing), _, (writing, operand), _ = specs
    assert nothing is None
    assert operand is not None
    assert plain is not writing


def test_grids_allow_any_number_of_sequences(specs, monkeypatch):
    """The second and third axis of a grid are limited to 65,535, the first is not."""
    monkeypatch.setattr(triton_launch, "launch", lambda spec, *_: specs.append(spec))
    monkeypatch.setattr(em_counts, "launch", lambda spec, *_: specs.append(spec))
    query, value = torch.empty(70_000, 1, 2, 16), torch.empty(70_000, 1, 2, 16)
    call = make_call({"query": query, "keys": query, "value": value, "shift": torch.empty(1, 2, 16)})
    triton.run_mixture(call)
    em_counts.component_counts(query, query, call.shift, *(None,) * 6, 1.0, 1.0, 0, 2, 2)
    assert {spec.kernel.__name__ for spec in specs} >= {"prepare_keys", "query_terms", "count_components"}
    assert max(n for spec in specs for n in spec.grid[1:]) <= 65_535


@pytest.mark.skipif(not triton_launch.HAS_NEW_TF32, reason="this torch has one setting")
def test_both_tf32_settings_are_read():
    """Reading the old one raises once the new one has been set."""
    x, matmul = torch.zeros(1), torch.backends.cuda.matmul
    try:
        for setting, precision in (("tf32", "tf32"), ("ieee", "ieee")):
            matmul.fp32_precision = setting
            assert triton_launch.precision_of(x) == ops._precision(x.dtype) == precision
    finally:
        matmul.fp32_precision = "none"
        matmul.allow_tf32 = False
