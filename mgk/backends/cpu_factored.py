"""Shifted keys on the CPU with one exponential per pair ("factored"): linear memory, forward and backward.

The components of a shifted key k_j + b_r share the product q_i·k_j, and the weights have factors:

    p_ij = Σ_r exp(λ q_i·k_j + a_ir + c_jr) = exp(λ q_i·k_j) Σ_r exp(a_ir) exp(c_jr),    a_ir = λ q_i·b_r

so one product of queries and keys, one exponential and a product of rank M replace M softmax attentions. The maxima of
a and c over components move into the exponential. The sum over components underflows if a and c prefer different
components by far: blocks of such queries compute the exponential of every component instead.

Shapes: N pairs of batch entry and key head, G query heads per key head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk._core import masks
from mgk._core.calls import MixtureCall
from mgk._core.logit_terms import key_terms, query_norm_term, scaled_query
from mgk._core.precision import compute_dtype, without_autocast
from mgk.kernels.autograd import raise_no_double_backward

# Numbers in a tile of weights: a tile and its temporaries fit the L2 cache.
TILE = 1 << 18
# Queries per block, at least: fewer make the sums over queries of dk and dv slow.
MIN_ROWS = 32
# Smallest sum of factored weights. Weights smaller than it by a factor of 1e-18 are still normal fp32 numbers.
MIN_SUM = 1e-20


def unsupported_reason(call: MixtureCall) -> str | None:
    """Return why the call is not supported, or None."""
    if call.query.device.type != "cpu":
        return f"it runs on the CPU only, but query is on {call.query.device}"
    if call.shift is None:
        return "independent keys have a product with the query for each component"
    if call.hard:
        return "a hard assignment is not a sum over components"
    if call.return_weights:
        return "it never forms the attention weights of all queries"
    if call.dropout_p > 0:
        return "it does not support dropout"
    if not call.equal_scale:
        return "components of different scales have no common factor"
    if call.attn_mask is not None and not _is_key_mask(call.attn_mask, call):
        return "it supports only boolean masks of keys, [B, 1, 1, S]"
    if call.packed is not None:
        return "it does not support packed sequences"
    if call.value_group != call.group:
        return "the numbers of key heads and value heads differ"
    if call.unsupported_transform is not None:
        return f"{call.unsupported_transform} are not supported"
    return None


def prefer_other_reason(call: MixtureCall) -> str | None:
    """Return why another backend is faster, or None."""
    if call.components == 1:
        return "torch's flash attention is faster for one component"
    return None


def _is_key_mask(mask: Tensor, call: MixtureCall) -> bool:
    return mask.dtype == torch.bool and mask.shape[1] == mask.shape[2] == 1 and mask.shape[3] == call.keys.shape[2]


def run(call: MixtureCall) -> tuple[Tensor, Tensor | None, None]:
    """Return the output [B, H, L, E], the lse [B, H, L], and None for the weights."""
    input_dtype, dtype = call.query.dtype, compute_dtype(call.query.dtype)
    call = call.with_zeroed_padding().converted(dtype)
    assert call.shift is not None
    with without_autocast(call.query):
        (B, HK, S, _), (H, L) = call.keys.shape, call.query.shape[1:3]
        query = scaled_query(call, dtype).unflatten(1, (HK, -1))  # [B, Hk, G, L, D]
        offset = S - L if call.causal == "bottom-right" else 0
        is_masked = bool(call.causal) and offset < S - 1
        if not is_masked:  # the queries of all heads of a group form one sequence
            query = query.flatten(2, 3).unsqueeze(2)
        query_term = query @ call.shift[:, None].transpose(-1, -2)  # [B, Hk, G, L, M]
        key_term = key_terms(call, call.component_keys(dtype)).expand(B, HK, -1, S)
        if call.attn_mask is not None:
            key_term = key_term.masked_fill(~call.attn_mask, masks.MASK_VALUE)
        output, lse, _, _ = factored_forward(
            query.flatten(0, 1),
            call.keys.flatten(0, 1),
            call.value.flatten(0, 1),
            query_term.flatten(0, 1),
            key_term.flatten(0, 1),
            offset if is_masked else None,
        )
        output, lse = output.view(B, H, L, output.shape[-1]), lse.view(B, H, L)
        if call.return_lse:
            lse = lse + query_norm_term(call, dtype)
    return output.to(input_dtype), lse, None


class _Factors(NamedTuple):
    """Factors of the weights: p_ij = exp(query_max_i) exp(query_i·key_j + key_max_j) Σ_r rho_ir coef_jr."""

    rho: Tensor  # [N, G, L, M]: exp(a_ir - query_max_i), at most 1
    coef: Tensor  # [N, M, S]: exp of c_jr minus its maximum, at most 1
    query_max: Tensor  # [N, G, L]: the maximum of a_ir over components
    key_max: Tensor  # [N, 1, S]: the maximum of c_jr over components


def _factors(query_term: Tensor, key_term: Tensor) -> _Factors:
    query_max, key_max = query_term.amax(-1, keepdim=True), key_term.amax(1, keepdim=True)
    return _Factors(
        rho=(query_term - query_max).exp_(),
        coef=(key_term - key_max).exp_(),
        query_max=query_max.squeeze(-1),
        key_max=key_max,
    )


class _Block(NamedTuple):
    """A block of queries that attend to a range of keys."""

    queries: tuple[slice, int, slice]  # index of [N, G, L]
    keys: tuple[slice, slice]  # index of [N, S]
    diagonal: int | None  # query i of the block attends to keys up to i + diagonal; None: to all keys


def _blocks(query: Tensor, num_keys: int, offset: int | None) -> Iterator[_Block]:
    """Split the queries [N, G, L, D] into blocks whose weights have about TILE numbers."""
    N, G, L, _ = query.shape
    num_rows = min(L, max(MIN_ROWS, TILE // num_keys))
    num_heads = max(1, TILE // (num_rows * num_keys))
    first_row = 0 if offset is None else max(0, -offset)  # the queries before it have no keys
    for first_head in range(0, N, num_heads):
        heads = slice(first_head, min(first_head + num_heads, N))
        for g in range(G):
            for start in range(first_row, L, num_rows):
                stop = min(start + num_rows, L)
                visible_keys = num_keys if offset is None else min(num_keys, stop + offset)
                diagonal = None if offset is None else start + offset
                yield _Block((heads, g, slice(start, stop)), (heads, slice(0, visible_keys)), diagonal)


def _products(query: Tensor, key: Tensor, block: _Block, term: Tensor | None = None) -> Tensor:
    """Return query_i·key_j + term_j of a block, −inf for keys after the query. term: [N, 1, S]."""
    heads, keys = block.keys
    block_query, block_key = query[block.queries], key[block.keys].transpose(1, 2)
    products = block_query @ block_key if term is None else torch.baddbmm(term[heads, :, keys], block_query, block_key)
    if block.diagonal is not None and block.diagonal < products.shape[2]:
        first = max(0, block.diagonal)  # all queries of the block attend to the keys before it
        future = products.new_full((products.shape[1], products.shape[2] - first), -math.inf)
        # Added, because masked_fill_ with a broadcast mask takes seven times as long.
        products[..., first:].add_(future.triu_(block.diagonal - first + 1))
    return products


def _component_logits(query: Tensor, key: Tensor, query_term: Tensor, key_term: Tensor, block: _Block) -> list[Tensor]:
    """Return λ q_i·k_j + a_ir + c_jr of a block for every component r, −inf for keys after the query."""
    products, (heads, keys) = _products(query, key, block), block.keys
    query_term, key_term = query_term[block.queries], key_term[heads, :, keys]
    return [products + query_term[..., r, None] + key_term[:, None, r] for r in range(key_term.shape[1])]


@torch.library.custom_op("mgk::factored_mixture", mutates_args=(), device_types="cpu")
def factored_forward(
    query: Tensor, key: Tensor, value: Tensor, query_term: Tensor, key_term: Tensor, offset: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attend with the softmax of q_i·k_j + a_ir + c_jr over keys and components.

    Args:
        query: [N, G, L, D].
        key: [N, S, D].
        value: [N, S, E].
        query_term: a, [N, G, L, M].
        key_term: c, [N, M, S]; MASK_VALUE masks a key.
        offset: Query i attends to keys up to i + offset; None: to all keys.

    Returns:
        The output [N, G, L, E] and the lse [N, G, L]. For the backward pass, both [N, G, L]: the maximum of the
        exponents of the weights, and the sum of the weights, negative where they were not factored. Weights from the
        lse would have its rounding error, which is large if the lse is.
    """
    output = query.new_zeros(*query.shape[:-1], value.shape[-1])
    lse, sums = query.new_full(query.shape[:-1], -math.inf), query.new_zeros(query.shape[:-1])
    row_max = torch.zeros_like(sums)
    if lse.numel() == 0 or key.shape[1] == 0:
        return output, lse, row_max, sums
    with without_autocast(query):
        factors = _factors(query_term, key_term)
        for block in _blocks(query, key.shape[1], offset):
            queries, (heads, keys) = block.queries, block.keys
            weights = _products(query, key, block, factors.key_max)
            row_max[queries] = maxima = weights.amax(-1)
            weights.sub_(maxima.unsqueeze(-1)).exp_().mul_(factors.rho[queries] @ factors.coef[heads, :, keys])
            total, log_factor = weights.sum(-1), maxima + factors.query_max[queries]
            is_masked = masks.is_masked(maxima)
            if bool(((total < MIN_SUM) & ~is_masked).any()):
                logits = torch.stack(_component_logits(query, key, query_term, key_term, block))
                row_max[queries] = log_factor = logits.amax((0, -1))
                weights = logits.sub_(log_factor.unsqueeze(-1)).exp_().sum(0)
                total = weights.sum(-1)
                sums[queries] = -total
            else:
                sums[queries] = total
            result = (weights @ value[block.keys]).div_(total.unsqueeze(-1))
            output[queries] = result.masked_fill_(is_masked.unsqueeze(-1), 0)
            lse[queries] = total.log_().add_(log_factor).masked_fill_(is_masked, -math.inf)
    return output, lse, row_max, sums


@factored_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse, row_max, sums = (query.new_empty(query.shape[:-1]) for _ in range(3))
    return query.new_empty(*query.shape[:-1], value.shape[-1]), lse, row_max, sums


@torch.library.custom_op("mgk::factored_mixture_backward", mutates_args=(), device_types="cpu")
def factored_backward(
    grad_output: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_term: Tensor,
    key_term: Tensor,
    offset: int | None,
    output: Tensor,
    lse: Tensor,
    row_max: Tensor,
    sums: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, query_term and key_term."""
    grad_query, grad_key, grad_value, grad_query_term, grad_key_term = grads = (
        query.new_zeros(query.shape),
        key.new_zeros(key.shape),
        value.new_zeros(value.shape),
        query_term.new_zeros(query_term.shape),
        key_term.new_zeros(key_term.shape),
    )
    if lse.numel() == 0 or key.shape[1] == 0:
        return grads
    with without_autocast(query):
        factors = _factors(query_term, key_term)
        minus_delta = (grad_lse - (grad_output * output).sum(-1)).unsqueeze(-1)
        normalizer = sums.abs().reciprocal_().masked_fill_(lse == -math.inf, 0).unsqueeze(-1)
        rho = factors.rho * normalizer
        for block in _blocks(query, key.shape[1], offset):
            queries, (heads, keys) = block.queries, block.keys
            grad_weights = torch.baddbmm(minus_delta[queries], grad_output[queries], value[block.keys].transpose(1, 2))
            if bool((sums[queries] >= 0).all()):
                coef = factors.coef[heads, :, keys]
                mixture = rho[queries] @ coef
                exponents = _products(query, key, block, factors.key_max)
                exponentials = exponents.sub_(row_max[queries].unsqueeze(-1)).exp_()
                grad_mixture = grad_weights.mul_(exponentials)
                grad_query_term[queries] = (grad_mixture @ coef.transpose(1, 2)).mul_(rho[queries])
                grad_key_term[heads, :, keys] += (rho[queries].transpose(1, 2) @ grad_mixture).mul_(coef)
                weights = exponentials.mul_(mixture)
                grad_logits = grad_mixture.mul_(mixture)
            else:
                logits = torch.stack(_component_logits(query, key, query_term, key_term, block))
                exponentials = logits.sub_(row_max[queries].unsqueeze(-1)).exp_()
                weights = exponentials.sum(0).mul_(normalizer[queries])
                grad_components = exponentials.mul_(grad_weights.mul_(normalizer[queries]))
                grad_query_term[queries] = grad_components.sum(-1).movedim(0, -1)
                grad_key_term[heads, :, keys] += grad_components.sum(-2).transpose(0, 1)
                grad_logits = grad_components.sum(0)
            grad_query[queries] = grad_logits @ key[block.keys]
            grad_key[block.keys].baddbmm_(grad_logits.transpose(1, 2), query[queries])
            grad_value[block.keys].baddbmm_(weights.transpose(1, 2), grad_output[queries])
    return grads


@factored_backward.register_fake
def _(grad_output: Tensor, grad_lse: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:5])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.offset = inputs
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
    *inputs, output, lse, row_max, sums = ctx.saved_tensors
    return *factored_backward(grad_output, grad_lse, *inputs, ctx.offset, output, lse, row_max, sums), None


factored_forward.register_autograd(_backward, setup_context=_setup_context)
factored_backward.register_autograd(raise_no_double_backward)
