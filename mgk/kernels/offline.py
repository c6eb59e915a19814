"""Compilation for a GPU that is not present."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mgk.kernels.architecture import Architecture, is_amd, targeting


class CompileOnlyDriver:
    """The methods of a Triton driver that the compiler calls.

    The device index is the architecture, because kernels cache compiled code by device.
    """

    def __init__(self, arch: Architecture):
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", self.arch, 64) if is_amd(self.arch) else GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> Architecture:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling_for(arch: Architecture) -> Iterator[None]:
    """Compile for this architecture. Launches select its blocks, and must not run (`jit_cache.collected_launches`)."""
    attribute = "_active" if hasattr(driver, "_active") else "active"  # Triton 3.4 has the latter only
    previous = getattr(driver, attribute)
    setattr(driver, attribute, CompileOnlyDriver(arch))
    try:
        with targeting(arch):
            yield
    finally:
        setattr(driver, attribute, previous)
