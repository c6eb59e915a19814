"""The sums over queries that expectation maximisation needs, in blocks of queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mgk import equations
from mgk._core.calls import MixtureCall
from mgk._core.masks import MASK_VALUE, allowed_pairs, block_of_rows
from mgk._core.precision import without_autocast
from mgk._core.query_blocks import expand_inputs, query_blocks


@dataclass(frozen=True)
class Statistics:
    count: Tensor  # N_jr = Σ_i γ_ijr over the queries i that may see j, [B, Hk, M, S]
    pairs: Tensor  # N_j, their number, [B, Hk, S]
    spread: Tensor  # Σ_i γ_ijr ‖q_i − k_jr‖², [B, Hk, M, S]; empty where it was not asked for


@torch.no_grad()
def equations_statistics(call: MixtureCall, counted: Tensor | None = None) -> Statistics:
    """Sum Eq. 11's responsibilities over the queries in `counted`, bool [B, L] (None: all), by the equations."""
    with without_autocast(call.query):
        query, keys, _, log_prior, scale, tau = expand_inputs(call)
        batch, heads, queries, _ = query.shape
        length = keys.shape[-2]
        bias = call.attn_mask
        count = query.new_zeros(batch, heads, call.components, length)
        pairs = query.new_zeros(batch, heads, length)
        spread = torch.zeros_like(count)
        key_norm = keys.square().sum(-1)
        for rows in query_blocks(call):
            block = query[:, :, rows]
            gamma = equations.responsibilities(block, keys, log_prior, scale=scale, tau=tau)  # [B, H, l, M, S]
            allowed = allowed_pairs(rows, queries, length, bias, call.causal, call.packed, query)
            if bias is not None and bias.dtype != torch.bool:
                finite = block_of_rows(bias, rows) >= MASK_VALUE
                allowed = finite if allowed is None else finite & allowed
            if counted is not None:
                real = counted[:, None, rows, None]
                allowed = real if allowed is None else real & allowed
            if allowed is None:
                pairs += rows.stop - rows.start
            else:
                gamma = gamma.masked_fill(~allowed.unsqueeze(-2), 0)
                pairs += allowed.expand(batch, heads, rows.stop - rows.start, length).sum(-2)
            answered = gamma.sum(-3)
            count += answered
            # Σ_i γ ‖q_i − k‖² = Σ_i γ ‖q_i‖² − 2 k·Σ_i γ q_i + N ‖k‖²
            weighted = gamma.movedim(-3, -1)  # [B, H, M, S, l]
            query_norm = (weighted @ block.square().sum(-1)[:, :, None, :, None]).squeeze(-1)
            cross = ((weighted @ block.unsqueeze(2)) * keys).sum(-1)
            spread += query_norm - 2 * cross + answered * key_norm
        per_key_head = (
            x.unflatten(1, (-1, call.group)).sum(2) if call.group > 1 else x
            for x in (count, pairs, spread.clamp(min=0))
        )
        return Statistics(*per_key_head)
