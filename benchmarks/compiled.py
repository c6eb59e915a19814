"""Compile the kernels for a GPU that need not be present, and report their registers and memory.

    python benchmarks/compiled.py --arch 90 --operator smgk --dtype bf16 --width 64
    python benchmarks/compiled.py --arch 86 --part 1/2

Operators are called as usual, but kernels are compiled and not launched. Without options: all operators, dtypes,
widths, components and features (hours). Prints registers, bytes of local memory (spills) and shared memory of each
kernel; at the end, the kernels that do not compile or do not fit. Exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

import mgk
from mgk._core.calls import mixture_call
from mgk.backends import em_statistics
from mgk.kernels import jit_cache
from mgk.kernels.architecture import Architecture, is_amd
from mgk.kernels.jit_cache import LaunchSpec
from mgk.kernels.mixture import launch
from mgk.kernels.mixture.experimental import one_pass_backward
from mgk.kernels.mixture.tile import FALLBACK
from mgk.kernels.offline import compiling_for

# Shared memory limit of a program in bytes, by compute capability.
SHARED: dict[Architecture, int] = {
    80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376, "gfx942": 65_536,
}  # fmt: skip
OPERATORS = ("smgk", "smgk-hard", "mgk", "mgk-hard", "smlk", "mlk")
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WIDTHS = (16, 32, 64, 128, 256)
COMPONENTS = (1, 2, 4, 8)
FEATURES = (
    "plain", "causal", "mask", "dropout", "scales", "packed", "small", "one query", "shared keys", "fewer key heads",
    "fewer key heads, one query", "counts", "one pass", "one pass, causal",
)  # fmt: skip
LONG, SHORT = 2048, 64  # sequence lengths; SHORT makes a call small


class Call(NamedTuple):
    operator: str
    dtype: str
    width: int
    components: int
    feature: str

    def __str__(self) -> str:
        return f"{self.operator} {self.dtype} D {self.width} M {self.components} {self.feature}"


class Kernel(NamedTuple):
    """Resources of a compiled kernel, or the reason why it did not compile."""

    name: str
    registers: int = 0
    local: int = 0  # bytes per thread
    shared: int = 0
    failure: str = ""

    def misfit(self, arch: Architecture) -> str:
        if self.failure or self.shared <= SHARED[arch]:
            return self.failure
        return f"{self.shared} bytes of shared memory, the limit is {SHARED[arch]}"


def kernels(call: Call, arch: Architecture, first_paths: bool = False) -> list[Kernel]:
    """Return the kernels that a call launches, forward and backward.

    Args:
        call: The call.
        arch: The GPU.
        first_paths: Skip the fallback, the second path of a kernel.
    """
    compiled_kernels: list[Kernel] = []
    for spec, path, kernel in compile_call(call, arch, first_paths):
        name = spec.kernel.__name__ + ("" if path is None else f" {path}")
        if isinstance(kernel, Exception):
            compiled_kernels.append(Kernel(name, failure=str(kernel).strip().splitlines()[-1][:150]))
        else:
            usage = _amd_usage(kernel.asm["amdgcn"]) if is_amd(arch) else resource_usage(kernel.asm["cubin"])
            compiled_kernels.append(Kernel(name, *usage, kernel.metadata.shared))
    return compiled_kernels


def compile_call(
    call: Call, arch: Architecture, first_paths: bool = False
) -> Iterator[tuple[LaunchSpec, int | None, Any]]:
    """Compile the kernels that a call launches. Yields each launch and path, with the kernel or the error."""
    limit = launch.small_call_limit(1 << 20 if call.feature == "small" else 0)
    one_pass = one_pass_backward(call.feature.startswith("one pass"))
    with limit, one_pass, compiling_for(arch):
        with jit_cache.collected_launches() as launches:
            _attend(call)
        for spec, tensors, floats in launches:
            for path in spec.paths:
                if first_paths and path == FALLBACK.value:
                    continue
                try:
                    kernel = jit_cache.compile_kernel(spec, path, tensors, floats)
                except Exception as error:  # continue with the other kernels
                    kernel = error
                yield spec, path, kernel


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the bytes of local memory per thread."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert match is not None, text
    return int(match[1]), int(match[2])


def _amd_usage(assembly: str) -> tuple[int, int]:
    """Return vector registers (with accumulation registers) and bytes of scratch memory per thread."""
    numbers = (re.search(rf"\.{name}:\s+(\d+)", assembly) for name in ("vgpr_count", "private_segment_fixed_size"))
    registers, scratch = (int(match[1]) if match else 0 for match in numbers)
    return registers, scratch


def _attend(call: Call) -> None:
    """Call an operator on uninitialized tensors, with gradients except in decoding."""
    family, _, hard = call.operator.partition("-")
    is_linear, is_shifted = family.endswith("mlk"), family.startswith("s")
    is_decoding = call.feature == "shared keys" or "one query" in call.feature
    has_fewer_keys = call.feature.startswith("fewer key heads")
    D, M, H = call.width, call.components, 2
    B = 1 if call.feature == "packed" else 2
    N = SHORT if call.feature == "small" else LONG
    query_heads = 2 * H if call.feature == "shared keys" or has_fewer_keys else H
    value_heads = 2 * H if has_fewer_keys else H

    def tensor(*shape: int, dtype: torch.dtype = TYPES[call.dtype]) -> Tensor:
        return torch.empty(shape, dtype=dtype).requires_grad_(not is_decoding)

    query = tensor(B, query_heads, 1 if is_decoding and not is_linear else N, D)
    keys = tensor(B, H, N, D) if is_shifted else tensor(B, H, M, N, D)
    value = tensor(B, value_heads, N, D)
    shift = (tensor(H, M, D, dtype=torch.float32),) if is_shifted else ()
    prior = None if hard else tensor(1, H, M, 1, dtype=torch.float32)
    if call.feature == "counts":  # of expectation maximization
        if not is_linear and not hard:
            shifted: dict[str, Any] = {"shift": shift[0], "shifted": True} if shift else {}
            em_statistics(mixture_call(query, keys, value, log_prior=prior, **shifted), with_spread=False)
        return
    options = _linear_options(call, N) if is_linear else _mixture_options(call, N, H, tensor)
    operator = getattr(mgk, f"{family}_attention")
    out = operator(query, keys, value, *shift, log_prior=prior, backend="triton", **options)
    if not is_decoding:
        out.sum().backward()


def _packing(length: int) -> Tensor:
    """Return the offsets of two sequences of equal length."""
    return torch.tensor([0, length // 2, length], dtype=torch.int32)


def _linear_options(call: Call, length: int) -> dict[str, Any]:
    """Return the options of the feature for linear attention."""
    options: dict[str, Any] = {"is_causal": call.feature in ("causal", "packed")}
    return options | ({"cu_seqlens": _packing(length)} if call.feature == "packed" else {})


def _mixture_options(call: Call, length: int, heads: int, tensor: Callable[..., Tensor]) -> dict[str, Any]:
    """Return the options of the feature for mixture attention; `tensor` makes a tensor of a shape."""
    options: dict[str, Any] = {"assignment": "hard" if call.operator.endswith("-hard") else "soft"}
    options["is_causal"] = call.feature.endswith("causal")
    match call.feature:
        case "dropout":
            options["dropout_p"] = 0.1
        case "scales":
            options["scale"] = tensor(heads, call.components, dtype=torch.float32)
        case "mask":
            options["attn_mask"] = tensor(1, 1, length, length, dtype=torch.float32)
        case "packed":
            options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), _packing(length))
            options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), length // 2)
    return options


def calls(args: argparse.Namespace) -> Iterator[Call]:
    choices = (args.operator, args.dtype, args.width, args.components, args.feature)
    defaults: tuple[tuple[Any, ...], ...] = (OPERATORS, tuple(TYPES), WIDTHS, COMPONENTS, FEATURES)
    values = (default if choice is None else (choice,) for choice, default in zip(choices, defaults, strict=True))
    return (Call(*combination) for combination in itertools.product(*values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--arch", default="90", choices=list(map(str, SHARED)), help="compute capability, as in sm_90, or gfx942"
    )
    parser.add_argument("--operator", choices=OPERATORS)
    parser.add_argument("--dtype", choices=list(TYPES))
    parser.add_argument("--width", type=int, choices=WIDTHS)
    parser.add_argument("--components", type=int)
    parser.add_argument("--feature", choices=FEATURES)
    parser.add_argument("--part", default="1/1", help="K/N: only the K-th of N parts")
    args = parser.parse_args()
    arch: Architecture = int(args.arch) if args.arch.isdigit() else args.arch
    part, parts = map(int, args.part.split("/"))
    misfits = []
    for call in list(calls(args))[part - 1 :: parts]:
        for kernel in kernels(call, arch):
            name, reason = f"{call}: {kernel.name}", kernel.misfit(arch)
            print(f"{name}: {kernel.registers} registers, {kernel.local} local, {kernel.shared} shared", flush=True)
            misfits += [f"{name}: {reason}"] if reason else []
    print(*misfits, sep="\n")
    sys.exit(1 if misfits else 0)


if __name__ == "__main__":
    main()
