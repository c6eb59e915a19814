"""Launches that are looked up: the same for the same call, and never those of another."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from mgk.backends import eager, triton
from mgk.kernels import jit_cache
from mgk.kernels.jit_cache import LaunchSpec, launch
from mgk.kernels.linear import ops
from mgk.kernels.mixture import block_sizes, em_counts, launch_config
from mgk.kernels.mixture import launch as triton_launch
from mgk.kernels.mixture.block_sizes import BlockConfig
from tests.kernels.mixture.test_kernels import DEVICE, GPU, case, make_call, small_blocks  # noqa: F401  (for every test)

pytestmark = [pytest.mark.gpu] if GPU else []


@pytest.fixture
def tf32():
    """Sets whether it is allowed."""
    yield lambda allowed: setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture
def steps(monkeypatch):
    """The launches of all calls."""
    seen = []

    def note(step, *args):
        seen.append(step)
        launch(step, *args)

    monkeypatch.setattr(triton_launch, "launch", note)
    return seen


def tensors(**options):
    leaves, _ = case(L=20, S=20, **options)
    return {name: t.to(DEVICE, torch.float32) for name, t in leaves.items()}


def gradients(x, **options):
    x = {name: t.detach().requires_grad_() for name, t in x.items()}
    out = triton.run_mixture(make_call(x, **options))[0]
    torch.autograd.grad(out.sum(), list(x.values()))


def test_same_call_same_launches(steps):
    x = tensors()
    gradients(x)
    first = steps.copy()
    steps.clear()
    gradients({name: t.clone() for name, t in x.items()})
    assert len(first) == 5
    assert all(a is b for a, b in zip(first, steps, strict=True))


def transposed(t):
    """The same numbers, rows apart by heads: as a projection leaves them."""
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
def test_other_tensors_other_launches(change, steps):
    """A call that differs in one layout gets its own answer, and the first call its own again."""
    x = tensors(H=2, Hk=2)
    changed = CHANGES[change](x)
    for given in (x, changed, x):
        leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
        call = make_call(leaves, causal="top-left")
        found, want = triton.run_mixture(call)[0], eager.run_mixture(call)[0]
        limit = 1e-5 if found.dtype == torch.float32 else 5e-3
        torch.testing.assert_close(found, want, atol=limit, rtol=limit)
        pairs = [torch.autograd.grad(y.sum(), list(leaves.values())) for y in (found, want)]
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b, atol=20 * limit, rtol=20 * limit)
    assert len(steps) == 15
    assert all(a is b for a, b in zip(steps[:5], steps[10:], strict=True))
    assert not any(a is b for a, b in zip(steps[:5], steps[5:10], strict=True) if a.kernel.__name__ != "prepare_keys")


def test_other_settings_other_launches(steps, tf32, monkeypatch):
    x = tensors()
    gradients(x)
    assert {step.constexprs.get("PRECISION", "ieee") for step in steps} == {"ieee"}
    steps.clear()
    tf32(True)
    gradients(x)
    assert [step.constexprs.get("PRECISION") for step in steps] == [None, "tf32", "tf32", "tf32", None]
    steps.clear()
    tf32(False)
    monkeypatch.setattr(triton_launch, "BOUNDED", [torch.float32])
    gradients(x)
    assert [step.paths for step in steps] == [(None,), (1, 2), (1, 2), (1, 2), (None,)]
    steps.clear()
    monkeypatch.setattr(triton_launch, "_small_pairs", 1 << 20)
    gradients(x)
    assert [step.paths for step in steps] == [(None,), (0,), (0,), (0,), (None,)]
    steps.clear()
    monkeypatch.setattr(triton_launch, "select_block", lambda *_: BlockConfig(32, 32, 2, 1))
    gradients(x)
    assert [step.num_warps for step in steps] == [4, 2, 2, 2, 8]


@pytest.mark.parametrize("D", [16, 64])
@pytest.mark.parametrize("M", [3, 4])
def test_a_small_call_of_many_components_is_one_launch_a_pass(M, D, steps, monkeypatch):
    """Both forms are in it, and there is no room for flags, which the second of two launches would read."""
    monkeypatch.setattr(triton_launch, "BOUNDED", [torch.float32])
    monkeypatch.setattr(triton_launch, "_small_pairs", 1 << 20)
    plans = []
    for name in ("forward_config", "backward_config"):
        plan = getattr(triton_launch, name)
        monkeypatch.setattr(triton_launch, name, lambda *args, plan=plan: plans.append(plan(*args)) or plans[-1])
    gradients(tensors(M=M, D=D, E=D), causal="top-left")
    passes = {step.kernel.__name__: step.paths for step in steps}
    assert len(passes) == len(steps) == 5
    assert [passes[name] for name in ("mixture_forward", "mixture_backward_dq", "mixture_backward_dkdv")] == [(3,)] * 3
    assert [plan.num_flags for plan in plans] == [0, 0]


@pytest.mark.parametrize(
    "change, capped",
    [({}, True), ({"dropout": True}, False), ({"mask": torch.bool}, False), ({"bounded": False}, False)],
    ids=["plain", "dropout", "mask", "general"],
)
def test_few_registers_are_for_plain_calls_by_the_first_kernel(change, capped):
    def layout(*shape, dtype=torch.bfloat16):
        return launch_config.layouts(torch.empty(*shape, dtype=dtype, device="meta"))[0]

    row, length = layout(8, 4, 4096, 32), 4096
    mask = layout(1, 1, length, length, dtype=change["mask"]) if "mask" in change else None
    some = (row, layout(8, 4, 2, 4096, 32), row, None, None, None, None, mask, None, None, None, row)
    dropout, bounded = change.get("dropout", False), change.get("bounded", True)
    flags = launch_config.LaunchFlags(
        0, False, dropout, length, length, 8 * 32, False, bounded, "tf32", block_sizes.select_block
    )  # fmt: skip
    forward = launch_config.forward_config(some, flags, True, True).attend
    backward = launch_config.backward_config(
        (*some[:11], row, row, None), flags, True, True, False, launch_config.NO_PRIOR_GRAD
    )
    for step, rows, cols in ((forward, 64, 64), (backward.dq, 64, 64 if capped else 128)):
        assert (step.maxnreg is not None) == capped
        assert (step.constexprs["BM"], step.constexprs["BN"]) == (rows, cols)


def test_gradients_or_not_by_the_flags_of_now():
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


def test_a_preparation_that_writes_an_operand_is_another(monkeypatch):
    """A launch that is kept is for tensors that are there each time, or never."""
    monkeypatch.setattr(triton_launch, "BOUNDED", (torch.float32,))
    steps = []
    monkeypatch.setattr(triton_launch, "launch", lambda step, tensors, floats=(): steps.append((step, tensors[-1])))
    for component_gemm in (False, True):
        block = BlockConfig(32, 32, 4, 1, operand_in_registers=True, component_gemm=component_gemm)
        monkeypatch.setattr(triton_launch, "select_block", lambda *_, block=block: block)
        triton.run_mixture(make_call(tensors()))
    (plain, nothing), _, (writing, operand), _ = steps
    assert nothing is None
    assert operand is not None
    assert plain is not writing


class Kernel:
    """Stands for a kernel of Triton: counts what is compiled and notes what compiled ones are launched with."""

    def __init__(self):
        self.examined, self.launched, self.by_hooks = [], [], []

    def __getitem__(self, grid):
        def compile_and_launch(*args, **options):
            self.examined.append(options)
            return Compiled(self)

        return compile_and_launch


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel):
        self.kernel = kernel

    def run(self, *args):
        self.kernel.launched.append(args)

    def __getitem__(self, grid):
        return lambda *args: self.kernel.by_hooks.append((grid, args))


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setattr(jit_cache, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=str)))


def spec_of(kernel, scalars=(16,), constexprs=None, paths=(None,), num_warps=4, maxnreg=None):
    return LaunchSpec(kernel, (3, 2, 1), scalars, (7,), constexprs or {"M": 2}, num_warps, 1, maxnreg, paths)


def test_a_compiled_kernel_is_launched_by_addresses(stream):
    kernel, x = Kernel(), torch.zeros(8)
    step = spec_of(kernel, paths=(1, 2))
    for _ in range(2):
        launch(step, (x, None), (0.5,))
    assert [options["PATH"] for options in kernel.examined] == [1, 2]
    start = (3, 2, 1, str(jit_cache.current_device()), "function", "metadata", None, None, None)
    assert kernel.launched == [(*start, x.data_ptr(), None, 0.5, 16, 7, 2, path) for path in (1, 2)]


def test_compiled_again_for_what_triton_specialises_on(stream, monkeypatch):
    kernel, x = Kernel(), torch.zeros(8)
    step = spec_of(kernel)

    def compiles(step, *tensors):
        before = len(kernel.examined)
        launch(step, tensors, ())
        launch(step, tensors, ())
        return len(kernel.examined) - before

    assert compiles(step, x, x) == 1
    assert compiles(step, x, x[4:]) == 0
    assert compiles(step, x, x[1:]) == 1
    assert compiles(step, x[1:], x) == 1
    assert compiles(step, x, x) == 0
    # Launches that are not kept find what was compiled for their like.
    assert compiles(spec_of(kernel, scalars=(32,)), x, x) == 0
    assert compiles(spec_of(kernel, scalars=(33,)), x, x) == 1
    assert compiles(spec_of(kernel, scalars=(1,)), x, x) == 1
    assert compiles(spec_of(kernel, constexprs={"M": 3}), x, x) == 1
    assert compiles(spec_of(kernel, num_warps=8), x, x) == 1
    assert compiles(spec_of(kernel), x.half(), x) == 1
    assert compiles(spec_of(kernel), None, x) == 1
    monkeypatch.setattr(jit_cache, "current_device", lambda: 1)
    assert compiles(step, x, x) == 1


def test_launched_where_the_tensors_are(stream, monkeypatch):
    """Also from a thread whose current device is another."""

    @contextlib.contextmanager
    def entered(device):
        with monkeypatch.context() as patch:
            patch.setattr(jit_cache, "current_device", lambda: device)
            yield

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 3)
    kernel, x = Kernel(), torch.zeros(8)
    for _ in range(2):
        launch(spec_of(kernel), (x, None), ())
    assert [args[3] for args in kernel.launched] == ["3"]


def test_linear_attention_is_launched_where_the_tensors_are(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def enter(device):
        entered.append(device)
        with monkeypatch.context() as patch:
            patch.setattr(jit_cache, "current_device", lambda: device)
            yield

    class Compiled:
        arg_names = ("x",)

        def __getitem__(self, grid):
            return lambda *args, **options: entered.append("launched")

    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 3)
    ops._launch(Compiled(), (1,), (torch.zeros(8),), (), {})
    assert entered == [3, "launched"]


def test_as_many_sequences_as_there_are(steps, monkeypatch):
    """The second and third axis of a grid end at 65,535, the first does not."""
    monkeypatch.setattr(triton_launch, "launch", lambda step, *_: steps.append(step))
    monkeypatch.setattr(em_counts, "launch", lambda step, *_: steps.append(step))
    query, value = torch.empty(70_000, 1, 2, 16), torch.empty(70_000, 1, 2, 16)
    call = make_call({"query": query, "keys": query, "value": value, "shift": torch.empty(1, 2, 16)})
    triton.run_mixture(call)
    em_counts.component_counts(query, query, call.shift, *(None,) * 6, 1.0, 1.0, 0, 2, 2)
    assert {step.kernel.__name__ for step in steps} >= {"prepare_keys", "query_terms", "count_components"}
    assert max(n for step in steps for n in step.grid[1:]) <= 65_535


@pytest.mark.skipif(not triton_launch.HAS_NEW_TF32, reason="this torch has one setting")
def test_either_setting_of_tf32():
    """To ask for the old one raises once the new one is used."""
    x, matmul = torch.zeros(1), torch.backends.cuda.matmul
    try:
        for setting, precision in (("tf32", "tf32"), ("ieee", "ieee")):
            matmul.fp32_precision = setting
            assert triton_launch.precision_of(x) == ops._precision(x.dtype) == precision
    finally:
        matmul.fp32_precision = "none"
        matmul.allow_tf32 = False


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_triton_are_called(hook, stream, monkeypatch):
    """Profilers of kernels see them by these."""
    kernel, x = Kernel(), torch.zeros(8)
    hooks = getattr(jit_cache.knobs, hook)

    def look(metadata):
        pass

    launch(spec_of(kernel), (x,), ())
    with monkeypatch.context() as patch:
        if hooks is None:  # Triton 3.4 has one hook instead of a chain of them
            patch.setattr(jit_cache.knobs, hook, look)
        else:
            patch.setattr(hooks, "calls", [look])
        launch(spec_of(kernel), (x,), ())
    assert kernel.by_hooks == [((3, 2, 1), (x.data_ptr(), 16, 7, 2))]
    launch(spec_of(kernel), (x,), ())
    assert len(kernel.by_hooks) == len(kernel.launched) == 1
