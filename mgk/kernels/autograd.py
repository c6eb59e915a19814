"""Differentiable operators whose eager calls bypass the torch.library dispatcher.

The dispatcher takes longer than a small kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


def needs_dispatcher() -> bool:
    """Return True under torch.compile, a TorchDispatchMode or torch.func: these must see torch.ops.mgk."""
    if torch.compiler.is_compiling():
        return True
    return bool(torch._C._len_torch_dispatch_stack()) or torch._C._functorch.peek_interpreter_stack() is not None


def raise_no_double_backward(ctx: Any, *grads: Any) -> Any:
    """Raise a RuntimeError; registered as the backward function of backward operators."""
    raise RuntimeError("This backend does not support second derivatives: use backend='eager'.")


def _is_batched(x: Tensor) -> bool:
    return torch._C._functorch.is_batchedtensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)


class _NotDifferentiable(torch.autograd.Function):
    """Identity on gradients that raises when it is differentiated; second derivatives would otherwise be 0."""

    @staticmethod
    def forward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.view_as(x) for x in gradients)

    backward = staticmethod(raise_no_double_backward)


def no_double_backward(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """Return a backward function of an autograd.Function whose gradients raise when they are differentiated."""

    def guarded_backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        # The forward pass was outside of the transform, so the kernels would read batched gradients by address.
        if any(_is_batched(x) for x in grads if x is not None):
            raise RuntimeError(
                "This backend does not support batched gradients (is_grads_batched, vectorize): use backend='eager'."
            )
        # Without create_graph no second derivatives are possible.
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        guarded: tuple[Tensor | None, ...] = _NotDifferentiable.apply(
            *[x if x is None else x.requires_grad_() for x in results]
        )
        return guarded

    return guarded_backward


def make_autograd_op(
    operator: Any,
    launch_forward: Callable[..., Tensors],
    launch_backward: Callable[..., tuple[Tensor | None, ...]],
    save: Callable[[Any, Any, Any], None],
    gradients: Callable[..., tuple[Tensor | None, ...]],
) -> Callable[..., Tensors]:
    """Register the gradients of an operator and return a function to call in its place.

    Args:
        operator: The forward operator. Outputs past the first two are for the backward pass only.
        launch_forward: Its implementation, with the same arguments.
        launch_backward: The implementation of the backward operator.
        save: Called as `save(ctx, inputs, output)`, like a `setup_context` function.
        gradients: Called as `gradients(ctx, *grads)` to run the backward operator, and as
            `gradients(ctx, *grads, launch=launch_backward)` to bypass the dispatcher.

    Returns:
        A function with the operator's arguments that returns its first two outputs.
    """
    operator.register_autograd(gradients, setup_context=save)

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensors:
            output = launch_forward(*args)
            save(ctx, args, output)
            return output[:2]

        @staticmethod
        @no_double_backward
        def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
            return gradients(ctx, *grads, launch=launch_backward)

    # `Direct.apply` without its check for function transforms, which `needs_dispatcher` covers.
    apply = super(torch.autograd.Function, Direct).apply
    unwrap = torch._C._functorch.unwrap_if_dead

    def call(*args: Any) -> Tensors:
        if needs_dispatcher():
            return operator(*args)[:2]
        if not torch.is_grad_enabled():
            return launch_forward(*args)[:2]
        return apply(*[unwrap(x) if isinstance(x, Tensor) else x for x in args])

    return call
