"""`warmup`: compile the kernels of a call or of a model before it runs."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgk._core.validation import fail
from mgk.backends.triton import NO_TRITON
from mgk.functional import OPERATORS, explain_backend
from mgk.kernels.architecture import Architecture

# Arguments of the operators that have gradients in training.
DIFFERENTIABLE = ("query", "keys", "key", "value", "shift", "log_prior")


@dataclass(frozen=True)
class Warmup:
    """The result of `warmup`.

    Attributes:
        kernels: Names of the compiled kernels, without those that were compiled before.
        seconds: Duration of the compilation.
        reason: Why no kernel was compiled, or None.

    Examples:
        >>> print(mgk.Warmup(("prepare_keys", "mixture_forward"), 3.25))
        2 kernels compiled in 3.2 s
    """

    kernels: tuple[str, ...]
    seconds: float
    reason: str | None = None

    def __str__(self) -> str:
        if not self.kernels:
            return f"no kernels compiled: {self.reason}"
        return f"{len(self.kernels)} kernels compiled in {self.seconds:.1f} s"


def warmup(
    op: Callable[..., Any] | str | torch.nn.Module,
    *args: Any,
    backward: bool = True,
    threads: int | None = None,
    arch: Architecture | None = None,
    **kwargs: Any,
) -> Warmup:
    """Compile the Triton kernels of ``op(*args, **kwargs)`` in parallel threads, without running them.

    Shapes, strides and dtypes of the tensors determine the kernels; their values are not read. Tensors on the meta
    device describe a call: they are replaced by empty tensors on the GPU. Compiled kernels stay in this process and in
    Triton's cache on disk, which later processes read.

    A call whose backend is not "triton" has no kernels to compile: `Warmup.reason` has the reason.

    Args:
        op: One of the four operators or its name, or a module, which is called as ``op(*args, **kwargs)``. A module's
            buffers and the random state are restored afterwards.
        *args: Positional arguments.
        backward: Also compile the backward pass; False compiles the forward of inference.
        threads: Number of threads; default: one per kernel, at most one per core. Triton before 3.5 uses one.
        arch: Compile for this architecture instead of the GPU, without one: 90 for sm_90, "gfx942" for an AMD GPU.
            Tensors and modules must be on the CPU or the meta device. The kernels are stored in Triton's cache only.
        **kwargs: Keyword arguments.

    Returns:
        A `Warmup`: names of the compiled kernels and the duration.

    Examples:
        >>> x = torch.empty(1, 4, 128, 64, dtype=torch.bfloat16, device="cpu")
        >>> print(mgk.warmup(mgk.smgk_attention, x, x, x, torch.empty(4, 2, 64)))
        no kernels compiled: ...
    """
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        fail("threads", f"must be a positive integer or None, got {threads!r}")
    if arch is not None and not (isinstance(arch, str) or (isinstance(arch, int) and arch >= 80)):
        fail("arch", f"must be a compute capability such as 90 (sm_90), or the name of an AMD GPU, got {arch!r}")
    if NO_TRITON is not None:
        return Warmup((), 0.0, NO_TRITON)
    is_module = isinstance(op, torch.nn.Module)
    device = _device(op, args, kwargs, arch)
    args = tuple(_materialize(x, device) for x in args)
    kwargs = {name: _materialize(x, device) for name, x in kwargs.items()}
    from mgk.kernels.jit_cache import collected_launches, compile_kernels
    from mgk.kernels.offline import compiling_for

    start = time.perf_counter()
    with contextlib.nullcontext() if arch is None else compiling_for(arch):
        if not is_module:
            choice = explain_backend(op, *args, **kwargs)
            if choice.backend != "triton":
                return Warmup((), 0.0, choice.reasons.get("triton", f"the call runs on {choice.backend!r}"))
        run = _run_module if is_module else _run_operator
        with collected_launches() as launches, _restored(op, device):
            run(op, args, kwargs, backward)
        kernels = compile_kernels(launches, threads)
    reason = None
    if not kernels:
        reason = "all of them were compiled before" if launches else "the call launches no Triton kernels"
    return Warmup(tuple(kernels), time.perf_counter() - start, reason)


def _device(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arch: Architecture | None) -> torch.device:
    """Return the device of the call: that of its tensors or, if they are on the meta device, the GPU."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if isinstance(op, torch.nn.Module):
        tensors += [*op.parameters(), *op.buffers()]
    devices = {x.device for x in tensors if not x.is_meta}
    if arch is not None:
        if any(device.type != "cpu" for device in devices):
            fail("arch", "needs tensors and modules on the CPU or the meta device: the kernels are compiled, not run")
        return torch.device("cpu")
    if devices:
        return next(iter(devices))
    if not torch.cuda.is_available():
        fail("arch", "must name an architecture, such as 90: the tensors are on the meta device, and there is no GPU")
    return torch.device("cuda", torch.cuda.current_device())


def _materialize(x: Any, device: torch.device) -> Any:
    """Replace a tensor on the meta device by an empty one."""
    if not isinstance(x, Tensor) or not x.is_meta:
        return x
    empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return empty.requires_grad_(x.requires_grad)


@contextlib.contextmanager
def _restored(op: Any, device: torch.device) -> Iterator[None]:
    """Restore the random state and the buffers of a module."""
    buffers = [(x, x.clone()) for x in op.buffers()] if isinstance(op, torch.nn.Module) else []
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _run_operator(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], backward: bool) -> None:
    name = op if isinstance(op, str) else op.__name__
    arguments = inspect.signature(OPERATORS[name]).bind(*args, **kwargs).arguments
    if backward:
        for key in DIFFERENTIABLE:
            if isinstance(arguments.get(key), Tensor):
                arguments[key] = arguments[key].detach().requires_grad_()
    inputs = [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]
    _differentiate(lambda: OPERATORS[name](**arguments), inputs, backward)


def _run_module(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], backward: bool) -> None:
    inputs = [p for p in op.parameters() if p.requires_grad]
    inputs += [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.requires_grad]
    _differentiate(lambda: op(*args, **kwargs), inputs, backward)


def _differentiate(forward: Callable[[], Any], inputs: list[Tensor], backward: bool) -> None:
    """Run a call and its backward pass in this thread; the gradients are discarded."""
    with torch.set_grad_enabled(backward):
        outputs = forward()
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    outputs = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    if backward and outputs and inputs:
        # In this thread: launches are collected per thread, and autograd has one for each GPU.
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.grad(outputs, inputs, [torch.empty_like(x) for x in outputs], allow_unused=True)
