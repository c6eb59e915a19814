"""Update of the EM priors and variances of an attention layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mgk._core.calls import AttentionArgs, MixtureCall
from mgk._core.em_checkpointing import is_recomputed_forward
from mgk._core.priors import EMPrior, EMVariance


def update_em(layer: Any, call: MixtureCall, positions: Tensor | None, args: AttentionArgs, is_self: bool) -> None:
    """Update EM priors and variances from a training batch, after the batch has used the old ones.

    Args:
        layer: An `Attention` layer.
        call: Call of the forward.
        positions: Positions of the keys, [S] or [B, S]; None counts from 0.
        args: Arguments of the forward.
        is_self: Whether the keys belong to the tokens of the queries.
    """
    if not layer.training or not torch.is_grad_enabled():
        return
    # A tuple: the compiler of torch 2.6 does not support isinstance with a union.
    modules = [module for module in (layer.prior, layer.variance) if isinstance(module, (EMPrior, EMVariance))]
    if modules and not is_recomputed_forward():
        # The padding mask covers the keys: it applies to the queries only in self-attention.
        real_queries = args.real_tokens() if is_self and args.cache is None else None
        with_spread = isinstance(layer.variance, EMVariance)
        statistics, positions = layer.em_statistics(call, positions, real_queries, with_spread)
        for module in modules:
            module.update(statistics, positions)
