"""Access to Transformers models: attention masks and the attention function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask


def with_infinite_mask(mask: Tensor) -> Tensor:
    """Replace the lowest finite number, with which Transformers masks a key in an additive mask, by -inf."""
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -math.inf)


@contextmanager
def replace_attention(model: PreTrainedModel, name: str, function: Callable[..., Any]) -> Iterator[bool]:
    """Register `function` as attention function `name`, and make the model use it until exit.

    Yields:
        True if the model accepts other attention functions.
    """
    previous = model.config._attn_implementation
    AttentionInterface.register(name, function)
    # Without a mask function of the same name, causal models would attend to later tokens.
    AttentionMaskInterface.register(name, eager_mask)
    try:
        model.set_attn_implementation(name)
        yield model.config._attn_implementation == name
    finally:
        model.set_attn_implementation(previous)
