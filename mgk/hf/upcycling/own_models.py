"""Layers of the models of mgk.models that can be merged, and the configuration of the merged model.

Their attention layers support separate numbers of key heads and value heads: a merged model has the same class, and
other numbers in its configuration.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mgk._core.validation import fail
from mgk.attention import Attention
from mgk.hf.modeling import MGKForCausalLM, MGKPreTrainedModel
from mgk.hf.resized_heads import find_projections
from mgk.hf.upcycling.algebra import NO_PLANES, Planes
from mgk.hf.upcycling.layers import MergeableLayer
from mgk.rotary import Rotary
from mgk.variants import VARIANTS


def is_own_model(model: Any) -> bool:
    """Return whether a model is one of mgk.models in a Transformers class."""
    return isinstance(model, MGKPreTrainedModel)


def check_own_model(model: Any, settings: dict[str, Any]) -> None:
    """Raise a ValueError for models of mgk.models, and for settings, that cannot be upcycled.

    Args:
        model: A model for which `is_own_model` is true.
        settings: Arguments of `mgk.hf.upcycle`.
    """
    name = type(model).__name__
    if not isinstance(model, MGKForCausalLM):
        fail("model", f"is a {name}: of the models of mgk.models, only language models can be upcycled")
    others = sorted(set(model.model.config.layer_variants) - {"softmax"})
    if others:
        fail("model", f"has layers of the variant {others[0]}: only those of the variant softmax can be merged")
    if settings["cache"] is not None:
        fail("cache", f"is not supported by {name}, whose layers have equal numbers of heads: set num_key_heads")
    if settings["mixture"]:
        fail("mixture", f"is not supported by {name}: train a model of the variant smgk")


def find_own_layers(model: MGKForCausalLM) -> list[MergeableLayer]:
    """Return the attention layers of a language model of mgk.models."""
    return [_describe_layer(name, module) for name, module in model.named_modules() if isinstance(module, Attention)]


def _describe_layer(name: str, layer: Attention) -> MergeableLayer:
    kv_heads, dim = layer.num_key_heads, layer.head_dim
    if layer.num_kv_heads != kv_heads:
        fail("model", f"has {kv_heads} key heads and {layer.num_kv_heads} value heads: upcycle the original model")
    assert layer.variant == VARIANTS["softmax"]
    planes = NO_PLANES
    if isinstance(layer.rotary, Rotary):
        pairs = layer.rotary.pairs
        planes = Planes(tuple(range(pairs)), tuple(range(pairs, 2 * pairs)))
    projections = find_projections(layer, None)
    assert projections is not None
    return MergeableLayer(name, layer, projections, layer.num_heads, kv_heads, dim, dim, planes, "")


def set_head_counts(model: MGKForCausalLM, key_heads: int, value_heads: int) -> None:
    """Write the numbers of heads of all layers to the configuration, in the form that a new model has."""
    config = model.model.config
    values = None if value_heads == config.num_heads else value_heads
    keys = None if key_heads == value_heads else key_heads
    model.model.config = dataclasses.replace(config, num_kv_heads=values, num_key_heads=keys)
    model.config.num_key_value_heads, model.config.num_key_heads = values, keys
