"""Linear attention (Eq. 14) in PyTorch ("chunked"): time and memory linear in the length."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from mgk._core.calls import LinearCall
from mgk._core.heads import repeat_heads
from mgk._core.integers import ceil_div
from mgk._core.linear_features import (
    EMPTY_LOG_WEIGHT,
    Features,
    State,
    add_state,
    divide_or_zero,
    final_state,
    initial_state,
    key_value_sums,
    map_features,
    max_log_weights,
    repeat_state,
)
from mgk._core.masks import cu_seqlens_to_segments

CHUNK = 64
# Positions per block of a long sequence: its temporaries stay small enough for the allocator to reuse.
BLOCK = 8192


def unsupported_reason(call: LinearCall) -> str | None:
    """Return why the call is not supported, or None."""
    return "it never forms the attention weights" if call.return_weights else None


def run(call: LinearCall) -> tuple[Tensor, State | None, None]:
    """Return the output [B, H, L, E], the state if requested, and None for the weights.

    Causal attention takes matmuls within chunks of CHUNK positions and a running state between them; otherwise there
    is one sum over all keys.
    """
    can_split = call.causal and call.cu_seqlens is None and not torch.compiler.is_compiling()
    if can_split and call.query.shape[2] > BLOCK:
        return _run_in_blocks(call)
    features = map_features(call)
    state = initial_state(call, features)
    if call.cu_seqlens is not None:
        return _run_packed(call, features), None, None
    reference = max_log_weights(features.log_weight, state, call.causal)
    attend = _attend_causal if call.causal else _attend_bidirectional
    output = attend(features, state, reference, call)
    final = final_state(features, state, reference) if call.return_state else None
    return output.to(call.query.dtype), final, None


def _run_in_blocks(call: LinearCall) -> tuple[Tensor, State | None, None]:
    """Run a long causal call as several, each starting from the state of the previous one."""

    def split(x: Tensor | None, dim: int) -> Iterable[Tensor | None]:
        # `split`, not slices: the gradient of a slice has the length of the whole sequence.
        return itertools.repeat(x) if x is None or x.shape[dim] == 1 else x.split(BLOCK, dim)

    outputs = []
    state = call.initial_state
    for query, keys, value, log_prior, key_mask in zip(
        call.query.split(BLOCK, 2),
        call.keys.split(BLOCK, -2),
        call.value.split(BLOCK, 2),
        split(call.log_prior, -1),
        split(call.key_mask, 1),
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
        output, state, _ = run(block)
        outputs.append(output)
    return torch.cat(outputs, dim=2), state if call.return_state else None, None


def _attend_bidirectional(
    features: Features, state: State | None, reference: Tensor | None, call: LinearCall
) -> Tensor:
    query = features.query
    total, norm = repeat_state(final_state(features, state, reference), query.shape[1])
    return divide_or_zero(query @ total, (query @ norm.unsqueeze(-1)).squeeze(-1), call.normalise)


def _attend_causal(features: Features, state: State | None, reference: Tensor | None, call: LinearCall) -> Tensor:
    length = features.query.shape[2]
    if length == 0:
        # There are no chunks; products of empty tensors keep the autograd graph connected to the inputs.
        value = repeat_heads(features.value, call.value_group)
        return (features.query @ repeat_heads(features.key, call.group).mT) @ value
    # torch.compile specializes on sizes 0 and 1: for an empty padding (a length that is a multiple of CHUNK) or few
    # chunks it would compile again. While compiling, padding is never empty and there are at least three chunks.
    compiling = torch.compiler.is_compiling()
    count = length // CHUNK + 3 if compiling else ceil_div(length, CHUNK)
    padding = count * CHUNK - length

    def split(x: Tensor) -> Tensor:
        """Reshape [B, H, chunks · CHUNK, ...] to [B, H, chunks, CHUNK, ...]."""
        # torch.export cannot prove that the sizes of `unflatten` match; outside it, its gradient is faster.
        return x.unfold(2, CHUNK, CHUNK).movedim(-1, 3) if compiling else x.unflatten(2, (count, CHUNK))

    def pad_and_split(x: Tensor, fill: float = 0.0) -> Tensor:
        """Reshape [B, H, S, ...] to [B, H, chunks, CHUNK, ...]."""
        pad = (0, 0) * (x.dim() - 3) + (0, padding)
        return split(torch.nn.functional.pad(x.contiguous(), pad, value=fill))

    query, key, value = (pad_and_split(x) for x in (features.query, features.key, features.value))
    # A column of ones makes the denominator another output column.
    value = torch.cat([value, value.new_ones(*value.shape[:-1], 1)], dim=-1)
    within = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).tril()
    if features.log_weight is None or reference is None:
        sums = key_value_sums(key, value).cumsum(2)
        before = torch.cat([torch.zeros_like(sums[:, :, :1]), sums[:, :, :-1]], dim=2)
        factors = within.to(query.dtype)
        entering = query
    else:
        weight = pad_and_split(features.log_weight, -math.inf)
        reference_chunks = split(torch.nn.functional.pad(reference, (0, padding), mode="replicate"))
        peak = reference_chunks[..., -1]  # [B, Hk, chunks]: the log weight that a chunk's sums are relative to
        sums = key_value_sums(key * (weight - peak.unsqueeze(-1)).exp().unsqueeze(-1), value)
        # Sums over earlier chunks, rescaled from the chunk's own log weight to that of the preceding chunk.
        earlier = torch.ones(count, count, dtype=torch.bool, device=query.device).tril(-1)
        last = torch.cat([torch.full_like(peak[..., :1], EMPTY_LOG_WEIGHT), peak[..., :-1]], dim=-1)
        shrink = (peak.unsqueeze(-2) - last.unsqueeze(-1)).masked_fill(~earlier, -math.inf).exp()
        shrink = repeat_heads(shrink, sums.shape[1] // shrink.shape[1])
        before = (shrink @ sums.flatten(-2)).unflatten(-1, sums.shape[-2:])
        factors = (weight.unsqueeze(-2) - reference_chunks.unsqueeze(-1)).masked_fill(~within, -math.inf).exp()
        factors = repeat_heads(factors, call.group)
        entering = query * repeat_heads((last.unsqueeze(-1) - reference_chunks).exp(), call.group).unsqueeze(-1)
    key, value, before = (repeat_heads(x, query.shape[1] // x.shape[1]) for x in (key, value, before))
    sums = ((query @ key.transpose(-1, -2)) * factors) @ value + entering @ before
    sums = sums.flatten(2, 3)
    # Copied while compiling: torch.export cannot prove the layout of a slice.
    sums = sums.index_select(2, torch.arange(length, device=sums.device)) if compiling else sums[:, :, :length]
    numerator, denominator = sums[..., :-1], sums[..., -1]
    if state is not None:
        numerator, denominator = add_state(numerator, denominator, features.query, state, reference, call.group)
    return divide_or_zero(numerator, denominator, call.normalise)


def _run_packed(call: LinearCall, features: Features) -> Tensor:
    """Attend within each packed sequence, as a row of a padded batch."""
    assert call.cu_seqlens is not None
    length = features.key.shape[2]
    segment, position = cu_seqlens_to_segments(call.cu_seqlens, length)
    rows, longest = call.cu_seqlens.numel() - 1, int(call.cu_seqlens.diff().max())

    def unpack(x: Tensor, fill: float = 0.0) -> Tensor:
        """Reshape [1, H, T, ...] to [N, H, longest, ...]."""
        padded = x.new_full((rows, longest, x.shape[1], *x.shape[3:]), fill)
        return padded.index_put((segment, position), x[0].transpose(0, 1)).transpose(1, 2)

    log_weight = None if features.log_weight is None else unpack(features.log_weight, -math.inf)
    padded = Features(unpack(features.query), unpack(features.key), log_weight, unpack(features.value))
    reference = max_log_weights(log_weight, None, call.causal)
    output = (_attend_causal if call.causal else _attend_bidirectional)(padded, None, reference, call)
    return output.transpose(1, 2)[segment, position].transpose(0, 1).unsqueeze(0).to(call.query.dtype)
