"""The forward pass of a large call that needs no gradients: part after part, so that the prepared terms of one part
only are held at a time."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

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


def launch_inference(
    want_lse: bool, query: Any, keys: Any, value: Any, shift: Any, bias: Any, scale_t: Any, tau_t: Any, mask: Any,
    seed: Any, cu_q: Any, cu_k: Any, scale: Any, tau: Any, constant: Any, dropout_p: Any, causal: Any, hard: Any,
    max_q: Any, max_k: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """out and, if wanted, lse as `launch_forward` gives them."""
    (B, H, L), (HK, S, E) = query.shape[:3], value.shape[1:]
    M = keys.shape[2] if shift is None else shift.shape[1]
    out = by_position(query, E)
    lse = query.new_empty(B, H, L, dtype=torch.float32) if want_lse else None
    # Packed sequences share an entry of the batch, and dropout draws by the number of a head in the call.
    at_a_time = B * HK
    if out.numel() and S and cu_q is None and dropout_p == 0:
        width = padded_width(max(query.shape[3], E))
        block = blocks("unblended forward", width, M, shift is not None, query.element_size())
        at_a_time = key_heads_of_part(B, H, HK, L, S, M, block)
    if at_a_time >= B * HK:
        prepared, stats = workspace(query, HK, M, slots_of(cu_k, B, S))
        forward_into(
            out, lse, prepared, stats, query, keys, value, shift, bias, scale_t, tau_t, mask, seed, cu_q, cu_k, scale,
            tau, constant, dropout_p, causal, hard, max_q, max_k,
        )  # fmt: skip
        return out, lse
    entries, heads, group = max(1, at_a_time // HK), min(at_a_time, HK), H // HK
    prepared, stats = workspace(query, heads, M, slots_of(None, entries, S))

    def of(x: Tensor | None, batch: slice, heads: slice) -> Tensor | None:
        """A part of [B or 1, heads or 1, ...]."""
        if x is None:
            return None
        x = x[batch] if x.shape[0] > 1 else x
        return x[:, heads] if x.shape[1] > 1 else x

    for batch, key in parts(B, HK, at_a_time):
        row = slice(key.start * group, key.stop * group)
        q, n_heads = of(query, batch, row), key.stop - key.start
        slots = slots_of(None, q.shape[0], S)  # type: ignore[union-attr]
        forward_into(
            of(out, batch, row), of(lse, batch, row), *_leading(prepared, stats, n_heads, slots), q,
            of(keys, batch, key), of(value, batch, key), None if shift is None else shift[key], of(bias, batch, key),
            None if scale_t is None else scale_t[key], None if tau_t is None else tau_t[key], of(mask, batch, row),
            seed, cu_q, cu_k, scale, tau, constant, dropout_p, causal, hard, max_q, max_k, True,
        )  # fmt: skip
    return out, lse


def _leading(prepared: Tensor, stats: Tensor, heads: int, slots: int) -> tuple[Tensor, Tensor]:
    """The room of a part, which may be smaller than the others, at the beginning of theirs."""
    M, n = prepared.shape[2], slots * SLOT
    return (
        prepared.view(-1)[: 2 * heads * M * n].view(2, heads, M, n),
        stats.view(-1)[: heads * slots * 4].view(heads, slots, 4),
    )
