"""A cache of compiled Triton kernels, and launches that bypass Triton's inspection of the arguments.

`kernel[grid](...)` inspects every argument at every launch, which takes longer than a small kernel runs.
"""

import concurrent.futures
import contextlib
import functools
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.knobs import runtime as knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mgk.kernels.architecture import Architecture, compile_target
from mgk.kernels.tma import encoding_properties, launcher_after_encoding

try:
    from triton.runtime import _async_compile
    from triton.runtime._async_compile import AsyncCompileMode
except ImportError:  # before Triton 3.5
    AsyncCompileMode = None

logger = logging.getLogger("mgk")
SLOW_COMPILATION = 2.0  # seconds; a longer compilation is logged
PARSER_RETRIES = 4
NO_GPU = -1  # the device index of a CPU tensor


class CompiledKernel(NamedTuple):
    """A compiled kernel, its grid, and the arguments that follow the tensors and floats."""

    grid: tuple[int, int, int]
    compiled: Any
    run: Callable[..., None]
    function: Any
    metadata: Any
    arguments: tuple[Any, ...]
    run_by_address: Callable[..., None]  # with encoded TMA descriptors, unless `descriptors` is None
    descriptors: tuple[Any, ...] | None  # properties by which TMA descriptors are encoded; None: Triton encodes them


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
    second_grid: tuple[int, int, int] | None = None  # of the second path; None: `grid`
    # By device and by the positions of tensors that are not aligned to 16 bytes.
    compiled: dict[Any, tuple[CompiledKernel, ...]] = field(default_factory=dict, repr=False)

    def path_grids(self) -> tuple[tuple[int | None, tuple[int, int, int]], ...]:
        """Return each path with its grid."""
        return tuple((path, self.second_grid or self.grid if n else self.grid) for n, path in enumerate(self.paths))


_compiled: dict[tuple[Any, ...], Any] = {}

# Arguments of `launch`.
Launch = tuple[LaunchSpec, tuple[Any, ...], tuple[float, ...]]

# Called with every launch before it runs, in all threads.
_observers: list[Callable[[LaunchSpec, tuple[Any, ...], tuple[float, ...]], None]] = []


class _Deferred(threading.local):
    """Launches of this thread that wait for the kernels of a block, or None outside of such a block."""

    launches: list[Launch] | None = None
    only_compile = False


_deferred = _Deferred()


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
    pending_launches = _deferred.launches
    if pending_launches is not None and _deferred.only_compile:
        pending_launches.append((spec, tensors, floats))
        return
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
    tensor_device = NO_GPU if last is None else last.get_device()
    device = current_device()
    if tensor_device not in (device, NO_GPU):
        with torch.cuda.device(tensor_device):
            launch(spec, tensors, floats)
        return
    unaligned = _unaligned(tensors) if address_bits % 16 else ()
    key = (device, *unaligned) if unaligned else device
    kernels = spec.compiled.get(key) or lookup(spec, key, device, tensors, unaligned)
    if pending_launches is not None and (kernels is None or pending_launches):
        pending_launches.append((spec, tensors, floats))
        return
    for observe in _observers:
        observe(spec, tensors, floats)
    if kernels is None:
        compile_and_launch(spec, device, tensors, floats, unaligned)
        return
    has_launch_hook = hook_installed(knobs.launch_enter_hook) or hook_installed(knobs.launch_exit_hook)
    for grid, compiled, run, function, metadata, arguments, _, _ in kernels:
        if has_launch_hook:
            compiled[grid](*addresses, *floats, *arguments)
        else:
            stream = driver.active.get_current_stream(device)
            run(*grid, stream, function, metadata, None, None, None, *addresses, *floats, *arguments)


def current_stream(device: int) -> Any:
    return driver.active.get_current_stream(max(device, 0))


def is_aligned(addresses: list[int | None]) -> bool:
    """Return whether all addresses are multiples of 16 bytes. Skips None."""
    bits = 0
    for address in addresses:
        if address is not None:
            bits |= address
    return bits % 16 == 0


def can_launch_by_address(device: int, addresses: list[int | None], specs: tuple[LaunchSpec, ...]) -> bool:
    """Return whether the specs can be launched by `launch_by_address`.

    Their kernels must be compiled for aligned tensors, and `device` must be the current device. No launch hook,
    `collected_launches` or `observed_launches` may be active.

    Args:
        device: Index of the tensors' device.
        addresses: Of the tensors, or None.
        specs: The launches.
    """
    current = current_device()
    if (device != current and not (device == NO_GPU and current == 0)) or _deferred.launches is not None:
        return False
    if _observers:
        return False
    if not is_aligned(addresses):
        return False
    for spec in specs:
        if current not in spec.compiled:
            return False
    return not (hook_installed(knobs.launch_enter_hook) or hook_installed(knobs.launch_exit_hook))


def launch_by_address(spec: LaunchSpec, device: int, stream: Any, arguments: tuple[Any, ...]) -> None:
    """Launch compiled kernels. arguments: addresses, TMA descriptors (`tma.encode`) or None, followed by the floats."""
    for grid, _, _, function, metadata, constants, run, _ in spec.compiled[max(device, 0)]:
        run(*grid, stream, function, metadata, None, None, None, *arguments, *constants)


def _unaligned(tensors: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(tensors) if isinstance(x, Tensor) and x.data_ptr() % 16)


def hook_installed(hook: Any) -> bool:
    """Return whether a launch hook of Triton has callbacks, for example those of a profiler."""
    return hook is not None and bool(getattr(hook, "calls", True))


def _key(
    spec: LaunchSpec, device: Architecture, tensors: tuple[Any, ...], unaligned: tuple[int, ...]
) -> tuple[Any, ...]:
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
    descriptors = encoding_properties(compiled, tensors)
    spec.compiled[key] = tuple(
        CompiledKernel(
            grid, kernel, kernel.run, kernel.function, kernel.packed_metadata,
            arguments if path is None else (*arguments, path),
            launcher_after_encoding(kernel.run) if descriptors else kernel.run, descriptors,
        )
        for kernel, (path, grid) in zip(compiled, spec.path_grids(), strict=True)
    )  # fmt: skip
    return spec.compiled[key]


@contextlib.contextmanager
def compiled_together() -> Iterator[None]:
    """Compile the kernels that the launches of this block need in parallel threads, before the first of them runs.

    From the first launch whose kernel is not compiled on, launches run at the end of the block. The block must not read
    their results.
    """
    if _deferred.launches is not None:
        yield
        return
    launches: list[Launch] = []
    _deferred.launches = launches
    try:
        yield
    finally:
        _deferred.launches = None
    if launches:
        compile_kernels(launches)
        for spec, tensors, floats in launches:
            launch(spec, tensors, floats)


@contextlib.contextmanager
def collected_launches() -> Iterator[list[Launch]]:
    """Collect the launches of this thread instead of running them."""
    previous = _deferred.launches, _deferred.only_compile
    launches: list[Launch] = []
    _deferred.launches, _deferred.only_compile = launches, True
    try:
        yield launches
    finally:
        _deferred.launches, _deferred.only_compile = previous


@contextlib.contextmanager
def observed_launches(observe: Callable[[LaunchSpec, tuple[Any, ...], tuple[float, ...]], None]) -> Iterator[None]:
    """Call a function with the arguments of every launch before it runs, in all threads."""
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)


def compile_kernel(
    spec: LaunchSpec, path: int | None, tensors: tuple[Any, ...], floats: tuple[float, ...] = ()
) -> Any:  # fmt: skip
    """Compile a kernel for one of its paths. Does not store it for launches.

    Returns:
        The compiled kernel; in a context of compiler threads, a future; None if a hook of Triton prevented it.
    """
    return spec.kernel.warmup(*_arguments(spec, tensors, floats), grid=spec.grid, **compile_options(spec, path))


def compile_kernels(launches: Sequence[Launch], threads: int | None = None) -> list[str]:
    """Compile the kernels of launches in parallel threads, and log the time if it is long.

    Args:
        launches: The launches. Kernels that are compiled already are skipped.
        threads: Number of threads; default: one per kernel, at most one per core.

    Returns:
        The names of the compiled kernels.
    """
    tensor_device = next(
        (x.get_device() for _, tensors, _ in launches for x in tensors if isinstance(x, Tensor)), NO_GPU
    )
    device = current_device()
    if tensor_device not in (device, NO_GPU):
        with torch.cuda.device(tensor_device):
            return compile_kernels(launches, threads)
    missing: dict[Any, Launch] = {}
    target = compile_target()
    for spec, tensors, floats in launches:
        # Kernels for another target are never launched.
        cache_key = _key(spec, device if target is None else target, tensors, _unaligned(tensors))
        cache_key = cache_key if target is None else ("target", cache_key)
        for path in spec.paths:
            # The interpreter does not compile.
            if (path, cache_key) not in _compiled and isinstance(spec.kernel, JITFunction):
                missing.setdefault((path, cache_key), (spec, tensors, floats))
    if not missing:
        return []
    start = time.perf_counter()
    if threads is None:
        threads = min(len(missing), os.cpu_count() or 1)
    kernels = {}
    with _compiler_threads(threads, device):
        for (path, cache_key), (spec, tensors, floats) in missing.items():
            # This thread parses too: the keys of Triton's cache contain the functions that a kernel calls.
            kernels[path, cache_key] = _retry_parser_errors(compile_kernel, spec, path, tensors, floats)
    for cache_key, kernel in kernels.items():
        if kernel is not None:
            _compiled[cache_key] = kernel.result() if hasattr(kernel, "result") else kernel
    seconds = time.perf_counter() - start
    names = [spec.kernel.__name__ for spec, _, _ in missing.values()]
    if seconds > SLOW_COMPILATION:
        logger.warning(
            "compiled %d kernels in %.1f s (%s). Call mgk.warmup to compile them in advance; later processes load them "
            "from Triton's cache.",
            len(names), seconds, ", ".join(sorted(set(names))),
        )  # fmt: skip
    return names


class _CompilerPool(concurrent.futures.ThreadPoolExecutor):
    """Threads for Triton's compiler, which compile again if `ast.parse` failed because it runs in several of them."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function in a thread."""
        return super().submit(_retry_parser_errors, fn, *args, **kwargs)


def _retry_parser_errors(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for _ in range(PARSER_RETRIES):
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            if not _is_parser_error(error):
                raise
    return fn(*args, **kwargs)


def _is_parser_error(error: BaseException | None) -> bool:
    """Return whether Python's parser failed, also in a function that a kernel calls: Triton wraps those errors."""
    while error is not None and not isinstance(error, SystemError | RecursionError):
        error = error.__cause__ or error.__context__
    return error is not None


@contextlib.contextmanager
def _collector_disabled() -> Iterator[None]:
    """Disable the garbage collector in Python up to 3.11.

    There it can run within `ast.parse` and let other threads run, and all threads share one counter of the recursion of
    `ast.parse`, which then fails: https://github.com/python/cpython/issues/106905.
    """
    disable = sys.version_info < (3, 12) and gc.isenabled()
    if disable:
        gc.disable()
    try:
        yield
    finally:
        if disable:
            gc.enable()


def _compiler_threads(threads: int, device: int) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which Triton compiles in threads; without effect for one thread or a Triton before 3.5."""
    stack = contextlib.ExitStack()
    if threads > 1 and AsyncCompileMode is not None and _async_compile.active_mode.get() is None:
        # The target of a thread is that of its current device.
        select_device: Any = (torch.cuda.set_device, (device,)) if torch.cuda.is_initialized() else (None, ())
        stack.enter_context(_collector_disabled())
        pool = stack.enter_context(_CompilerPool(threads, "mgk-compile", *select_device))
        # A compilation that fails leaves the mode active, and later ones would use threads that have ended.
        stack.callback(_async_compile.active_mode.set, None)
        stack.enter_context(AsyncCompileMode(pool))
    return stack


def _arguments(spec: LaunchSpec, tensors: tuple[Any, ...], floats: tuple[float, ...]) -> tuple[Any, ...]:
    return (*tensors, *floats, *spec.scalars, *spec.unspecialized)


def compile_options(spec: LaunchSpec, path: int | None) -> dict[str, Any]:
    """Return the keyword arguments of a kernel: constexprs and options of the compiler."""
    options = {**spec.constexprs, "num_warps": spec.num_warps, "num_stages": spec.num_stages}
    if path is not None:
        options["PATH"] = path
    if spec.maxnreg is not None and path == spec.paths[0]:
        options["maxnreg"] = spec.maxnreg
    return options


def compile_and_launch(
    spec: LaunchSpec, device: int, tensors: tuple[Any, ...], floats: tuple[float, ...], unaligned: tuple[int, ...]
) -> None:
    """Launch through Triton, which compiles the kernels."""
    if len(spec.paths) > 1:
        compile_kernels([(spec, tensors, floats)])
    cache_key = _key(spec, device, tensors, unaligned)
    arguments = _arguments(spec, tensors, floats)
    for path, grid in spec.path_grids():
        _compiled[path, cache_key] = spec.kernel[grid](*arguments, **compile_options(spec, path))
