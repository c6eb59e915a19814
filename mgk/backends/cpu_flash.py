"""torch's CPU flash attention ("sdpa"), for soft mixtures: linear memory, forward and backward.

A mixture over M components is M softmax attentions over the same values, merged by their logsumexps; in the backward
pass each of the M gets the merged output and logsumexp. Gaussian keys add to the dot product one term per key and, with
unequal variances, one per query and component. Both are extra features of query and key, so that autograd outside this
operator computes all their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mgk._core.calls import MixtureCall
from mgk._core.logit_terms import key_terms, query_norm_term, scale_and_tau, scaled_query
from mgk._core.masks import MASK_VALUE, MASKED_ROW_LSE, allowed_pairs, block_of_rows, is_masked
from mgk._core.precision import compute_dtype, without_autocast
from mgk.kernels.autograd import raise_no_double_backward

# Queries per call of the flash kernel with an explicit mask, which is [B, H, TILE, S].
TILE = 256
# Feature widths are padded to this multiple: odd widths are slower, more padding is more work.
WIDTH_MULTIPLE = 2


def unsupported_reason(call: MixtureCall) -> str | None:
    """Return why the call is not supported, or None."""
    if call.query.device.type != "cpu":
        return f"it runs on the CPU only, but query is on {call.query.device}"
    if call.hard:
        return "a hard assignment is not a sum of softmaxes"
    if call.return_weights:
        return "it never forms the attention weights"
    if call.dropout_p > 0:
        return "its dropout would apply to pairs of key and component, not to attention weights"
    if call.attn_mask is not None and call.attn_mask.requires_grad:
        return "it has no gradient for attn_mask"
    if isinstance(call.scale, Tensor) and call.scale.shape[-1] != 1:
        return "it does not support a scale per key"
    if call.unsupported_transform is not None:
        return f"{call.unsupported_transform} are not supported"
    return None


def run(call: MixtureCall) -> tuple[Tensor, Tensor | None, None]:
    """Return the output [B, H, L, E], the lse [B, H, L], and None for the weights."""
    input_dtype, dtype = call.query.dtype, compute_dtype(call.query.dtype)
    call = call.with_zeroed_padding().converted(dtype)
    with without_autocast(call.query):
        query, keys, value = add_logit_features(call, dtype)
        mask = call.attn_mask
        packed = call.packed
        output, lse = mixture_forward(
            query,
            keys,
            value,
            mask if mask is None or mask.dtype == torch.bool else mask.to(dtype),
            call.causal or "",
            None if packed is None else packed.cu_seqlens_q,
            None if packed is None else packed.cu_seqlens_k,
        )
        if call.return_lse and call.equal_scale:
            lse = lse + query_norm_term(call, dtype)
    return output[..., : call.value.shape[-1]].to(input_dtype), lse, None


def add_logit_features(call: MixtureCall, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return query', keys' and value' of one width F, with query'·keys'_r = ℓ_ijr.

    If all components share λ, the term of ‖q‖² is left out: it cancels in the softmax.
    """
    query, keys = call.query.to(dtype), call.component_keys(dtype)
    key_term, ones = key_terms(call, keys).unsqueeze(-1), torch.ones_like(query[..., :1])
    if call.equal_scale:
        # λ multiplies the query, which is smaller than the keys.
        query_parts, key_parts = [scaled_query(call, dtype), ones], [keys, key_term]
    else:
        scale, tau = scale_and_tau(call, dtype)
        query_parts = [query, ones, query.square().sum(-1, keepdim=True)]
        norm_factor = (-0.5 * tau * scale).expand(keys.shape[:-1]).unsqueeze(-1)
        key_parts = [keys * scale.unsqueeze(-1), key_term, norm_factor]
    # The backward pass needs a free last column of the value.
    width = max(call.value.shape[-1] + 1, query.shape[-1] + len(query_parts) - 1)
    width += -width % WIDTH_MULTIPLE
    return (
        _concatenate(query_parts, width),
        _concatenate(key_parts, width),
        _concatenate([call.value.to(dtype)], width),
    )


def _concatenate(parts: list[Tensor], width: int) -> Tensor:
    """Concatenate along the last dimension, padded with zeros to `width`."""
    missing = width - sum(part.shape[-1] for part in parts)
    if missing:
        parts = [*parts, parts[0].new_zeros(*parts[0].shape[:-1], missing)]
    return torch.cat(parts, dim=-1)


def _flash_calls(
    query: Tensor, keys: Tensor, mask: Tensor | None, causal: str, cu_q: Tensor | None, cu_k: Tensor | None
) -> Iterator[tuple[slice, slice, bool, Tensor | None]]:
    """Split the attention into calls that the flash kernel supports.

    Yields rows, columns, whether the piece is top-left causal, and an additive mask.
    """
    if cu_q is None or cu_k is None:
        spans = [(slice(0, query.shape[2]), slice(0, keys.shape[3]))]
    else:
        q, k = cu_q.tolist(), cu_k.tolist()
        spans = [(slice(*q[n : n + 2]), slice(*k[n : n + 2])) for n in range(len(q) - 1)]
    for rows, columns in spans:
        queries, length = rows.stop - rows.start, columns.stop - columns.start
        if queries == 0 or length == 0:
            continue
        if mask is None and (not causal or causal == "top-left" or queries == length):
            yield rows, columns, bool(causal), None
            continue
        span_mask = None if mask is None else block_of_rows(mask, rows)
        if span_mask is not None and span_mask.shape[-1] != 1:
            span_mask = span_mask[..., columns]
        for start in range(0, queries, TILE):
            tile = slice(start, min(start + TILE, queries))
            num_keys = length
            if causal:
                num_keys = min(length, tile.stop + (length - queries if causal == "bottom-right" else 0))
            if num_keys <= 0:
                continue
            allowed = allowed_pairs(tile, queries, length, span_mask, causal or None, None, query)
            bias = query.new_zeros(1, 1, tile.stop - tile.start, num_keys)
            if span_mask is not None and span_mask.dtype != torch.bool:
                part = block_of_rows(span_mask, tile)
                bias = bias + (part if part.shape[-1] == 1 else part[..., :num_keys]).clamp(min=MASK_VALUE)
            if allowed is not None:
                bias = bias.masked_fill(~(allowed if allowed.shape[-1] == 1 else allowed[..., :num_keys]), MASK_VALUE)
            # The sum inherits the strides of the mask.
            bias = bias.contiguous().expand(query.shape[0], query.shape[1], -1, -1)
            yield _shift_slice(tile, rows.start), slice(columns.start, columns.start + num_keys), False, bias


def _expand_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Expand key or value heads to the query heads: the flash kernel does not broadcast, it reads out of bounds."""
    heads, group = query.shape[1], query.shape[1] // tensor.shape[1]
    if tensor.shape[1] == 1:
        return tensor.expand(-1, heads, *tensor.shape[2:])
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=1)


def _sum_heads(grad: Tensor, heads: int) -> Tensor:
    """Sum the gradients of the query heads that share a key or value head."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _make_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copy the tensors that are not contiguous.

    The flash kernel assumes without a check that the stride of the last dimension is 1, and `torch.cat` keeps the
    channels-last layout of its parts.
    """
    return tuple(tensor.contiguous() for tensor in tensors)


def _shift_slice(part: slice, start: int) -> slice:
    return slice(part.start + start, part.stop + start)


@torch.library.custom_op("mgk::sdpa_mixture", mutates_args=(), device_types="cpu")
def mixture_forward(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: str,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend with the softmax of query·keys_r over keys and components; inputs may have any strides.

    Args:
        query: [B, H, L, F].
        keys: [B, Hk, M, S, F].
        value: [B, Hv, S, F], with zeros in its last column.
        mask: Bool (True = attend) or additive, broadcastable to [B, H, L, S], or None.
        causal: "", "top-left" or "bottom-right".
        cu_seqlens_q: Offsets [N + 1] of packed queries, or None.
        cu_seqlens_k: Offsets [N + 1] of packed keys, or None.

    Returns:
        The output [B, H, L, F] and the lse [B, H, L].
    """
    query, keys, value = _make_contiguous(query, keys, value)
    components = keys.shape[2]
    keys, value = _expand_heads(keys, query), _expand_heads(value, query)
    parts = []
    if query.numel():
        for rows, columns, is_causal, bias in _flash_calls(query, keys, mask, causal, cu_seqlens_q, cu_seqlens_k):
            results = [
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    query[:, :, rows],
                    keys[:, :, r, columns],
                    value[:, :, columns],
                    0.0,
                    is_causal,
                    attn_mask=bias,
                    scale=1.0,
                )
                for r in range(components)
            ]
            parts.append((rows, *_merge(results)))
    if len(parts) == 1 and parts[0][1].shape == query.shape:
        return parts[0][1:]
    output, lse = torch.zeros_like(query), query.new_full(query.shape[:-1], -math.inf)
    for rows, part, part_lse in parts:
        output[:, :, rows], lse[:, :, rows] = part, part_lse
    return output, lse


def _merge(results: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge the outputs [B, H, L, F] and logsumexps [B, H, L] of all components into one attention."""
    lses = torch.stack([lse for _, lse in results])
    total = lses.logsumexp(0)
    masked = is_masked(total)
    # Not exp(lse - total): the rounding of a large lse would keep the shares from summing to 1.
    shares = lses.softmax(0).masked_fill(masked, 0).unsqueeze(-1)
    merged = results[0][0].mul_(shares[0])
    for (output, _), share in zip(results[1:], shares[1:], strict=True):
        merged.addcmul_(output, share)
    return merged, total.masked_fill(masked, -math.inf)


@mixture_forward.register_fake
def _(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(query.shape[:-1])


@torch.library.custom_op("mgk::sdpa_mixture_backward", mutates_args=(), device_types="cpu")
def mixture_backward(
    grad_output: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: str,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    output: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, keys and value."""
    query, keys, value = _make_contiguous(query, keys, value)
    components = keys.shape[2]
    all_keys, all_value = _expand_heads(keys, query), _expand_heads(value, query)
    grad_query, grad_keys, grad_value = (query.new_zeros(x.shape) for x in (query, all_keys, all_value))
    if query.numel() == 0:  # the kernel divides by the number of heads
        return torch.zeros_like(query), torch.zeros_like(keys), torch.zeros_like(value)
    lse = lse.masked_fill(lse == -math.inf, MASKED_ROW_LSE)
    # The kernel uses the output only for δ = dO·O, from which d lse is subtracted: the free last column carries it.
    grad_output, output = (x.clone(memory_format=torch.contiguous_format) for x in (grad_output, output))
    grad_output[..., -1] = 1
    output[..., -1] = -grad_lse
    for rows, columns, is_causal, bias in _flash_calls(query, all_keys, mask, causal, cu_seqlens_q, cu_seqlens_k):
        for r in range(components):
            part_query, part_key, part_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_output[:, :, rows],
                query[:, :, rows],
                all_keys[:, :, r, columns],
                all_value[:, :, columns],
                output[:, :, rows],
                lse[:, :, rows],
                0.0,
                is_causal,
                attn_mask=bias,
                scale=1.0,
            )
            grad_query[:, :, rows] += part_query
            grad_keys[:, :, r, columns] += part_key
            grad_value[:, :, columns] += part_value
    return grad_query, _sum_heads(grad_keys, keys.shape[1]), _sum_heads(grad_value, value.shape[1])


@mixture_backward.register_fake
def _(
    grad_output: Tensor, grad_lse: Tensor, query: Tensor, keys: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    layout = torch.contiguous_format
    return tuple(torch.empty_like(x, memory_format=layout) for x in (query, keys, value))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, keys, value, mask, ctx.causal, cu_seqlens_q, cu_seqlens_k = inputs
    ctx.save_for_backward(query, keys, value, mask, cu_seqlens_q, cu_seqlens_k, *output)


def _backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    query, keys, value, mask, cu_seqlens_q, cu_seqlens_k, output, lse = ctx.saved_tensors
    # fmt: off
    grads = mixture_backward(
        grad_output, grad_lse, query, keys, value, mask, ctx.causal, cu_seqlens_q, cu_seqlens_k, output, lse
    )
    # fmt: on
    return *grads, None, None, None, None


mixture_forward.register_autograd(_backward, setup_context=_setup_context)
mixture_backward.register_autograd(raise_no_double_backward)
