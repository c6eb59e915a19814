"""Means and second moments of the queries, keys and values of attention layers over a calibration text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mgk._core.eval_mode import eval_mode
from mgk.hf.upcycling.layers import MergeableLayer

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Moments:
    """Statistics of a layer over the tokens of a text, fp64, before rotary embeddings.

    Attributes:
        tokens: Number of tokens.
        query: Second moment of each query head [H, D, D].
        key_mean: Mean of the key heads [n·D].
        key: Second moment of the key heads [n·D, n·D].
        value_mean: Mean of the value heads [n·E].
        value: Second moment of the value heads [n·E, n·E].
    """

    tokens: int
    query: Tensor
    key_mean: Tensor
    key: Tensor
    value_mean: Tensor
    value: Tensor

    def centred_key(self) -> Tensor:
        """Return the covariance of the keys: softmax ignores what is added to all keys."""
        return self.key - torch.outer(self.key_mean, self.key_mean)

    def centred_value(self) -> Tensor:
        """Return the covariance of the values."""
        return self.value - torch.outer(self.value_mean, self.value_mean)

    def query_weights(self, kv_heads: int) -> Tensor:
        """Return the second moment of the queries of each key head [n, D, D], summed over its query heads."""
        return self.query.unflatten(0, (kv_heads, -1)).sum(1)


@dataclass
class TokenMask:
    """Padding mask of the batch on which a model runs, for hooks that leave out the padding.

    Attributes:
        mask: attention_mask [B, L] of the batch, or None.
    """

    mask: Tensor | None = None

    def select(self, x: Tensor) -> Tensor:
        """Return the rows of x [B, L, width] that are not padding, [N, width] in fp64."""
        if self.mask is not None and self.mask.shape == x.shape[:-1]:
            return x[self.mask.bool()].double()
        return x.reshape(-1, x.shape[-1]).double()


@dataclass
class _Sums:
    """Sums over tokens; the attributes are those of `Moments`, times the number of tokens."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_mean: Tensor
    value_mean: Tensor
    tokens: int = 0


def collect_moments(
    model: PreTrainedModel, layers: Sequence[MergeableLayer], batches: Iterable[Batch]
) -> dict[str, Moments]:
    """Return the statistics of layers over batches, by name; padding is excluded.

    Args:
        model: The model, not merged.
        layers: Its attention layers.
        batches: Inputs of the model; attention_mask marks padding by 0.
    """
    sums = {layer.name: _zeros(layer) for layer in layers}
    padding = TokenMask()
    hooks = []
    for layer in layers:
        modules = (layer.projections.query, layer.projections.key, layer.projections.value)
        if layer.projections.is_fused:
            hooks.append(modules[0].register_forward_hook(_fused_hook(layer, sums[layer.name], padding)))
            continue
        for part, module in zip(("query", "key", "value"), modules, strict=True):
            hooks.append(module.register_forward_hook(_hook(part, layer, sums[layer.name], padding)))
    try:
        with eval_mode(model):
            for batch in batches:
                padding.mask = batch.get("attention_mask")
                model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: _finish(total) for name, total in sums.items()}


def _zeros(layer: MergeableLayer) -> _Sums:
    factory: dict[str, Any] = {"dtype": torch.float64, "device": next(layer.projections.key.parameters()).device}
    _, keys, values = layer.widths
    return _Sums(
        torch.zeros(layer.heads, layer.key_dim, layer.key_dim, **factory),
        torch.zeros(keys, keys, **factory),
        torch.zeros(values, values, **factory),
        torch.zeros(keys, **factory),
        torch.zeros(values, **factory),
    )


def _finish(sums: _Sums) -> Moments:
    count = max(sums.tokens, 1)
    parts = (sums.query, sums.key_mean, sums.key, sums.value_mean, sums.value)
    return Moments(sums.tokens, *((part / count).cpu() for part in parts))


def _hook(part: str, layer: MergeableLayer, sums: _Sums, padding: TokenMask) -> Any:
    def add(module: nn.Module, args: Any, output: Tensor) -> None:
        _add(part, layer, sums, padding.select(output))

    return add


def _fused_hook(layer: MergeableLayer, sums: _Sums, padding: TokenMask) -> Any:
    def add(module: nn.Module, args: Any, output: Tensor) -> None:
        parts = padding.select(output).split(layer.widths, -1)
        for part, tokens in zip(("query", "key", "value"), parts, strict=True):
            _add(part, layer, sums, tokens)

    return add


def _add(part: str, layer: MergeableLayer, sums: _Sums, tokens: Tensor) -> None:
    """Add the outputs [N, width] of a projection."""
    if part == "query":
        heads = tokens.unflatten(-1, (layer.heads, -1))
        sums.query += torch.einsum("nhi,nhj->hij", heads, heads)
        return
    if part == "key":
        sums.tokens += len(tokens)
    moment, mean = getattr(sums, part), getattr(sums, f"{part}_mean")
    moment += tokens.T @ tokens
    mean += tokens.sum(0)
