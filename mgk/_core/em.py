"""Statistics of expectation maximization: sums of responsibilities over queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mgk import equations
from mgk._core.calls import MixtureCall
from mgk._core.masks import allowed_pairs, and_mask, as_bool, block_of_rows
from mgk._core.precision import without_autocast
from mgk._core.query_blocks import expand_inputs, query_blocks


@dataclass(frozen=True)
class EMStatistics:
    """Sums over the queries i that attend to key j, with responsibilities γ_ijr (Eq. 11)."""

    count: Tensor  # N_jr = Σ_i γ_ijr, [B, Hk, M, S]
    pairs: Tensor  # N_j, the number of queries, [B, Hk, S]
    spread: Tensor | None  # Σ_i γ_ijr ‖q_i − k_jr‖², [B, Hk, M, S]; None if not computed


@torch.no_grad()
def statistics_by_equations(call: MixtureCall, real_queries: Tensor | None = None) -> EMStatistics:
    """Compute all statistics with the equations of the paper, in blocks of queries.

    Args:
        call: Call whose masks and causality limit the pairs.
        real_queries: bool [B, L], False for queries to leave out, such as padding. None includes all.
    """
    call = call.with_zeroed_padding()
    with without_autocast(call.query):
        query, keys, _, log_prior, scale, tau = expand_inputs(call)
        batch, heads = query.shape[:2]
        length = keys.shape[-2]
        count = query.new_zeros(batch, heads, call.components, length)
        pairs = query.new_zeros(batch, heads, length)
        spread = torch.zeros_like(count)
        key_norm = equations.squared_norms(keys)
        for rows in query_blocks(call):
            block = query[:, :, rows]
            gamma = equations.responsibilities(block, keys, log_prior, scale=scale, tau=tau)  # [B, H, l, M, S]
            allowed = _attended_pairs(call, rows, real_queries)
            if allowed is None:
                pairs += rows.stop - rows.start
            else:
                gamma = gamma.masked_fill(~allowed.unsqueeze(-2), 0)
                pairs += allowed.expand(batch, heads, rows.stop - rows.start, length).sum(-2)
            block_count = gamma.sum(-3)
            count += block_count
            # Σ_i γ ‖q_i − k‖² = Σ_i γ ‖q_i‖² − 2 k·Σ_i γ q_i + N ‖k‖²
            weighted = gamma.movedim(-3, -1)  # [B, H, M, S, l]
            query_norm = (weighted @ block.square().sum(-1)[:, :, None, :, None]).squeeze(-1)
            cross = ((weighted @ block.unsqueeze(2)) * keys).sum(-1)
            spread += query_norm - 2 * cross + block_count * key_norm
        spread = spread.clamp(min=0)
        if call.group > 1:
            count, pairs, spread = (x.unflatten(1, (-1, call.group)).sum(2) for x in (count, pairs, spread))
        return EMStatistics(count, pairs, spread)


def _attended_pairs(call: MixtureCall, rows: slice, real_queries: Tensor | None) -> Tensor | None:
    """Return which pairs of a block of queries count, bool and broadcastable to [B, H, rows, S]; None if all do."""
    mask = call.attn_mask
    allowed = allowed_pairs(rows, call.query.shape[2], call.keys.shape[-2], mask, call.causal, call.packed, call.query)
    if mask is not None and mask.dtype != torch.bool:
        allowed = and_mask(as_bool(block_of_rows(mask, rows)), allowed)
    if real_queries is not None:
        allowed = and_mask(real_queries[:, None, rows, None], allowed)
    return allowed
