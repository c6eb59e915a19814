"""The forward pass of a large call that needs no gradients: part after part, so that the prepared terms of one part
only are held at a time."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mgk.kernels.mixture.args import MixtureArgs
from mgk.kernels.mixture.block_sizes import Block, blocks
from mgk.kernels.mixture.launch import by_position, forward_into, slots_of, workspace
from mgk.kernels.mixture.launch_config import BLEND_WIDTH, SLOT, ceil_div, padded_width

# A part keeps the device busy, some three rounds of programs on 132 processors, and takes far longer than its launches.
PART_PROGRAMS = 1024
PART_PAIRS = 1 << 31
# Bytes of c and C, for each key and component, and of a key's side of the blend.
PREPARED_BYTES = 8
OPERAND_BYTES = 2 * BLEND_WIDTH
# What may be held: as much as the lse of the call, which others keep.
HELD_BYTES = 4

Part = tuple[slice, slice]


def key_heads_of_part(batch: int, heads: int, key_heads: int, L: int, S: int, components: int, block: Block) -> int:
    """How many key heads, of all batch entries, are taken at a time: all, unless parts that hold no more than they may
    are large enough."""
    rows, way = block[0], block[-1]
    held = PREPARED_BYTES * components + OPERAND_BYTES * bool(way & 2)
    group, every = heads // key_heads, batch * key_heads
    wanted = HELD_BYTES * heads * L * batch // (held * S)
    enough = max(ceil_div(PART_PROGRAMS, group * ceil_div(L, rows)), ceil_div(PART_PAIRS, group * L * S))
    wanted = max(wanted, 1)
    return wanted if enough <= wanted < every else every


def parts(batch: int, key_heads: int, at_a_time: int) -> Iterator[Part]:
    """Slices of the batch and of the key heads; a part of the lse is contiguous."""
    if at_a_time >= key_heads:
        step = at_a_time // key_heads
        for b in range(0, batch, step):
            yield slice(b, b + step), slice(0, key_heads)
        return
    for b in range(batch):
        for h in range(0, key_heads, at_a_time):
            yield slice(b, b + 1), slice(h, min(h + at_a_time, key_heads))


def launch_inference(want_lse: bool, args: MixtureArgs) -> tuple[Tensor, Tensor | None]:
    """out and, if wanted, lse as `launch_forward` gives them."""
    query, value, shift, cu_q = args.query, args.value, args.shift, args.cu_q
    (B, H, L, D), (_, HK, S, E) = query.shape, value.shape
    M = args.components
    out = by_position(query, E)
    lse = query.new_empty(B, H, L, dtype=torch.float32) if want_lse else None
    # Packed sequences share an entry of the batch, and dropout draws by the number of a head in the call.
    at_a_time = B * HK
    if out.numel() and S and cu_q is None and args.dropout_p == 0:
        width = padded_width(max(D, E))
        block = blocks("unblended forward", width, M, shift is not None, query.element_size())
        at_a_time = key_heads_of_part(B, H, HK, L, S, M, block)
    if at_a_time >= B * HK:
        prepared, stats = workspace(query, HK, M, slots_of(args.cu_k, B, S))
        forward_into(out, lse, prepared, stats, args)
        return out, lse
    entries, heads, group = max(1, at_a_time // HK), min(at_a_time, HK), H // HK
    prepared, stats = workspace(query, heads, M, slots_of(None, entries, S))

    def of(x: Any, batch: slice, heads: slice) -> Any:
        """A part of [B or 1, heads or 1, ...]."""
        if x is None:
            return None
        x = x[batch] if x.shape[0] > 1 else x
        return x[:, heads] if x.shape[1] > 1 else x

    for batch, key in parts(B, HK, at_a_time):
        row = slice(key.start * group, key.stop * group)
        part = args._replace(
            query=of(query, batch, row), keys=of(args.keys, batch, key), value=of(value, batch, key),
            shift=None if shift is None else shift[key], bias=of(args.bias, batch, key),
            scale_t=None if args.scale_t is None else args.scale_t[key],
            tau_t=None if args.tau_t is None else args.tau_t[key], mask=of(args.mask, batch, row),
        )  # fmt: skip
        buffers = _leading(prepared, stats, key.stop - key.start, slots_of(None, part.query.shape[0], S))
        forward_into(of(out, batch, row), of(lse, batch, row), *buffers, part, True)
    return out, lse


def _leading(prepared: Tensor, stats: Tensor, heads: int, slots: int) -> tuple[Tensor, Tensor]:
    """The room of a part, which may be smaller than the others, at the beginning of theirs."""
    M, n = prepared.shape[2], slots * SLOT
    return (
        prepared.view(-1)[: 2 * heads * M * n].view(2, heads, M, n),
        stats.view(-1)[: heads * slots * 4].view(heads, slots, 4),
    )
