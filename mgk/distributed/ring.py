"""Mixture attention over a sharded sequence: keys and values travel around a ring of ranks.

Rank r starts with its own block of keys and values and receives in each of R - 1 steps the block of the next rank from
its left neighbour, while it attends to the current one. The outputs of the blocks are merged by their logsumexps. The
backward pass runs the ring again: it recomputes each block, and the gradients of a block travel with it back to its
owner. A rank thus never holds more than two blocks, and no logits of other blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mgk import functional
from mgk._core.calls import MixtureCall, Packed
from mgk._core.masks import and_mask, as_additive
from mgk._core.precision import compute_dtype
from mgk._core.validation import fail
from mgk.distributed.sharding import chunk_starts, rows_of_rank

Tensors = dict[str, Tensor]
# Fields of a call that may need gradients. `Tensors` of a ring may also have "full_mask": a mask of this rank's queries
# and the keys of all ranks.
TENSOR_FIELDS = ("query", "keys", "value", "shift", "log_prior", "scale", "tau", "attn_mask")


@dataclass(frozen=True)
class Shards:
    """The position of this rank in the ring, and the packed sequences of the whole length."""

    group: dist.ProcessGroup
    rank: int
    ranks: int
    cu_seqlens: Tensor | None = None  # int32 [N + 1], offsets in the whole length
    max_seqlen: int | None = None

    def circulate(self, block: Tensors) -> Iterator[tuple[int, Tensors]]:
        """Yield the rank and the block of every rank, this one first; the next block is received meanwhile."""
        for step in range(self.ranks):
            exchange = None if step == self.ranks - 1 else Exchange(self, block)
            yield (self.rank - step) % self.ranks, block
            if exchange is not None:
                block = exchange.wait()

    def offsets(self, source: int, chunk: int, halves: slice) -> Tensor:
        """Return the offsets of the packed sequences within chunks of a rank, int32 [N + 1]."""
        assert self.cu_seqlens is not None
        starts: tuple[int, ...] = chunk_starts(source, self.ranks, chunk)
        parts = [self.cu_seqlens.clamp(start, start + chunk) - start for start in starts[halves]]
        return torch.stack(parts).sum(0, dtype=torch.int32)


class Exchange:
    """A transfer in progress: the block of this rank to the right, that of the left neighbour to this rank."""

    def __init__(self, shards: Shards, block: Tensors) -> None:
        self.shards, self.block = shards, block
        self.work: list[dist.Work] = []
        if shards.ranks == 1:
            return
        self.sent = {name: _as_bytes(x.contiguous()) for name, x in block.items()}
        self.received = {name: torch.empty_like(x) for name, x in self.sent.items()}
        right, left = (dist.get_global_rank(shards.group, (shards.rank + step) % shards.ranks) for step in (1, -1))
        operations = []
        for name in self.sent:
            operations.append(dist.P2POp(dist.isend, self.sent[name], right, shards.group))
            operations.append(dist.P2POp(dist.irecv, self.received[name], left, shards.group))
        with explain_failures(shards, self._action()):
            self.work = dist.batch_isend_irecv(operations)

    def _action(self) -> str:
        left, right = ((self.shards.rank + step) % self.shards.ranks for step in (-1, 1))
        return f"exchange keys with ranks {left} and {right}"

    def wait(self) -> Tensors:
        """Return the received block; on a GPU, the current stream waits for it."""
        if self.shards.ranks == 1:
            return self.block
        with explain_failures(self.shards, self._action()):
            for work in self.work:
                work.wait()
        received = {name: x.view(self.block[name].dtype) for name, x in self.received.items()}
        # Free the sent block now: a generator or a loop variable may refer to this object for longer.
        self.block = self.sent = self.received = {}
        return received


@contextmanager
def explain_failures(shards: Shards, action: str) -> Iterator[None]:
    """Add the ranks concerned to the error of a failed transfer.

    Args:
        shards: The ring.
        action: The transfer, as a sentence continues after "could not".
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"context parallelism: rank {shards.rank} of {shards.ranks} could not {action}: a rank has ended, or did "
            f"not take part within the timeout of the process group ({str(error).splitlines()[0]})"
        ) from error


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.bool else x


@dataclass(frozen=True)
class Part:
    """The pairs of this rank's queries and a block of keys: all rows with all columns, or top-left causal."""

    rows: slice
    columns: slice
    causal: str | None
    packed: Packed | None
    positions: Tensor | None  # of the columns in the whole sequence, if a mask needs them


def plan_part(shards: Shards, tensors: Tensors, source: int, is_causal: bool) -> Part:
    """Return which of this rank's queries attend to which keys of a rank's block.

    With 2R chunks, all chunks of keys below a chunk of queries are attended to without a mask, those above not at all.
    """
    query, length = tensors["query"], tensors["keys"].shape[-2]
    queries = query.shape[2]
    rows, columns, causal = slice(0, queries), slice(0, length), None
    row_halves = column_halves = slice(0, 2)
    if is_causal:
        if source == shards.rank:
            causal = "top-left"
        elif source < shards.rank:
            columns, column_halves = slice(0, length // 2), slice(0, 1)
        else:
            rows, row_halves = slice(queries // 2, queries), slice(1, 2)
    packed = None
    if shards.cu_seqlens is not None:
        limit = shards.max_seqlen
        packed = Packed(
            shards.offsets(shards.rank, queries // 2, row_halves),
            shards.offsets(source, length // 2, column_halves),
            None if limit is None else min(limit, rows.stop - rows.start),
            None if limit is None else min(limit, columns.stop - columns.start),
        )
    positions = None
    if "full_mask" in tensors:
        positions = rows_of_rank(source, shards.ranks, length, query.device)[columns]
    return Part(rows, columns, causal, packed, positions)


def part_call(call: MixtureCall, tensors: Tensors, part: Part) -> MixtureCall:
    """Return the call of a part: its rows of the query, its columns of everything that belongs to keys."""
    keys, value = (tensors[name].narrow(-2, 0, part.columns.stop) for name in ("keys", "value"))
    per_key: dict[str, Any] = {
        name: x if x.shape[-1] == 1 else x.narrow(-1, 0, part.columns.stop)
        for name, x in tensors.items()
        if name in ("log_prior", "scale", "attn_mask")
    }
    mask = per_key.pop("attn_mask", None)
    full_mask = tensors.get("full_mask")
    if full_mask is not None:
        full_mask = full_mask if full_mask.shape[-2] == 1 else full_mask[:, :, part.rows]
        full_mask = full_mask if full_mask.shape[-1] == 1 else full_mask[..., part.positions]
        if mask is None or mask.dtype == torch.bool:
            mask = full_mask if mask is None else and_mask(mask, full_mask)
        else:
            mask = as_additive(full_mask, mask.dtype) + mask
    others: dict[str, Any] = {name: tensors[name] for name in ("shift", "tau") if name in tensors}
    return replace(
        call, query=tensors["query"][:, :, part.rows], keys=keys, value=value, attn_mask=mask, causal=part.causal,
        packed=part.packed, return_lse=True, **per_key, **others,
    )  # fmt: skip


def split_tensors(call: MixtureCall, full_mask: Tensor | None) -> tuple[Tensors, set[str]]:
    """Return the tensors of a call, and the names of those that travel with the keys."""
    tensors = {name: x for name in TENSOR_FIELDS if isinstance(x := getattr(call, name), Tensor)}
    if full_mask is not None:
        tensors["full_mask"] = full_mask
    length = call.keys.shape[-2]
    travelling = {"keys", "value"}
    for name in ("log_prior", "scale", "attn_mask"):
        if name in tensors and tensors[name].shape[-1] == length:
            travelling.add(name)
    return tensors, travelling


class RingAttention(torch.autograd.Function):
    """Output [B, H, L, E] and logsumexp [B, H, L] of a rank's queries over the keys of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, shards: Shards, call: MixtureCall, backend: str, names: tuple[str, ...], travelling: set[str],
        *flat: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        tensors = dict(zip(names, flat, strict=True))
        query = call.query
        dtype = compute_dtype(query.dtype)
        output = query.new_zeros(*query.shape[:-1], call.value.shape[-1], dtype=dtype)
        lse = query.new_full(query.shape[:-1], -math.inf, dtype=dtype)
        block = {name: tensors[name] for name in names if name in travelling}
        for source, remote in shards.circulate(block):
            part = plan_part(shards, tensors, source, call.causal is not None)
            part_output, part_lse = functional.run_mixture(part_call(call, {**tensors, **remote}, part), backend)
            merge_part(output, lse, part.rows, part_output, part_lse)
        result = output.to(query.dtype)
        ctx.save_for_backward(result, lse, *flat)
        # Without its tensors, which activation checkpointing frees only if ctx has no other reference to them.
        ctx.arguments = shards, _without_tensors(call), backend, names, travelling
        return result, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        shards, call, backend, names, travelling = ctx.arguments
        output, lse, *flat = ctx.saved_tensors
        tensors = dict(zip(names, flat, strict=True))
        needed = {name for name, is_needed in zip(names, ctx.needs_input_grad[5:], strict=True) if is_needed}
        zeros = {name: torch.zeros_like(tensors[name], dtype=compute_dtype(tensors[name].dtype)) for name in needed}
        # Gradients of the current block, to which every rank adds before it sends them on.
        # In the order of `names`: that of a set differs between processes, and the tensors are sent in this order.
        travelling_gradients = {name: zeros.pop(name) for name in names if name in needed & travelling}
        gradients = zeros
        block = {name: tensors[name] for name in names if name in travelling}
        gradient_exchange = None
        for source, remote in shards.circulate(block):
            part = plan_part(shards, tensors, source, call.causal is not None)
            part_gradients = _part_gradients(
                call, {**tensors, **remote}, part, backend, needed, output, lse, grad, grad_lse
            )
            if gradient_exchange is not None:
                travelling_gradients = gradient_exchange.wait()
            for name, part_gradient in part_gradients.items():
                total = (travelling_gradients if name in travelling else gradients)[name]
                total += part_gradient
            part_gradients.clear()
            if needed & travelling:
                gradient_exchange = Exchange(shards, travelling_gradients)
        if gradient_exchange is not None:
            travelling_gradients = gradient_exchange.wait()
        gradients.update(travelling_gradients)
        return (*(None,) * 5, *(gradients[name].to(tensors[name].dtype) if name in needed else None for name in names))


def _without_tensors(call: MixtureCall) -> MixtureCall:
    names = [name for name in TENSOR_FIELDS if isinstance(getattr(call, name), Tensor)]
    return replace(call, **dict.fromkeys(names))  # type: ignore[arg-type]


def merge_part(output: Tensor, lse: Tensor, rows: slice, part: Tensor, part_lse: Tensor) -> None:
    """Merge the output of a block of keys into that of the former blocks, in place."""
    old = lse[:, :, rows]
    # The share as a sigmoid of a difference: exp(lse - total) of two rounded numbers does not sum to 1.
    share = torch.sigmoid(part_lse - old).masked_fill(part_lse == -math.inf, 0).unsqueeze(-1)
    output[:, :, rows] += share * (part - output[:, :, rows])
    lse[:, :, rows] = torch.logaddexp(old, part_lse.to(old.dtype))


def _part_gradients(
    call: MixtureCall, tensors: Tensors, part: Part, backend: str, needed: set[str], output: Tensor, lse: Tensor,
    grad: Tensor, grad_lse: Tensor,
) -> Tensors:  # fmt: skip
    """Return the gradients of all needed tensors through one block of keys.

    The output is Σ_b w_b o_b with w_b = exp(lse_b - lse): the gradient of o_b is w_b dO, that of lse_b is
    w_b (dO·(o_b - o) + dlse).
    """
    leaves = {name: x.detach().requires_grad_(name in needed) for name, x in tensors.items()}
    with torch.enable_grad():
        part_output, part_lse = functional.run_mixture(part_call(call, leaves, part), backend)
    rows = part.rows
    dtype = lse.dtype
    weight = (part_lse.detach() - lse[:, :, rows]).exp().masked_fill(part_lse == -math.inf, 0)
    grad = grad[:, :, rows].to(dtype)
    product = (grad * (part_output.detach().to(dtype) - output[:, :, rows].to(dtype))).sum(-1)
    outputs = [
        (part_output, (weight.unsqueeze(-1) * grad).to(part_output.dtype)),
        (part_lse, weight * (product + grad_lse[:, :, rows])),
    ]
    outputs = [(x, gradient) for x, gradient in outputs if x.requires_grad]
    names = sorted(needed)
    results = torch.autograd.grad(
        [x for x, _ in outputs], [leaves[name] for name in names], [x for _, x in outputs], allow_unused=True
    )
    return {name: x for name, x in zip(names, results, strict=True) if x is not None}


@torch.compiler.disable
def run_ring(shards: Shards, call: MixtureCall, backend: str, full_mask: Tensor | None = None) -> Any:
    """Run a mixture call whose query, keys and value are the rows of this rank.

    Args:
        shards: The ring.
        call: The call. Its attn_mask, if any, has one row and the columns of this rank's keys.
        backend: Backend of the blocks.
        full_mask: Mask with the rows of this rank and the columns of all keys in the order of the sequence, or None.

    Returns:
        The output, or a tuple of output and lse if the call returns the lse.
    """
    check_supported(call)
    tensors, travelling = split_tensors(call, full_mask)
    output, lse = RingAttention.apply(shards, call, backend, tuple(tensors), travelling, *tensors.values())
    return (output, lse) if call.return_lse else output


def check_supported(call: MixtureCall) -> None:
    """Raise a ValueError that names an argument which the ring does not support."""
    if call.dropout_p > 0:
        fail("dropout_p", "must be 0 with context parallelism: the recomputed blocks would draw other masks")
    if call.return_weights:
        fail("return_weights", "is not supported with context parallelism, which forms no weights")
    if call.causal == "bottom-right":
        fail("is_causal", "must be True or False with context parallelism: queries and keys have the same positions")
    queries, length = call.query.shape[2], call.keys.shape[-2]
    if call.causal is not None and queries != length:
        fail("is_causal", f"requires as many queries as keys on a rank, got {queries} and {length}")
