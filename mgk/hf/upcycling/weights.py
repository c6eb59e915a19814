"""Projections of a layer as matrices per head, and the weights of the merged layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mgk.hf.resized_heads import resize_heads
from mgk.hf.upcycling.algebra import NO_PLANES, Merge, Planes, merge_loss, merge_mean, merge_svd, select_heads
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
    counts = (layer.heads, layer.kv_heads, layer.kv_heads)
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
    requires_grad = {
        name: [parameter.requires_grad for parameter in module.get_submodule(name).parameters()]
        for name in (key_name, value_name)
    }
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
    for name, flags in requires_grad.items():
        for parameter, is_trained in zip(module.get_submodule(name).parameters(), flags, strict=True):
            parameter.requires_grad_(is_trained)
    _store(layer.projections.output, weights.output.transpose(0, 1).flatten(1), weights.output_bias)


@dataclass(frozen=True)
class _Heads:
    """Statistics of the key heads or the value heads of a layer, from which they are merged.

    Attributes:
        moment: Second moment of the stacked heads [n·D, n·D].
        weights: Importance of the directions of each head [n, D, D].
        planes: Dimensions that a rotary embedding rotates.
        method: "svd" or "mean".
    """

    moment: Tensor
    weights: Tensor
    planes: Planes
    method: str

    def merge(self, group: Sequence[int]) -> Merge:
        """Merge a group of heads."""
        moment, weights = self._select(group)
        return merge_mean(moment, weights) if self.method == "mean" else merge_svd(moment, weights, self.planes)

    def svd_loss(self, group: frozenset[int]) -> float:
        """Return the energy that an SVD of a group of heads loses."""
        return merge_loss(*self._select(sorted(group)), self.planes)

    def energy(self) -> float:
        """Return the energy of all heads, above 0."""
        return max(sum(self.merge([head]).energy for head in range(len(self.weights))), 1e-300)

    def _select(self, group: Sequence[int]) -> tuple[Tensor, Tensor]:
        return select_heads(self.moment, group, self.weights.shape[1]), self.weights[list(group)]


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
    # Rotations depend on the position, so that the mean of rotated keys is not a constant of the logits.
    has_centred_keys = not layer.planes.first
    # The mean of the values moves into the bias of the output projection.
    has_centred_values = weights.output_bias is not None
    key_moment = moments.centred_key() if has_centred_keys else moments.key
    value_moment = moments.centred_value() if has_centred_values else moments.value
    gram = weights.output.mT @ weights.output  # [H, E, E]
    keys = _Heads(key_moment, moments.query_weights(layer.kv_heads), layer.planes, method)
    values = _Heads(value_moment, gram.unflatten(0, (layer.kv_heads, -1)).sum(1), NO_PLANES, method)
    key_energy, value_energy = keys.energy(), values.energy()
    order = list(range(layer.kv_heads))
    if method == "svd":
        order = order_heads(
            layer.kv_heads,
            key_heads,
            value_heads,
            key_cost=lambda group: keys.svd_loss(group) / key_energy,
            value_cost=lambda group: values.svd_loss(group) / value_energy,
        )
    merged, key_loss, value_loss = weights, 0.0, 0.0
    if key_heads < layer.kv_heads:
        merges = [keys.merge(group) for group in _blocks(order, key_heads)]
        key_loss = sum(merge.loss for merge in merges) / key_energy
        mean = moments.key_mean if has_centred_keys and method == "svd" else None
        merged = _merge_keys(merged, order, merges, mean)
    else:
        merged = _reorder_keys(merged, order)
    if value_heads < layer.kv_heads:
        merges = [values.merge(group) for group in _blocks(order, value_heads)]
        value_loss = sum(merge.loss for merge in merges) / value_energy
        mean = moments.value_mean if has_centred_values and method == "svd" else None
        merged = _merge_values(merged, order, merges, mean)
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
    return [key_head * share + i for key_head in order for i in range(share)]


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
