"""Test the operators with different numbers of key and value heads: every backend against the oracle."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import mgk
from mgk._core.calls import mixture_call
from mgk.backends import em_statistics
from tests.support import oracle
from tests.support.operator_cases import HEADS, Shape, arguments, compare, draw

MIXTURE = {
    "causal": Shape(L=7, S=7, D=5, E=3, causal="top-left", prior="position"),
    "scale-lse": Shape(L=3, S=9, D=3, E=4, M=3, causal="bottom-right", prior="batch", scale="component", lse=True),
    "mask": Shape(B=1, L=4, S=6, D=3, E=4, mask="float", prior="component"),
    "packed": Shape(B=1, L=9, S=9, D=3, E=4, packed=((4, 5), (4, 5)), causal="top-left"),
}
LINEAR = {
    "cross": Shape(L=4, S=7, D=3, E=5, mask="key"),
    "causal": Shape(L=9, S=9, D=3, E=5, causal="top-left", prior="position"),
    "packed": Shape(B=1, L=9, S=9, D=3, E=4, packed=((4, 5), (4, 5)), causal="top-left"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("name", MIXTURE)
@pytest.mark.parametrize("op", ["mgk", "smgk"])
@pytest.mark.parametrize(("backend", "assignment"), [("eager", "soft"), ("eager", "hard"), ("sdpa", "soft")])
def test_mixture(backend, assignment, op, name, heads, dtype, poisoned):
    if backend == "sdpa" and name == "mask":
        pytest.skip("sdpa has no gradient for attn_mask")
    if dtype == torch.float32 and name not in ("causal", "scale-lse"):
        pytest.skip("rounding is compared for two shapes")
    compare(op, backend, replace(MIXTURE[name], **heads), dtype, {"similarity": "per-head", "assignment": assignment})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_softmax(heads, dtype, poisoned):
    for shape in (Shape(M=1, L=7, S=7, prior=None, causal="top-left"), Shape(M=1, L=3, S=8, prior=None, mask="bool")):
        compare("mgk", "plain", replace(shape, **heads), dtype, {"similarity": "dot", "assignment": "soft"})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("op", ["mlk", "smlk"])
@pytest.mark.parametrize("backend", ["eager", "chunked"])
def test_linear(backend, op, name, heads, dtype, poisoned):
    compare(op, backend, replace(LINEAR[name], **heads), dtype, {"feature_map": "elu"})


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("feature_map", ["elu", "favor"])
@pytest.mark.parametrize("backend", ["eager", "chunked"])
def test_linear_state(backend, feature_map, heads):
    """The state of the first keys continues to the output of all keys; z has the key heads, Z those of the pairs."""
    shape = Shape(L=9, S=9, D=4, E=5, causal="top-left", prior="position", **heads)
    inputs, _ = draw(shape, "mlk", torch.float64, 0)
    query, keys, value, prior = (inputs[name] for name in ("query", "keys", "value", "log_prior"))
    features = mgk.features.FAVOR(4) if feature_map == "favor" else feature_map
    options = {"feature_map": features, "is_causal": True, "backend": backend}
    full, (total, norm, *_) = mgk.mlk_attention(query, keys, value, log_prior=prior, return_state=True, **options)
    if feature_map == "elu":
        for actual, expected in zip((total, norm), oracle.state(keys, value, log_prior=prior), strict=True):
            torch.testing.assert_close(actual, expected)
    state, parts = None, []
    for part in (slice(0, 4), slice(4, 9)):
        out, state = mgk.mlk_attention(
            query[:, :, part],
            keys[:, :, :, part],
            value[:, :, part],
            log_prior=prior[..., part],
            initial_state=state,
            return_state=True,
            **options,
        )
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 2), full)
    with pytest.raises(ValueError, match="initial_state"):
        mgk.mlk_attention(query, keys, value, initial_state=(total[:, :-1], norm), **(options | {"feature_map": "elu"}))


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_em_statistics(heads):
    """Counts belong to key heads: the number of value heads does not change them."""
    inputs, _ = draw(Shape(prior="position", **heads), "mgk", torch.float64, 0)
    query, keys, value, prior = (inputs[name] for name in ("query", "keys", "value", "log_prior"))
    statistics = em_statistics(mixture_call(query, keys, value, log_prior=prior))
    gamma = oracle.responsibilities(query, keys, log_prior=prior).sum(3)  # [B, H, M, S]
    expected = gamma.unflatten(1, (heads["Hk"], -1)).sum(2)
    torch.testing.assert_close(statistics.count, expected)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_flops(heads):
    """Shared heads change the projections, not the attention; linear attention has one sum per pair of heads."""
    shape = Shape(B=1, L=6, S=8, D=4, E=3, prior=None, **heads)
    H, pairs = heads["H"], {"4-1-4": 4, "4-2-4": 4, "4-4-1": 4, "12-4-6": 12, "4-4-2": 4}
    expected = {"smgk": 2 * H * 6 * 8 * (4 + 3), "mgk": 2 * H * 6 * 8 * (2 * 4 + 3)}
    sums = pairs["-".join(str(n) for n in heads.values())]
    expected["mlk"] = 2 * 4 * (sums * 8 * 3 + H * 6 * (3 + 1))
    for op, flops in expected.items():
        inputs, constants = draw(shape, op, torch.float32, 0)
        options = {"feature_map": "elu", "similarity": "gaussian", "assignment": "soft"}
        args, kwargs = arguments(op, shape, {n: x.float().to("meta") for n, x in inputs.items()}, constants, options)
        with FlopCounterMode(display=False) as counter:
            getattr(mgk, f"{op}_attention")(*args, **kwargs)
        assert counter.get_total_flops() == flops, op


@pytest.mark.parametrize(("key_heads", "value_heads", "name"), [(3, 4, "key"), (4, 3, "value"), (2, 0, "value")])
def test_heads_that_do_not_divide_the_query_heads(key_heads, value_heads, name):
    key, value = torch.zeros(1, key_heads, 5, 2), torch.zeros(1, value_heads, 5, 2)
    with pytest.raises(ValueError, match=f"^{name} has {key_heads if name == 'key' else value_heads} heads"):
        mgk.smgk_attention(torch.zeros(1, 4, 5, 2), key, value, torch.zeros(key_heads, 2, 2))
