"""Access to Transformers models: attention masks and the attention function."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import eager_mask


def with_infinite_mask(mask: Tensor) -> Tensor:
    """Replace the lowest finite number, with which Transformers masks a key in an additive mask, by -inf."""
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -math.inf)


def with_attention(config: PreTrainedConfig, name: str) -> PreTrainedConfig:
    """Copy a configuration with another attention function; its sub-configurations keep theirs."""
    changed = copy.copy(config)
    # The setter of the property would change the sub-configurations too.
    changed._attn_implementation_internal = name
    return changed


@contextmanager
def replace_attention(model: PreTrainedModel, name: str, function: Callable[..., Any]) -> Iterator[bool]:
    """Register `function` as attention function `name`, and make the model and its masks use it until exit.

    Yields:
        True if the model accepts other attention functions.
    """
    # The parts of a composite model may have different attention functions.
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    configs = [config for part in models for config in _with_sub_configs(part.config)]
    previous = [config._attn_implementation_internal for config in configs]
    AttentionInterface.register(name, function)
    # Without a mask function of the same name, causal models would attend to later tokens.
    AttentionMaskInterface.register(name, eager_mask)
    try:
        model.set_attn_implementation(name)
        yield model.config._attn_implementation == name
    finally:
        for config, implementation in zip(configs, previous, strict=True):
            config._attn_implementation_internal = implementation


@contextmanager
def replace_layer_attention(model: PreTrainedModel, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Register `function` as attention function `name`, and make all layers use it until exit; masks do not change."""
    AttentionInterface.register(name, function)
    configs = {
        module: module.config
        for module in model.base_model.modules()
        if not isinstance(module, PreTrainedModel) and isinstance(getattr(module, "config", None), PreTrainedConfig)
    }
    try:
        for module, config in configs.items():
            module.config = with_attention(config, name)
        yield
    finally:
        for module, config in configs.items():
            module.config = config


def _with_sub_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a configuration and its sub-configurations at any depth."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from _with_sub_configs(part)
