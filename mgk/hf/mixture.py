"""Mixture keys inside the attention layers of a Transformers model, which look their attention function up by name.

B batch, H query heads, Hk key heads, M components, L queries, S keys, D head width, E value width.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask

from mgk._core.priors import LearnedPrior
from mgk._core.validation import fail
from mgk.functional import smgk_attention
from mgk.hf.attention_interface import with_infinite_mask
from mgk.variants import PRESETS, VARIANTS

NAME = "mgk"  # of the attention function, and of what a converted layer holds

# What a layer may hand to its attention function beside query, key, value and mask that changes the weights.
FEATURES = {
    "softcap": "capped logits",
    "s_aux": "learned sinks",
    "position_bias": "a position bias",
    "indices": "keys chosen by an index",
    "block_indices": "blocks of keys chosen by an index",
    "cache": "a paged cache",
}


class MixtureKeys(nn.Module):
    """What makes sMGK of a layer's softmax attention: M shifts, a learned prior and a learned τ for each key head.

    At τ = 0, where it starts, shifts and prior cancel (Eq. 8 with a prior shared over positions is softmax attention);
    τ has a gradient there, and once it has moved they have one too. Keys are cached without their shifts.
    """

    def __init__(
        self,
        heads: int,
        components: int,
        head_dim: int,
        config: PreTrainedConfig,
        *,
        shift_std: float = 1.0,
        **place: Any,
    ):
        super().__init__()
        self.shift_std = shift_std
        self.config = config  # the model's own: it says which masks the model makes
        self.shift = nn.Parameter(torch.empty(heads, components, head_dim, **place))
        self.prior = LearnedPrior(heads, components, VARIANTS["smgk"], PRESETS["paper"], None, **place)
        self.tau = nn.Parameter(torch.empty(heads, **place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.shift, std=self.shift_std)
        nn.init.zeros_(self.tau)
        self.prior.reset_parameters()

    def extra_repr(self) -> str:
        heads, components, head_dim = self.shift.shape
        return f"key heads={heads}, components={components}, head_dim={head_dim}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        is_causal: bool,
        dropout: float,
        scaling: float | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        result = smgk_attention(
            query,
            key,
            value,
            self.shift,
            mask,
            is_causal=is_causal,
            dropout_p=dropout,
            scale=scaling,
            log_prior=self.prior(key.shape[2], None),
            similarity=self.tau,
            return_weights=need_weights,
        )
        return result if need_weights else (result, None)


def install(module: nn.Module, mixture: MixtureKeys) -> None:
    """The layer looks its attention function up under our name from now on, whatever the other layers do."""
    assert isinstance(module.config, PreTrainedConfig)
    module.config = renamed(module.config, NAME)
    module.add_module(NAME, mixture)


def remove(module: nn.Module) -> None:
    mixture = module.get_submodule(NAME)
    assert isinstance(mixture, MixtureKeys)
    module.config = mixture.config
    delattr(module, NAME)


def renamed(config: PreTrainedConfig, name: str) -> PreTrainedConfig:
    """The same configuration with another attention function. Its parts are shared: they keep theirs."""
    changed = copy.copy(config)
    # The property would set it in the parts too.
    changed._attn_implementation_internal = name
    return changed


def refuse_features(module: nn.Module, given: dict[str, Any]) -> None:
    for name, feature in FEATURES.items():
        if given.get(name) is not None:
            fail("model", f"has {feature} ({name}) in its {type(module).__name__}, which mixture keys do not have")


def masks_hold_causality(config: PreTrainedConfig) -> bool:
    """Whether no mask means that all is seen; else it means whatever the layer's is_causal says."""
    name = config._attn_implementation
    made_by = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    if made_by is not eager_mask and made_by is not sdpa_mask:
        fail(
            "model",
            f"runs {name!r} attention, whose masks mixture keys do not read: model.set_attn_implementation('sdpa')",
        )
    return made_by is eager_mask


def attend(
    module: nn.Module,
    query: Tensor,  # [B, H, L, D]
    key: Tensor,  # [B, Hk, S, D], without shifts
    value: Tensor,  # [B, Hk, S, E]
    attention_mask: Tensor | None,  # broadcastable to [B, H, L, S], True = attend, or added
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **extras: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function of converted layers: [B, L, H, E] and, where the model runs `eager`, the weights."""
    mixture = getattr(module, NAME, None)
    if not isinstance(mixture, MixtureKeys):
        fail(
            "model", f"has a {type(module).__name__} without mixture keys: use mgk.hf.convert, not attn_implementation"
        )
    refuse_features(module, extras)
    mask = attention_mask
    if masks_hold_causality(mixture.config) or mask is not None or query.shape[2] == 1:
        is_causal = False
    elif is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if mask is not None and mask.is_floating_point():
        mask = with_infinite_mask(mask)
    output, weights = mixture(
        query,
        key,
        value,
        mask,
        is_causal=is_causal,
        dropout=dropout,
        scaling=scaling,
        need_weights=mixture.config._attn_implementation == "eager",
    )
    return output.transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, attend)
# The mask with the function: under a name without one, causal models would see the future.
AttentionMaskInterface.register(NAME, sdpa_mask)
