"""Linear attention over a sharded sequence: ranks exchange the states of their chunks (Eq. 14).

The state of a chunk is the sum over its keys, of a size that does not depend on the length. All ranks gather the states
of all chunks. A chunk of queries starts from the sum of the chunks before it or, without causality, of all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgk import functional
from mgk._core.calls import LinearCall
from mgk._core.linear_features import State, final_state, map_features, max_log_weights
from mgk._core.validation import fail
from mgk.distributed.ring import Shards, explain_failures
from mgk.distributed.sharding import chunk_starts


@dataclass(frozen=True)
class Segment:
    """Rows of a chunk that belong to a sequence with rows in other chunks."""

    sequence: int
    start: int  # in the whole length
    stop: int


def crossing_segments(bounds: list[int], start: int, stop: int) -> list[Segment]:
    """Return the at most two segments of a chunk whose sequences cross its edges.

    Args:
        bounds: Offsets of the packed sequences.
        start: First row of the chunk.
        stop: Row after the last one.
    """
    segments = []
    for sequence, (first, last) in enumerate(pairwise(bounds)):
        crosses = first < start < last or first < stop < last
        if crosses:
            segments.append(Segment(sequence, max(first, start), min(last, stop)))
    return segments


def split_chunk(segments: list[Segment], start: int, stop: int) -> Iterator[Segment | slice]:
    """Yield the rows of a chunk in order: its crossing segments, and slices of whole sequences between them."""
    row = start
    for segment in segments:
        if row < segment.start:
            yield slice(row, segment.start)
        yield segment
        row = segment.stop
    if row < stop:
        yield slice(row, stop)


class GatherStates(torch.autograd.Function):
    """Gather a tensor from all ranks, [R, ...]; the gradient of a rank's part is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        parts = [torch.empty_like(x) for _ in range(shards.ranks)]
        with explain_failures(shards, "gather the states of linear attention"):
            dist.all_gather(parts, x.contiguous(), group=shards.group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        with explain_failures(ctx.shards, "sum the gradients of the states of linear attention"):
            dist.all_reduce(total, group=ctx.shards.group)
        return total[ctx.shards.rank], None


def add_states(states: list[State]) -> State | None:
    """Add states; with log weights, relative to the largest one."""
    if not states:
        return None
    if len(states[0]) == 2:
        return tuple(torch.stack(parts).sum(0) for parts in zip(*states, strict=True))
    references = torch.stack([state[2] for state in states]).detach()
    reference = references.amax(0)
    factors = (references - reference).exp()  # [n, B, Hk]
    totals, norms = (torch.stack([state[n] for state in states]) for n in (0, 1))
    # Z may have more heads than the keys, each key head for several of them.
    repeated = factors.repeat_interleave(totals.shape[2] // factors.shape[2], 2)
    return (totals * repeated[..., None, None]).sum(0), (norms * factors.unsqueeze(-1)).sum(0), reference


def slice_call(call: LinearCall, start: int, stop: int, **changes: Any) -> LinearCall:
    """Return the call of some of a rank's rows."""
    size = stop - start
    prior, mask = call.log_prior, call.key_mask
    return replace(
        call,
        query=call.query.narrow(2, start, size),
        keys=call.keys.narrow(-2, start, size),
        value=call.value.narrow(2, start, size),
        log_prior=prior if prior is None or prior.shape[-1] == 1 else prior.narrow(-1, start, size),
        key_mask=None if mask is None else mask[:, start:stop],
        **changes,
    )


def segment_state(call: LinearCall) -> State:
    """Return the sums over the keys of a call."""
    features = map_features(replace(call, query=call.query[:, :, :1]))
    return final_state(features, None, max_log_weights(features.log_weight, None, causal=False))


@torch.compiler.disable
def run_state_passing(shards: Shards, call: LinearCall, backend: str) -> Tensor:
    """Run a linear call whose query, keys and value are the rows of this rank; return the output."""
    check_supported(call)
    rank, ranks, chunk = shards.rank, shards.ranks, call.query.shape[2] // 2
    bounds = [0, 2 * ranks * chunk] if shards.cu_seqlens is None else shards.cu_seqlens.tolist()
    segments = {
        (source, half): crossing_segments(bounds, start, start + chunk)
        for source in range(ranks)
        for half, start in enumerate(chunk_starts(source, ranks, chunk))
    }
    gathered = _gather_segment_states(shards, call, segments, chunk)
    outputs = []
    for half, start in enumerate(chunk_starts(rank, ranks, chunk)):
        offset = half * chunk - start
        for rows in split_chunk(segments[rank, half], start, start + chunk):
            changes: dict[str, Any]
            if isinstance(rows, Segment):
                others = [
                    state
                    for other, state in gathered
                    if other.sequence == rows.sequence
                    and (other.stop <= rows.start if call.causal else other.start != rows.start)
                ]
                changes = {"initial_state": add_states(others)}
            else:
                inner = sorted({bound - rows.start for bound in bounds if rows.start <= bound <= rows.stop})
                changes = {"cu_seqlens": torch.tensor(inner, dtype=torch.int32, device=call.query.device)}
            part = slice_call(call, rows.start + offset, rows.stop + offset, **changes)
            outputs.append(functional.run_linear(part, backend))
    return torch.cat(outputs, dim=2)


def _gather_segment_states(
    shards: Shards, call: LinearCall, segments: dict[tuple[int, int], list[Segment]], chunk: int
) -> list[tuple[Segment, State]]:
    """Return the segments of all ranks with their states."""
    slots = max(len(parts) for parts in segments.values())
    if shards.ranks == 1 or slots == 0:
        # One rank has two chunks, whose states need no communication.
        sources, states = [shards.rank], [_local_states(shards, call, segments, chunk, slots)]
    else:
        local = _local_states(shards, call, segments, chunk, slots)
        stacked = [torch.stack(parts) for parts in zip(*local, strict=True)]
        gathered = [GatherStates.apply(x, shards) for x in stacked]
        sources = list(range(shards.ranks))
        states = [[tuple(x[source, n] for x in gathered) for n in range(2 * slots)] for source in sources]
    return [
        (segment, parts[half * slots + n])
        for source, parts in zip(sources, states, strict=True)
        for half in range(2)
        for n, segment in enumerate(segments[source, half])
    ]


def _local_states(
    shards: Shards, call: LinearCall, segments: dict[tuple[int, int], list[Segment]], chunk: int, slots: int
) -> list[State]:
    """Return the states of this rank's segments, 2 × slots of them; unused ones repeat an empty segment's."""
    states = []
    for half, start in enumerate(chunk_starts(shards.rank, shards.ranks, chunk)):
        offset = half * chunk - start
        parts = segments[shards.rank, half]
        for n in range(slots):
            rows = (parts[n].start + offset, parts[n].stop + offset) if n < len(parts) else (0, 0)
            states.append(segment_state(slice_call(call, *rows)))
    return states


def check_supported(call: LinearCall) -> None:
    """Raise a ValueError that names an argument which state passing does not support."""
    if call.return_weights:
        fail("return_weights", "is not supported with context parallelism, which forms no weights")
    if call.return_state or call.initial_state is not None:
        fail("initial_state", "and return_state are not supported with context parallelism, which passes states itself")
    if call.query.shape[2] != call.keys.shape[-2]:
        fail("query", "must have as many rows as the keys in linear attention with context parallelism")
