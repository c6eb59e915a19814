"""A CUDA driver that runs nothing, to time and check launches without a GPU.

Kernels are compiled for Hopper by Triton and launched by its own launcher. Only the CUDA driver below it is replaced
(`stub_libcuda.c`, compiled with the C compiler that Triton needs as well). Tensors are on the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import triton
from triton import knobs
from triton.runtime.jit import JITFunction

from mgk.kernels import jit_cache
from mgk.kernels.architecture import HOPPER, targeting
from mgk.kernels.mixture import launch

SOURCE = Path(__file__).with_name("stub_libcuda.c")
COMPILER = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
MAX_LAUNCHES = 256
TENSOR_MAP_BYTES = 128


class Launch(NamedTuple):
    """A launch that the driver has received."""

    kernel: str
    grid: tuple[int, ...]
    threads: int
    shared: int
    parameters: tuple[bytes, ...]  # values


class StubDriver:
    """The compiled library, and the kernels that were launched through it."""

    def __init__(self, folder: str):
        path = Path(folder) / "libcuda.so.1"
        command = [str(COMPILER), "-O2", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", str(path), str(SOURCE)]
        subprocess.run(command, check=True)
        (Path(folder) / "libcuda.so").symlink_to(path)  # Triton 3.4 and 3.5 link with it
        # Triton finds the loaded library by its soname.
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.library.stub_launch.restype = ctypes.POINTER(_Launch)
        self.kernels: dict[int, tuple[str, list[int]]] = {}  # names and sizes of parameters by function

    def register(self, kernel: Any) -> None:
        """Keep the parameters of launches of a compiled kernel."""
        kernel.run  # noqa: B018  (loads the function)
        if kernel.function not in self.kernels:
            sizes = parameter_sizes(kernel.asm["ptx"])
            self.kernels[kernel.function] = kernel.metadata.name, sizes
            self.library.stub_set_parameters(
                ctypes.c_void_p(kernel.function), len(sizes), (ctypes.c_uint32 * len(sizes))(*sizes)
            )

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[Launch]]:
        """Append the launches of this block to a list, at its end."""
        launches: list[Launch] = []
        self.library.stub_record(MAX_LAUNCHES)
        try:
            yield launches
            for index in range(self.library.stub_num_launches()):
                item = self.library.stub_launch(index).contents
                name, sizes = self.kernels[item.function]
                data = bytes(item.data[: item.size])
                ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
                parameters = tuple(data[end - size : end] for size, end in zip(sizes, ends, strict=True))
                launches.append(Launch(name, tuple(item.grid), item.block[0], item.shared, parameters))
        finally:
            self.library.stub_record(0)


class _Launch(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_uint64), ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32), ("size", ctypes.c_uint32), ("data", ctypes.c_ubyte * 8192),
    )  # fmt: skip


def parameter_sizes(ptx: str) -> list[int]:
    """Return the sizes of a kernel's parameters in bytes."""
    entry = re.search(r"\.entry [^(]*\((.*?)\)", ptx, re.DOTALL)
    assert entry is not None, "the PTX has no kernel"
    sizes = []
    for declaration in entry[1].split(","):
        match = re.search(r"\.([bufs])(\d+)(?:\s+\.ptr[^\[]*)?\s+\w+(?:\[(\d+)\])?", declaration)
        assert match is not None, declaration
        sizes.append(int(match[2]) // 8 * int(match[3] or 1))
    return sizes


@contextlib.contextmanager
def stub_cuda() -> Iterator[StubDriver]:
    """Launch kernels for CPU tensors through Triton and a driver that runs nothing.

    The kernels must not have been imported for Triton's interpreter. A process can have one stub driver, and no GPU.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stub = StubDriver(folder)
        stack.enter_context(mock.patch.object(knobs.nvidia, "libcuda_path", folder))
        from triton.backends.nvidia.driver import CudaDriver

        driver = CudaDriver()
        driver.get_current_device = lambda: 0
        driver.get_device_capability = lambda device: (HOPPER // 10, HOPPER % 10)
        driver.get_current_stream = lambda device: 0
        run = JITFunction.run

        def registered(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            compiled = run(kernel, *args, **kwargs)
            stub.register(compiled)
            return compiled

        active = "_active" if hasattr(triton.runtime.driver, "_active") else "active"  # Triton 3.4 has the latter only
        stack.enter_context(mock.patch.object(triton.runtime.driver, active, driver))
        stack.enter_context(mock.patch.object(jit_cache, "_compiled", {}))
        stack.enter_context(mock.patch.object(jit_cache, "compile_kernels", return_value=[]))
        stack.enter_context(mock.patch.object(JITFunction, "run", registered))
        stack.enter_context(mock.patch.dict(os.environ, TRITON_INTERPRET="1"))  # allows CPU tensors
        stack.enter_context(mock.patch.object(launch, "supports_tma", _supports_tma))
        yield stub


_original_supports_tma = launch.supports_tma


def _supports_tma(*tensors: Any) -> bool:
    with targeting(HOPPER):
        return _original_supports_tma(*tensors)
