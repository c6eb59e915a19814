"""A cache of compiled Triton kernels, and launches that bypass Triton's inspection of the arguments.

`kernel[grid](...)` inspects every argument at every launch, which takes longer than a small kernel runs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.knobs import runtime as knobs
from triton.runtime import driver

NO_GPU = -1  # the device index of a CPU tensor


class CompiledKernel(NamedTuple):
    """A compiled kernel and the arguments that follow the tensors and floats."""

    compiled: Any
    run: Callable[..., None]
    function: Any
    metadata: Any
    arguments: tuple[Any, ...]


@dataclass(slots=True, eq=False)
class LaunchSpec:
    """A launch without its tensors and floats.

    Every launch of a spec that is reused needs tensors of the same dtypes, and None in the same positions.
    """

    kernel: Any
    grid: tuple[int, int, int]
    scalars: tuple[float, ...]  # Triton specializes on those that are 1 or divisible by 16
    unspecialized: tuple[int, ...]  # the kernel's do_not_specialize arguments
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1
    maxnreg: int | None = None  # of the first path
    paths: tuple[int | None, ...] = (None,)  # values of the constexpr PATH, one launch each; None: there is no PATH
    # By device and by the positions of tensors that are not aligned to 16 bytes.
    compiled: dict[Any, tuple[CompiledKernel, ...]] = field(default_factory=dict, repr=False)


_compiled: dict[tuple[Any, ...], Any] = {}


@functools.lru_cache(1 << 12)
def specialization_key(scalars: tuple[float, ...]) -> tuple[int, ...]:
    """Return the properties that Triton specializes on. Cached: most launches repeat earlier strides."""
    return tuple((n % 16 == 0) + 2 * (n == 1) + 4 * (n >= 1 << 31) for n in scalars)


def current_device() -> int:
    return torch._C._cuda_getDevice() if torch.cuda.is_initialized() else 0


def launch(spec: LaunchSpec, tensors: tuple[Any, ...], floats: tuple[float, ...] = ()) -> None:
    """Launch the kernel once for each of its paths.

    Args:
        spec: The launch.
        tensors: Its first arguments: tensors, tensor descriptors or None.
        floats: The arguments after them.
    """
    # Addresses instead of tensors: Triton's launcher would query the driver about the pointer of each tensor.
    addresses: list[Any] = []
    address_bits = 0
    last: Tensor | None = None
    for x in tensors:
        if x is not None and isinstance(x, Tensor):
            address = x.data_ptr()
            address_bits |= address
            addresses.append(address)
            last = x
        else:
            addresses.append(x)
    home = NO_GPU if last is None else last.get_device()
    device = current_device()
    if home not in (device, NO_GPU):
        with torch.cuda.device(home):
            launch(spec, tensors, floats)
        return
    unaligned = _unaligned(tensors) if address_bits % 16 else ()
    key = (device, *unaligned) if unaligned else device
    kernels = spec.compiled.get(key) or lookup(spec, key, device, tensors, unaligned)
    if kernels is None:
        compile_and_launch(spec, device, tensors, floats, unaligned)
        return
    hooked = hook_installed(knobs.launch_enter_hook) or hook_installed(knobs.launch_exit_hook)
    for compiled, run, function, metadata, arguments in kernels:
        if hooked:
            compiled[spec.grid](*addresses, *floats, *arguments)
        else:
            stream = driver.active.get_current_stream(device)
            run(*spec.grid, stream, function, metadata, None, None, None, *addresses, *floats, *arguments)


def current_stream(device: int) -> Any:
    return driver.active.get_current_stream(max(device, 0))


def can_launch_by_address(device: int, addresses: list[int | None], specs: tuple[LaunchSpec, ...]) -> bool:
    """Return whether the specs can be launched by `launch_by_address`.

    Their kernels must be compiled for aligned tensors, `device` must be the current one, and no launch hook installed.

    Args:
        device: Index of the tensors' device.
        addresses: Of the tensors, or None.
        specs: The launches.
    """
    current = current_device()
    if device != current and not (device == NO_GPU and current == 0):
        return False
    bits = 0
    for address in addresses:
        if address is not None:
            bits |= address
    if bits % 16:
        return False
    for spec in specs:
        if current not in spec.compiled:
            return False
    return not (hook_installed(knobs.launch_enter_hook) or hook_installed(knobs.launch_exit_hook))


def launch_by_address(spec: LaunchSpec, device: int, stream: Any, arguments: tuple[Any, ...]) -> None:
    """Launch compiled kernels. arguments: addresses, tensor descriptors or None, followed by the floats."""
    for _, run, function, metadata, constants in spec.compiled[max(device, 0)]:
        run(*spec.grid, stream, function, metadata, None, None, None, *arguments, *constants)


def _unaligned(tensors: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(tensors) if isinstance(x, Tensor) and x.data_ptr() % 16)


def hook_installed(hook: Any) -> bool:
    """Return whether a launch hook of Triton has callbacks, for example those of a profiler."""
    return hook is not None and bool(getattr(hook, "calls", True))


def _key(spec: LaunchSpec, device: int, tensors: tuple[Any, ...], unaligned: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the properties that Triton specializes on: dtypes and alignment of tensors, divisibility of scalars."""
    dtypes = [x.dtype if isinstance(x, Tensor) else x is None for x in tensors]
    # By id: hashing a kernel hashes its source.
    kernel, options = id(spec.kernel), (spec.num_warps, spec.num_stages, spec.maxnreg)
    constexprs = tuple(spec.constexprs.values())
    return (kernel, device, options, constexprs, specialization_key(spec.scalars), *dtypes, *unaligned)


def lookup(
    spec: LaunchSpec, key: Any, device: int, tensors: tuple[Any, ...], unaligned: tuple[int, ...]
) -> tuple[CompiledKernel, ...] | None:
    """Return the kernels of a new spec that were compiled for an equal one, and store them in the spec."""
    cache_key = _key(spec, device, tensors, unaligned)
    compiled: list[Any] = [_compiled.get((path, cache_key)) for path in spec.paths]
    if None in compiled:
        return None
    arguments = (*spec.scalars, *spec.unspecialized, *spec.constexprs.values())
    spec.compiled[key] = tuple(
        CompiledKernel(
            kernel, kernel.run, kernel.function, kernel.packed_metadata,
            arguments if path is None else (*arguments, path),
        )
        for kernel, path in zip(compiled, spec.paths, strict=True)
    )  # fmt: skip
    return spec.compiled[key]


def compile_and_launch(
    spec: LaunchSpec, device: int, tensors: tuple[Any, ...], floats: tuple[float, ...], unaligned: tuple[int, ...]
) -> None:
    """Launch through Triton, which compiles the kernels."""
    cache_key = _key(spec, device, tensors, unaligned)
    for path in spec.paths:
        options = {} if path is None else {"PATH": path}
        if spec.maxnreg is not None and path == spec.paths[0]:
            options["maxnreg"] = spec.maxnreg
        _compiled[path, cache_key] = spec.kernel[spec.grid](
            *tensors, *floats, *spec.scalars, *spec.unspecialized, **spec.constexprs, num_warps=spec.num_warps,
            num_stages=spec.num_stages, **options,
        )  # fmt: skip
