"""Mixed key features and running sums of linear attention (Eq. 14), shared by its backends.

The mixed features are φ̃_j = Σ_r π_jr φ(k_jr). With a feature map that has `key_features` (FAVOR) they are represented
as φ̃_j = f_j·exp(w_j), with f_j of order 1 and a log weight w_j. The sums are then divided by the exponential of the
largest log weight so far, the reference, which cancels in the ratio.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk import equations
from mgk._core.calls import LinearCall
from mgk._core.heads import pair_key_and_value, repeat_heads
from mgk._core.masks import MASK_VALUE
from mgk._core.precision import compute_dtype, without_autocast
from mgk._core.validation import fail

# Log weight of an empty sum. Finite, so that the difference of two of them is not NaN.
EMPTY_LOG_WEIGHT = MASK_VALUE

# Z [B, Hs, F, E] with Hs = pair_heads(Hk, Hv), z [B, Hk, F], and the log weight they are relative to, [B, Hk].
State = tuple[Tensor, ...]


class Features(NamedTuple):
    """Features of a call, in the compute dtype."""

    query: Tensor  # [B, H, L, F]
    key: Tensor  # [B, Hk, S, F], zeros where masked
    log_weight: Tensor | None  # [B, Hk, S], -inf where masked
    value: Tensor  # [B, Hv, S, E]


def map_features(call: LinearCall) -> Features:
    """Apply the feature map of a call to its queries and keys, and mix the components."""
    dtype = compute_dtype(call.query.dtype)
    with without_autocast(call.query):
        keys, value = call.component_keys(dtype), call.value.to(dtype)
        if call.key_mask is not None:
            # Features of very large padding overflow, and 0 times infinity is NaN in their gradients.
            masked = ~call.key_mask[:, None, :]
            keys = keys.masked_fill(masked[:, :, None, :, None], 0)
            value = value.masked_fill(masked.unsqueeze(-1), 0)
        log_prior = None if call.log_prior is None else call.log_prior.to(dtype)
        query = call.feature_map(call.query.to(dtype))
        log_weight = None
        if hasattr(call.feature_map, "key_features"):
            key, log_weight = _mix_scaled_features(call.feature_map, keys, log_prior)
        else:
            key = equations.mixed_features(keys, log_prior, call.feature_map)
        if call.key_mask is not None:
            key = key.masked_fill(masked.unsqueeze(-1), 0)
            log_weight = None if log_weight is None else log_weight.masked_fill(masked, -math.inf)
        if query.shape[:-1] != call.query.shape[:-1] or key.shape[-1] != query.shape[-1]:
            fail("feature_map", f"must map [..., D] to [..., F], got {list(query.shape)}, {list(key.shape)}")
        return Features(query, key, log_weight, value)


def _mix_scaled_features(feature_map: Any, keys: Tensor, log_prior: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return mixed features divided by the largest component's scale, [B, Hk, S, F], and its logarithm, [B, Hk, S]."""
    features, log_scale = feature_map.key_features(keys)  # [B, Hk, M, S, F], [B, Hk, M, S]
    log_scale = log_scale - math.log(keys.shape[2]) if log_prior is None else log_scale + log_prior
    peak = log_scale.amax(2).detach()
    factor = (log_scale - peak.masked_fill(peak == -math.inf, 0).unsqueeze(2)).exp()
    return (factor.unsqueeze(-1) * features).sum(2), peak


def max_log_weights(log_weight: Tensor | None, state: State | None, causal: bool) -> Tensor | None:
    """Return the reference of each position: the largest log weight that it attends to, [B, Hk, S or 1]."""
    if log_weight is None:
        return None
    if log_weight.shape[-1] == 0:
        peak = log_weight.new_full((*log_weight.shape[:-1], 1), -math.inf)
    else:
        peak = log_weight.cummax(-1).values if causal else log_weight.amax(-1, keepdim=True)
    if state is not None:
        peak = torch.maximum(peak, state[2].unsqueeze(-1))
    return peak.detach().clamp(min=EMPTY_LOG_WEIGHT)


def divide_or_zero(numerator: Tensor, denominator: Tensor, normalise: bool) -> Tensor:
    """Return Eq. 14's ratio, with 0 for rows whose denominator is 0; without `normalise`, return the numerator."""
    if not normalise:
        return numerator
    denominator = denominator.unsqueeze(-1)
    empty = denominator == 0
    return numerator.masked_fill(empty, 0) / denominator.masked_fill(empty, 1)


def final_state(features: Features, state: State | None, reference: Tensor | None) -> State:
    """Return the sums over all keys, including those of the initial state."""
    if features.log_weight is None or reference is None:
        total, norm = key_value_sums(features.key, features.value), features.key.sum(-2)
        return (total, norm) if state is None else (total + state[0], norm + state[1])
    last = reference[..., -1:]
    key = features.key * (features.log_weight - last).exp().unsqueeze(-1)
    total, norm = key_value_sums(key, features.value), key.sum(-2)
    if state is not None:
        shrink = (state[2].unsqueeze(-1) - last).exp()  # [B, Hk, 1]
        shrink_total = repeat_heads(shrink, total.shape[1] // shrink.shape[1]).unsqueeze(-1)
        total, norm = total + state[0] * shrink_total, norm + state[1] * shrink
    return total, norm, last.squeeze(-1)


def key_value_sums(key: Tensor, value: Tensor) -> Tensor:
    """Return Σ_j φ̃_j v_jᵀ of key [B, Hk, ..., S, F] and value [B, Hv, ..., S, E]: [B, Hs, ..., F, E]."""
    key, value = pair_key_and_value(key, value)
    return key.transpose(-1, -2) @ value


def repeat_state(state: State, heads: int) -> tuple[Tensor, Tensor]:
    """Repeat Z and z of a state for the query heads; single heads broadcast."""
    total, norm = (repeat_heads(x, heads // x.shape[1]) for x in state[:2])
    return total, norm


def add_state(
    numerator: Tensor, denominator: Tensor, query: Tensor, state: State, reference: Tensor | None, group: int
) -> tuple[Tensor, Tensor]:
    """Add the contribution of the initial state to Eq. 14's numerator and denominator."""
    if reference is not None:
        query = query * repeat_heads((state[2].unsqueeze(-1) - reference).exp(), group).unsqueeze(-1)
    total, norm = repeat_state(state, query.shape[1])
    return numerator + query @ total, denominator + (query @ norm.unsqueeze(-1)).squeeze(-1)


def initial_state(call: LinearCall, features: Features) -> State | None:
    """Return the call's initial state in the compute dtype, checked against its feature map."""
    if call.initial_state is None:
        return None
    check_state_features(call.initial_state, 2 if features.log_weight is None else 3, features.key.shape[-1])
    return tuple(x.to(features.key.dtype) for x in call.initial_state)


def check_state_features(state: State, num_tensors: int, num_features: int) -> None:
    """Check that a state was returned by a call with the same feature map."""
    if len(state) != num_tensors or state[1].shape[-1] != num_features:
        fail("initial_state", "comes from another feature_map: use a state returned with the same one")
