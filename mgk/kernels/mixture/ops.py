"""The mixture kernels as torch operators: fake implementations, gradients and FLOP counts."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mgk.kernels.autograd import make_autograd_op, needs_dispatcher, raise_no_double_backward
from mgk.kernels.mixture.args import MixtureArgs, from_fields, schema, without_fields
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


# Fields of `MixtureArgs` that the operators do not take. bias and constant are part of `prepared`.
DECODE_OMITS = ("seed", "cu_q", "cu_k", "dropout_p", "max_q", "max_k")
BACKWARD_OMITS = ("bias", "constant")


def _decode(*flat: Any) -> tuple[Tensor, Tensor]:
    """Return out [B, H, L, E] and base-2 lse [B, H, L] for few queries, without gradients.

    The last argument is count: int32 [1], the number of keys that are valid, or None for all.
    """
    num_fields = len(MixtureArgs._fields) - len(DECODE_OMITS)
    # The dispatcher drops a last argument that is equal to its default.
    (count,) = flat[num_fields:] or (None,)
    return launch_decode(from_fields(flat[:num_fields], DECODE_OMITS), count)


decode_op = torch.library.custom_op(
    "mgk::mixture_decode",
    _decode,
    mutates_args=(),
    schema=schema(2, without=DECODE_OMITS, after="Tensor? count=None"),
)


@decode_op.register_fake
def _decode_fake(query: Any, keys: Any, value: Any, *_: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty(*query.shape[:3], value.shape[3])
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def _backward(
    grad: Any, grad_lse: Any, out: Any, lse: Any, prepared: Any, stats: Any, *flat: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, keys, value, log prior, the small parameters and a float mask.

    That of the log prior is [B, Hk, M, S] with FULL_PRIOR_GRAD, else empty. Those of the small parameters are
    concatenated: shift [Hk, M, D], tau [Hk], scale [Hk, M] (a scale shared by all components: in the first column, the
    others are 0) and, with SUMMED_PRIOR_GRAD, log prior [Hk, M]. That of the mask is [B, H, L, S] or empty.
    """
    *fields, mask_grad, prior_grad = flat
    args = from_fields(fields, BACKWARD_OMITS)
    dq, dk, dv, dbias, sums, dmask = launch_backward(
        grad, grad_lse, out, lse, prepared, stats, args, mask_grad, prior_grad
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
        without=BACKWARD_OMITS,
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
        grad, grad_lse, out, lse, prepared, stats, *without_fields(args, BACKWARD_OMITS), mask_grad, prior_grad
    )
    return gradients


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    args = MixtureArgs._make(inputs)
    ctx.save_for_backward(*output, *args._replace(bias=None).tensors)
    ctx.numbers = args.numbers
    ctx.bias_like = None if args.bias is None else (args.bias.shape, args.bias.dtype)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _reduce_to(grad: Any, shape: Any, dtype: torch.dtype) -> Tensor:
    return (grad if grad.shape == shape else grad.sum_to_size(shape)).to(dtype)


NO_GRADIENTS: Any = MixtureArgs._make([None] * len(MixtureArgs._fields))


def _gradients(
    ctx: Any, grad: Any, grad_lse: Any, *_: Any, launch: Any = _dispatch_backward
) -> tuple[Tensor | None, ...]:  # fmt: skip
    out, lse, prepared, stats, *tensors = ctx.saved_tensors
    args: Any = MixtureArgs(*tensors, *ctx.numbers)
    shift, scale_t = args.shift, args.scale_t
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
    M, D, HK = prepared.shape[2], args.query.shape[3], args.keys.shape[1]
    taus = 0 if shift is None else HK * M * D
    scales = taus + HK
    if prior_grad == SUMMED_PRIOR_GRAD:
        dbias = sums.as_strided((1, HK, M, 1), (HK * M, M, 1, 1), scales + HK * M)
    gradients = NO_GRADIENTS._replace(
        query=dq, keys=dk, value=dv,
        shift=sums.as_strided((HK, M, D), (M * D, D, 1)).to(shift.dtype) if need.shift else None,
        bias=_reduce_to(dbias, *ctx.bias_like) if need.bias else None,
        scale_t=sums.as_strided(scale_t.shape, (M, 1), scales).to(scale_t.dtype) if need.scale_t else None,
        tau_t=sums[taus:scales].to(args.tau_t.dtype) if need.tau_t else None,
        mask=_reduce_to(dmask, args.mask.shape, args.mask.dtype) if need.mask else None,
    )  # fmt: skip
    return tuple(gradients)


# Output and lse, differentiable.
mixture = make_autograd_op(forward_op, _forward, launch_backward, _save, _gradients)
backward_op.register_autograd(raise_no_double_backward)


def infer(return_lse: bool, args: MixtureArgs) -> tuple[Tensor, Tensor | None]:
    """Return out and lse (None unless return_lse) of `mixture` for a call that needs no gradients."""
    if not needs_dispatcher():
        return launch_inference(return_lse, args)
    out, lse, _, _ = forward_op(*args)
    return out, lse if return_lse else None


def decode(args: MixtureArgs, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return out and lse of few queries without gradients. count: valid keys, int32 [1], or None for all."""
    if not needs_dispatcher():
        return launch_decode(args, count)
    outputs: tuple[Tensor, Tensor] = decode_op(*without_fields(args, DECODE_OMITS), count)
    return outputs


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
