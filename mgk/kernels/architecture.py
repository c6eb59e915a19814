"""The GPU architecture of a device, by which launches select their code. Does not import Triton."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

# The number of a compute capability, as in sm_90, or the name of an AMD GPU, as in "gfx942".
Architecture = int | str

HOPPER = 90  # the architecture that was measured; devices other than GPUs (the interpreter) use its block sizes
FIRST_WITH_TMA = 90

_target: Architecture | None = None


@functools.cache
def _architecture_of(device: torch.device) -> Architecture:
    if device.type != "cuda":
        return HOPPER
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def architecture(device: torch.device) -> Architecture:
    """Return the architecture of a device, or the one that kernels are compiled for (`compile_target`)."""
    return _architecture_of(device) if _target is None else _target


def compile_target() -> Architecture | None:
    """Return the architecture of the active `targeting` context, or None."""
    return _target


@contextlib.contextmanager
def targeting(target: Architecture) -> Iterator[None]:
    """Select launches for this architecture whatever the device: kernels are compiled and not run."""
    global _target
    previous, _target = _target, target
    try:
        yield
    finally:
        _target = previous


def is_amd(target: Architecture) -> bool:
    return isinstance(target, str)


def has_tma(target: Architecture) -> bool:
    return isinstance(target, int) and target >= FIRST_WITH_TMA
