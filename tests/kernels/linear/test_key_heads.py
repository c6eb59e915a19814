"""Test the linear kernels with different numbers of key and value heads against the oracle and the chunked backend."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

import mgk
from mgk.kernels.linear import ops
from tests.kernels.linear.test_linear import DEVICE, GPU, on_this_device, small_blocks  # noqa: F401
from tests.support import operator_cases
from tests.support.operator_cases import HEADS, Shape, draw

pytestmark = [pytest.mark.gpu] if GPU else []

ONE_KEY, TWO_KEYS, ONE_VALUE, _, TWO_VALUES = HEADS.values()
UNALIGNED = {"H": 6, "Hk": 2, "Hv": 3}  # numbers that do not divide each other, as 12, 4, 6
CASES = {
    "one-key-causal": ("smlk", Shape(B=1, L=34, S=34, D=8, E=8, causal="top-left", prior="position", **ONE_KEY)),
    "one-value": ("mlk", Shape(B=1, L=5, S=9, D=8, E=16, mask="key", **ONE_VALUE)),
    "unaligned": ("smlk", Shape(B=1, L=5, S=5, D=8, E=8, causal="top-left", prior="position", **UNALIGNED)),
    "two-values-packed": (
        "mlk",
        Shape(B=1, L=12, S=12, D=8, E=8, packed=((9, 3),) * 2, causal="top-left", **TWO_VALUES),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_two_times_rule(name, on_this_device, poisoned, monkeypatch):  # noqa: F811
    monkeypatch.setitem(operator_cases.DRAWS, torch.float32, 1)  # the interpreter is slow
    op, shape = CASES[name]
    operator_cases.compare(op, "triton", shape, torch.float32, {"feature_map": "elu"})


def tensors(shape):
    inputs, _ = draw(shape, "smlk", torch.float32, 0)
    return {n: inputs[n].to(DEVICE, torch.float32) for n in ("query", "key", "value", "shift")}


@pytest.mark.parametrize("heads", [ONE_KEY, UNALIGNED, TWO_VALUES], ids=["4-1-4", "6-2-3", "4-4-2"])
def test_states(heads, poisoned, monkeypatch):
    """States, their gradients and single tokens equal those of the chunked backend."""
    x = tensors(Shape(B=1, L=6, S=6, D=8, E=5, **heads))
    results, states, launches = [], [], []
    launch_decode = ops.launch_decode
    monkeypatch.setattr(ops, "launch_decode", lambda *args: launches.append(args) or launch_decode(*args))
    for backend in ("triton", "chunked"):
        leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
        parts = [{n: t if n == "shift" else t[:, :, i] for n, t in leaves.items()} for i in (slice(0, 4), slice(4, 5))]
        options = {"is_causal": True, "return_state": True, "backend": backend}
        _, state = mgk.smlk_attention(**parts[0], **options)
        out, state = mgk.smlk_attention(**parts[1], initial_state=state, **options)
        loss = out.square().sum() + sum(part.square().sum() for part in state)
        results.append([out, *state, *torch.autograd.grad(loss, list(leaves.values()))])
        with torch.no_grad():
            token = {n: t if n == "shift" else t[:, :, 5:] for n, t in x.items()}
            out, state = mgk.smlk_attention(**token, initial_state=tuple(t.detach() for t in state), **options)
        states.append((out, *state))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(*states, atol=1e-4, rtol=1e-4)
    assert len(launches) == 1


def test_flops_equal_those_of_the_meta_device():
    shape = Shape(B=1, L=3, S=3, D=8, E=8, **UNALIGNED)
    counts = []
    for device in (DEVICE, "meta"):
        x = {n: t.to(device) for n, t in tensors(shape).items()}
        with FlopCounterMode(display=False) as counter:
            mgk.smlk_attention(**x, is_causal=True, backend="triton" if device == DEVICE else "auto")
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
