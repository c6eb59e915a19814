"""Least-squares fit of the output projections of merged layers to the outputs of the original layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.pytorch_utils import Conv1D

from mgk._core.eval_mode import eval_mode
from mgk.hf.upcycling.layers import MergeableLayer
from mgk.hf.upcycling.moments import TokenMask

# Ridge penalty, times width / tokens. On all-MiniLM-L6-v2 with 2,873 tokens a third of it is worse.
RIDGE = 2.0


@dataclass
class _Sums:
    """Sums over the tokens of a text, from which the change of an output projection is solved."""

    gram: Tensor  # Σ c cᵀ [width, width], c: output of the merged attention, and 1 if there is a bias
    product: Tensor  # Σ c eᵀ [width, out], e: difference of the outputs


@torch.no_grad()
def refit_outputs(
    teacher: PreTrainedModel,
    original: Sequence[MergeableLayer],
    merged: Sequence[MergeableLayer],
    batches: Iterable[Mapping[str, Any]],
    tokens: int,
) -> None:
    """Fit the output projections of merged layers, in place.

    The merged attention runs on the inputs of the original layer. A ridge penalty on the change of the weights keeps
    the fit close to the merge where the text has few tokens.

    Args:
        teacher: The original model.
        original: Its layers.
        merged: The same layers of the merged model.
        batches: Calibration text.
        tokens: Number of its tokens.
    """
    sums: dict[str, _Sums] = {}
    padding = TokenMask()
    hooks = []
    for layer, copy in zip(original, merged, strict=True):
        hooks += _add_hooks(layer, copy, sums, padding)
    try:
        with ExitStack() as stack:
            for module in (teacher, *(layer.module for layer in merged)):
                stack.enter_context(eval_mode(module))  # without dropout
            for batch in batches:
                padding.mask = batch.get("attention_mask")
                teacher(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    for layer in merged:
        _solve(layer.projections.output, sums[layer.name], tokens)


def _add_hooks(layer: MergeableLayer, merged: MergeableLayer, sums: dict[str, _Sums], padding: TokenMask) -> list[Any]:
    """Add hooks to an original layer that run the merged attention on the same inputs."""
    inputs: list[Any] = []
    contexts: list[Tensor] = []

    def store_inputs(module: nn.Module, args: Any, kwargs: Any) -> None:
        # Keys of earlier tokens are part of a cache, which the merged layer must not change.
        inputs[:] = [tuple(map(_without_cache, args)), {name: _without_cache(value) for name, value in kwargs.items()}]

    def compare(module: nn.Module, args: Any, output: Tensor) -> None:
        contexts.clear()
        hook = merged.projections.output.register_forward_pre_hook(lambda _, values: contexts.append(values[0]))
        try:
            result = merged.module(*inputs[0], **inputs[1])
        finally:
            hook.remove()
        # The output projection of BERT is not part of the layer, which then returns the context.
        context = contexts[0] if contexts else result[0]
        add(context, output)

    def add(context: Tensor, output: Tensor) -> None:
        weight, bias = _weight(merged.projections.output), merged.projections.output.bias
        difference = output - context @ weight.T - (0 if bias is None else bias)  # type: ignore[operator]
        rows, errors = padding.select(context), padding.select(difference)
        if bias is not None:
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        gram, product = rows.T @ rows, rows.T @ errors
        if layer.name in sums:
            sums[layer.name].gram += gram
            sums[layer.name].product += product
        else:
            sums[layer.name] = _Sums(gram, product)

    return [
        layer.module.register_forward_pre_hook(store_inputs, with_kwargs=True),
        layer.projections.output.register_forward_hook(compare),
    ]


def _without_cache(value: Any) -> Any:
    return None if isinstance(value, Cache) else value


def _weight(module: nn.Module) -> Tensor:
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.T if isinstance(module, Conv1D) else weight


def _solve(module: nn.Module, sums: _Sums, tokens: int) -> None:
    """Add the ridge solution to the weights of an output projection."""
    width = _weight(module).shape[1]
    penalty = torch.zeros(len(sums.gram), dtype=torch.float64, device=sums.gram.device)
    penalty[:width] = RIDGE * width / tokens * sums.gram.diagonal()[:width].mean()
    change = torch.linalg.solve(sums.gram + torch.diag(penalty.clamp(min=1e-12)), sums.product)
    _weight(module).add_(change[:width].T)
    if module.bias is not None:
        module.bias.add_(change[width])  # type: ignore[operator]
