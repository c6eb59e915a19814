"""Eq. 14 in two backends: `eager` forms the weights, `chunked` takes time and memory linear in the length.

Both work on the mixed key features φ̃_j = Σ_r π_jr φ(k_jr). A feature map may give them as φ̃_j = f_j·exp(w_j) with f_j
near 1 (Performer's exponentials): the sums are then kept relative to the largest w so far, which cancels in the ratio.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk import equations
from mgk._core.calls import LinearCall
from mgk._core.masks import cu_seqlens_to_segments, repeat_heads
from mgk._core.precision import compute_dtype, without_autocast

CHUNK = 64
# Positions at a time: what is formed for them stays small enough for the allocator to keep and use again.
BLOCK = 8192
# The log weight of no keys at all: finite, so that differences of two are not NaN.
NOTHING = -1e30

State = tuple[Tensor, ...]  # Z [B, Hk, F, E], z [B, Hk, F], and the log weight they are relative to, [B, Hk]


class Features(NamedTuple):
    query: Tensor  # [B, H, L, F]
    key: Tensor  # [B, Hk, S, F], zeros where masked
    log_weight: Tensor | None  # [B, Hk, S], -inf where masked
    value: Tensor  # [B, Hk, S, E]


def features(call: LinearCall) -> Features:
    dtype = compute_dtype(call.query.dtype)
    with without_autocast(call.query):
        keys = call.component_keys(dtype)
        log_prior = None if call.log_prior is None else call.log_prior.to(dtype)
        query = call.feature_map(call.query.to(dtype))
        log_weight = None
        if hasattr(call.feature_map, "key_features"):
            key, log_weight = _scaled_features(call.feature_map, keys, log_prior)
        else:
            key = equations.mixed_features(keys, log_prior, call.feature_map)
        if call.key_mask is not None:
            hidden = ~call.key_mask[:, None, :]
            key = key.masked_fill(hidden.unsqueeze(-1), 0)
            log_weight = None if log_weight is None else log_weight.masked_fill(hidden, -math.inf)
        if query.shape[:-1] != call.query.shape[:-1] or key.shape[-1] != query.shape[-1]:
            raise ValueError(f"feature_map must map [..., D] to [..., F], got {list(query.shape)}, {list(key.shape)}")
        return Features(query, key, log_weight, call.value.to(dtype))


def _scaled_features(feature_map: Any, keys: Tensor, log_prior: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mixed features over the largest component's scale, [B, Hk, S, F], and its logarithm, [B, Hk, S]."""
    parts, log_scale = feature_map.key_features(keys)  # [B, Hk, M, S, F], [B, Hk, M, S]
    log_scale = log_scale - math.log(keys.shape[2]) if log_prior is None else log_scale + log_prior
    peak = log_scale.amax(2).detach()
    factor = (log_scale - peak.masked_fill(peak == -math.inf, 0).unsqueeze(2)).exp()
    return (factor.unsqueeze(-1) * parts).sum(2), peak


def _references(log_weight: Tensor | None, state: State | None, causal: bool) -> Tensor | None:
    """What each position's sums are relative to: the largest log weight it sees, [B, Hk, S or 1]."""
    if log_weight is None:
        return None
    if log_weight.shape[-1] == 0:
        peak = log_weight.new_full((*log_weight.shape[:-1], 1), -math.inf)
    else:
        peak = log_weight.cummax(-1).values if causal else log_weight.amax(-1, keepdim=True)
    if state is not None:
        peak = torch.maximum(peak, state[2].unsqueeze(-1))
    return peak.detach().clamp(min=NOTHING)


def _divide(numerator: Tensor, denominator: Tensor, normalise: bool) -> Tensor:
    """Eq. 14's ratio; a row without weight gives 0."""
    if not normalise:
        return numerator
    denominator = denominator.unsqueeze(-1)
    empty = denominator == 0
    return numerator.masked_fill(empty, 0) / denominator.masked_fill(empty, 1)


def _final_state(f: Features, state: State | None, reference: Tensor | None) -> State:
    """The sums over all keys, earlier ones included."""
    if f.log_weight is None or reference is None:
        total, norm = f.key.transpose(-1, -2) @ f.value, f.key.sum(-2)
        return (total, norm) if state is None else (total + state[0], norm + state[1])
    last = reference[..., -1:]
    key = f.key * (f.log_weight - last).exp().unsqueeze(-1)
    total, norm = key.transpose(-1, -2) @ f.value, key.sum(-2)
    if state is not None:
        shrink = (state[2].unsqueeze(-1) - last).exp()  # [B, Hk, 1]
        total, norm = total + state[0] * shrink.unsqueeze(-1), norm + state[1] * shrink
    return total, norm, last.squeeze(-1)


def _checked_state(call: LinearCall, f: Features) -> State | None:
    if call.initial_state is None:
        return None
    wanted = 2 if f.log_weight is None else 3
    if len(call.initial_state) != wanted or call.initial_state[1].shape[-1] != f.key.shape[-1]:
        raise ValueError("initial_state comes from another feature_map: use the state that this one returned")
    return tuple(x.to(f.key.dtype) for x in call.initial_state)


def refuses_eager(call: LinearCall) -> str | None:
    return None


def refuses_chunked(call: LinearCall) -> str | None:
    return "it never forms the attention weights" if call.return_weights else None


def run_eager(call: LinearCall) -> tuple[Tensor, State | None, Tensor | None]:
    """The weights [B, H, L, S] formed, by Eq. 14 as it stands."""
    f = features(call)
    state = _checked_state(call, f)
    queries, length = f.query.shape[2], f.key.shape[2]
    allowed = torch.ones(queries, length, dtype=torch.bool, device=f.query.device)
    if call.cu_seqlens is not None:
        segment = cu_seqlens_to_segments(call.cu_seqlens, length)[0]
        allowed = segment[:, None] == segment
    if call.causal:
        allowed = allowed.tril()
    reference = _references(f.log_weight, state, call.causal)
    if f.log_weight is not None and call.cu_seqlens is not None:
        # Each query's own sequence sets the scale.
        seen = f.log_weight.unsqueeze(-2).masked_fill(~allowed, -math.inf)
        reference = seen.amax(-1).detach().clamp(min=NOTHING)
    key, value = repeat_heads(f.key, call.group), repeat_heads(f.value, call.group)
    if reference is None and state is None and call.normalise:
        output, weights = equations.linear_attention(f.query, key, value, allowed)
    else:
        scores = (f.query @ key.transpose(-1, -2)).masked_fill(~allowed, 0)
        if f.log_weight is not None and reference is not None:
            # [B, Hk, L or 1, S]: a query sees each key relative to the largest weight that it sees itself.
            relative = f.log_weight.unsqueeze(-2) - reference.unsqueeze(-1)
            scores = scores * repeat_heads(relative.masked_fill(~allowed, -math.inf).exp(), call.group)
        numerator, denominator = scores @ value, scores.sum(-1)
        if state is not None:
            numerator, denominator = _add_state(numerator, denominator, f.query, state, reference, call.group)
        output = _divide(numerator, denominator, call.normalise)
        weights = _divide(scores, denominator, call.normalise)
    final = _final_state(f, state, reference) if call.return_state else None
    dtype = call.query.dtype
    return output.to(dtype), final, weights.to(dtype) if call.return_weights else None


def _add_state(
    numerator: Tensor, denominator: Tensor, query: Tensor, state: State, reference: Tensor | None, group: int
) -> tuple[Tensor, Tensor]:
    if reference is not None:
        query = query * repeat_heads((state[2].unsqueeze(-1) - reference).exp(), group).unsqueeze(-1)
    total, norm = (repeat_heads(x, group) for x in state[:2])
    return numerator + query @ total, denominator + (query @ norm.unsqueeze(-1)).squeeze(-1)


def run_chunked(call: LinearCall) -> tuple[Tensor, State | None, None]:
    """Causal: matmuls within chunks of CHUNK and a running state between them. Otherwise one sum over all keys."""
    long = call.causal and call.cu_seqlens is None and not torch.compiler.is_compiling()
    if long and call.query.shape[2] > BLOCK:
        return _run_in_blocks(call)
    f = features(call)
    state = _checked_state(call, f)
    if call.cu_seqlens is not None:
        return _run_packed(call, f), None, None
    reference = _references(f.log_weight, state, call.causal)
    output = _causal(f, state, reference, call) if call.causal else _bidirectional(f, state, reference, call)
    final = _final_state(f, state, reference) if call.return_state else None
    return output.to(call.query.dtype), final, None


def _run_in_blocks(call: LinearCall) -> tuple[Tensor, State | None, None]:
    """A long causal call as several, each going on from the state of the one before."""

    def blocks(x: Tensor | None, dim: int) -> Iterable[Tensor | None]:
        # Split, not sliced: the gradient of a slice is as long as the whole.
        return itertools.repeat(x) if x is None or x.shape[dim] == 1 else x.split(BLOCK, dim)

    outputs = []
    state = call.initial_state
    for query, keys, value, log_prior, key_mask in zip(
        call.query.split(BLOCK, 2),
        call.keys.split(BLOCK, -2),
        call.value.split(BLOCK, 2),
        blocks(call.log_prior, -1),
        blocks(call.key_mask, 1),
        strict=False,
    ):
        block = dataclasses.replace(
            call,
            query=query,
            keys=keys,
            value=value,
            log_prior=log_prior,
            key_mask=key_mask,
            initial_state=state,
            return_state=True,
        )
        output, state, _ = run_chunked(block)
        outputs.append(output)
    return torch.cat(outputs, dim=2), state if call.return_state else None, None


def _bidirectional(f: Features, state: State | None, reference: Tensor | None, call: LinearCall) -> Tensor:
    total, norm = (repeat_heads(x, call.group) for x in _final_state(f, state, reference)[:2])
    return _divide(f.query @ total, (f.query @ norm.unsqueeze(-1)).squeeze(-1), call.normalise)


def _causal(f: Features, state: State | None, reference: Tensor | None, call: LinearCall) -> Tensor:
    length = f.query.shape[2]
    # A compiler treats sizes 0 and 1 apart, and would compile again for a length that is a multiple of CHUNK or has few
    # chunks: there, padding is never empty and chunks are never few.
    compiling = torch.compiler.is_compiling()
    count = length // CHUNK + 3 if compiling else -(-length // CHUNK)
    padding = count * CHUNK - length

    def split(x: Tensor) -> Tensor:
        """[B, H, chunks · CHUNK, ...] -> [B, H, chunks, CHUNK, ...]"""
        # That `unflatten` fits, export cannot show; its gradient is the faster one.
        return x.unfold(2, CHUNK, CHUNK).movedim(-1, 3) if compiling else x.unflatten(2, (count, CHUNK))

    def chunks(x: Tensor, fill: float = 0.0) -> Tensor:
        """[B, H, S, ...] -> [B, H, chunks, CHUNK, ...]"""
        pad = (0, 0) * (x.dim() - 3) + (0, padding)
        return split(torch.nn.functional.pad(x.contiguous(), pad, value=fill))

    key, value = chunks(f.key), chunks(f.value)
    # One column more, of ones, makes the denominator another output.
    value = torch.cat([value, value.new_ones(*value.shape[:-1], 1)], dim=-1)
    query = chunks(f.query)
    within = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).tril()
    if f.log_weight is None or reference is None:
        sums = (key.transpose(-1, -2) @ value).cumsum(2)
        before = torch.cat([torch.zeros_like(sums[:, :, :1]), sums[:, :, :-1]], dim=2)
        factors = within.to(query.dtype)
        entering = query
    else:
        weight = chunks(f.log_weight, -math.inf)
        # Behind the end, the last reference holds on.
        seen = split(torch.nn.functional.pad(reference, (0, padding), mode="replicate"))
        peak = seen[..., -1]  # [B, Hk, chunks]: what a chunk's sums are relative to
        sums = (key * (weight - peak.unsqueeze(-1)).exp().unsqueeze(-1)).transpose(-1, -2) @ value
        # Sums of earlier chunks, each brought from its own scale to that of the chunk before this one.
        earlier = torch.ones(count, count, dtype=torch.bool, device=query.device).tril(-1)
        last = torch.cat([torch.full_like(peak[..., :1], NOTHING), peak[..., :-1]], dim=-1)
        shrink = (peak.unsqueeze(-2) - last.unsqueeze(-1)).masked_fill(~earlier, -math.inf).exp()
        before = (shrink @ sums.flatten(-2)).unflatten(-1, sums.shape[-2:])
        factors = (weight.unsqueeze(-2) - seen.unsqueeze(-1)).masked_fill(~within, -math.inf).exp()
        factors = repeat_heads(factors, call.group)
        entering = query * repeat_heads((last.unsqueeze(-1) - seen).exp(), call.group).unsqueeze(-1)
    key, value, before = (repeat_heads(x, call.group) for x in (key, value, before))
    both = ((query @ key.transpose(-1, -2)) * factors) @ value + entering @ before
    both = both.flatten(2, 3)
    # Copied under a compiler, since a part of it would be laid out in a way that export cannot show either.
    both = both.index_select(2, torch.arange(length, device=both.device)) if compiling else both[:, :, :length]
    numerator, denominator = both[..., :-1], both[..., -1]
    if state is not None:
        numerator, denominator = _add_state(numerator, denominator, f.query, state, reference, call.group)
    return _divide(numerator, denominator, call.normalise)


def _run_packed(call: LinearCall, f: Features) -> Tensor:
    """Each sequence by itself, as a row of a padded batch."""
    assert call.cu_seqlens is not None
    length = f.key.shape[2]
    segment, position = cu_seqlens_to_segments(call.cu_seqlens, length)
    rows, longest = call.cu_seqlens.numel() - 1, int(call.cu_seqlens.diff().max())

    def unpack(x: Tensor, fill: float = 0.0) -> Tensor:
        """[1, H, T, ...] -> [N, H, longest, ...]"""
        padded = x.new_full((rows, longest, x.shape[1], *x.shape[3:]), fill)
        return padded.index_put((segment, position), x[0].transpose(0, 1)).transpose(1, 2)

    log_weight = None if f.log_weight is None else unpack(f.log_weight, -math.inf)
    padded = Features(unpack(f.query), unpack(f.key), log_weight, unpack(f.value))
    reference = _references(log_weight, None, call.causal)
    output = (_causal if call.causal else _bidirectional)(padded, None, reference, call)
    return output.transpose(1, 2)[segment, position].transpose(0, 1).unsqueeze(0).to(call.query.dtype)
