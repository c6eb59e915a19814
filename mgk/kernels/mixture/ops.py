"""The mixture kernels as torch operators: fake implementations, gradients and FLOP counts."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mgk.kernels.autograd import make_autograd_op, needs_dispatcher, raise_no_double_backward
from mgk.kernels.mixture.args import MixtureArgs, schema
from mgk.kernels.mixture.bwd_common import summed_entries
from mgk.kernels.mixture.launch import (
    count_key_tiles,
    empty_like_bshd,
    launch_backward,
    launch_decode,
    launch_forward,
    launch_inference,
)
from mgk.kernels.mixture.launch_config import FULL_PRIOR_GRAD, KEYS_PER_TILE, NO_PRIOR_GRAD, SUMMED_PRIOR_GRAD


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out [B, H, L, E], base-2 lse [B, H, L] and, for the backward pass, the preprocessed keys.

    Those are c and C [2, Hk, M, key tiles * 128] and the statistics [Hk, key tiles, 4] of their tiles.
    """
    return launch_forward(MixtureArgs(*args))


forward_op = torch.library.custom_op("mgk::mixture_forward", _forward, mutates_args=(), schema=schema(4))


@forward_op.register_fake
def _forward_fake(*flat: Any) -> tuple[Tensor, ...]:
    args = MixtureArgs(*flat)
    query = args.query
    B, H, L, _ = query.shape
    HK, (S, E) = args.keys.shape[1], args.value.shape[2:]
    tiles = count_key_tiles(args.cu_k, B, S)
    empty = lambda *shape: query.new_empty(*shape, dtype=torch.float32)  # noqa: E731
    prepared, stats = empty(2, HK, args.components, tiles * KEYS_PER_TILE), empty(HK, tiles, 4)
    return empty_like_bshd(query, E), empty(B, H, L), prepared, stats


def _decode(
    query: Any, keys: Any, value: Any, shift: Any, bias: Any, scale_t: Any, tau_t: Any, mask: Any, scale: Any,
    tau: Any, constant: Any, causal: Any, hard: Any, count: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out [B, H, L, E] and base-2 lse [B, H, L] for few queries, without gradients.

    count: int32 [1], the number of keys that are valid, or None for all.
    """
    args = MixtureArgs(
        query, keys, value, shift, bias, scale_t, tau_t, mask, None, None, None, scale, tau, constant, 0.0, causal,
        hard, 0, 0,
    )  # fmt: skip
    return launch_decode(args, count)


decode_op = torch.library.custom_op(
    "mgk::mixture_decode",
    _decode,
    mutates_args=(),
    schema=schema(2, without=("seed", "cu_q", "cu_k", "dropout_p", "max_q", "max_k"), after="Tensor? count=None"),
)


@decode_op.register_fake
def _decode_fake(query: Any, keys: Any, value: Any, *_: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty(*query.shape[:3], value.shape[3])
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


# bias and constant are part of `prepared`: the backward operator does not take them.
def _without_bias(args: MixtureArgs) -> tuple[Any, ...]:
    return *args[:4], *args[5:13], *args[14:]


def _with_bias(flat: list[Any]) -> MixtureArgs:
    return MixtureArgs._make([*flat[:4], None, *flat[4:12], 0.0, *flat[12:]])


def _backward(
    grad: Any, grad_lse: Any, out: Any, lse: Any, prepared: Any, stats: Any, *flat: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, keys, value, log prior, the small parameters and a float mask.

    That of the log prior is [B, Hk, M, S] with FULL_PRIOR_GRAD, else empty. Those of the small parameters are
    concatenated: shift [Hk, M, D], tau [Hk], scale [Hk, M] (a scale shared by all components: in the first column, the
    others are 0) and, with SUMMED_PRIOR_GRAD, log prior [Hk, M]. That of the mask is [B, H, L, S] or empty.
    """
    *flat_args, mask_grad, prior_grad = flat
    dq, dk, dv, dbias, sums, dmask = launch_backward(
        grad, grad_lse, out, lse, prepared, stats, _with_bias(flat_args), mask_grad, prior_grad
    )
    dbias, dmask = (lse.new_empty(0) if x is None else x for x in (dbias, dmask))
    return dq, dk, dv, dbias, sums, dmask


backward_op = torch.library.custom_op(
    "mgk::mixture_backward",
    _backward,
    mutates_args=(),
    schema=schema(
        6,
        before="Tensor grad, Tensor? grad_lse, Tensor out, Tensor lse, Tensor prepared, Tensor stats",
        without=("bias", "constant"),
        after="bool mask_grad, SymInt prior_grad",
    ),
)


@backward_op.register_fake
def _backward_fake(
    grad: Any, grad_lse: Any, out: Any, lse: Any, prepared: Any, stats: Any, query: Any, keys: Any, value: Any,
    shift: Any, *flat: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    *_, mask_grad, prior_grad = flat
    B, H, L, D = query.shape
    HK, S = keys.shape[1], value.shape[2]
    M = prepared.shape[2]
    dmask = lse.new_empty(B, H, L, S) if mask_grad else lse.new_empty(0)
    dbias = lse.new_empty(B, HK, M, S) if prior_grad == FULL_PRIOR_GRAD else lse.new_empty(0)
    dq, dk, dv = empty_like_bshd(query), empty_like_bshd(keys), empty_like_bshd(value)
    n = HK * summed_entries(M, 0 if shift is None else M * D, prior_grad == SUMMED_PRIOR_GRAD)
    return dq, dk, dv, dbias, lse.new_empty(n), dmask


def _dispatch_backward(
    grad: Any, grad_lse: Any, out: Any, lse: Any, prepared: Any, stats: Any, args: MixtureArgs, mask_grad: bool,
    prior_grad: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    gradients: tuple[Tensor, ...] = backward_op(
        grad, grad_lse, out, lse, prepared, stats, *_without_bias(args), mask_grad, prior_grad
    )
    return gradients


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    bias = inputs[4]
    ctx.save_for_backward(*output, *inputs[:4], *inputs[5:11])
    ctx.numbers = inputs[11:]
    ctx.bias_like = None if bias is None else (bias.shape, bias.dtype)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _reduce_to(grad: Any, shape: Any, dtype: torch.dtype) -> Tensor:
    return (grad if grad.shape == shape else grad.sum_to_size(shape)).to(dtype)


def _gradients(
    ctx: Any, grad: Any, grad_lse: Any, *_: Any, launch: Any = _dispatch_backward
) -> tuple[Tensor | None, ...]:  # fmt: skip
    out, lse, prepared, stats, query, keys, value, shift, *tensors = ctx.saved_tensors
    args: Any = MixtureArgs(query, keys, value, shift, None, *tensors, *ctx.numbers)
    if grad is None:
        grad = torch.zeros_like(out)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    need = MixtureArgs(*ctx.needs_input_grad)
    prior_grad = NO_PRIOR_GRAD
    if need.bias:
        shape = ctx.bias_like[0]
        prior_grad = SUMMED_PRIOR_GRAD if shape[0] == shape[3] == 1 else FULL_PRIOR_GRAD
    dq, dk, dv, dbias, sums, dmask = launch(
        grad, grad_lse, out, lse, prepared, stats, args, need.mask, prior_grad
    )  # fmt: skip
    M, D, HK = prepared.shape[2], query.shape[3], keys.shape[1]
    taus = 0 if shift is None else HK * M * D
    scales = taus + HK
    if prior_grad == SUMMED_PRIOR_GRAD:
        dbias = sums.as_strided((1, HK, M, 1), (HK * M, M, 1, 1), scales + HK * M)
    mask, scale_t, tau_t = args.mask, args.scale_t, args.tau_t
    return (
        dq, dk, dv,
        sums.as_strided((HK, M, D), (M * D, D, 1)).to(shift.dtype) if need.shift else None,
        _reduce_to(dbias, *ctx.bias_like) if need.bias else None,
        sums.as_strided(scale_t.shape, (M, 1), scales).to(scale_t.dtype) if need.scale_t else None,
        sums[taus:scales].to(tau_t.dtype) if need.tau_t else None,
        _reduce_to(dmask, mask.shape, mask.dtype) if need.mask else None,
        *(None,) * 11,
    )  # fmt: skip


# Output and lse, differentiable.
mixture = make_autograd_op(forward_op, _forward, launch_backward, _save, _gradients)
backward_op.register_autograd(raise_no_double_backward)


def infer(return_lse: bool, *args: Any) -> tuple[Tensor, Tensor | None]:
    """Return out and lse (None unless return_lse) of `mixture` for a call that needs no gradients."""
    if not needs_dispatcher():
        return launch_inference(return_lse, MixtureArgs(*args))
    out, lse, _, _ = forward_op(*args)
    return out, lse if return_lse else None


def decode(*args: Any) -> tuple[Tensor, Tensor]:
    return (decode_op if needs_dispatcher() else _decode)(*args)


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
    """Count the GEMMs of the gradients and of the recomputed scores once, as torch does for SDPA."""
    B, H, L, D = query
    M = 1 if shift is not None else keys[2]
    return 2 * B * H * L * value[2] * (3 * M * D + 2 * value[3])
