"""Lookup of repeated operator calls, which are validated and configured once, by a key of layouts and options."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Subclasses may override any function that the operators call.
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)

# Functions that repeat a validated and configured call, by `repeated_call_key`.
_plans_by_key: dict[Any, Any] = {}
MAX_PLANS = 1 << 10


def find_current_plan(call_key: tuple[Any, ...]) -> Any:
    """Return the function that repeats a call, or None if there is none for the current settings of the kernels."""
    try:
        plan = _plans_by_key.get(call_key)
    except TypeError:  # an argument is not hashable: validation reports it
        return None
    return plan if plan is not None and plan.is_current() else None


def store_plan(call_key: tuple[Any, ...], plan: Any) -> None:
    """Store the function that repeats a call; forget all others if there are too many."""
    if len(_plans_by_key) >= MAX_PLANS:
        _plans_by_key.clear()
    _plans_by_key[call_key] = plan


def repeated_call_key(tensors: tuple[Any, ...], *options: Any) -> tuple[Any, ...] | None:
    """Return a key that is equal for calls that run in the same way, or None for a call that is not looked up.

    The key has everything that validation, the selection of the backend and the launch configuration read: layouts,
    dtypes, devices and requires_grad of the tensors, the options with their types, gradient mode and autocast.
    The values of tensors are not part of it.

    Args:
        tensors: query, keys, value and further tensors or None.
        *options: Hashable arguments. True, 1 and 1.0 are equal in Python; types are part of the key.
    """
    # torch.compile must not trace the lookup. Dispatch modes, function transforms and tracing must see the operators.
    if torch.compiler.is_compiling():
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    if forward_ad._current_level >= 0 or torch._C._is_tracing():
        return None
    layouts: list[Any] = []
    try:
        for x in tensors:
            if x is None:
                layouts.append(None)
                continue
            if type(x) not in PLAIN_TENSORS:
                return None
            layouts += x.shape, x.stride(), x.dtype, x.device, x.requires_grad
        device_type = tensors[0].device.type
        autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    except (AttributeError, RuntimeError):
        # Nested and sparse tensors have no strides, and some devices no autocast; validation reports them.
        return None
    return (*layouts, torch.is_grad_enabled(), autocast, *options, *map(type, options))
