"""The kernels as torch operators: shapes for the compiler, gradients and FLOP counts."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mgk.kernels.autograd import make_autograd_op, needs_dispatcher, raise_no_double_backward
from mgk.kernels.mixture.bwd_common import summed_entries
from mgk.kernels.mixture.launch import by_position, launch_backward, launch_decode, launch_forward, slots_of
from mgk.kernels.mixture.launch_config import EACH, NOTHING, SLOT, SUMMED
from mgk.kernels.mixture.launch_parts import launch_inference


@torch.library.custom_op("mgk::mixture_forward", mutates_args=())
def forward_op(
    query: Tensor, keys: Tensor, value: Tensor, shift: Tensor | None, bias: Tensor | None, scale_t: Tensor | None,
    tau_t: Tensor | None,
    mask: Tensor | None, seed: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, scale: float, tau: float,
    constant: float, dropout_p: float,
    causal: int, hard: bool, max_q: int, max_k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out [B, H, L, E], base-2 lse [B, H, L], and for the backward pass: c and C [2, Hk, M, slots * TILE], statistics
    of their tiles."""
    return launch_forward(
        query, keys, value, shift, bias, scale_t, tau_t, mask, seed, cu_q, cu_k, scale, tau, constant, dropout_p,
        causal, hard, max_q, max_k,
    )  # fmt: skip


@forward_op.register_fake
def _forward_fake(
    query: Any, keys: Any, value: Any, shift: Any, bias: Any, scale_t: Any, tau_t: Any, mask: Any, seed: Any,
    cu_q: Any, cu_k: Any, scale: Any, tau: Any, constant: Any, dropout_p: Any, causal: Any, hard: Any, max_q: Any,
    max_k: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    B, H, L, _ = query.shape
    HK, S, E = value.shape[1:]
    M = shift.shape[1] if shift is not None else keys.shape[2]
    slots = slots_of(cu_k, B, S)
    empty = lambda *shape: query.new_empty(*shape, dtype=torch.float32)  # noqa: E731
    return by_position(query, E), empty(B, H, L), empty(2, HK, M, slots * SLOT), empty(HK, slots, 4)


@torch.library.custom_op("mgk::mixture_decode", mutates_args=())
def decode_op(
    query: Tensor, keys: Tensor, value: Tensor, shift: Tensor | None, bias: Tensor | None, scale_t: Tensor | None,
    tau_t: Tensor | None, mask: Tensor | None, scale: float, tau: float, constant: float, causal: int, hard: bool,
    count: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B, H, L, E] and base-2 lse [B, H, L] for few queries; no gradient. count: int32 [1], so many of the keys are
    there."""
    return launch_decode(
        query, keys, value, shift, bias, scale_t, tau_t, mask, scale, tau, constant, causal, hard, count
    )  # fmt: skip


@decode_op.register_fake
def _decode_fake(query: Any, keys: Any, value: Any, *_: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty(*query.shape[:3], value.shape[3])
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op("mgk::mixture_backward", mutates_args=())
def backward_op(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, prepared: Tensor, stats: Tensor, query: Tensor,
    keys: Tensor, value: Tensor,
    shift: Tensor | None, scale_t: Tensor | None, tau_t: Tensor | None, mask: Tensor | None, seed: Tensor | None,
    cu_q: Tensor | None, cu_k: Tensor | None,
    scale: float, tau: float, dropout_p: float, causal: int, hard: bool, max_q: int, max_k: int, mask_grad: bool,
    prior_grad: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, keys, value; of log prior [B, Hk, M, S] if prior_grad is EACH, or empty; one after
    another of shift [Hk, M, D], tau [Hk], scale [Hk, M] (one for all: in the first column, and 0 in the
    others) and, if prior_grad is SUMMED, log prior [Hk, M];
    [B, H, L, S] of a float mask or empty."""
    dq, dk, dv, dbias, sums, dmask = launch_backward(
        grad, grad_lse, out, lse, prepared, stats, query, keys, value, shift, scale_t, tau_t, mask, seed, cu_q, cu_k,
        scale, tau, dropout_p, causal, hard,
        max_q, max_k, mask_grad, prior_grad,
    )  # fmt: skip
    dbias, dmask = (lse.new_empty(0) if x is None else x for x in (dbias, dmask))
    return dq, dk, dv, dbias, sums, dmask


@backward_op.register_fake
def _backward_fake(
    grad: Any, grad_lse: Any, out: Any, lse: Any, prepared: Any, stats: Any, query: Any, keys: Any, value: Any,
    shift: Any, scale_t: Any, tau_t: Any, mask: Any, seed: Any, cu_q: Any, cu_k: Any, scale: Any, tau: Any,
    dropout_p: Any, causal: Any, hard: Any, max_q: Any, max_k: Any, mask_grad: Any, prior_grad: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    B, H, L, D = query.shape
    HK, S = value.shape[1:3]
    M = prepared.shape[2]
    dmask = lse.new_empty(B, H, L, S) if mask_grad else lse.new_empty(0)
    dbias = lse.new_empty(B, HK, M, S) if prior_grad == EACH else lse.new_empty(0)
    dq, dk, dv = by_position(query), by_position(keys), by_position(value)
    n = HK * summed_entries(M, 0 if shift is None else M * D, prior_grad == SUMMED)
    return dq, dk, dv, dbias, lse.new_empty(n), dmask


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    query, keys, value, shift, bias, scale_t, tau_t, mask, seed, cu_q, cu_k, *numbers = inputs
    ctx.save_for_backward(*output, query, keys, value, shift, scale_t, tau_t, mask, seed, cu_q, cu_k)
    ctx.bias_like = None if bias is None else (bias.shape, bias.dtype)
    ctx.numbers = numbers
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _reduced(grad: Any, shape: Any, dtype: torch.dtype) -> Tensor:
    return (grad if grad.shape == shape else grad.sum_to_size(shape)).to(dtype)


def _gradients(ctx: Any, grad: Any, grad_lse: Any, *_: Any, launch: Any = None) -> tuple[Tensor | None, ...]:
    out, lse, prepared, stats, query, keys, value, shift, scale_t, tau_t, mask, seed, cu_q, cu_k = ctx.saved_tensors
    scale, tau, _, dropout_p, causal, hard, max_q, max_k = ctx.numbers
    if grad is None:
        grad = torch.zeros_like(out)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    need = ctx.needs_input_grad
    prior_grad = NOTHING
    if need[4]:
        shape = ctx.bias_like[0]
        prior_grad = SUMMED if shape[0] == shape[3] == 1 else EACH
    dq, dk, dv, dbias, sums, dmask = (launch or backward_op)(
        grad, grad_lse, out, lse, prepared, stats, query, keys, value, shift, scale_t, tau_t, mask, seed, cu_q, cu_k,
        scale, tau, dropout_p, causal, hard,
        max_q, max_k, need[7], prior_grad,
    )  # fmt: skip
    M, D, HK = prepared.shape[2], query.shape[3], value.shape[1]
    taus = 0 if shift is None else HK * M * D
    scales = taus + HK
    if prior_grad == SUMMED:
        dbias = sums.as_strided((1, HK, M, 1), (HK * M, M, 1, 1), scales + HK * M)
    return (
        dq, dk, dv,
        sums.as_strided((HK, M, D), (M * D, D, 1)).to(shift.dtype) if need[3] else None,
        _reduced(dbias, *ctx.bias_like) if need[4] else None,
        sums.as_strided(scale_t.shape, (M, 1), scales).to(scale_t.dtype) if need[5] else None,
        sums[taus:scales].to(tau_t.dtype) if need[6] else None,
        _reduced(dmask, mask.shape, mask.dtype) if need[7] else None,
        *(None,) * 11,
    )  # fmt: skip


mixture = make_autograd_op(forward_op, launch_forward, launch_backward, _save, _gradients)
backward_op.register_autograd(raise_no_double_backward)


def infer(want_lse: bool, *args: Any) -> tuple[Tensor, Tensor | None]:
    """As `mixture` where no gradient is needed: out and, if wanted, lse."""
    if not needs_dispatcher():
        return launch_inference(want_lse, *args)
    out, lse, _, _ = forward_op(*args)
    return out, lse if want_lse else None


def decode(*args: Any) -> tuple[Tensor, Tensor]:
    return (decode_op if needs_dispatcher() else launch_decode)(*args)


@register_flop_formula([torch.ops.mgk.mixture_forward, torch.ops.mgk.mixture_decode])
def _forward_flops(
    query: Any, keys: Any, value: Any, shift: Any, *args: Any, out_shape: Any = None, **kwargs: Any,
) -> int:  # fmt: skip
    B, H, L, D = query
    M = 1 if shift is not None else keys[2]
    return 2 * B * H * L * value[2] * (M * D + value[3])


@register_flop_formula(torch.ops.mgk.mixture_backward)
def _backward_flops(
    grad: Any, grad_lse: Any, out: Any, lse: Any, prepared: Any, stats: Any, query: Any, keys: Any, value: Any,
    shift: Any, *args: Any, out_shape: Any = None, **kwargs: Any,
) -> int:  # fmt: skip
    """As torch counts SDPA's: the products that the gradients need, one pass, with the scores recomputed."""
    B, H, L, D = query
    M = 1 if shift is not None else keys[2]
    return 2 * B * H * L * value[2] * (3 * M * D + 2 * value[3])
