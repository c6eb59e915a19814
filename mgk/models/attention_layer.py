"""Attention layers from the configuration of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mgk._core.validation import number, positive_integer
from mgk.attention import Attention
from mgk.features import FEATURE_MAP_FACTORIES

if TYPE_CHECKING:
    from mgk.models.decoder import DecoderConfig
    from mgk.models.encoder import EncoderConfig


def check_attention_fields(config: DecoderConfig | EncoderConfig) -> None:
    """Check the fields of a configuration that both models pass to their attention layers."""
    positive_integer("num_components", config.num_components)
    if config.num_kv_heads is not None:
        positive_integer("num_kv_heads", config.num_kv_heads)
    number("dropout", config.dropout, 0, 1)
    if config.attention_dropout is not None:
        number("attention_dropout", config.attention_dropout, 0, 1)


def make_attention(config: DecoderConfig | EncoderConfig, variant: str, **options: Any) -> Attention:
    """Make the attention layer that a configuration describes.

    Args:
        config: Configuration of the model.
        variant: Attention variant of the layer.
        **options: Further arguments of Attention.
    """
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
