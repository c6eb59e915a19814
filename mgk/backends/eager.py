"""The equations in PyTorch ("eager"): supports every call on every device, and is differentiable twice.

Mixture attention runs in blocks of queries. Linear attention forms the weights [B, H, L, S].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mgk import equations
from mgk._core import linear_features
from mgk._core.calls import LinearCall, MixtureCall
from mgk._core.heads import repeat_heads
from mgk._core.linear_features import EMPTY_LOG_WEIGHT, Features, State
from mgk._core.masks import MASK_VALUE, allowed_pairs, block_of_rows, cu_seqlens_to_segments
from mgk._core.precision import without_autocast
from mgk._core.query_blocks import expand_inputs, query_blocks


def unsupported_reason(call: MixtureCall | LinearCall) -> None:
    """Return None: every call is supported."""


def run_mixture(call: MixtureCall) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the output [B, H, L, E], the lse [B, H, L], and the weights [B, H, L, S] if requested."""
    call = call.with_zeroed_padding()
    with without_autocast(call.query):
        query, keys, value, log_prior, scale, tau = expand_inputs(call)
        bias = _additive_bias(call.attn_mask, query.dtype)

        def run_block(rows: slice) -> tuple[Tensor, Tensor, Tensor | None]:
            output, weights, lse = equations.mixture_attention(
                query[:, :, rows],
                keys,
                value,
                log_prior,
                scale=scale,
                tau=tau,
                hard=call.hard,
                bias=None if bias is None else block_of_rows(bias, rows),
                allowed=allowed_pairs(
                    rows, query.shape[2], keys.shape[-2], call.attn_mask, call.causal, call.packed, query
                ),
                dropout_p=call.dropout_p,
            )
            return output, lse, weights if call.return_weights else None

        blocks = query_blocks(call)
        if len(blocks) == 1:
            output, lse, weights = run_block(blocks[0])
        else:
            # Recomputed in the backward pass, so that the weights of all blocks are never in memory together.
            outputs, lses, parts = zip(
                *(checkpoint(run_block, rows, use_reentrant=False) for rows in blocks), strict=True
            )
            output, lse = torch.cat(outputs, dim=2), torch.cat(lses, dim=2)
            weights = torch.cat(parts, dim=2) if call.return_weights else None
    dtype = call.query.dtype
    return output.to(dtype), lse, None if weights is None else weights.to(dtype)


def _additive_bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return an additive mask with -inf at masked pairs; None for a bool mask, which `allowed_pairs` applies."""
    if mask is None or mask.dtype == torch.bool:
        return None
    # Values below MASK_VALUE mask a pair, as in the kernels: other libraries mask with the lowest finite number, and a
    # row without any other value must count as fully masked.
    bias = mask.to(dtype)
    return bias.masked_fill(bias < MASK_VALUE, -math.inf)


def run_linear(call: LinearCall) -> tuple[Tensor, State | None, Tensor | None]:
    """Return the output [B, H, L, E], and the state and the weights [B, H, L, S] if requested."""
    features = linear_features.map_features(call)
    state = linear_features.initial_state(call, features)
    allowed = _allowed_pairs(call, features)
    reference = linear_features.max_log_weights(features.log_weight, state, call.causal)
    if features.log_weight is not None and call.cu_seqlens is not None and features.key.shape[2] > 0:
        # The maximum is taken over the query's packed sequence.
        log_weights = features.log_weight.unsqueeze(-2).masked_fill(~allowed, -math.inf)
        reference = log_weights.amax(-1).detach().clamp(min=EMPTY_LOG_WEIGHT)
    key, value = repeat_heads(features.key, call.group), repeat_heads(features.value, call.value_group)
    if reference is None and state is None and call.normalise:
        output, weights = equations.linear_attention(features.query, key, value, allowed)
    else:
        scores = (features.query @ key.transpose(-1, -2)).masked_fill(~allowed, 0)
        if features.log_weight is not None and reference is not None:
            # [B, Hk, L or 1, S]: the log weight of a key relative to the largest one the query attends to.
            relative = features.log_weight.unsqueeze(-2) - reference.unsqueeze(-1)
            scores = scores * repeat_heads(relative.masked_fill(~allowed, -math.inf).exp(), call.group)
        numerator, denominator = scores @ value, scores.sum(-1)
        if state is not None:
            numerator, denominator = linear_features.add_state(
                numerator, denominator, features.query, state, reference, call.group
            )
        output = linear_features.divide_or_zero(numerator, denominator, call.normalise)
        weights = linear_features.divide_or_zero(scores, denominator, call.normalise)
    final = linear_features.final_state(features, state, reference) if call.return_state else None
    dtype = call.query.dtype
    return output.to(dtype), final, weights.to(dtype) if call.return_weights else None


def _allowed_pairs(call: LinearCall, features: Features) -> Tensor:
    """Return which query may attend to which key by causality and packing, bool [L, S]."""
    queries, length = features.query.shape[2], features.key.shape[2]
    allowed = torch.ones(queries, length, dtype=torch.bool, device=features.query.device)
    if call.cu_seqlens is not None:
        segment = cu_seqlens_to_segments(call.cu_seqlens, length)[0]
        allowed = segment[:, None] == segment
    return allowed.tril() if call.causal else allowed
