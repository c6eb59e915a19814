"""Conversion of a call to inputs of the equations, and blocks of queries that bound the memory of the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mgk._core.calls import MixtureCall
from mgk._core.heads import repeat_heads
from mgk._core.precision import compute_dtype

# Maximum number of elements of a block's logits [B, H, M, rows, S]: 64 MiB in fp32.
BLOCK_ELEMENTS = 1 << 24


class EquationInputs(NamedTuple):
    """Inputs of the equations in the compute dtype, with heads repeated for the query heads; one head broadcasts."""

    query: Tensor  # [B, H, L, D]
    keys: Tensor  # [B, H or 1, M, S, D]
    value: Tensor  # [B, H or 1, S, E]
    log_prior: Tensor  # broadcastable to [B, H, M, S]
    scale: float | Tensor  # a number, or broadcastable to [B, H, M, S]
    tau: float | Tensor  # a number, or [H]


def expand_inputs(call: MixtureCall) -> EquationInputs:
    """Convert a call to inputs of the equations."""
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
    keys = repeat_heads(call.component_keys(dtype), group)
    value = repeat_heads(call.value.to(dtype), call.value_group)
    return EquationInputs(call.query.to(dtype), keys, value, log_prior, scale, tau)


def query_blocks(call: MixtureCall) -> list[slice]:
    """Split the queries into blocks whose logits have at most BLOCK_ELEMENTS elements."""
    queries = call.query.shape[2]
    # One block under torch.compile: a loop over blocks would specialize on the symbolic length.
    if torch.compiler.is_compiling() or queries == 0:
        return [slice(0, queries)]
    per_row = call.query.shape[0] * call.query.shape[1] * call.components * call.keys.shape[-2]
    rows = max(1, BLOCK_ELEMENTS // max(1, per_row))
    return [slice(start, min(start + rows, queries)) for start in range(0, queries, rows)]
