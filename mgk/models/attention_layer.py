"""Attention layers from the configuration of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from mgk._core.validation import fail, number, one_of, positive_integer
from mgk.attention import Attention
from mgk.features import FEATURE_MAP_FACTORIES
from mgk.variants import PRESETS, VARIANTS

if TYPE_CHECKING:
    from mgk.models.decoder import DecoderConfig
    from mgk.models.encoder import EncoderConfig
    from mgk.models.vision import VisionConfig

# Layers other than `Attention` that the models can use, by name.
REGISTERED_LAYERS: dict[str, Callable[..., nn.Module]] = {}


def check_attention_fields(config: DecoderConfig | EncoderConfig | VisionConfig) -> None:
    """Check the fields of a configuration that describe the attention layers, which all models have."""
    variants = config.layer_variants
    for name in variants:
        one_of("variant", name, known_variants())
    if len(variants) != config.num_layers:
        choices = f"one name for all layers or one for each of {config.num_layers}"
        fail("variant", f"must have {choices}, got {len(variants)} names")
    one_of("preset", config.preset, PRESETS)
    one_of("feature_map", config.feature_map, FEATURE_MAP_FACTORIES)
    positive_integer("num_components", config.num_components)
    for name in ("num_kv_heads", "num_key_heads"):
        if getattr(config, name) is not None:
            positive_integer(name, getattr(config, name))
    number("dropout", config.dropout, 0, 1)
    if config.attention_dropout is not None:
        number("attention_dropout", config.attention_dropout, 0, 1)


def register_attention(name: str, make: Callable[..., nn.Module]) -> None:
    """Register another attention layer for the models, under a name for `variant`.

    Args:
        name: Name of the layer in configurations and recipes.
        make: Called with the configuration, and `layer_index`, `is_causal` and `rotary` as keywords. It returns a
            module from [B, L, embed_dim] to the same shape, whose forward accepts the keywords `key_padding_mask`,
            `position_ids`, `cu_seqlens`, `max_seqlen` and `cache`, which are None unless used.
    """
    if name in VARIANTS:
        fail("name", f"{name!r} is a variant of mgk.Attention")
    REGISTERED_LAYERS[name] = make


def known_variants() -> list[str]:
    """Return the names that `variant` of a model's configuration can have."""
    return [*VARIANTS, *REGISTERED_LAYERS]


def make_attention(
    config: DecoderConfig | EncoderConfig | VisionConfig, variant: str, layer_index: int = 0, **options: Any
) -> Any:
    """Make the attention layer that a configuration describes.

    Args:
        config: Configuration of the model.
        variant: Attention variant of the layer.
        layer_index: Index of the layer in the model, for registered layers.
        **options: Further arguments of Attention.
    """
    if variant in REGISTERED_LAYERS:
        options = {"is_causal": False, "rotary": None, **options}
        return REGISTERED_LAYERS[variant](config, layer_index=layer_index, **options)
    return Attention(
        config.embed_dim,
        config.num_heads,
        head_dim=config.head_dim,
        num_kv_heads=config.num_kv_heads,
        num_key_heads=config.num_key_heads,
        variant=variant,
        num_components=config.num_components,
        preset=config.preset,
        feature_map=FEATURE_MAP_FACTORIES[config.feature_map](config.head_dim),
        dropout=config.attention_dropout,
        # The paper shares priors over positions; the authors' code has one per position.
        max_positions=None if config.preset == "paper" else config.max_length,
        backend=config.backend,
        **options,
    )
