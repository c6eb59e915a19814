"""Attention layers of models: the fields of their configuration, and the layers made from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from mgk._core.validation import fail, number, one_of, positive_integer
from mgk.attention import Attention
from mgk.features import FEATURE_MAP_FACTORIES
from mgk.variants import PRESETS, VARIANTS

# Layers other than `Attention` that the models can use, by name.
REGISTERED_LAYERS: dict[str, Callable[..., nn.Module]] = {}


class AttentionConfig:
    """Base class of the configurations of models: the fields of their attention layers.

    The dataclasses of the models define the fields, with defaults and in an order of their own.
    """

    max_length: int
    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None
    num_key_heads: int | None
    head_dim: int
    variant: str | tuple[str, ...]
    num_components: int
    preset: str
    feature_map: str
    dropout: float
    attention_dropout: float | None
    backend: str

    @property
    def layer_variants(self) -> tuple[str, ...]:
        """Attention variant of each layer."""
        if not isinstance(self.variant, str | Sequence):
            fail("variant", f"must be a name, or a list of names, one for each layer, got {self.variant!r}")
        return (self.variant,) * self.num_layers if isinstance(self.variant, str) else tuple(self.variant)

    def check_attention_fields(self) -> None:
        """Check the fields that describe the attention layers, and make a list of variants a tuple."""
        if isinstance(self.variant, list):
            object.__setattr__(self, "variant", tuple(self.variant))
        variants = self.layer_variants
        for name in variants:
            one_of("variant", name, known_variants())
        if len(variants) != self.num_layers:
            choices = f"one name for all layers or one for each of {self.num_layers}"
            fail("variant", f"must have {choices}, got {len(variants)} names")
        one_of("preset", self.preset, PRESETS)
        one_of("feature_map", self.feature_map, FEATURE_MAP_FACTORIES)
        positive_integer("num_components", self.num_components)
        for name in ("num_kv_heads", "num_key_heads"):
            if getattr(self, name) is not None:
                positive_integer(name, getattr(self, name))
        number("dropout", self.dropout, 0, 1)
        if self.attention_dropout is not None:
            number("attention_dropout", self.attention_dropout, 0, 1)


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


def make_attention(config: AttentionConfig, variant: str, layer_index: int = 0, **options: Any) -> Any:
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
