"""Attention layers of Transformers models with fewer key heads and value heads, as separate numbers.

`find_projections` has the names of the projections of the supported architectures. `resize_heads` replaces the key and
value projections of a layer by smaller ones and makes the layer use an attention function of this package: those of
Transformers require equal numbers of key heads and value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticLayer
from transformers.masking_utils import sdpa_mask
from transformers.pytorch_utils import Conv1D

from mgk._core.validation import fail, positive_integer
from mgk.attention import Attention
from mgk.functional import mgk_attention
from mgk.hf.attention_interface import with_attention
from mgk.hf.mixture_keys import check_supported, resolve_mask, shared_config
from mgk.hf.registration import register_builder

NAME = "mgk_heads"  # of the attention function
ENTRY = "heads"  # of config.mgk: key heads, value heads and their dimensions by layer

# Names of the query, key, value and output projections. The output projection of BERT and its relatives belongs to the
# parent of the layer.
SEPARATE = (
    ("q_proj", "k_proj", "v_proj", ("o_proj", "out_proj", "dense")),
    ("query", "key", "value", ("^output.dense", "dense")),
    ("q_lin", "k_lin", "v_lin", ("out_lin",)),
)
FUSED = ("c_attn", "c_proj")  # GPT-2: one projection for queries, keys and values


@dataclass(frozen=True)
class Projections:
    """Projections of an attention layer.

    Attributes:
        query: Module of the queries; of queries, keys and values if they are fused.
        key: Module of the keys.
        value: Module of the values.
        output: Module that follows the attention.
        is_fused: Whether one module projects queries, keys and values.
    """

    query: nn.Module
    key: nn.Module
    value: nn.Module
    output: nn.Module
    is_fused: bool = False


def find_projections(module: nn.Module, parent: nn.Module | None) -> Projections | None:
    """Return the projections of an attention layer, or None if their names are not known.

    Args:
        module: The layer that calls the attention function.
        parent: The module that contains it.
    """
    if isinstance(module, Attention):
        return Projections(module.query, module.keys.projection, module.value, module.out)
    for query, key, value, outputs in SEPARATE:
        modules: list[Any] = [getattr(module, name, None) for name in (query, key, value)]
        for name in outputs:
            owner = parent if name.startswith("^") else module
            output: Any = owner
            for part in name.removeprefix("^").split("."):
                output = getattr(output, part, None)
            if all(isinstance(item, nn.Linear) for item in [*modules, output]):
                return Projections(modules[0], modules[1], modules[2], output)
    fused, output = (getattr(module, name, None) for name in FUSED)
    if not isinstance(fused, Conv1D) or not isinstance(output, Conv1D):
        return None
    # Cross attention has a separate projection of the queries. `resize_heads` makes split_size a list.
    is_self_attention = isinstance(getattr(module, "split_size", None), list) or fused.nf == 3 * output.weight.shape[0]
    return Projections(fused, fused, fused, output, is_fused=True) if is_self_attention else None


def resize_heads(module: nn.Module, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> None:
    """Give a layer other numbers of key heads and value heads; the new projections are not initialized.

    Args:
        module: The attention layer.
        key_heads: New number of key heads.
        value_heads: New number of value heads.
        key_dim: Dimension of a key.
        value_dim: Dimension of a value.
    """
    key_width, value_width = key_heads * key_dim, value_heads * value_dim
    module.resized_heads = key_heads, value_heads  # type: ignore[assignment]
    if isinstance(module, Attention):
        module.num_key_heads = module.keys.heads = key_heads
        module.num_kv_heads = value_heads
        module.keys.projection = _empty_linear(module.keys.projection, key_width)
        module.value = _empty_linear(module.value, value_width)
        return
    fused = getattr(module, FUSED[0], None)
    if isinstance(fused, Conv1D):
        sizes: Any = module.split_size
        width = sizes[0] if isinstance(sizes, list) else sizes
        module.split_size = [width, key_width, value_width]  # type: ignore[assignment]
        module.c_attn = _empty_conv(fused, width + key_width + value_width)
    else:
        names = next(names for names in SEPARATE if isinstance(getattr(module, names[1], None), nn.Linear))
        setattr(module, names[1], _empty_linear(getattr(module, names[1]), key_width))
        setattr(module, names[2], _empty_linear(getattr(module, names[2]), value_width))
    install(module)


def install(module: nn.Module) -> None:
    """Make a layer use the attention function NAME, independently of the other layers."""
    if not hasattr(module, "shared_config"):
        module.register_forward_pre_hook(_separate_static_cache, with_kwargs=True)
    module.shared_config = shared_config(module)
    module.config = with_attention(module.shared_config, NAME)


def restore_heads(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    """Resize the layers of a new model as config.mgk describes, before their weights are loaded."""
    for name, sizes in settings[ENTRY].items():
        key_heads, value_heads, key_dim, value_dim = (positive_integer(name, size) for size in sizes)
        resize_heads(model.base_model.get_submodule(name), key_heads, value_heads, key_dim, value_dim)


def check_reshaped_heads(module: nn.Module, key: Tensor, value: Tensor) -> None:
    """Raise a ValueError if a layer has reshaped its keys [B, Hk, S, D] or values to other numbers of heads.

    Some layers reshape with a fixed number of heads and -1 for the length, which then mixes positions.
    """
    counts = getattr(module, "resized_heads", None)
    heads = key.shape[1], value.shape[1]
    # With tensor parallelism a rank has an equal part of both.
    if counts is not None and (counts[0] * heads[1] != counts[1] * heads[0] or counts[0] % heads[0]):
        fail("model", f"reshapes {counts[0]} key and {counts[1]} value heads to {heads[0]} and {heads[1]}")


def attend(
    module: nn.Module,
    query: Tensor,  # [B, H, L, D]
    key: Tensor,  # [B, Hk, S, D]
    value: Tensor,  # [B, Hv, S, E]
    attention_mask: Tensor | None,  # broadcastable to [B, H, L, S]: bool (True = attend) or additive
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **extras: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute softmax attention: return [B, L, H, E] and, if the model runs `eager`, the weights."""
    check_supported(module, extras)
    check_reshaped_heads(module, key, value)
    config = shared_config(module)
    mask, causal = resolve_mask(module, config, query, attention_mask, is_causal)
    need_weights = config._attn_implementation == "eager"
    result = mgk_attention(
        query,
        key.unsqueeze(2),
        value,
        mask,
        is_causal=causal,
        dropout_p=dropout,
        scale=scaling,
        similarity="dot",
        return_weights=need_weights,
    )
    output, weights = result if need_weights else (result, None)
    return output.transpose(1, 2).contiguous(), weights


def _empty_linear(linear: Any, width: int) -> nn.Linear:
    bias = linear.bias is not None
    return nn.Linear(linear.in_features, width, bias=bias, device=linear.weight.device, dtype=linear.weight.dtype)


def _empty_conv(conv: Any, width: int) -> Conv1D:
    new = Conv1D(width, conv.nx)
    new.weight = nn.Parameter(conv.weight.new_empty(conv.nx, width))
    new.bias = nn.Parameter(conv.bias.new_zeros(width))
    return new


def _separate_static_cache(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Make the static cache of a layer allocate keys and values with their numbers of heads, before its first use."""
    caches = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, Cache)]
    for item in caches:
        parts = (
            (item.self_attention_cache, item.cross_attention_cache)
            if isinstance(item, EncoderDecoderCache)
            else (item,)
        )
        for part in parts:
            index = getattr(module, "layer_idx", None)
            layer = part.layers[index] if index is not None and index < len(part.layers) else None
            if isinstance(layer, StaticLayer) and not layer.is_initialized:
                layer_class: Any = type(layer)
                layer.__class__ = _with_separate_heads(layer_class)


@cache
def _with_separate_heads(layer_class: type[Any]) -> type[Any]:
    """Derive a static cache layer that allocates values with their own number of heads."""
    if getattr(layer_class, "has_separate_heads", False):
        return layer_class

    def lazy_initialization(self: Any, key_states: Tensor, value_states: Tensor) -> None:
        layer_class.lazy_initialization(self, key_states, value_states)
        if value_states.shape[1] != key_states.shape[1]:
            batch, heads, _, width = value_states.shape
            self.values = value_states.new_zeros(batch, heads, self.max_cache_len, width)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.values)

    members = {"lazy_initialization": lazy_initialization, "has_separate_heads": True}
    return type(layer_class.__name__, (layer_class,), members)


AttentionInterface.register(NAME, attend)
# Without a mask function of the same name, causal models would attend to later tokens.
AttentionMaskInterface.register(NAME, sdpa_mask)
# Mixture keys are added to layers that have their numbers of heads.
register_builder(ENTRY, restore_heads, first=True)
