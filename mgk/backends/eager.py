"""The equations themselves as a backend: covers every call, on every device, in blocks of queries."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mgk import equations
from mgk._core.calls import MixtureCall
from mgk._core.masks import MASK_VALUE, allowed_pairs, block_of_rows, repeat_heads

# Elements of one block's logits [B, H, M, rows, S]: 64 MiB in fp32.
BLOCK_ELEMENTS = 1 << 24


def refuses(call: MixtureCall) -> str | None:
    return None


def without_autocast(like: Tensor) -> AbstractContextManager[Any]:
    """Inside, nothing is converted to half precision. The meta device knows no autocast."""
    kind = like.device.type
    # Only where it is on: a program that torch 2.6 exports cannot be saved with such a region in it.
    return torch.autocast(kind, enabled=False) if kind != "meta" and torch.is_autocast_enabled(kind) else nullcontext()


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is computed in fp32; fp32 and fp64 as they are."""
    return dtype if dtype == torch.float64 else torch.float32


def prepare(call: MixtureCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float | Tensor, float | Tensor]:
    """query, keys [B, H, M, S, D], value, log_prior, scale and tau for the query heads, in the type to compute in."""
    dtype = compute_dtype(call.query.dtype)
    group = call.group
    scale, tau, log_prior = call.scale, call.tau, call.log_prior
    if isinstance(scale, Tensor):
        scale = repeat_heads(scale.to(dtype), group)
    if isinstance(tau, Tensor):
        tau = tau.to(dtype).repeat_interleave(group)
    if log_prior is None:
        log_prior = call.query.new_full((1, 1, 1, 1), 1 / call.components, dtype=dtype).log()
    log_prior = repeat_heads(log_prior.to(dtype), group)
    keys, value = (repeat_heads(x, group) for x in (call.component_keys(dtype), call.value.to(dtype)))
    return call.query.to(dtype), keys, value, log_prior, scale, tau


def query_blocks(call: MixtureCall) -> list[slice]:
    """The queries in blocks that keep the logits under BLOCK_ELEMENTS."""
    queries = call.query.shape[2]
    # A compiler sees lengths as symbols, which a loop over blocks would fix: it gets one block.
    if torch.compiler.is_compiling() or queries == 0:
        return [slice(0, queries)]
    per_row = call.query.shape[0] * call.query.shape[1] * call.components * call.keys.shape[-2]
    rows = max(1, BLOCK_ELEMENTS // max(1, per_row))
    return [slice(start, min(start + rows, queries)) for start in range(0, queries, rows)]


def run(call: MixtureCall) -> tuple[Tensor, Tensor | None, Tensor | None]:
    with without_autocast(call.query):
        query, keys, value, log_prior, scale, tau = prepare(call)
        bias = call.attn_mask
        if bias is not None:
            # What other libraries hide by, the least finite number, hides here too, as in the kernels: a row of nothing
            # else is one that sees nothing.
            bias = None if bias.dtype == torch.bool else bias.to(query.dtype)
            bias = None if bias is None else bias.masked_fill(bias < MASK_VALUE, -math.inf)

        def block(rows: slice) -> tuple[Tensor, Tensor, Tensor | None]:
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
            output, lse, weights = block(blocks[0])
        else:
            # Recomputed in the backward, so that the weights of all blocks are never in memory together.
            outputs, lses, parts = zip(*(checkpoint(block, rows, use_reentrant=False) for rows in blocks), strict=True)
            output, lse = torch.cat(outputs, dim=2), torch.cat(lses, dim=2)
            weights = torch.cat(parts, dim=2) if call.return_weights else None
    dtype = call.query.dtype
    return output.to(dtype), lse, None if weights is None else weights.to(dtype)
