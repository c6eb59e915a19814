"""Launches of compiled kernels by the shortest way: Triton's examination of every argument takes longer than a small
kernel does."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.knobs import runtime as knobs
from triton.runtime import driver


class CompiledKernel(NamedTuple):
    """A compiled kernel, and what of its arguments is known: all but tensors and floats."""

    compiled: Any
    run: Callable[..., None]
    function: Any
    metadata: Any
    tail: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A launch but for its tensors and floats. One that is kept is for tensors of the same types each time, None where
    they were None."""

    kernel: Any
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]  # Triton compiles for their divisibility by 16,
    free: tuple[int, ...]  # but does not look at these
    switches: dict[str, Any]  # what the kernel is compiled for, in the order of its arguments, and PATH after them
    paths: tuple[int, ...]
    warps: int
    stages: int
    registers: int | None = None
    # By device and by which tensors are not at a multiple of 16 bytes.
    ready: dict[Any, tuple[CompiledKernel, ...]] = field(default_factory=dict, compare=False, repr=False)


_compiled: dict[tuple[Any, ...], Any] = {}


@functools.lru_cache(1 << 12)
def kinds_of(numbers: tuple[Any, ...]) -> tuple[int, ...]:
    """What Triton specialises on. Most launches are of strides that have been seen before."""
    return tuple((n % 16 == 0) + 2 * (n == 1) + 4 * (n >= 1 << 31) for n in numbers)


NO_GPU = -1  # where a tensor lies that is on none


def current_device() -> int:
    return torch._C._cuda_getDevice() if torch.cuda.is_initialized() else 0


def launch(step: LaunchSpec, tensors: tuple[Any, ...], floats: tuple[float, ...]) -> None:
    """Launches the kernel for each of the paths. `tensors` may have None and tensor descriptors."""
    # As numbers: of a tensor the launcher asks its address, and the driver whether that is the device's.
    addresses: list[Any] = []
    uneven: list[int] = []
    home = NO_GPU
    for x in tensors:
        if x is not None and isinstance(x, Tensor):
            if home == NO_GPU:
                home = x.get_device()
            address = x.data_ptr()
            if address % 16:
                uneven.append(len(addresses))
            addresses.append(address)
        else:
            addresses.append(x)
    device = current_device()
    if home not in (device, NO_GPU):
        with torch.cuda.device(home):
            launch(step, tensors, floats)
        return
    key = (device, *uneven) if uneven else device
    ready = step.ready.get(key) or _found(step, key, device, tensors, uneven)
    if ready is None:
        _examined(step, device, tensors, floats, uneven)
        return
    observed = _called(knobs.launch_enter_hook) or _called(knobs.launch_exit_hook)
    for compiled, run, function, metadata, tail in ready:
        if observed:
            compiled[step.grid](*addresses, *floats, *tail)
        else:
            stream = driver.active.get_current_stream(device)
            run(*step.grid, stream, function, metadata, None, None, None, *addresses, *floats, *tail)


def _called(hook: Any) -> bool:
    """Whether somebody waits for this hook, a profiler for example."""
    return hook is not None and bool(getattr(hook, "calls", True))


def _key(step: LaunchSpec, device: int, tensors: tuple[Any, ...], uneven: list[int]) -> tuple[Any, ...]:
    """What Triton specialises on: types and alignment of tensors, divisibility of numbers."""
    types = [x.dtype if isinstance(x, Tensor) else x is None for x in tensors]
    # By its id: a kernel's own hash is one of its text.
    kernel, options = id(step.kernel), (step.warps, step.stages, step.registers)
    return (kernel, device, options, tuple(step.switches.values()), kinds_of(step.numbers), *types, *uneven)


def _found(
    step: LaunchSpec, key: Any, device: int, tensors: tuple[Any, ...], uneven: list[int]
) -> tuple[CompiledKernel, ...] | None:  # fmt: skip
    """The compiled kernels of a launch that is new, but whose like there was; noted on it."""
    like, tail = _key(step, device, tensors, uneven), (*step.numbers, *step.free, *step.switches.values())
    compiled: list[Any] = [_compiled.get((path, like)) for path in step.paths]
    if None in compiled:
        return None
    step.ready[key] = tuple(
        CompiledKernel(kernel, kernel.run, kernel.function, kernel.packed_metadata, (*tail, path))
        for kernel, path in zip(compiled, step.paths, strict=True)
    )
    return step.ready[key]


def _examined(
    step: LaunchSpec, device: int, tensors: tuple[Any, ...], floats: tuple[float, ...], uneven: list[int]
) -> None:  # fmt: skip
    """Launches through Triton, which compiles what is not yet."""
    like = _key(step, device, tensors, uneven)
    for path in step.paths:
        options = {} if step.registers is None or path != 1 else {"maxnreg": step.registers}
        _compiled[path, like] = step.kernel[step.grid](
            *tensors, *floats, *step.numbers, *step.free, **step.switches, PATH=path, num_warps=step.warps,
            num_stages=step.stages, **options,
        )  # fmt: skip
