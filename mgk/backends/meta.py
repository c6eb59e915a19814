"""Shapes only ("meta"): runs the matmuls of the algorithm on tensors of the meta device.

torch's FLOP counter can then count a model without allocating memory: 2 FLOPs per multiply-add, causal calls in full;
exponentials and the work per key are not counted.
"""

from __future__ import annotations

from torch import Tensor

from mgk._core.calls import LinearCall, MixtureCall
from mgk._core.heads import repeat_heads
from mgk._core.linear_features import key_value_sums, repeat_state


def unsupported_reason(call: MixtureCall | LinearCall) -> str | None:
    """Return why the call is not supported, or None."""
    if call.query.device.type == "meta":
        return None
    return "it computes shapes only, for tensors on the meta device"


def run_mixture(call: MixtureCall) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply query and keys (once for shifted keys, M times for independent ones), and weights and value."""
    keys = call.keys.unsqueeze(2) if call.shift is not None else call.keys
    keys, value = repeat_heads(keys, call.group), repeat_heads(call.value, call.value_group)
    weights = (call.query.unsqueeze(2) @ keys.transpose(-1, -2)).sum(2)
    return weights @ value, weights[..., 0], weights


def run_linear(call: LinearCall) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """Compute Z = Σ φ̃ vᵀ over the keys, then φ(q)·Z and φ(q)·z for each query."""
    query, key = call.feature_map(call.query), call.feature_map(call.component_keys(call.query.dtype)[:, :, 0])
    state = (key_value_sums(key, call.value), key.sum(-2))
    total, norm = repeat_state(state, query.shape[1])
    output = query @ total / (query @ norm.unsqueeze(-1))
    return output, state, query[..., :1].expand(*query.shape[:-1], call.value.shape[2])
