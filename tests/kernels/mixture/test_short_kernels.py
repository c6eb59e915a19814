"""Kernels of short sequences: the 2x rule, launches, the calls that they do not run, and reproducibility."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from mgk.backends import triton
from mgk.kernels.mixture import experimental, launch
from mgk.kernels.mixture.block_sizes import BlockConfig
from tests.kernels.mixture.test_kernels import case, check, gradients, make_call, truth

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float16] + ([torch.bfloat16] if GPU else [])
pytestmark = [pytest.mark.gpu] if GPU else []


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Use the kernels; without a GPU, with several tiles in each direction."""
    if not GPU:
        dkdv, other = BlockConfig(32, 16, 4, 1), BlockConfig(16, 32, 4, 1, operand_in_registers=True)
        monkeypatch.setattr(launch, "select_block", lambda key, *_: dkdv if key.pass_ in ("dkdv", "dv") else other)
    with experimental.short_kernels():
        yield


@pytest.fixture
def kernels(monkeypatch):
    """Return the names of the launched kernels."""
    names = []
    launch_kernel = launch.launch

    def recorded(spec, *args):
        names.append(spec.kernel.__name__)
        launch_kernel(spec, *args)

    monkeypatch.setattr(launch, "launch", recorded)
    return names


CASES = {
    "smgk": {"L": 33, "S": 33},
    "smgk-one-row": {"L": 1, "S": 19},
    "smgk-causal-gqa": {"B": 2, "H": 2, "Hk": 1, "causal": "top-left", "D": 24, "E": 20, "L": 20, "S": 20},
    "smgk-bottom-right": {"L": 40, "S": 21, "causal": "bottom-right"},
    "smgk-prior-per-key": {"prior": (1, 1, 2, 21), "L": 18, "S": 21},
    "smgk-padding": {"B": 2, "L": 9, "S": 135, "padding": ((0, 120), (3, 3))},
    "smgk-key-bias": {"mask_shape": (1, 1, 1, 20), "L": 20, "S": 20},
    "smgk-m3-tau-scale": {"M": 3, "H": 2, "Hk": 2, "tau_shape": (2,), "scale_shape": (1, 2, 1, 1), "L": 17, "S": 17},
    "smgk-key-heads": {"H": 2, "Hk": 1, "Hv": 2, "L": 17, "S": 17},
    "mgk-causal": {"variant": "mgk", "causal": "top-left", "L": 34, "S": 34},
    "mgk-padding-no-prior": {"variant": "mgk", "prior": False, "L": 17, "S": 17, "padding": ((2, 15),)},
}
if GPU:
    CASES |= {
        f"{variant}-{n}-{D}": {"variant": variant, "B": 2, "H": 4, "Hk": 2, "L": n, "S": n, "D": D, "E": D, **causal}
        for variant in ("smgk", "mgk")
        for n, D, causal in ((128, 64, {}), (511, 64, {"causal": "top-left"}), (300, 128, {"causal": "top-left"}))
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_two_times_rule(name, dtype, kernels):
    check(dtype, **CASES[name])
    assert "short_forward" in kernels
    assert "prepare_keys" not in kernels


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_and_keys_that_prefer_different_components(dtype):
    """All weights would underflow in the factored form: the program takes one exponential per component."""
    g = torch.Generator().manual_seed(0)
    e = torch.eye(16, dtype=torch.float64)[0]
    size = 20.0 if dtype == torch.float16 else 80.0
    x = {"query": (size * e).expand(1, 1, 3, 16), "shift": torch.stack([-4 * e, 4 * e])[None]}
    x["keys"] = size * e + 0.3 * torch.randn(1, 1, 9, 16, generator=g, dtype=torch.float64)
    x["value"] = torch.randn(1, 1, 9, 16, generator=g, dtype=torch.float64)
    rounded = {name: t.to(dtype).double() for name, t in x.items()}
    want, _ = truth(rounded, torch.float64)
    call = make_call({name: t.to(DEVICE, dtype).contiguous().requires_grad_() for name, t in x.items()})
    out, lse, _ = triton.run_mixture(call)
    torch.testing.assert_close(out.detach().cpu().double(), want, atol=0.05, rtol=0.05)
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize(("variant", "Hv"), [("smgk", 1), ("mgk", 1), ("smgk", 2)])
def test_number_of_launches(variant, Hv, kernels):
    """One forward and two backward; with different numbers of key and value heads, the sums take one more."""
    leaves, options = case(variant, L=9, S=9, H=2, Hk=1, Hv=Hv)
    x = {name: t.to(DEVICE, DTYPES[-1]) for name, t in leaves.items()}
    weights = torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9)
    gradients(lambda x: triton.run_mixture(make_call(x, **options))[:2], x, weights)
    sums = ["add_parts"] if Hv == 2 else []
    assert kernels == ["short_forward", "mixture_backward_dq", "mixture_backward_dkdv", *sums]
    kernels.clear()
    triton.run_mixture(make_call({**x, "query": x["query"].repeat(1, 1, 2, 1)}, **options))
    assert kernels == ["short_forward"]


def test_results_are_bitwise_reproducible():
    leaves, options = case(L=40, S=40, B=2, causal="top-left")
    x = {name: t.to(DEVICE, DTYPES[-1]) for name, t in leaves.items()}
    weights = torch.randn(2, 1, 40, 16), torch.randn(2, 1, 40)
    repeats = range(1000 if GPU else 2)
    runs = [gradients(lambda x: triton.run_mixture(make_call(x, **options))[:2], x, weights) for _ in repeats]
    for run in runs[1:]:
        for name, t in run.items():
            assert torch.equal(t, runs[0][name]), name


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"hard": True, "prior": False}, torch.float16),
        ({"mask_shape": (1, 1, 5, 5)}, torch.float16),
        ({"scale_shape": (1, 1, 2, 1)}, torch.float16),
        ({"lengths": ((2, 2), (3, 3))}, torch.float16),
        ({}, torch.float32),
    ],
    ids=str,
)
def test_other_calls_take_the_ordinary_kernels(options, dtype, kernels):
    leaves, options = case(L=5, S=5, **options)
    triton.run_mixture(make_call({name: t.to(DEVICE, dtype).requires_grad_() for name, t in leaves.items()}, **options))
    assert kernels
    assert "short_forward" not in kernels


def test_long_sequences_take_the_ordinary_kernels(kernels, monkeypatch):
    monkeypatch.setattr(experimental, "MAX_SHORT_LENGTH", 5)
    for length, short in ((5, True), (6, False)):
        leaves, options = case(L=4, S=length)
        x = {name: t.to(DEVICE, torch.float16).requires_grad_() for name, t in leaves.items()}
        kernels.clear()
        triton.run_mixture(make_call(x, **options))
        assert ("short_forward" in kernels) == short


def test_environment_variable_selects_the_kernels():
    command = "from mgk.kernels.mixture import experimental; print(experimental.short_kernels.enabled)"
    environment = {"MGK_SHORT_KERNELS": "1", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize("shape", [{"L": 530, "S": 9}, {"B": 33, "L": 2, "S": 3}], ids=["tiles", "batch entries"])
def test_all_parts_are_added(shape):
    """Partial gradients of more tiles, and of more batch entries, than are added at once."""
    leaves, options = case(**shape)
    x = {name: t.to(DEVICE, torch.float16) for name, t in leaves.items()}
    B, L = shape.get("B", 1), shape["L"]
    weights = torch.randn(B, 1, L, 16), torch.randn(B, 1, L)

    def run():
        return gradients(lambda x: triton.run_mixture(make_call(x, **options))[:2], x, weights)

    got = run()
    with experimental.short_kernels(False):
        want = run()
    for name in ("shift", "log_prior"):
        torch.testing.assert_close(got[name], want[name], atol=2e-2, rtol=5e-3)
