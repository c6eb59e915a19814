"""Repeated calls: kernels launched by address give the results of ordinary launches, and changed arguments are seen."""

import contextlib
import ctypes

import pytest
import torch
from torch.utils import checkpoint

pytest.importorskip("triton")

import mgk
from mgk import functional
from mgk._core import repeated_calls
from mgk.kernels import jit_cache
from mgk.kernels.mixture import call_plan, launch, launch_config
from mgk.kernels.mixture.block_config import BlockConfig

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.gpu] if GPU else []
DTYPE = torch.bfloat16 if GPU else torch.float16


class Interpreted:
    """A compiled kernel that the interpreter runs from addresses."""

    function = packed_metadata = None

    def __init__(self, spec, path, tensors):
        self.spec, self.path, self.dtypes = spec, path, [None if x is None else x.dtype for x in tensors]

    def pairs(self, arguments):
        return zip(arguments[: len(self.dtypes)], self.dtypes, strict=True)

    def run(self, x, y, z, stream, function, metadata, first, second, third, *arguments):
        tensors = [address if dtype is None else at(address, dtype) for address, dtype in self.pairs(arguments)]
        rest = arguments[len(tensors) : len(arguments) - len(self.spec.constexprs) - (self.path is not None)]
        options = {} if self.path is None else {"PATH": self.path}
        self.spec.kernel[x, y, z](*tensors, *rest, **self.spec.constexprs, **options)


def at(address, dtype):
    return torch.frombuffer((ctypes.c_byte * 16).from_address(address), dtype=dtype)


class Launches(list):
    """Names of the kernels launched by address. runs_first: the call that compiles a kernel also runs it."""

    runs_first = False


@pytest.fixture
def by_address(monkeypatch):
    """Keep interpreted kernels in the cache of compiled ones; return the list of launches by address."""
    launches = Launches()
    clear_caches()
    launch_by_address = jit_cache.launch_by_address

    def recorded(spec, *args):
        launches.append(spec.kernel.__name__)
        launch_by_address(spec, *args)

    monkeypatch.setattr(call_plan, "launch_by_address", recorded)
    if not GPU:

        def keep(spec, device, tensors, floats, unaligned):
            for path, grid in spec.path_grids():
                kernel = Interpreted(spec, path, tensors)
                if launches.runs_first:
                    constants = (*spec.scalars, *spec.unspecialized, *spec.constexprs.values())
                    constants += () if path is None else (path,)
                    addresses = [x if x is None else x.data_ptr() for x in tensors]
                    kernel.run(*grid, *(None,) * 6, *addresses, *floats, *constants)
                jit_cache._compiled[path, jit_cache._key(spec, device, tensors, unaligned)] = kernel

        monkeypatch.setattr(jit_cache, "compile_and_launch", keep)
        monkeypatch.setattr(jit_cache, "_compiled", {})
        monkeypatch.setattr(jit_cache, "current_stream", lambda device: 0)
        monkeypatch.setattr(jit_cache.driver, "_active", type("Driver", (), {"get_current_stream": lambda *_: 0})())
        monkeypatch.setattr(launch, "_select_block", lambda *_: BlockConfig(16, 16, 4, 1))
    yield launches
    clear_caches()


def clear_caches():
    repeated_calls._plans_by_key.clear()
    for cached in (launch_config.preprocess_spec, launch_config.forward_config, launch_config.backward_config):
        cached.cache_clear()


def inputs(operator="smgk", B=1, H=2, Hk=2, Hv=None, M=2, N=17, D=16, prior=None, seed=0):
    g = torch.Generator().manual_seed(seed)

    def leaf(*shape, dtype=DTYPE):
        return torch.randn(shape, generator=g).to(DEVICE, dtype).requires_grad_()

    keys = leaf(B, Hk, N, D) if operator == "smgk" else leaf(B, Hk, M, N, D)
    tensors = [leaf(B, H, N, D), keys, leaf(B, Hv or Hk, N, D)]
    tensors += [leaf(Hk, M, D, dtype=torch.float32)] if operator == "smgk" else []
    options = {} if prior is None else {"log_prior": leaf(*prior, dtype=torch.float32)}
    return tensors, options


def attend(tensors, options, **more):
    operator = mgk.smgk_attention if len(tensors) == 4 else mgk.mgk_attention
    return operator(*tensors, **{"backend": "triton", **options, **more})


def results(tensors, options, **more):
    out = attend(tensors, options, **more)
    leaves = [*tensors, *options.values()]
    grad = torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@contextlib.contextmanager
def without_plans():
    with functional.intercept_calls(lambda call, result: result):
        yield


CASES = {
    "smgk-causal-gqa": ({"Hk": 1, "B": 2, "N": 9}, {"is_causal": True}),
    "smgk-prior-per-head": ({"prior": (2, 2, 1)}, {}),
    "smgk-prior-per-key": ({"prior": (1, 2, 2, 17)}, {}),
    "smgk-hard": ({"M": 3}, {"assignment": "hard", "scale": 0.3}),
    "smgk-key-heads": ({"Hk": 1, "Hv": 2}, {}),
    "mgk": ({"operator": "mgk"}, {"similarity": "dot", "is_causal": "bottom-right"}),
    "mgk-prior": ({"operator": "mgk", "prior": (1, 2, 2, 1)}, {"similarity": 0.5}),
}


@pytest.mark.parametrize("name", CASES)
def test_launches_by_address_give_the_same_bits(name, by_address, monkeypatch):
    shape, more = CASES[name]
    limit = 0 if name in ("smgk-causal-gqa", "mgk") else launch.SMALL_PAIRS
    monkeypatch.setattr(launch, "BOUNDED", (torch.bfloat16, torch.float16))
    monkeypatch.setattr(launch, "_small_pairs", limit)
    for _ in range(2):
        results(*inputs(**shape, seed=1), **more)  # the second call stores compiled kernels in the launches
    tensors, options = inputs(**shape)
    with without_plans():
        want = results(tensors, options, **more)
    by_address.clear()
    got = results(tensors, options, **more)
    assert {"prepare_keys", "mixture_forward"} <= set(by_address)
    assert ("mixture_backward_dkdv" in by_address) == ("Hv" not in shape)
    assert all(map(torch.equal, got, want))


def test_component_gemm_operands(by_address, monkeypatch):
    """The operands of both passes are part of the workspaces."""
    monkeypatch.setattr(launch, "BOUNDED", (torch.bfloat16, torch.float16))
    monkeypatch.setattr(launch, "_small_pairs", 0)
    block = BlockConfig(32, 32, 4, 1, operand_in_registers=True, component_gemm=True)
    monkeypatch.setattr(launch, "_select_block", lambda *_: block)
    for _ in range(2):
        results(*inputs(M=3, seed=1))
    tensors, options = inputs(M=3)
    with without_plans():
        want = results(tensors, options)
    got = results(tensors, options)
    assert "write_key_operand" in by_address
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("first", [True, False], ids=["first backward", "later backward"])
def test_hooks_of_saved_tensors_may_change_strides(first, by_address):
    """Saved outputs are [B, L, H, D] in memory; hooks that offload tensors may return them contiguous."""

    def fused(seed):
        """Return query, keys and value as slices of one projection."""
        (query, _, _, shift), _ = inputs(seed=seed)
        both = torch.cat([query, query.flip(2), -query], -1).detach().requires_grad_()
        return [*both.split(16, -1), shift], both

    def gradients(seed, hooks=False):
        (query, keys, value, shift), both = fused(seed)
        offload = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.contiguous())
        with offload if hooks else contextlib.nullcontext():
            out = attend([query, keys, value, shift], {})
        grad = torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out).to(out.dtype)
        return torch.autograd.grad(out, [both, shift], grad)

    for hooks in (True, True, False) if first else (False, False, True):
        gradients(1, hooks)
    with without_plans():
        want = gradients(0)
    for hooks in (True, False):
        by_address.clear()
        assert all(map(torch.equal, gradients(0, hooks), want))
        assert ("mixture_backward_dkdv" in by_address) == (not hooks)


@pytest.mark.skipif(not GPU, reason="TMA needs a GPU")
@pytest.mark.parametrize("dimension", [0, 1, 2], ids=["batch", "heads", "rows"])
def test_expanded_tensors_are_read_without_tma(dimension, by_address, monkeypatch):
    """Expanded tensors have strides of 0: learned queries of a batch, or the gradient of a mean over the rows."""
    monkeypatch.setattr(launch, "_small_pairs", 0)
    shape = [2, 2, 130, 64]
    shape[dimension] = 1
    g = torch.Generator().manual_seed(0)
    query, keys, value, grad = (torch.randn(shape, generator=g).to(DEVICE, DTYPE) for _ in range(4))
    shift = torch.randn(2, 2, 64, generator=g).to(DEVICE)

    def gradients(copy):
        leaves = [x.expand(2, 2, 130, 64) for x in (query, keys, value)]
        leaves = [(x.contiguous() if copy else x.detach()).requires_grad_() for x in leaves]
        out = attend([*leaves, shift], {})
        output_grad = grad.expand(out.shape)
        return [out, *torch.autograd.grad(out, leaves, output_grad.contiguous() if copy else output_grad)]

    want = gradients(copy=True)
    for _ in range(3):
        got = gradients(copy=False)
    assert "mixture_backward_dkdv" in by_address
    for actual, expected in zip(got, want, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2**-7)


def test_inference_has_a_plan_of_its_own(by_address):
    tensors, options = inputs()
    for _ in range(3):
        with torch.no_grad():
            out = attend(tensors, options)
        assert not out.requires_grad
        assert attend(tensors, options).requires_grad
    assert torch.equal(out, attend(tensors, options))
    assert len(repeated_calls._plans_by_key) == 2


def unaligned(x):
    """Return a copy of a tensor at an address that is not a multiple of 16 bytes."""
    flat = x.detach().flatten()
    return torch.cat([flat[:1], flat])[1:].view_as(x)


def test_tensors_that_are_not_aligned(by_address):
    """Kernels that were compiled for aligned tensors are not launched."""
    by_address.runs_first = True
    tensors, options = inputs()
    shifted = [unaligned(x) for x in tensors]
    assert any(x.data_ptr() % 16 for x in shifted)
    for x in shifted:
        x.requires_grad_()
    for _ in range(2):
        results(tensors, options)
        results(shifted, options)
    want = results(tensors, options)
    assert by_address
    by_address.clear()
    got = results(shifted, options)
    assert not by_address
    # On a GPU, kernels for tensors that are not aligned read them without TMA and sum in another order.
    tolerances = {"atol": 2e-2, "rtol": 2**-7} if GPU else {"atol": 0, "rtol": 0}
    for actual, expected in zip(got, want, strict=True):
        torch.testing.assert_close(actual, expected, **tolerances)


def test_plans_are_made_for_aligned_tensors_only(by_address):
    """A plan that was made for other tensors would never use TMA."""
    by_address.runs_first = True
    tensors, options = inputs()
    attend([unaligned(x).requires_grad_() for x in tensors], options)
    assert not repeated_calls._plans_by_key
    out = attend(tensors, options)
    (plan,) = repeated_calls._plans_by_key.values()
    torch.autograd.grad(out, tensors, unaligned(out))
    assert not plan.backward_plans
    results(tensors, options)
    assert len(plan.backward_plans) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_causal": 1}, "is_causal"),
        ({"is_causal": 0}, "is_causal"),
        ({"dropout_p": False}, "dropout_p"),
        ({"scale": True}, "scale"),
        ({"scale": [1.0]}, "scale"),
        ({"return_lse": 0}, "return_lse"),
        ({"return_weights": 0}, "return_weights"),
        ({"similarity": True}, "similarity"),
        ({"assignment": "soft "}, "assignment"),
        ({"max_seqlen_q": 4}, "max_seqlen_q"),
        ({"log_prior": torch.zeros(3, 2, 1, device=DEVICE)}, "log_prior"),
        ({"backend": "sdpa "}, "backend"),
    ],
    ids=str,
)
def test_errors_are_raised_after_a_hit(options, message):
    tensors, _ = inputs(N=2)
    for causal in (False, True):
        attend(tensors, {}, scale=1.0, similarity=1.0, is_causal=causal)
    with pytest.raises(ValueError, match=message):
        attend(tensors, {}, **{"scale": 1.0, "similarity": 1.0, **options})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_wrong_tensors_are_refused_after_a_hit():
    tensors, _ = inputs(N=2)
    attend(tensors, {})
    query, key, value, shift = tensors
    for changed, message in (
        ((query, key.float(), value, shift), "key has dtype"),
        ((query, key[:, :, :-1], value, shift), "value must have shape"),
        ((query, key, value, shift[:1]), "shift must have shape"),
        ((query, key, value, shift.to("meta")), "shift is on meta"),
        ((torch.nested.nested_tensor([torch.zeros(2, 3)]), key, value, shift), "nested"),
        ((query, None, value, shift), "key must be a tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(changed, {})


def test_changed_arguments_change_the_result():
    tensors, options = inputs(prior=(2, 2, 1))
    for more in ({}, {"is_causal": True}, {"is_causal": "bottom-right"}, {"scale": 0.7}, {"similarity": "dot"}):
        for _ in range(2):
            got = attend(tensors, options, **more)
        want = attend(tensors, options, **{**more, "backend": "eager"})
        # One unit in the last place of bf16, in which both are rounded.
        torch.testing.assert_close(got, want, atol=5e-3, rtol=2**-7)
    out, lse = attend(tensors, options, return_lse=True)
    assert out.shape[:-1] == lse.shape


def test_requires_grad_and_subset_of_gradients():
    tensors, options = inputs(prior=(2, 2, 1))
    want = results(tensors, options)
    out = attend(tensors, options)
    grad = torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out).to(out.dtype)
    (dvalue,) = torch.autograd.grad(out, tensors[2:3], grad)
    assert torch.equal(dvalue, want[3])
    frozen = [x.detach() for x in tensors]
    assert not attend(frozen, {}).requires_grad
    (dprior,) = torch.autograd.grad(attend(frozen, options), options["log_prior"], grad)
    assert torch.equal(dprior, want[5])


def test_second_derivatives_raise():
    tensors, options = inputs()
    for _ in range(2):
        out = attend(tensors, options)
        (dquery,) = torch.autograd.grad(out.sum(), tensors[0], create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives"):
            dquery.sum().backward()


def test_autocast_is_part_of_the_key():
    tensors, _ = inputs()
    single = [x.detach().float() for x in tensors]
    for _ in range(2):
        assert attend(single, {}).dtype == torch.float32
        with torch.autocast(DEVICE, DTYPE):
            assert attend(single, {}).dtype == DTYPE
            assert attend(tensors, {}).dtype == DTYPE


def test_handlers_and_settings_are_seen():
    tensors, options = inputs()
    repeated_calls._plans_by_key.clear()
    attend(tensors, options)
    calls = []

    def handler(call, result):
        calls.append(call)
        return "result"

    with functional.intercept_calls(handler):
        assert attend(tensors, options) == "result"
    assert len(calls) == 1
    (plan,) = repeated_calls._plans_by_key.values()
    with launch.small_call_limit(0):
        assert not plan.is_current()
        attend(tensors, options)
    assert plan not in repeated_calls._plans_by_key.values()
    repeated_calls._plans_by_key.clear()


def test_transforms_and_dispatch_modes_see_the_operator():
    tensors, options = inputs()
    attend(tensors, options)
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.grad(lambda query: attend([query, *tensors[1:]], options).sum())(tensors[0])
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        attend(tensors, options)
    assert counter.get_total_flops() > 0

    class Subclass(torch.Tensor):
        pass

    out = attend([tensors[0].detach().as_subclass(Subclass), *tensors[1:]], options)
    assert torch.equal(out.as_subclass(torch.Tensor), attend(tensors, options))


def test_activation_checkpointing(by_address):
    """The first forward compiles, its recomputation launches by address: both save the same tensors."""
    by_address.runs_first = True
    tensors, options = inputs()
    out = checkpoint.checkpoint(lambda *x: attend(x, options), *tensors, use_reentrant=False)
    grad = torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out).to(out.dtype)
    got = torch.autograd.grad(out, tensors, grad)
    with without_plans():
        want = results(tensors, options)
    assert all(map(torch.equal, got, want[1:]))


def test_number_of_plans_is_limited(monkeypatch):
    monkeypatch.setattr(repeated_calls, "MAX_PLANS", 3)
    repeated_calls._plans_by_key.clear()
    for n in range(2, 9):
        attend(inputs(N=n)[0], {})
    assert 0 < len(repeated_calls._plans_by_key) <= 3
    repeated_calls._plans_by_key.clear()


def test_layers_use_plans():
    repeated_calls._plans_by_key.clear()
    layer = mgk.Attention(32, 2, variant="smgk", backend="triton").to(DEVICE, DTYPE)
    x = torch.randn(2, 9, 32, device=DEVICE, dtype=DTYPE)
    want = layer(x)
    assert len(repeated_calls._plans_by_key) == 1
    assert torch.equal(layer(x), want)
    repeated_calls._plans_by_key.clear()
