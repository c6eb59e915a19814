"""Interception of the attention-operator calls that a model makes.

A call holds queries, keys and values. The attention weights are recomputed from them in blocks of rows (see
`weights`), without forming the full matrix.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mgk._core.calls import LinearCall, MixtureCall
from mgk.attention import Attention
from mgk.functional import intercept_calls
from mgk.multihead import MultiheadAttention

Call = MixtureCall | LinearCall
# Called with the layer's name, the call and its output [B, H, L, E]; returns the output that the model receives.
LayerHandler = Callable[[str, Call, Tensor], Tensor]
# Passes the calls of a model to a handler: `capture_attention`, or the one of `hf_models` for Transformers models.
Capture = Callable[[nn.Module, LayerHandler], AbstractContextManager[None]]

# The stance of torch.compile and the hooks of a model are shared by all threads.
_lock = threading.RLock()


def attention_layers(model: nn.Module) -> dict[nn.Module, str]:
    """Return this package's attention layers in a model, with their names."""
    original: Any = getattr(model, "_orig_mod", model)  # of a compiled model
    classes = (Attention, MultiheadAttention)
    return {module: name for name, module in original.named_modules() if isinstance(module, classes)}


@contextmanager
def push_names(names: Mapping[nn.Module, str], layer_stack: list[str]) -> Iterator[None]:
    """Push the name of each module on the stack while it runs."""

    def pop(*_: Any) -> None:
        layer_stack.pop()

    with ExitStack() as stack:
        for module, name in names.items():
            push = module.register_forward_pre_hook(lambda *_, name=name: layer_stack.append(name))
            stack.callback(push.remove)
            stack.callback(module.register_forward_hook(pop, always_call=True).remove)
        yield


@contextmanager
def capture_attention(model: nn.Module, handler: LayerHandler, layer_stack: list[str] | None = None) -> Iterator[None]:
    """Pass every attention-operator call that a model makes to a handler.

    Args:
        model: The model; its modules of type Attention and MultiheadAttention name the calls.
        handler: Called with the layer's name, the call and its output; returns the output that the model receives.
        layer_stack: Names of the layers that are running, innermost last. A caller that runs operators for other layers
            pushes their names. A call outside all layers is named "call 0", "call 1", ...
    """
    running: list[str] = [] if layer_stack is None else layer_stack
    unnamed_calls = 0

    def handle(call: Call, result: Any) -> Any:
        nonlocal unnamed_calls
        if running:
            name = running[-1]
        else:
            name, unnamed_calls = f"call {unnamed_calls}", unnamed_calls + 1
        output, *extras = result if isinstance(result, tuple) else (result,)
        output = handler(name, call, output)
        return (output, *extras) if extras else output

    with (
        _lock,
        torch.compiler.set_stance("force_eager"),  # compiled code is not intercepted
        push_names(attention_layers(model), running),
        intercept_calls(handle),
    ):
        yield


def call_model(model: nn.Module, sample: Any) -> Any:
    """Call the model with a sample: a tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(sample, dict):
        return model(**sample)
    return model(*sample) if isinstance(sample, tuple) else model(sample)
