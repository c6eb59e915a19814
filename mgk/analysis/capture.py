"""Interception of the attention-operator calls that a model makes.

Nothing is kept here. A call holds queries, keys and values, from which the weights are computed again in blocks of
rows (see `weights`), so that no matrix of all pairs has to exist.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mgk._core.calls import LinearCall, MixtureCall
from mgk.attention import Attention
from mgk.functional import intercept_calls
from mgk.multihead import MultiheadAttention

Call = MixtureCall | LinearCall
# Told the layer's name, the call and its output [B, H, L, E]; what it returns goes on through the model.
Watcher = Callable[[str, Call, Tensor], Tensor]
# How the calls of a model come to be seen: `watching` below, or another for models of other packages.
Watch = Callable[[nn.Module, Watcher], AbstractContextManager[None]]
Progress = Callable[[str, int, int], None]  # stage, done, total

# The stance of torch.compile and the hooks of a model are shared by all threads.
_lock = threading.RLock()


def attention_layers(model: nn.Module) -> dict[nn.Module, str]:
    """The layers of this package in a model, and what they are called there."""
    # A compiled model holds the one that was written under this name.
    written: Any = getattr(model, "_orig_mod", model)
    kinds = (Attention, MultiheadAttention)
    return {module: name for name, module in written.named_modules() if isinstance(module, kinds)}


@contextmanager
def capture_attention(model: nn.Module, watcher: Watcher, layer_stack: list[str] | None = None) -> Iterator[None]:
    """Pass every attention-operator call that a model makes to a watcher.

    Args:
        model: The model; its modules of type Attention and MultiheadAttention name the calls.
        watcher: Called with the layer's name, the call and its output; returns the output that the model receives.
        layer_stack: Names of the layers that are running, innermost last. A caller that runs operators for other layers
            pushes their names. A call outside all layers is named "call 0", "call 1", ...
    """
    running = [] if layer_stack is None else layer_stack
    unnamed_calls = 0

    def handle(call: Call, result: Any) -> Any:
        nonlocal unnamed_calls
        if running:
            name = running[-1]
        else:
            name, unnamed_calls = f"call {unnamed_calls}", unnamed_calls + 1
        output, *extras = result if isinstance(result, tuple) else (result,)
        output = watcher(name, call, output)
        return (output, *extras) if extras else output

    with ExitStack() as stack:
        stack.enter_context(_lock)
        # Compiled code is not intercepted.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module, name in attention_layers(model).items():
            enter = module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
            leave = module.register_forward_hook(lambda *_: running.pop() and None, always_call=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        stack.enter_context(intercept_calls(handle))
        yield


def call_model(model: nn.Module, sample: Any) -> Any:
    """model(x), model(*arguments) or model(**arguments)."""
    if isinstance(sample, dict):
        return model(**sample)
    return model(*sample) if isinstance(sample, tuple) else model(sample)
