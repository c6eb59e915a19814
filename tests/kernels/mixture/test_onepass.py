"""The one-pass backward: the 2x rule, tiles beyond the factored form's range, and the calls that it does not run."""

import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from mgk.backends import triton
from mgk.kernels.mixture import experimental, launch, tile
from mgk.kernels.mixture.block_config import BlockConfig
from tests.kernels.mixture import test_call_plan as plans
from tests.kernels.mixture.test_block_sizes import UNEVEN, flagged
from tests.kernels.mixture.test_call_plan import by_address  # noqa: F401
from tests.kernels.mixture.test_kernels import case, check, gradients, make_call
from tests.support import interpreted_bf16

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float16, torch.bfloat16]
PREPARE, FINISH, BOTH = (path.value for path in (tile.PREPARE, tile.FINISH, tile.BOTH))
ONE_PASS = [
    ("mixture_backward_dq", (PREPARE,)), ("mixture_backward_dkdv", (BOTH,)), ("mixture_backward_dq", (FINISH,)),
    ("add_parts", (None,)),
]  # fmt: skip
pytestmark = [pytest.mark.gpu] if GPU else []


@pytest.fixture(autouse=True)
def one_pass(monkeypatch):
    """Use the kernel for all calls that it supports; without a GPU, with several tiles in each direction."""
    monkeypatch.setattr(launch, "_small_pairs", 0)
    if not GPU:
        interpreted_bf16.enable(monkeypatch)
        keys, other = BlockConfig(32, 16, 4, 1), BlockConfig(16, 32, 4, 1, operand_in_registers=True)
        by_keys = ("dkdv", "dv", "onepass")
        monkeypatch.setattr(launch, "_select_block", lambda key, *_: keys if key.pass_ in by_keys else other)
    with experimental.one_pass_backward():
        yield


@pytest.fixture
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def launches(monkeypatch):
    """Return the kernels of the backward pass that are launched, with their paths."""
    kernels = []
    launch_kernel = launch.launch

    def recorded(spec, *args):
        if spec.kernel.__name__ not in ("prepare_keys", "mixture_forward"):
            kernels.append((spec.kernel.__name__, spec.paths))
        launch_kernel(spec, *args)

    monkeypatch.setattr(launch, "launch", recorded)
    return kernels


def attend(x, options):
    return triton.run_mixture(make_call(x, **options))[:2]


def all_gradients(dtype, seed=0, **shape):
    leaves, options = case(seed=seed, **shape)
    x = {name: t.to(DEVICE, dtype) for name, t in leaves.items()}
    g = torch.Generator().manual_seed(1)
    B, H, L, E = *x["query"].shape[:3], x["value"].shape[3]
    weights = torch.randn(B, H, L, E, generator=g), 0.3 * torch.randn(B, H, L, generator=g)
    return gradients(lambda x: attend(x, options), x, weights)


CASES = {
    "plain": {"D": 32, "E": 32, "L": 65, "S": 33},
    "one-row": {"L": 1, "S": 19},
    "causal-gqa": {"B": 2, "H": 4, "Hk": 2, "causal": "top-left", "D": 24, "E": 20},
    "bottom-right": {"L": 21, "S": 50, "causal": "bottom-right"},
    "empty-rows": {"L": 50, "S": 21, "causal": "bottom-right"},
    "m1": {"M": 1, "causal": "top-left"},
    "m3-no-prior": {"M": 3, "prior": False},
    "m4-tau-scale": {"M": 4, "H": 2, "Hk": 2, "tau_shape": (2,), "scale_shape": (1, 2, 1, 1)},
    "prior-per-key": {"prior": (2, 1, 2, 21), "B": 2, "L": 18, "S": 21},
    "padding": {"B": 3, "L": 9, "S": 270, "padding": ((0, 120), (128, 260), (3, 3))},
    "key-bias": {"B": 2, "mask_shape": (2, 1, 1, 37)},
}
if GPU:
    CASES |= {
        f"{n}-{M}-{causal}": {"B": 2, "H": 4, "Hk": 2, "M": M, "L": n, "S": n, "D": 32, "E": 32, "causal": causal}
        for n, M, causal in ((512, 2, None), (511, 2, "top-left"), (300, 4, "top-left"), (257, 1, None))
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_two_times_rule(name, dtype, launches):
    check(dtype, **CASES[name])
    assert launches
    assert launches == ONE_PASS * (len(launches) // len(ONE_PASS))


@pytest.mark.skipif(GPU, reason="test_two_times_rule has the blocks of the tables, which use it")
@pytest.mark.parametrize("name", ["plain", "causal-gqa", "m3-no-prior", "m4-tau-scale", "padding"])
def test_two_times_rule_with_component_gemm(name, launches, monkeypatch):
    keys, other = BlockConfig(32, 16, 4, 1, component_gemm=True), BlockConfig(16, 32, 4, 1)
    monkeypatch.setattr(launch, "_select_block", lambda key, *_: keys if key.pass_ == "onepass" else other)
    check(torch.bfloat16, **CASES[name])
    assert launches == ONE_PASS * (len(launches) // len(ONE_PASS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M", [2, 4])
def test_tiles_beyond_the_range_of_the_factored_form(M, dtype, monkeypatch):
    """Some programs take the factored form, some the general one, and both add to the same rows."""
    shape = {"D": 32, "E": 32, "M": M, **UNEVEN}
    leaves, options = case(**shape)
    with experimental.one_pass_backward(False):
        fractions = flagged(leaves, options, dtype, monkeypatch)
        want = all_gradients(dtype, **shape)
    assert 0 < fractions["mixture_backward_dkdv"] < 1
    check(dtype, **shape)
    for name, got in all_gradients(dtype, **shape).items():
        assert torch.isfinite(got).all(), name
        difference = (got.float() - want[name].float()).norm() / want[name].float().norm()
        assert difference <= 4 * torch.finfo(dtype).eps, (name, difference)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_numbers_in_masked_keys_change_nothing(dtype, launches):
    """Tiles with large keys take the general form."""
    leaves, options = case(B=2, L=20, S=150, padding=((0, 130), (20, 40)))
    masked = ~options["attn_mask"].view(2, 1, 150, 1).expand_as(leaves["keys"])
    weights = torch.randn(2, 1, 20, 16), torch.randn(2, 1, 20)
    results = []
    for size in (0.0, 3e4):
        x = {name: torch.where(masked, size, t) if name in ("keys", "value") else t for name, t in leaves.items()}
        x = {name: t.to(DEVICE, dtype) for name, t in x.items()}
        with np.errstate(all="ignore"):
            results.append(gradients(lambda x: attend(x, options), x, weights))
    assert launches == 2 * ONE_PASS
    for name, want in results[0].items():
        difference = (results[1][name].float() - want.float()).norm() / want.float().norm()
        assert difference <= 4 * torch.finfo(dtype).eps, (name, difference)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"variant": "mgk"}, torch.float16),
        ({"hard": True, "prior": False}, torch.float16),
        ({"mask_shape": (1, 1, 5, 5)}, torch.float16),
        ({"scale_shape": (1, 1, 2, 1)}, torch.float16),
        ({"lengths": ((2, 2), (3, 3))}, torch.float16),
        ({"H": 2, "Hk": 1, "Hv": 2}, torch.float16),
        ({"M": 5}, torch.float16),
        ({"D": 33}, torch.float16),
        ({"E": 33}, torch.float16),
        ({}, torch.float32),
    ],
    ids=str,
)
def test_other_calls_take_two_passes(options, dtype, launches):
    all_gradients(dtype, **{"L": 5, "S": 5, **options})
    assert launches
    assert not {path for _, paths in launches for path in paths} & {PREPARE, FINISH}


def test_small_calls_take_two_passes(launches, monkeypatch):
    monkeypatch.setattr(launch, "_small_pairs", 25)
    for length, one_pass in ((5, False), (6, True)):
        launches.clear()
        all_gradients(torch.float16, L=length, S=length)
        assert (launches == ONE_PASS) == one_pass


def test_deterministic_algorithms_take_two_passes(launches, deterministic):
    shape = {"L": 33, "S": 33, "H": 2}
    first = all_gradients(DTYPES[-1], **shape)
    assert launches
    assert not {path for _, paths in launches for path in paths} & {PREPARE, FINISH}
    for _ in range(100 if GPU else 1):
        for name, t in all_gradients(DTYPES[-1], **shape).items():
            assert torch.equal(t, first[name]), name


def test_default_is_off():
    command = "from mgk.kernels.mixture import experimental; print(experimental.one_pass_allowed())"
    for variables, want in (({}, False), ({"MGK_ONE_PASS_BACKWARD": "1"}, True)):
        environment = {"PYTHONPATH": ":".join(sys.path), **variables}
        done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == str(want), done.stderr


@pytest.mark.parametrize("prior", [(2, 2, 1), (1, 2, 2, 17)], ids=["prior per head", "prior per key"])
def test_repeated_calls(prior, by_address, monkeypatch):  # noqa: F811
    """Launches by address give the results of ordinary launches; the two forms have configurations of their own."""
    if not GPU:
        monkeypatch.setattr(launch, "_select_block", lambda *_: BlockConfig(32, 16, 4, 1))
    for _ in range(2):
        plans.results(*plans.inputs(prior=prior, seed=1))  # the second call stores compiled kernels in the launches
    tensors, options = plans.inputs(prior=prior)
    with plans.without_plans():
        want = plans.results(tensors, options)
    by_address.clear()
    got = plans.results(tensors, options)
    backward = ["mixture_backward_dq", "mixture_backward_dkdv", "mixture_backward_dq", "add_parts"]
    assert by_address == ["prepare_keys", "mixture_forward", *backward]
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, atol=1e-3 if GPU else 0, rtol=1e-3 if GPU else 0)


def test_deterministic_algorithms_after_the_forward_of_a_repeated_call(by_address, launches):  # noqa: F811
    """The mode at the time of the backward pass decides."""
    by_address.runs_first = True
    tensors, options = plans.inputs()
    for _ in range(3):
        by_address.clear()
        plans.results(tensors, options)
    assert "mixture_backward_dkdv" in by_address
    out = plans.attend(tensors, options)
    by_address.clear()
    launches.clear()
    torch.use_deterministic_algorithms(True)
    try:
        torch.autograd.grad(out, tensors, torch.ones(out.shape, device=DEVICE, dtype=out.dtype))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not by_address
    assert launches
    assert not {path for _, paths in launches for path in paths} & {PREPARE, FINISH}
