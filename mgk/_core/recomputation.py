"""What a forward that activation checkpointing runs again must find: the state that it has used the first time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

REMEDY = (
    "checkpoint with use_reentrant=False and preserve_rng_state=True, do not compile the layer, nor set the same seed "
    "again between a forward and its backward"
)
# So many states are kept where the region may have no end: other hooks than checkpointing's may stay for a whole
# training, and before torch 2.8 nobody can say whether there are any.
KEPT = 64
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def recomputing() -> bool:
    """True inside a backward: activation checkpointing runs the forward a second time there."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _unknown() -> None:
    """Stands for any region where torch does not tell."""


def _region() -> Callable[..., Any] | None:
    """An object that lives as long as what the checkpointed region we are in has saved; None outside of any.

    Non-reentrant checkpointing replaces what is saved by hooks; the graph holds them until it is freed.
    """
    if _top_hooks is None:
        return _unknown if torch.is_grad_enabled() else None
    hooks = _top_hooks(True)
    return None if hooks is None else hooks[1]


def _refuse_region() -> None:
    """Called once a compilation, as a constant: what is raised here stops it, and is not left to run uncompiled."""
    if _top_hooks is not None and _top_hooks(True) is not None:
        raise RuntimeError(f"a compiled EM layer is trained in a checkpointed region: {REMEDY}")


# What torch.compiler.assume_constant_result does, which would import the compiler to do it.
_refuse_region._dynamo_marked_constant = True  # type: ignore[attr-defined]


def counted_already() -> bool:
    """Whether the training forward that runs now is run again, and what it says has been counted the first time."""
    if not recomputing():
        return False
    if _region() is None:
        raise RuntimeError(
            "an EM layer is trained inside a backward: reentrant activation checkpointing runs the first forward under "
            f"no_grad, where nothing is counted; {REMEDY}"
        )
    return True


class CheckpointedStateLog:
    """The states that forwards have used, each of which replaces it, for as long as they may be run again.

    Backwards may come in any order, more than once or never, and inputs may be equal. What does tell forwards apart
    is a random number: checkpointing restores the generator, so a forward that is run again draws the same one.
    """

    def __init__(self) -> None:
        self._used: WeakKeyDictionary[Callable[..., Any], dict[int, Tensor]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[CheckpointedStateLog], tuple[()]]:
        """Copies start empty: they have run nothing."""
        return CheckpointedStateLog, ()

    def __len__(self) -> int:
        return sum(len(states) for states in self._used.values())

    def use(self, current: Tensor) -> Tensor:
        """The state to be used by the forward that runs now: the current one, or if it is run again, what it was."""
        if torch.compiler.is_compiling():
            _refuse_region()
            return current
        region = _region()
        if region is None:
            return current
        # On the CPU's generator: a GPU is not waited for.
        name = int(torch.randint(2**62, (), device="cpu"))
        if recomputing():
            return self._find(name)
        states = self._used.setdefault(region, {})
        states[name] = current.clone()
        if len(states) > KEPT and region.__module__ != checkpoint.__module__:
            del states[next(iter(states))]
        return current

    def _find(self, name: int) -> Tensor:
        found = [states[name] for states in list(self._used.values()) if name in states]
        if len(found) != 1:
            which = "none" if not found else "more than one"
            raise RuntimeError(
                f"a checkpointed forward of an EM layer is run again, but {which} of the forwards kept is it: {REMEDY}"
            )
        return found[0]
