"""EM state under activation checkpointing: a recomputed forward uses the state of the first one.

A region is the code of one call of `torch.utils.checkpoint.checkpoint`, which the backward pass runs again.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

REMEDY = (
    "checkpoint with use_reentrant=False and preserve_rng_state=True, do not compile the layer, and do not reset the "
    "seed between a forward and its backward"
)
# Maximum number of states of a region that may never end: hooks other than those of checkpointing may stay installed
# during a whole training run, and before torch 2.8 the hooks cannot be queried.
MAX_STATES = 64
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def is_in_backward() -> bool:
    """Return whether a backward is running, in which activation checkpointing recomputes forwards."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class _UnknownRegion:
    """Type of `UNKNOWN_REGION`; its instances, unlike those of `object`, can be keys of a WeakKeyDictionary."""


# Stands for every region, as a key of the log, if regions cannot be distinguished (before torch 2.8).
UNKNOWN_REGION = _UnknownRegion()


def _current_region() -> Any:
    """Return an object that lives as long as the saved tensors of the checkpointed region; None outside of one.

    Non-reentrant checkpointing installs saved-tensor hooks, which the graph holds until it is freed.
    """
    if _top_hooks is None:
        return UNKNOWN_REGION if torch.is_grad_enabled() else None
    hooks = _top_hooks(True)
    return None if hooks is None else hooks[1]


def _raise_if_compiled_in_region() -> None:
    """Raise in a checkpointed region; evaluated once per compilation, as a constant, so that compiling fails."""
    if _top_hooks is not None and _top_hooks(True) is not None:
        raise RuntimeError(f"a compiled EM layer cannot be trained in a checkpointed region: {REMEDY}")


# Same effect as torch.compiler.assume_constant_result, which imports the compiler.
_raise_if_compiled_in_region._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_recomputed_forward() -> bool:
    """Return whether this training forward is a recomputation, whose statistics were added the first time."""
    if not is_in_backward():
        return False
    if _current_region() is None:
        raise RuntimeError(
            "an EM layer cannot be trained inside a backward: reentrant activation checkpointing runs the first "
            f"forward under no_grad, which does not update the EM state; {REMEDY}"
        )
    return True


class CheckpointedStateLog:
    """States that forwards in checkpointed regions used, kept until their regions are freed.

    Backwards may run in any order, repeatedly or never, and inputs may be equal. Forwards are identified by a random
    number: checkpointing restores the generator, so that a recomputed forward draws the number of the first one.
    """

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[Any, dict[int, Tensor]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[CheckpointedStateLog], tuple[()]]:
        """Copy as an empty log."""
        return CheckpointedStateLog, ()

    def __len__(self) -> int:
        return sum(len(states) for states in self._states.values())

    def state_for_forward(self, current: Tensor) -> Tensor:
        """Return the current state, or in a recomputed forward the state of the first one."""
        if torch.compiler.is_compiling():
            _raise_if_compiled_in_region()
            return current
        region = _current_region()
        if region is None:
            return current
        # From the CPU's generator: no synchronization with a GPU.
        forward_id = int(torch.randint(2**62, (), device="cpu"))
        if is_in_backward():
            return self._lookup(forward_id)
        states = self._states.setdefault(region, {})
        states[forward_id] = current.clone()
        if len(states) > MAX_STATES and region.__module__ != checkpoint.__module__:
            del states[next(iter(states))]
        return current

    def _lookup(self, forward_id: int) -> Tensor:
        matches = [states[forward_id] for states in list(self._states.values()) if forward_id in states]
        if len(matches) != 1:
            count = "none" if not matches else "more than one"
            raise RuntimeError(
                f"a checkpointed forward of an EM layer was recomputed, but {count} of the logged forwards matches it: "
                f"{REMEDY}"
            )
        return matches[0]
