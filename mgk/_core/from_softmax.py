"""From a trained softmax layer to a mixture layer that computes the same and can learn from there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mgk._core.validation import fail, number, one_of
from mgk.variants import VARIANTS, Variant


def from_softmax(
    layer_class: Callable[..., Any],
    source: nn.MultiheadAttention,
    variant: str | Variant,
    num_components: int,
    is_causal: bool,
    noise: float,
    backend: str,
) -> Any:
    """See `Attention.from_softmax`."""
    if not isinstance(source, nn.MultiheadAttention):
        inside = source.named_modules() if isinstance(source, nn.Module) else ()
        parts = [name for name, each in inside if isinstance(each, nn.MultiheadAttention)]
        instead = f": convert its parts, of which the first is {parts[0]!r}" if parts else ""
        kind = f"{type(source).__module__}.{type(source).__name__}"
        fail("source", f"must be a torch.nn.MultiheadAttention, got {kind}{instead}")
    if source.bias_k is not None or source.add_zero_attn:
        fail("source", "has add_bias_kv or add_zero_attn, which mixture keys do not have")
    number("noise", noise, 0)
    target = variant if isinstance(variant, Variant) else VARIANTS[one_of("variant", variant, VARIANTS)]
    if target.similarity == "linear":
        fail("variant", "is linear: softmax attention has no exact linear form")
    if target.normalise:
        fail("variant", "normalises queries and keys, which softmax attention does not: its outputs would be others")
    if (target.similarity, target.components) != ("dot", 1):
        target = dataclasses.replace(target, similarity="between")
    layer = layer_class(
        source.embed_dim,
        source.num_heads,
        kdim=source.kdim,
        vdim=source.vdim,
        variant=target,
        num_components=num_components,
        dropout=source.dropout,
        bias=source.in_proj_bias is not None,
        is_causal=is_causal,
        backend=backend,
        device=source.out_proj.weight.device,
        dtype=source.out_proj.weight.dtype,
    )
    if source.in_proj_weight is not None:
        query, key, value = source.in_proj_weight.chunk(3)
    else:
        query, key, value = source.q_proj_weight, source.k_proj_weight, source.v_proj_weight
    biases = (None, None, None) if source.in_proj_bias is None else source.in_proj_bias.chunk(3)
    copies = (
        (layer.query, query, biases[0]),
        (layer.value, value, biases[2]),
        (layer.out, source.out_proj.weight, source.out_proj.bias),
    )
    with torch.no_grad():
        for projection, weight, bias in copies:
            projection.weight.copy_(weight)
            if bias is not None:
                projection.bias.copy_(bias)
        layer.keys.load_softmax_keys(key, biases[1], noise)
        if layer.tau is not None:
            layer.tau.zero_()
    _freeze_like(source, layer)
    return layer.train(source.training)


def _freeze_like(source: nn.MultiheadAttention, layer: Any) -> None:
    """A copy of what was frozen is frozen. What softmax attention does not have learns."""
    shared = source.in_proj_weight
    weights = (source.q_proj_weight, source.k_proj_weight, source.v_proj_weight) if shared is None else (shared,) * 3
    pairs = list(zip((layer.query, layer.keys.projection, layer.value), weights, strict=True))
    for projection, weight in [*pairs, (layer.out, source.out_proj.weight)]:
        projection.weight.requires_grad_(weight.requires_grad)
    for projection, bias in [*((each, source.in_proj_bias) for each, _ in pairs), (layer.out, source.out_proj.bias)]:
        if bias is not None:
            projection.bias.requires_grad_(bias.requires_grad)
