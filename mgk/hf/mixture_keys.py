"""Mixture keys in the attention layers of a Transformers model, as an attention function of its AttentionInterface."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask

from mgk._core.head_shards import HeadShards, local_tensor
from mgk._core.priors import LearnedPrior
from mgk._core.validation import fail
from mgk.functional import smgk_attention
from mgk.hf.attention_interface import with_attention, with_infinite_mask
from mgk.variants import PRESETS, VARIANTS

NAME = "mgk"  # of the attention function, the submodule of a converted layer, and the entry in config.json

# Arguments of attention functions that change the weights, if a function does not take them.
UNSUPPORTED = {
    "softcap": "capped logits",
    "s_aux": "learned attention sinks",
    "position_bias": "a position bias",
    "indices": "keys chosen by an index",
    "block_indices": "blocks of keys chosen by an index",
    "cache": "a paged cache",
}


class MixtureKeys(nn.Module):
    """Parameters that turn a layer's softmax attention into sMGK: M shifts, a prior and τ for each key head.

    Initially τ = 0, where shifts and prior cancel: Eq. 8 with a prior shared over positions is softmax attention. τ has
    a gradient there; shifts and prior have one as soon as τ is not 0. Keys are cached without their shifts.

    Args:
        heads: Number of key heads Hk.
        components: Number of components M.
        head_dim: Dimension D of a head.
        shift_std: Standard deviation of the initial shifts.
        **factory: `device` and `dtype` of the parameters.
    """

    def __init__(self, heads: int, components: int, head_dim: int, *, shift_std: float = 1.0, **factory: Any) -> None:
        super().__init__()
        self.shift_std = shift_std
        self.shift = nn.Parameter(torch.empty(heads, components, head_dim, **factory))
        self.prior = LearnedPrior(heads, components, VARIANTS["smgk"], PRESETS["paper"], None, **factory)
        self.tau = nn.Parameter(torch.empty(heads, **factory))
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
        sinks: Tensor | None = None,
        shards: HeadShards | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, H, L, E] and, if needed, the weights [B, H, L, S].

        `sinks` [H] are logits of one more key at 0, whose value is 0. With `shards` the layer has a part of the heads;
        all ranks have all mixture keys.
        """
        count, heads = len(self.shift), key.shape[1]
        if heads != (count if shards is None else count / shards.count):
            fail(
                "model",
                f"has mixture keys for {count} key heads and a layer with {heads}: "
                "tensor parallelism (tp_plan) must divide the key heads into equal parts",
            )

        def select(x: Tensor) -> Tensor:
            x = local_tensor(x)
            return x if shards is None else shards.sum_gradient(x)[shards.index * heads : (shards.index + 1) * heads]

        shift = select(self.shift)
        settings: dict[str, Any] = {"scale": scaling, "similarity": select(self.tau)}
        results = smgk_attention(
            query,
            key,
            value,
            shift,
            mask,
            is_causal=is_causal,
            dropout_p=dropout,
            log_prior=select(self.prior(key.shape[2], None)),
            return_weights=need_weights,
            return_lse=sinks is not None,
            **settings,
        )
        output, *others = results if isinstance(results, tuple) else (results,)
        weights = others[0] if need_weights else None
        if sinks is not None:
            zero = torch.zeros_like(key[:, :, :1])
            _, sink_lse = smgk_attention(
                query, zero, zero, shift, log_prior=select(self.prior(1, None)), return_lse=True, **settings
            )
            share = torch.sigmoid(others[-1] - sink_lse - sinks[:, None]).unsqueeze(-1)  # [B, H, L, 1] of the keys
            output = (output * share).to(output.dtype)
            weights = None if weights is None else (weights * share).to(weights.dtype)
        return output, weights


def install(module: nn.Module, mixture: MixtureKeys) -> None:
    """Make a layer use the attention function NAME, independently of the other layers."""
    module.shared_config = shared_config(module)
    module.config = with_attention(module.shared_config, NAME)
    module.add_module(NAME, mixture.train(module.training))


def remove(module: nn.Module, config: PreTrainedConfig) -> None:
    """Undo `install`; `config` is the layer's configuration before it."""
    if module.shared_config is config:
        del module.shared_config
    module.config = config
    delattr(module, NAME)


def shared_config(module: nn.Module) -> PreTrainedConfig:
    """Return the configuration that a layer shares with the model: its attention implementation makes the masks."""
    config = getattr(module, "shared_config", module.config)
    assert isinstance(config, PreTrainedConfig)
    return config


def find_shards(module: nn.Module) -> HeadShards | None:
    """Return the part of the heads that a layer has under Transformers' tensor parallelism (`tp_plan`), or None."""
    parameters: Any = module.named_parameters()
    for name, parameter in parameters:
        mesh = getattr(parameter, "device_mesh", None)
        # Projections are sharded by their outputs, which are the heads, or by their inputs.
        if mesh is None or f"{NAME}." in name or not any(placement.is_shard() for placement in parameter.placements):
            continue
        names = mesh.mesh_dim_names or ("tp",)
        if "tp" not in names:
            return None
        axis = names.index("tp")
        if parameter.placements[axis].is_shard() and mesh.size(axis) > 1:
            return HeadShards(mesh.get_group(axis), mesh.get_local_rank(axis), mesh.size(axis))
    return None


def check_supported(module: nn.Module, extras: dict[str, Any]) -> None:
    """Raise a ValueError if a layer passes an argument that mixture keys do not support."""
    for name, feature in UNSUPPORTED.items():
        if extras.get(name) is not None:
            fail("model", f"has {feature} ({name}) in its {type(module).__name__}, which mixture keys do not support")


def masks_include_causality(config: PreTrainedConfig) -> bool:
    """Return whether no mask means full attention; otherwise the layer's is_causal applies."""
    name = config._attn_implementation
    mask_function = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    if mask_function is not eager_mask and mask_function is not sdpa_mask:
        fail(
            "model",
            f"runs {name!r} attention, whose masks mixture keys do not support: "
            "call model.set_attn_implementation('sdpa')",
        )
    return mask_function is eager_mask


def resolve_mask(
    module: nn.Module, config: PreTrainedConfig, query: Tensor, mask: Tensor | None, is_causal: bool | None
) -> tuple[Tensor | None, bool]:
    """Return the mask and is_causal of an operator call, from the arguments of an attention function.

    Args:
        module: The layer.
        config: Configuration whose attention implementation made the mask.
        query: Queries [B, H, L, D].
        mask: Mask of Transformers, or None.
        is_causal: Argument of the attention function; None for that of the layer.
    """
    if masks_include_causality(config) or mask is not None or query.shape[2] == 1:
        is_causal = False
    elif is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if mask is not None and mask.is_floating_point():
        mask = with_infinite_mask(mask)
    return mask, is_causal


def add_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    """Return an additive mask: a bias of the logits, -inf where a mask hides a key."""
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else bias + mask


def attend(
    module: nn.Module,
    query: Tensor,  # [B, H, L, D]
    key: Tensor,  # [B, Hk, S, D] without shifts
    value: Tensor,  # [B, Hk, S, E]
    attention_mask: Tensor | None,  # broadcastable to [B, H, L, S]: bool (True = attend) or additive
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **extras: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with mixture keys: return [B, L, H, E] and, if the model runs `eager`, the weights."""
    # Adapters of PEFT wrap the module.
    mixture = getattr(module, NAME, None)
    if mixture is None:
        fail(
            "model", f"has a {type(module).__name__} without mixture keys: use mgk.hf.convert, not attn_implementation"
        )
    check_supported(module, extras)
    config = shared_config(module)
    mask, is_causal = resolve_mask(module, config, query, attention_mask, is_causal)
    if position_bias is not None:
        mask = add_bias(mask, position_bias)
    # A wrapper of PEFT may hide the shifts.
    shift = getattr(mixture, "shift", None)
    shards = None if shift is not None and len(shift) == key.shape[1] else find_shards(module)
    output, weights = mixture(
        query,
        key,
        value,
        mask,
        is_causal=is_causal,
        dropout=dropout,
        scaling=scaling,
        need_weights=config._attn_implementation == "eager",
        sinks=s_aux,
        shards=shards,
    )
    return output.transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, attend)
# Without a mask function of the same name, causal models would attend to later tokens.
AttentionMaskInterface.register(NAME, sdpa_mask)
