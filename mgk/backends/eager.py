"""The equations themselves as a backend: covers every call, on every device, in blocks of queries."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mgk import equations
from mgk._core.calls import MixtureCall
from mgk._core.masks import MASK_VALUE, allowed_pairs, block_of_rows
from mgk._core.precision import without_autocast
from mgk._core.query_blocks import expand_inputs, query_blocks


def refuses(call: MixtureCall) -> str | None:
    return None


def run(call: MixtureCall) -> tuple[Tensor, Tensor | None, Tensor | None]:
    with without_autocast(call.query):
        query, keys, value, log_prior, scale, tau = expand_inputs(call)
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
