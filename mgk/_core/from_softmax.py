"""Conversion of a trained torch.nn.MultiheadAttention to a mixture layer with the same outputs."""

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
    *,
    num_components: int,
    is_causal: bool,
    noise: float,
    backend: str,
) -> Any:
    """Convert a layer to `layer_class`; see `Attention.from_softmax` for the arguments."""
    if not isinstance(source, nn.MultiheadAttention):
        modules = source.named_modules() if isinstance(source, nn.Module) else ()
        layers = [name for name, module in modules if isinstance(module, nn.MultiheadAttention)]
        advice = f": convert its layers, of which the first is {layers[0]!r}" if layers else ""
        class_name = f"{type(source).__module__}.{type(source).__name__}"
        fail("source", f"must be a torch.nn.MultiheadAttention, got {class_name}{advice}")
    if source.bias_k is not None or source.add_zero_attn:
        fail("source", "has add_bias_kv or add_zero_attn, which mixture keys do not support")
    number("noise", noise, 0)
    target = variant if isinstance(variant, Variant) else VARIANTS[one_of("variant", variant, VARIANTS)]
    if target.similarity == "linear":
        fail("variant", "must not be linear: softmax attention has no exact linear form")
    if target.normalise:
        fail("variant", "must not normalize queries and keys: softmax attention does not, and outputs would change")
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
    """Freeze copies of frozen weights; parameters that softmax attention does not have stay trainable."""
    shared = source.in_proj_weight
    weights = (source.q_proj_weight, source.k_proj_weight, source.v_proj_weight) if shared is None else (shared,) * 3
    projections = (layer.query, layer.keys.projection, layer.value, layer.out)
    for projection, weight in zip(projections, (*weights, source.out_proj.weight), strict=True):
        projection.weight.requires_grad_(weight.requires_grad)
    for projection, bias in zip(projections, [source.in_proj_bias] * 3 + [source.out_proj.bias], strict=True):
        if bias is not None:
            projection.bias.requires_grad_(bias.requires_grad)
