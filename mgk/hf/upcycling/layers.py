"""Attention layers that can be merged: their projections, and how queries and keys depend on the position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mgk._core.eval_mode import eval_mode
from mgk._core.validation import fail
from mgk.hf.attention_interface import replace_layer_attention
from mgk.hf.mixture_keys import UNSUPPORTED
from mgk.hf.resized_heads import Projections, find_projections
from mgk.hf.upcycling.algebra import NO_PLANES, Planes

PROBE = "mgk_upcycling_probe"
TOLERANCE = 1e-3  # relative; that of bf16 is larger


@dataclass(frozen=True)
class MergeableLayer:
    """An attention layer, before its heads are merged.

    Attributes:
        name: Name of the layer in model.base_model.
        module: The layer.
        projections: Its projections.
        heads: Number of query heads H.
        kv_heads: Number of key heads, and of value heads; H/kv_heads query heads share a key and a value.
        key_dim: Dimension D of a key.
        value_dim: Dimension E of a value.
        planes: Dimensions of queries and keys that a rotary embedding rotates.
        fixed_keys: Reason why the keys cannot be merged, or "".
        is_cached: Whether generation caches its keys and values; it does not in an encoder with a decoder.
    """

    name: str
    module: nn.Module
    projections: Projections
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    planes: Planes
    fixed_keys: str
    is_cached: bool = True

    @property
    def widths(self) -> tuple[int, int, int]:
        """Numbers of outputs of the query, key and value projections."""
        return self.heads * self.key_dim, self.kv_heads * self.key_dim, self.kv_heads * self.value_dim


@dataclass
class _Call:
    """Tensors of an attention call, and those that its projections returned."""

    query: Tensor
    key: Tensor
    value: Tensor
    context: Tensor
    projected: dict[str, Tensor]
    output_input: Tensor | None = None


def find_layers(model: PreTrainedModel, batch: Mapping[str, Any]) -> list[MergeableLayer]:
    """Return the layers whose heads can be merged, in the order of the modules.

    Args:
        model: A Transformers model.
        batch: Inputs of the model, with sequences of at least two tokens.

    Raises:
        ValueError: The model has no layer that uses the AttentionInterface, or one that cannot be merged.
    """
    parents = {child: module for module in model.base_model.modules() for child in module.children()}
    calls = _record_calls(model, batch, parents)
    if not calls:
        fail("model", f"is a {type(model).__name__}, none of whose layers uses Transformers' AttentionInterface")
    names = {module: name for name, module in model.base_model.named_modules()}
    uncached = set(model.get_encoder().modules()) if model.config.is_encoder_decoder else set()
    layers = [
        _describe_layer(names[module], module, parents.get(module), calls[module])
        for module in names
        if module in calls
    ]
    return [replace(layer, is_cached=layer.module not in uncached) for layer in layers]


def _record_calls(
    model: PreTrainedModel, batch: Mapping[str, Any], parents: Mapping[nn.Module, nn.Module]
) -> dict[nn.Module, _Call]:
    """Run the model once with random attention outputs, and return the last call of every attention layer."""
    calls: dict[nn.Module, _Call] = {}
    projected: dict[nn.Module, Tensor] = {}
    generator = torch.Generator().manual_seed(0)

    def probe(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **extras: Any
    ) -> tuple[Tensor, None]:
        for name, feature in UNSUPPORTED.items():
            if extras.get(name) is not None:
                fail("model", f"has {feature} ({name}) in its {type(module).__name__}, which cannot be upcycled")
        # Merging changes the order of the heads.
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4 and attention_mask.shape[1] > 1:
            fail("model", f"has masks that differ between the heads of its {type(module).__name__}")
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        context = torch.randn(shape, generator=generator).to(query)
        projections = find_projections(module, parents.get(module))
        tensors = {}
        if projections is not None:
            for name in ("query", "key", "value"):
                tensors[name] = projected[getattr(projections, name)]
        calls[module] = _Call(query, key, value, context, tensors)
        return context, None

    def store_output(module: nn.Module, args: Any, output: Tensor) -> None:
        projected[module] = output

    def store_input(module: nn.Module, args: Any) -> None:
        for attention, call in calls.items():
            projections = find_projections(attention, parents.get(attention))
            if projections is not None and projections.output is module:
                call.output_input = args[0]

    hooks = []
    for module in model.base_model.modules():
        projections = find_projections(module, parents.get(module))
        if projections is not None:
            hooks += [
                item.register_forward_hook(store_output)
                for item in {projections.query, projections.key, projections.value}
            ]
            hooks.append(projections.output.register_forward_pre_hook(store_input))
    try:
        # In training mode, layer dropout would leave layers out.
        with replace_layer_attention(model, PROBE, probe), eval_mode(model):
            model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _describe_layer(name: str, module: nn.Module, parent: nn.Module | None, call: _Call) -> MergeableLayer:
    """Compare the tensors of a call with those of the projections, and return the layer."""
    projections = find_projections(module, parent)
    kind = type(module).__name__
    if projections is None:
        # Linear layers of other libraries, and of torch.ao.quantization, are not instances of nn.Linear.
        if any("quant" in type(child).__module__ for child in module.modules()):
            fail("model", f"is quantized in its {kind}: upcycle it before quantizing it")
        fail("model", f"has a {kind} without separate query, key, value and output projections that can be resized")
    heads, kv_heads, key_dim, value_dim = call.query.shape[1], call.key.shape[1], call.key.shape[3], call.value.shape[3]
    if call.value.shape[1] != kv_heads:
        fail(
            "model",
            f"has {kv_heads} key heads and {call.value.shape[1]} value heads in a {kind}: upcycle the original model",
        )
    tensors = call.projected
    if projections.is_fused:
        widths = (heads * key_dim, kv_heads * key_dim, kv_heads * value_dim)
        tensors = dict(zip(("query", "key", "value"), tensors["query"].split(widths, -1), strict=True))
    query, key, value = (
        _by_head(tensors[part], count) for part, count in (("query", heads), ("key", kv_heads), ("value", kv_heads))
    )
    expected = call.context.reshape(*call.context.shape[:2], -1)
    context = call.output_input
    is_context = context is not None and context.shape == expected.shape and _is_equal(context, expected)
    if not is_context or not _is_equal(value, call.value):
        fail("model", f"has a {kind} that changes values or attention outputs between its projections")
    planes = _rotated_planes(key, call.key)
    fixed = ""
    if planes is None or _rotated_planes(_rescaled(query, call.query), call.query, planes) is None:
        planes, fixed = NO_PLANES, f"{kind} normalizes or otherwise changes queries or keys after their projections"
    return MergeableLayer(name, module, projections, heads, kv_heads, key_dim, value_dim, planes, fixed)


def _by_head(tensor: Tensor, heads: int) -> Tensor:
    """Reshape [B, L, heads · D] to [B, heads, L, D]."""
    return tensor.unflatten(-1, (heads, -1)).transpose(1, 2)


def _rescaled(raw: Tensor, used: Tensor) -> Tensor:
    """Scale projections to the norm of the tensors that the attention receives: some layers scale their queries."""
    return raw * (used.float().norm() / raw.float().norm().clamp(min=1e-30)).to(raw.dtype)


def _is_equal(actual: Tensor, expected: Tensor) -> bool:
    tolerance = max(TOLERANCE, 4 * torch.finfo(expected.dtype).eps)
    return bool((actual - expected).float().norm() <= tolerance * expected.float().norm())


def _rotated_planes(raw: Tensor, used: Tensor, planes: Planes | None = None) -> Planes | None:
    """Return the planes in which `used` is `raw` rotated by an angle per position, or None if it is not.

    Args:
        raw: Projected queries or keys [B, heads, L, D].
        used: Queries or keys of the attention [B, heads, L, D].
        planes: Planes to test. Default: those of the usual rotary embeddings, on all or the first dimensions.
    """
    dim = raw.shape[-1]
    if raw.shape != used.shape:
        return None
    candidates = [planes] if planes is not None else [NO_PLANES, *_candidates(dim)]
    for candidate in candidates:
        free = candidate.free(dim)
        if free and not _is_equal(raw[..., free], used[..., free]):
            continue
        if not candidate.first or _rotates(raw, used, candidate):
            return candidate
    return None


def _candidates(dim: int) -> Iterator[Planes]:
    for rotated in range(dim - dim % 2, 0, -2):
        half = rotated // 2
        yield Planes(tuple(range(half)), tuple(range(half, rotated)))
        yield Planes(tuple(range(0, rotated, 2)), tuple(range(1, rotated, 2)))


def _rotates(raw: Tensor, used: Tensor, planes: Planes) -> bool:
    """Return whether all heads are rotated in these planes by the same angle, up to one positive factor."""
    first, second = list(planes.first), list(planes.second)
    before = torch.complex(raw[..., first].double(), raw[..., second].double())
    after = torch.complex(used[..., first].double(), used[..., second].double())
    # Least squares over the heads: one complex factor per batch, position and plane.
    factor = (after * before.conj()).sum(1) / before.abs().square().sum(1).clamp(min=1e-30)
    tolerance = max(TOLERANCE, 4 * torch.finfo(used.dtype).eps)
    residual = (after - factor.unsqueeze(1) * before).abs().square().sum().sqrt()
    if not residual <= tolerance * after.abs().square().sum().sqrt():
        return False
    # Scaled rotary embeddings multiply by a constant, which is the same for all positions and planes.
    weight = before.abs().square().sum(1)
    mean = (factor.abs() * weight).sum() / weight.sum()
    deviation = ((factor.abs() - mean).square() * weight).sum() / weight.sum()
    return bool(deviation.sqrt() <= 10 * tolerance * mean)
