"""Operators of torch.library by the shortest way: plain eager calls skip the dispatcher, whose rounds cost more than a
small kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


def needs_dispatcher() -> bool:
    """Whether someone looks on who must see torch.ops.mgk: a compiler, a dispatch mode, a function transform."""
    if torch.compiler.is_compiling():
        return True
    return bool(torch._C._len_torch_dispatch_stack()) or torch._C._functorch.peek_interpreter_stack() is not None


def raise_no_double_backward(ctx: Any, *grads: Any) -> Any:
    """The gradient of our gradients, as autograd wants it."""
    raise RuntimeError("second derivatives are not covered by this backend: use backend='eager'")


class _Final(torch.autograd.Function):
    """Gradients as they are, except that theirs are refused, and not silently 0."""

    @staticmethod
    def forward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.view_as(x) for x in gradients)

    backward = staticmethod(raise_no_double_backward)


def make_autograd_op(
    operator: Any,
    launch_forward: Callable[..., Tensors],
    launch_backward: Callable[..., tuple[Tensor | None, ...]],
    save: Callable[[Any, Any, Any], None],
    gradients: Callable[..., tuple[Tensor | None, ...]],
) -> Callable[..., Tensors]:
    """Gives the operator its gradients, and returns what to call in its place for its first two outputs.

    save(ctx, inputs, output) as for setup_context; gradients(ctx, *grads, launch=...) launches what it is given, or by
    default the operator of the backward pass. Outputs past the first two are for the backward pass alone.
    """
    operator.register_autograd(gradients, setup_context=save)

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensors:
            output = launch_forward(*args)
            save(ctx, args, output)
            return output[:2]

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
            # Most backward passes are not themselves recorded: there is nothing to forbid.
            if not torch.is_grad_enabled():
                return gradients(ctx, *grads, launch=launch_backward)
            with torch.no_grad():
                found = gradients(ctx, *grads, launch=launch_backward)
            recorded: tuple[Tensor | None, ...] = _Final.apply(*[x if x is None else x.requires_grad_() for x in found])
            return recorded

    # `Direct.apply` but for its questions about function transforms: under one, a call is observed.
    apply = super(torch.autograd.Function, Direct).apply
    alive = torch._C._functorch.unwrap_if_dead

    def call(*args: Any) -> Tensors:
        if needs_dispatcher():
            return operator(*args)[:2]
        if not torch.is_grad_enabled():
            return launch_forward(*args)[:2]
        return apply(*[alive(x) if isinstance(x, Tensor) else x for x in args])

    return call
