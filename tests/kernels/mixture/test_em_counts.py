"""Compare the EM counts of the kernels with those of the equations."""

import pytest
import torch

pytest.importorskip("triton")

from mgk._core.calls import Packed
from mgk._core.em import statistics_by_equations
from mgk.backends import em_statistics, triton
from mgk.kernels.mixture import em_counts
from tests.kernels.mixture.test_kernels import DEVICE, GPU, case, make_call

pytestmark = [pytest.mark.gpu] if GPU else []

CASES = {
    "shifted": {"B": 2, "L": 70, "S": 70},
    "causal-gqa": {"H": 4, "Hk": 2, "B": 2, "causal": "top-left", "L": 80, "S": 67, "M": 3},
    "bottom-right": {"L": 21, "S": 90, "causal": "bottom-right", "prior": (1, 1, 2, 90)},
    "padding": {"B": 2, "padding": ((0, 30), (5, 37))},
    "mask": {"B": 2, "H": 2, "Hk": 1, "mask_shape": (1, 2, 37, 37), "bool_mask": True, "causal": "top-left"},
    "bias": {"H": 2, "Hk": 1, "mask_shape": (1, 2, 37, 37)},
    "far-apart": {"std": 40.0, "L": 66, "S": 66},
    "unequal": {"M": 3, "scale_shape": (1, 1, 3, 1), "tau_shape": (1,)},
    "independent": {"variant": "mgk", "B": 2, "H": 2, "Hk": 1, "causal": "top-left", "L": 70, "S": 66},
    "independent-scale-tau": {
        "variant": "mgk",
        "M": 3,
        "Hk": 2,
        "H": 2,
        "tau_shape": (2,),
        "scale_shape": (1, 2, 1, 1),
    },
}


def compare(call, counted=None):
    assert triton.mixture_unsupported_reason(call) is None
    got = em_statistics(call, counted, with_spread=False)
    want = statistics_by_equations(call, counted)
    torch.testing.assert_close(got.pairs, want.pairs)
    torch.testing.assert_close(got.count, want.count, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_counts_match_the_equations(name, poisoned):
    leaves, options = case(**CASES[name])
    compare(make_call({n: t.to(DEVICE, torch.float32) for n, t in leaves.items()}, **options))


@pytest.mark.parametrize("name", CASES)
def test_counts_over_selected_queries(name, poisoned):
    leaves, options = case(**CASES[name])
    call = make_call({n: t.to(DEVICE, torch.float32) for n, t in leaves.items()}, **options)
    batch, queries = call.query.shape[0], call.query.shape[2]
    compare(call, torch.arange(batch * queries, device=DEVICE).reshape(batch, queries) % 3 > 0)


def test_counts_over_selected_queries_with_a_key_mask_per_head(poisoned):
    leaves, options = case(H=4, Hk=2, mask_shape=(1, 4, 1, 37), bool_mask=True)
    compare(
        make_call({n: t.to(DEVICE, torch.float32) for n, t in leaves.items()}, **options),
        torch.arange(37, device=DEVICE)[None] < 20,
    )


@pytest.mark.parametrize("mask_value", [-torch.inf, torch.finfo(torch.float32).min])
def test_masked_keys_have_no_counts(mask_value, poisoned):
    leaves, options = case(mask_shape=(1, 1, 1, 37))
    leaves["attn_mask"][..., 30:] = mask_value
    call = make_call({n: t.to(DEVICE, torch.float32) for n, t in leaves.items()}, **options)
    compare(call)
    assert (em_statistics(call, with_spread=False).count[..., 30:] == 0).all()


def test_counts_of_packed_sequences(poisoned):
    leaves, _ = case(L=58, S=58, H=2)
    cu = torch.tensor([0, 20, 21, 58], dtype=torch.int32, device=DEVICE)
    x = {name: t.to(DEVICE, torch.float32) for name, t in leaves.items()}
    compare(make_call(x, causal="top-left", packed=Packed(cu, cu, None, None)))


def test_key_with_zero_priors_has_no_counts(poisoned):
    leaves, _ = case(prior=(1, 1, 2, 37))
    leaves["log_prior"][0, 0, :, 3] = leaves["log_prior"][0, 0, 0, 5] = -torch.inf
    call = make_call({name: t.to(DEVICE, torch.float32) for name, t in leaves.items()})
    compare(call)
    assert (em_statistics(call, with_spread=False).count[0, 0, :, 3] == 0).all()


def test_operator_is_registered():
    leaves, _ = case()
    x = {name: t.to(DEVICE, torch.float32) for name, t in leaves.items()}
    arguments = (x["query"], x["keys"], x["shift"], x["log_prior"], *(None,) * 5, 0.25, 1.0, 1, 37, 37)
    torch.library.opcheck(em_counts.component_counts, arguments, test_utils=("test_schema", "test_faketensor"))
