"""Projections of an `Attention` layer: initialization, and application to the inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mgk._core.layer_checks import check_dtype
from mgk._core.operator_checks import check_query_keys_value
from mgk._core.precision import autocast_inputs
from mgk.rotary import Rotary


def reset_projections(layer: Any) -> None:
    """Initialize query, value and output projection of an `Attention` layer, and τ."""
    for projection in (layer.query, layer.value, layer.out):
        nn.init.xavier_uniform_(projection.weight)
        if projection.bias is not None:
            nn.init.zeros_(projection.bias)
    if layer.tau is not None:
        nn.init.ones_(layer.tau)


def project_inputs(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, positions: Tensor | None, key_positions: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Project the inputs of an `Attention` layer.

    Args:
        layer: The layer.
        query: [B, L, embed_dim].
        key: [B, S, kdim].
        value: [B, S, vdim].
        positions: Positions of the queries, [L] or [B, L]; None counts from 0.
        key_positions: Positions of the keys, [S] or [B, S]; None counts from 0.

    Returns:
        Query [B, H, L, D], keys [B, Hk, (M,) S, D] and value [B, Hv, S, D].
    """
    # Local names: attributes of a module are slow to look up.
    to_query, to_keys, to_value, rotary = layer.query, layer.keys, layer.value, layer.rotary
    check_dtype("query", query, to_query)
    check_dtype("key", key, to_keys.projection)
    check_dtype("value", value, to_value)
    (batch, queries), length = query.shape[:2], key.shape[1]
    q = to_query(query).view(batch, queries, layer.num_heads, layer.head_dim).transpose(1, 2)
    k = to_keys(key)
    v = to_value(value).view(batch, length, layer.num_kv_heads, layer.head_dim).transpose(1, 2)
    if layer.variant.normalise:
        q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
    if rotary is not None:
        q = rotary(q, _positions_or_range(positions, query))
        k = rotary(k, _positions_or_range(key_positions, key))
    q, k, v = autocast_inputs(q, k, v)
    # Only a user-supplied rotary callable or a replaced projection can return wrong shapes or dtypes.
    if not (rotary is None or isinstance(rotary, Rotary)) or not q.dtype == k.dtype == v.dtype:
        check_query_keys_value(q, k, v, to_keys.shift, to_keys.shift is not None)
    return q, k, v


def _positions_or_range(positions: Tensor | None, x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device) if positions is None else positions
