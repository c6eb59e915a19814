"""fp16 forward of soft shifted keys: one exponential per pair, relative to the running maximum of s_ij + max_r c_jr."""

import pytest
import torch

pytest.importorskip("triton")

from mgk.kernels.mixture import launch_config
from mgk.kernels.mixture.tile import FALLBACK, GENERAL, RUNNING
from tests.kernels.mixture.test_kernels import GPU, case, check, make_call, small_blocks, triton  # noqa: F401

pytestmark = [pytest.mark.gpu] if GPU else []

# Large inputs and shifts, and priors of very different size, take some or all tiles out of the range of the fast form.
STRESS = {
    "large": {"std": 4.0, "L": 21, "S": 67},
    "uneven": {"uneven": 20.0, "H": 2, "Hk": 2, "L": 40, "causal": "top-left"},
    "large-shifts": {"shift_std": 4.0, "M": 3, "causal": "top-left"},
    "huge-shifts": {"shift_std": 20.0, "L": 21},
    "priors": {"prior_std": 12.0, "prior": (1, 1, 4, 37), "M": 4},
    "priors-and-shifts": {"prior_std": 40.0, "prior": (1, 1, 2, 37), "shift_std": 4.0},
    "padding": {"B": 3, "L": 9, "S": 150, "padding": ((0, 120), (128, 140), (3, 3))},
    "padding-large": {"B": 2, "std": 4.0, "L": 21, "S": 50, "padding": ((0, 30), (20, 50)), "M": 3},
    "bool-mask": {"M": 4, "mask_shape": (1, 1, 37, 37), "bool_mask": True, "std": 3.0},
    "packed": {"M": 3, "L": 58, "S": 58, "std": 3.0, "causal": "top-left", "lengths": ((20, 20), (1, 1), (37, 37))},
    "m1": {"M": 1, "std": 4.0},
    "scale-tau": {"tau_shape": (1,), "scale_shape": (1, 1, 1, 1), "std": 3.0},
}


@pytest.mark.parametrize("name", STRESS)
def test_two_times_rule(name, poisoned):
    check(torch.float16, **STRESS[name])


@pytest.mark.parametrize("masked", [60.0, 300.0])
def test_masked_keys_do_not_count(masked):
    """Scores of masked keys may exceed the maximum of the others by any amount."""
    leaves, options = case(L=21, S=50, padding=((0, 30),))
    x = {name: t.to("cuda" if GPU else "cpu", torch.float16) for name, t in leaves.items()}
    want = triton.run_mixture(make_call(x, **options))
    x["keys"][:, :, 30:] = masked
    x["value"][:, :, 30:] = 1e4
    got = triton.run_mixture(make_call(x, **options))
    torch.testing.assert_close(got[0], want[0], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(got[1], want[1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("shape", "path"), [
    ({}, RUNNING), ({"M": 4}, RUNNING), ({"mask_shape": (1, 1, 37, 37), "bool_mask": True}, RUNNING),
    ({"M": 1}, GENERAL),
    ({"mask_shape": (1, 1, 37, 37)}, GENERAL), ({"hard": True, "prior": False}, GENERAL), ({"variant": "mgk"}, GENERAL),
    ({"scale_shape": (1, 1, 2, 1)}, GENERAL),
])  # fmt: skip
def test_calls_with_one_exponential(shape, path, monkeypatch):
    paths, forward_config = [], launch_config.forward_config

    def record(*args):
        config = forward_config(*args)
        paths.append(config.attend.paths)
        return config

    monkeypatch.setattr("mgk.kernels.mixture.launch.forward_config", record)
    leaves, options = case(**shape)
    x = {name: t.to("cuda" if GPU else "cpu", torch.float16) for name, t in leaves.items()}
    triton.run_mixture(make_call(x, **options))
    assert paths == [(path.value,) if path == GENERAL else (path.value, FALLBACK.value)]
