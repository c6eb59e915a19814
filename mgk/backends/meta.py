"""On the meta device nothing is computed: the products that the algorithm needs are formed in shape alone.

So parameters and FLOPs of a model can be counted without memory, by torch's own counter: 2 a multiply-add, causal calls
in full, exponentials and the work per key not at all.
"""

from __future__ import annotations

from torch import Tensor

from mgk._core.calls import LinearCall, MixtureCall
from mgk._core.masks import repeat_heads


def refuses(call: MixtureCall | LinearCall) -> str | None:
    return None if call.query.device.type == "meta" else "it computes nothing: it is for tensors on the meta device"


def run_mixture(call: MixtureCall) -> tuple[Tensor, Tensor, Tensor]:
    """One product query·key for each pair where keys are shifted, M where they are independent; then one with value."""
    keys = call.keys.unsqueeze(2) if call.shift is not None else call.keys
    keys, value = repeat_heads(keys, call.group), repeat_heads(call.value, call.group)
    weights = (call.query.unsqueeze(2) @ keys.transpose(-1, -2)).sum(2)
    return weights @ value, weights[..., 0], weights


def run_linear(call: LinearCall) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """Σ φ̃ vᵀ over the keys, then φ(q)·Z and φ(q)·z for each query."""
    query, key = call.feature_map(call.query), call.feature_map(call.component_keys(call.query.dtype)[:, :, 0])
    total = key.transpose(-1, -2) @ call.value
    state = (total, total[..., 0])
    total, norm = (repeat_heads(x, call.group) for x in state)
    output = query @ total / (query @ norm.unsqueeze(-1))
    return output, state, query[..., :1].expand(*query.shape[:-1], call.value.shape[2])
