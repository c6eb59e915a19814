"""On the meta device nothing is computed: an operator with the right shapes, and the count of what the algorithm needs.

The products that have to be formed are counted, 2 FLOPs a multiply-add, as torch counts its own attention: causal
calls in full, exponentials and the work per key not at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mgk.arguments import LinearCall, MixtureCall


def refuses(call: MixtureCall | LinearCall) -> str | None:
    return None if call.query.device.type == "meta" else "it computes nothing: it is for tensors on the meta device"


@torch.library.custom_op("mgk::counted_mixture", mutates_args=())
def counted_mixture(query: Tensor, value: Tensor, products: int) -> Tensor:
    """Attention with so many products query·key for each pair: M for independent keys, 1 for shifted ones."""
    raise RuntimeError("mgk::counted_mixture is for the meta device")


@torch.library.custom_op("mgk::counted_linear", mutates_args=())
def counted_linear(query: Tensor, value: Tensor, features: int) -> Tensor:
    """Linear attention with so many features."""
    raise RuntimeError("mgk::counted_linear is for the meta device")


@counted_mixture.register_fake
@counted_linear.register_fake
def _(query: Tensor, value: Tensor, count: int) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


@register_flop_formula(torch.ops.mgk.counted_mixture)
def mixture_flops(query: torch.Size, value: torch.Size, products: int, *args: Any, **kwargs: Any) -> int:
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * value[2] * (products * width + value[3])


@register_flop_formula(torch.ops.mgk.counted_linear)
def linear_flops(query: torch.Size, value: torch.Size, features: int, *args: Any, **kwargs: Any) -> int:
    """Σ φ̃ vᵀ over the keys, then φ(q)·Z and φ(q)·z for each query."""
    batch, heads, queries, _ = query
    key_heads, keys, width = value[1:]
    return 2 * batch * features * (key_heads * keys * width + heads * queries * (width + 1))


def run_mixture(call: MixtureCall) -> tuple[Tensor, Tensor, Tensor]:
    query, value = call.query, call.value
    output = counted_mixture(query, value, call.components if call.shift is None else 1)
    return output, query[..., 0], query.new_empty(*query.shape[:-1], value.shape[2])


def run_linear(call: LinearCall) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    query, value = call.query, call.value
    features = call.feature_map(query[..., :1, :]).shape[-1]
    output = counted_linear(query, value, features)
    state = value.new_empty(*value.shape[:2], features, value.shape[3])
    return output, (state, state[..., 0]), query.new_empty(*query.shape[:-1], value.shape[2])
