"""Looks over the shoulder of a model: what its attention layers ask of the operators, as they ask it.

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

from mgk import functional
from mgk._core.calls import LinearCall, MixtureCall
from mgk.attention import Attention
from mgk.multihead import MultiheadAttention

Call = MixtureCall | LinearCall
# Told the layer's name, the call and its output [B, H, L, E]; what it returns goes on through the model.
Watcher = Callable[[str, Call, Tensor], Tensor]
# How the calls of a model come to be seen: `watching` below, or another for models of other packages.
Watch = Callable[[nn.Module, Watcher], AbstractContextManager[None]]
Progress = Callable[[str, int, int], None]  # stage, done, total

# One at a time: the operators are looked up in one place, `mgk.functional`.
_lock = threading.Lock()


def attention_layers(model: nn.Module) -> dict[nn.Module, str]:
    """The layers of this package in a model, and what they are called there."""
    # A compiled model holds the one that was written under this name.
    written: Any = getattr(model, "_orig_mod", model)
    kinds = (Attention, MultiheadAttention)
    return {module: name for name, module in written.named_modules() if isinstance(module, kinds)}


@contextmanager
def capture_attention(model: nn.Module, watcher: Watcher) -> Iterator[None]:
    """While it lasts, every call of an operator that `model` makes is shown to the watcher."""
    names = attention_layers(model)
    inside: list[str] = []
    others = 0

    def shown(call: Call, result: Any) -> Any:
        nonlocal others
        if inside:
            name = inside[-1]
        else:
            name, others = f"call {others}", others + 1
        output, *extras = result if isinstance(result, tuple) else (result,)
        output = watcher(name, call, output)
        return (output, *extras) if extras else output

    run_mixture, run_linear = functional.run_mixture, functional.run_linear
    with ExitStack() as stack:
        stack.enter_context(_lock)
        # What was compiled would run past the two functions below.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module, name in names.items():
            enter = module.register_forward_pre_hook(lambda *_, name=name: inside.append(name))
            leave = module.register_forward_hook(lambda *_: inside.pop() and None, always_call=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        stack.callback(setattr, functional, "run_mixture", run_mixture)
        stack.callback(setattr, functional, "run_linear", run_linear)
        functional.run_mixture = lambda call, backend: shown(call, run_mixture(call, backend))
        functional.run_linear = lambda call, backend: shown(call, run_linear(call, backend))
        yield


def call_model(model: nn.Module, sample: Any) -> Any:
    """model(x), model(*arguments) or model(**arguments)."""
    if isinstance(sample, dict):
        return model(**sample)
    return model(*sample) if isinstance(sample, tuple) else model(sample)
