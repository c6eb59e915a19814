"""Test the mixture kernels with different numbers of key and value heads by the 2x rule."""

import pytest
import torch

pytest.importorskip("triton")

import mgk
from mgk.backends import em_statistics, triton
from mgk.kernels.mixture import launch
from tests.kernels.mixture.test_decode import check as check_decode
from tests.kernels.mixture.test_kernels import DEVICE, DTYPES, GPU, case, check, make_call, small_blocks, truth  # noqa: F401
from tests.support.operator_cases import HEADS

pytestmark = [pytest.mark.gpu] if GPU else []

ONE_KEY, TWO_KEYS, ONE_VALUE, _, TWO_VALUES = HEADS.values()
UNALIGNED = {"H": 6, "Hk": 2, "Hv": 3}  # numbers that do not divide each other, as 12, 4, 6
CASES = {
    "smgk-one-key": {**ONE_KEY, "prior": (1, 1, 2, 20), "causal": "top-left", "L": 20, "S": 20},
    "smgk-two-keys-packed": {**TWO_KEYS, "L": 12, "S": 12, "causal": "top-left", "lengths": ((9, 9), (3, 3))},
    "smgk-one-value": {**ONE_VALUE, "L": 9, "S": 18, "tau_shape": (4,), "scale_shape": (1, 4, 1, 1)},
    "smgk-unaligned": {**UNALIGNED, "L": 5, "S": 18, "D": 12, "E": 20, "prior": (1, 2, 2, 18)},
    "smgk-unequal": {**TWO_VALUES, "L": 9, "S": 21, "scale_shape": (1, 4, 2, 1), "tau_shape": (4,)},
    "smgk-hard": {**ONE_KEY, "L": 9, "S": 9, "hard": True, "prior": False, "causal": "top-left"},
    "mgk-unaligned": {**UNALIGNED, "variant": "mgk", "L": 5, "S": 9, "prior": (1, 2, 2, 9)},
    "mgk-wide-mask": {**ONE_KEY, "variant": "mgk", "D": 72, "E": 72, "L": 5, "S": 9, "mask_shape": (1, 4, 5, 9)},
}
DECODING = {
    "one-key": {**ONE_KEY, "S": 70},
    "two-keys-independent": {**TWO_KEYS, "variant": "mgk", "S": 40, "E": 20},
    "two-values-hard": {**TWO_VALUES, "S": 90, "B": 2, "hard": True, "prior": False},
    "unaligned": {**UNALIGNED, "S": 40, "D": 12, "prior": (1, 2, 2, 40)},
    "unaligned-split": {**UNALIGNED, "L": 2, "S": 40},
    "two-keys-mask": {**TWO_KEYS, "L": 3, "S": 40, "mask_shape": (1, 4, 3, 40), "bool_mask": True},
    "many-heads": {"H": 24, "Hk": 1, "Hv": 8, "S": 40},
}


@pytest.mark.parametrize("name", CASES)
def test_two_times_rule(name, poisoned):
    check(torch.float32, **CASES[name])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_two_times_rule_in_half_precision(dtype, poisoned):
    check(dtype, **CASES["smgk-hard"])


@pytest.mark.parametrize("small", [False, True], ids=["fast", "both"])
def test_fast_paths(small, monkeypatch):
    """Force the forms that bf16 takes on a GPU, in two launches or one, on some tiles beyond their range."""
    monkeypatch.setattr(launch, "BOUNDED", DTYPES)
    monkeypatch.setattr(launch, "_small_pairs", 1 << 20 if small else 0)
    check(torch.float32, **ONE_KEY, L=20, S=20, M=3, uneven=40.0)


@pytest.mark.parametrize("name", DECODING)
def test_decoding(name, monkeypatch, poisoned):
    check_decode(DECODING[name], torch.float32, monkeypatch)


@pytest.mark.parametrize("heads", [ONE_KEY, TWO_VALUES], ids=["4-1-4", "4-4-2"])
def test_large_inference_in_chunks(heads, monkeypatch):
    """A forward without gradients that runs in chunks of batch entries equals the one in a single launch."""
    leaves, options = case(B=3, L=18, S=9, **heads)
    call = make_call({n: t.to(DEVICE, torch.float32) for n, t in leaves.items()}, **options)
    expected = triton.run_mixture(call)[0]
    monkeypatch.setattr(launch, "key_heads_per_chunk", lambda *_: 1)
    assert torch.equal(triton.run_mixture(call)[0], expected)


@pytest.mark.parametrize("heads", [ONE_KEY, UNALIGNED], ids=["4-1-4", "6-2-3"])
def test_em_counts(heads):
    leaves, _ = case(L=5, S=9, **heads)
    call = make_call({n: t.to(DEVICE, torch.float32) for n, t in leaves.items()})
    actual, expected = (em_statistics(call, with_spread=spread).count for spread in (False, True))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_dropout(monkeypatch):
    """The weights of every query head are dropped separately, also where they share keys."""
    leaves, _ = case(L=8, S=16, E=16, **ONE_KEY)
    x = {name: t.to(DEVICE, torch.float32).requires_grad_() for name, t in leaves.items()}
    eye = {**x, "value": torch.eye(16, device=DEVICE).expand(1, 4, 16, 16)}
    torch.manual_seed(3)
    dropped = triton.run_mixture(make_call(eye, dropout_p=0.5))[0]
    assert not torch.equal(dropped[:, 0] != 0, dropped[:, 1] != 0)
    torch.manual_seed(3)
    out = triton.run_mixture(make_call(x, dropout_p=0.5))[0]
    expected = dropped @ x["value"]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    g = torch.randn_like(out)
    actual, expected = (torch.autograd.grad(y, x["value"], g)[0] for y in (out, expected))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_softmax_with_shared_keys_runs_the_kernels():
    """SDPA would need copies of the keys or the values."""
    query, keys, value = torch.randn(1, 4, 5, 8), torch.randn(1, 1, 1, 5, 8), torch.randn(1, 4, 5, 8)
    query, keys, value = (x.to(DEVICE) for x in (query, keys, value))
    choice = mgk.explain_backend("mgk_attention", query, keys, value, similarity="dot")
    assert choice.backend == "triton"
    assert "copies" in choice.reasons["plain"]
