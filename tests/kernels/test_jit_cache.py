"""The cache of compiled kernels: launches by address, recompilation, devices and hooks."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from mgk.kernels import jit_cache
from mgk.kernels.jit_cache import LaunchSpec, launch
from mgk.kernels.linear import ops

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


class Kernel:
    """A Triton kernel that records its compilations and the arguments of its launches."""

    def __init__(self):
        self.compilations, self.launches, self.hooked_launches = [], [], []

    def __getitem__(self, grid):
        def compile_and_launch(*args, **options):
            self.compilations.append(options)
            return Compiled(self)

        return compile_and_launch


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel):
        self.kernel = kernel

    def run(self, *args):
        self.kernel.launches.append(args)

    def __getitem__(self, grid):
        return lambda *args: self.kernel.hooked_launches.append((grid, args))


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setattr(jit_cache, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=str)))


def spec_of(kernel, scalars=(16,), constexprs=None, paths=(None,), num_warps=4, maxnreg=None):
    return LaunchSpec(kernel, (3, 2, 1), scalars, (7,), constexprs or {"M": 2}, num_warps, 1, maxnreg, paths)


def test_compiled_kernel_is_launched_by_addresses(stream):
    kernel, x = Kernel(), torch.zeros(8)
    spec = spec_of(kernel, paths=(1, 2))
    for _ in range(2):
        launch(spec, (x, None), (0.5,))
    assert [options["PATH"] for options in kernel.compilations] == [1, 2]
    start = (3, 2, 1, str(jit_cache.current_device()), "function", "metadata", None, None, None)
    assert kernel.launches == [(*start, x.data_ptr(), None, 0.5, 16, 7, 2, path) for path in (1, 2)]


def test_specialization_compiles_again(stream, monkeypatch):
    kernel, x = Kernel(), torch.zeros(8)
    spec = spec_of(kernel)

    def compiles(spec, *tensors):
        before = len(kernel.compilations)
        launch(spec, tensors, ())
        launch(spec, tensors, ())
        return len(kernel.compilations) - before

    assert compiles(spec, x, x) == 1
    assert compiles(spec, x, x[4:]) == 0
    assert compiles(spec, x, x[1:]) == 1
    assert compiles(spec, x[1:], x) == 1
    assert compiles(spec, x, x) == 0
    # New specs use kernels that were compiled for equal ones.
    assert compiles(spec_of(kernel, scalars=(32,)), x, x) == 0
    assert compiles(spec_of(kernel, scalars=(33,)), x, x) == 1
    assert compiles(spec_of(kernel, scalars=(1,)), x, x) == 1
    assert compiles(spec_of(kernel, constexprs={"M": 3}), x, x) == 1
    assert compiles(spec_of(kernel, num_warps=8), x, x) == 1
    assert compiles(spec_of(kernel), x.half(), x) == 1
    assert compiles(spec_of(kernel), None, x) == 1
    monkeypatch.setattr(jit_cache, "current_device", lambda: 1)
    assert compiles(spec, x, x) == 1


def test_launches_on_the_device_of_the_tensors(stream, monkeypatch):
    """Also from a thread with another current device."""

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
    assert [args[3] for args in kernel.launches] == ["3"]


def test_linear_attention_launches_on_the_device_of_the_tensors(monkeypatch):
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


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_triton_launch_hooks_are_called(hook, stream, monkeypatch):
    """Kernel profilers rely on them."""
    kernel, x = Kernel(), torch.zeros(8)
    hooks = getattr(jit_cache.knobs, hook)

    def hook_function(metadata):
        pass

    launch(spec_of(kernel), (x,), ())
    with monkeypatch.context() as patch:
        if hooks is None:  # Triton 3.4 has one hook instead of a chain of them
            patch.setattr(jit_cache.knobs, hook, hook_function)
        else:
            patch.setattr(hooks, "calls", [hook_function])
        launch(spec_of(kernel), (x,), ())
    assert kernel.hooked_launches == [((3, 2, 1), (x.data_ptr(), 16, 7, 2))]
    launch(spec_of(kernel), (x,), ())
    assert len(kernel.hooked_launches) == len(kernel.launches) == 1


def test_launches_of_a_block_wait_for_its_kernels(stream, monkeypatch):
    """From the first missing kernel on, launches run at the end of the block and in their order."""
    kernel, x = Kernel(), torch.zeros(8)
    specs = {name: spec_of(kernel, constexprs={"M": name}) for name in range(4)}
    launch(specs[0], (x,), ())
    launch(specs[2], (x,), ())
    compiled = []
    monkeypatch.setattr(jit_cache, "compile_kernels", lambda launches: compiled.extend(spec for spec, *_ in launches))
    with jit_cache.compiled_together():
        launch(specs[0], (x,), ())
        assert len(kernel.launches) == 1
        launch(specs[1], (x,), ())
        with jit_cache.compiled_together():
            launch(specs[2], (x,), ())
            launch(specs[3], (x,), ())
        assert (len(kernel.launches), len(kernel.compilations)) == (1, 2)
    assert compiled == [specs[1], specs[2], specs[3]]
    # The kernels of 1 and 3 are compiled at their launch; those of 0 and 2 were compiled before.
    assert [options["M"] for options in kernel.compilations] == [0, 2, 1, 3]
    assert [args[-1] for args in kernel.launches] == [0, 2]


def test_failed_block_launches_nothing(stream):
    kernel, x = Kernel(), torch.zeros(8)

    @jit_cache.compiled_together()
    def fail():
        launch(spec_of(kernel), (x,), ())
        raise RuntimeError("failed")

    with pytest.raises(RuntimeError, match="failed"):
        fail()
    assert kernel.compilations == []
    launch(spec_of(kernel), (x,), ())
    assert len(kernel.compilations) == 1


def test_collected_launches_do_not_run(stream):
    kernel, x = Kernel(), torch.zeros(8)
    launch(spec_of(kernel), (x,), ())
    with jit_cache.collected_launches() as launches:
        launch(spec_of(kernel), (x,), ())
        with jit_cache.compiled_together():
            launch(spec_of(kernel, num_warps=8), (x,), (0.5,))
    assert [(spec.num_warps, floats) for spec, _, floats in launches] == [(4, ()), (8, (0.5,))]
    assert (len(kernel.compilations), kernel.launches) == (1, [])
