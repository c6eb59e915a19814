"""Projections of a layer as matrices per head, and the weights of the merged layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mgk.hf.shared_heads import resize_heads
from mgk.hf.upcycling.algebra import NO_PLANES, Merge, merge_loss, merge_mean, merge_svd, stack
from mgk.hf.upcycling.grouping import order_heads
from mgk.hf.upcycling.layers import MergeableLayer
from mgk.hf.upcycling.moments import Moments

METHODS = ("svd", "mean")


@dataclass(frozen=True)
class HeadWeights:
    """Weights and biases of the projections, fp64. n: key heads, and value heads.

    Attributes:
        query: [H, D, in].
        query_bias: [H, D], or None.
        key: [n, D, in].
        key_bias: [n, D], or None.
        value: [n, E, in].
        value_bias: [n, E], or None.
        output: [H, out, E].
        output_bias: [out], or None.
    """

    query: Tensor
    query_bias: Tensor | None
    key: Tensor
    key_bias: Tensor | None
    value: Tensor
    value_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None


@dataclass(frozen=True)
class MergedLayer:
    """Weights of a merged layer, and the share of the energy of keys and values that the merge loses."""

    weights: HeadWeights
    key_loss: float
    value_loss: float


def read_weights(layer: MergeableLayer) -> HeadWeights:
    """Return the weights of a layer's projections."""
    parts: list[tuple[Tensor, Tensor | None]] = []
    if layer.projections.is_fused:
        weight, bias = _matrix(layer.projections.query)
        assert bias is not None
        parts = list(zip(weight.split(layer.widths), bias.split(layer.widths), strict=True))
    else:
        parts = [
            _matrix(module) for module in (layer.projections.query, layer.projections.key, layer.projections.value)
        ]
    counts = (layer.heads, layer.units, layer.units)
    tensors: list[Any] = [
        None if tensor is None else tensor.unflatten(0, (count, -1))
        for (weight, bias), count in zip(parts, counts, strict=True)
        for tensor in (weight, bias)
    ]
    output, output_bias = _matrix(layer.projections.output)
    by_head = output.unflatten(1, (layer.heads, -1)).transpose(0, 1)
    query, query_bias, key, key_bias, value, value_bias = tensors
    return HeadWeights(query, query_bias, key, key_bias, value, value_bias, by_head, output_bias)


def write_weights(layer: MergeableLayer, weights: HeadWeights) -> None:
    """Give a layer new weights; its key and value projections are replaced by smaller ones."""
    module = layer.module
    key_heads, value_heads = len(weights.key), len(weights.value)
    names = {id(child): name for name, child in module.named_modules()}
    key_name, value_name = (names[id(part)] for part in (layer.projections.key, layer.projections.value))
    was_training = [parameter.requires_grad for parameter in layer.projections.key.parameters()]
    resize_heads(module, key_heads, value_heads, layer.key_dim, layer.value_dim)
    flat = {
        "query": (weights.query.flatten(0, 1), _flatten(weights.query_bias)),
        "key": (weights.key.flatten(0, 1), _flatten(weights.key_bias)),
        "value": (weights.value.flatten(0, 1), _flatten(weights.value_bias)),
    }
    new_key, new_value = module.get_submodule(key_name), module.get_submodule(value_name)
    if layer.projections.is_fused:
        biases = [bias for _, bias in flat.values() if bias is not None]
        _store(new_key, torch.cat([weight for weight, _ in flat.values()]), torch.cat(biases))
    else:
        _store(layer.projections.query, *flat["query"])
        _store(new_key, *flat["key"])
        _store(new_value, *flat["value"])
    for part in {new_key, new_value}:
        for parameter, requires_grad in zip(part.parameters(), was_training, strict=False):
            parameter.requires_grad_(requires_grad)
    _store(layer.projections.output, weights.output.transpose(0, 1).flatten(1), weights.output_bias)


def merge_heads(
    layer: MergeableLayer, weights: HeadWeights, moments: Moments, key_heads: int, value_heads: int, method: str = "svd"
) -> MergedLayer:
    """Merge the heads of a layer.

    Args:
        layer: The layer.
        weights: Its weights.
        moments: Its statistics over the calibration text.
        key_heads: Number of key heads after the merge; divides the present number.
        value_heads: Number of value heads after the merge; divides the present number.
        method: "svd", or "mean" for the mean of neighbouring heads.
    """
    planes = layer.planes
    has_bias = weights.output_bias is not None
    key_moment = moments.key if planes.first else moments.centred_key()
    value_moment = moments.centred_value() if has_bias else moments.value
    key_weights = moments.query_weights(layer.units)
    gram = weights.output.mT @ weights.output  # [H, E, E]
    value_weights = gram.unflatten(0, (layer.units, -1)).sum(1)

    def merge(kind: str, group: Sequence[int]) -> Merge:
        is_key = kind == "key"
        moment, importance = (key_moment, key_weights) if is_key else (value_moment, value_weights)
        part = stack(moment, group, importance.shape[1])
        if method == "mean":
            return merge_mean(part, importance[list(group)])
        return merge_svd(part, importance[list(group)], planes if is_key else NO_PLANES)

    def cost(kind: str, group: frozenset[int]) -> float:
        is_key = kind == "key"
        moment, importance = (key_moment, key_weights) if is_key else (value_moment, value_weights)
        heads = sorted(group)
        part = stack(moment, heads, importance.shape[1])
        loss = merge_loss(part, importance[heads], planes if is_key else NO_PLANES)
        return loss / totals[kind]

    totals = {
        kind: max(sum(merge(kind, [unit]).energy for unit in range(layer.units)), 1e-300) for kind in ("key", "value")
    }
    order = list(range(layer.units))
    if method == "svd":
        order = order_heads(
            layer.units, key_heads, value_heads, lambda group: cost("key", group), lambda group: cost("value", group)
        )
    merged, key_loss, value_loss = weights, 0.0, 0.0
    if key_heads < layer.units:
        merges = [merge("key", group) for group in _blocks(order, key_heads)]
        key_loss = sum(item.loss for item in merges) / totals["key"]
        centre = not planes.first and method == "svd"
        merged = _merge_keys(merged, order, merges, moments.key_mean if centre else None)
    else:
        merged = _reorder_keys(merged, order)
    if value_heads < layer.units:
        merges = [merge("value", group) for group in _blocks(order, value_heads)]
        value_loss = sum(item.loss for item in merges) / totals["value"]
        merged = _merge_values(merged, order, merges, moments.value_mean if has_bias and method == "svd" else None)
    else:
        merged = _reorder_values(merged, order)
    return MergedLayer(merged, key_loss, value_loss)


def _blocks(order: Sequence[int], count: int) -> list[list[int]]:
    size = len(order) // count
    return [list(order[start : start + size]) for start in range(0, len(order), size)]


def _merge_keys(weights: HeadWeights, order: list[int], merges: Sequence[Merge], mean: Tensor | None) -> HeadWeights:
    """Compress the keys, and move the factors A_u into the queries; queries get the new order."""
    reordered = _reorder_keys(weights, order)
    bias = reordered.key_bias
    if bias is not None and mean is not None:
        # Softmax ignores what is added to all keys; keys with mean 0 have the smallest rounding errors.
        bias = bias - mean.unflatten(0, (len(order), -1))[order]
    compress = torch.stack([merge.compress for merge in merges])  # [groups, D, g·D]
    expand = torch.cat([merge.expand for merge in merges])  # [n, D, D]
    groups = len(compress)
    share = len(reordered.query) // len(order)
    factors = expand.repeat_interleave(share, 0).mT  # [H, D, D]
    return replace(
        reordered,
        query=factors @ reordered.query,
        query_bias=_apply(factors, reordered.query_bias),
        key=compress @ reordered.key.reshape(groups, -1, reordered.key.shape[-1]),
        key_bias=None if bias is None else _apply(compress, bias.reshape(groups, -1)),
    )


def _merge_values(weights: HeadWeights, order: list[int], merges: Sequence[Merge], mean: Tensor | None) -> HeadWeights:
    """Compress the values, move the factors A_u into the output projection, and the means into its bias."""
    reordered = _reorder_values(weights, order)
    compress = torch.stack([merge.compress for merge in merges])
    expand = torch.cat([merge.expand for merge in merges])
    groups = len(compress)
    share = len(reordered.output) // len(order)
    factors = expand.repeat_interleave(share, 0)  # [H, E, E]
    output, bias, output_bias = reordered.output @ factors, reordered.value_bias, reordered.output_bias
    if mean is not None:
        assert output_bias is not None
        means = mean.unflatten(0, (len(order), -1))[order]  # [n, E]
        # Attention weights sum to 1, so that the mean of a value head is a constant of the output.
        constant = torch.einsum("hoe,he->o", reordered.output, means.repeat_interleave(share, 0))
        if bias is None:
            compressed = _apply(compress, means.reshape(groups, -1)).repeat_interleave(len(output) // groups, 0)
            constant = constant - torch.einsum("hoe,he->o", output, compressed)
        else:
            bias = bias - means
        output_bias = output_bias + constant
    return replace(
        reordered,
        value=compress @ reordered.value.reshape(groups, -1, reordered.value.shape[-1]),
        value_bias=None if bias is None else _apply(compress, bias.reshape(groups, -1)),
        output=output,
        output_bias=output_bias,
    )


def _reorder_keys(weights: HeadWeights, order: list[int]) -> HeadWeights:
    heads = _query_order(order, len(weights.query))
    query_bias = None if weights.query_bias is None else weights.query_bias[heads]
    key_bias = None if weights.key_bias is None else weights.key_bias[order]
    return replace(
        weights, query=weights.query[heads], query_bias=query_bias, key=weights.key[order], key_bias=key_bias
    )


def _reorder_values(weights: HeadWeights, order: list[int]) -> HeadWeights:
    heads = _query_order(order, len(weights.output))
    value_bias = None if weights.value_bias is None else weights.value_bias[order]
    return replace(weights, value=weights.value[order], value_bias=value_bias, output=weights.output[heads])


def _query_order(order: Sequence[int], heads: int) -> list[int]:
    """Return the query heads in the order of their key heads."""
    share = heads // len(order)
    return [unit * share + i for unit in order for i in range(share)]


def _apply(matrices: Tensor, vectors: Tensor | None) -> Tensor:
    """Multiply matrices [n, a, b] by vectors [n, b]; None stays None."""
    return None if vectors is None else (matrices @ vectors.unsqueeze(-1)).squeeze(-1)  # type: ignore[return-value]


def _flatten(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.flatten()


def _matrix(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the weight [out, in] and the bias of a projection, fp64 on the CPU."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    weight = weight.detach().double().cpu()
    return weight.T if isinstance(module, Conv1D) else weight, None if bias is None else bias.detach().double().cpu()


@torch.no_grad()
def _store(module: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    module.weight.copy_(weight.T if isinstance(module, Conv1D) else weight)  # type: ignore[operator]
    if bias is not None:
        module.bias.copy_(bias)  # type: ignore[operator]
