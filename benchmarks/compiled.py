"""What the fused kernels need on a GPU that is not here: calls of the operators compile for it, and launch nothing.

    python benchmarks/compiled.py --arch 90 --operator smgk --dtype bf16 --width 64
    python benchmarks/compiled.py --arch 86 --part 1/2

Without options: all operators, types, widths, components and features (hours). Prints registers, bytes of local memory
(spills) and shared memory of each kernel; at the end, those that do not compile or do not fit.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import mgk
from mgk.kernels import jit_cache
from mgk.kernels.linear import ops  # noqa: F401  (before TRITON_INTERPRET is set: Triton reads it on import)
from mgk.kernels.mixture import launch

# Bytes of shared memory that one program may have, by compute capability.
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
FIRST_WITH_TMA = 90
OPERATORS = ("smgk", "smgk-hard", "mgk", "mgk-hard", "smlk", "mlk")
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WIDTHS = (16, 32, 64, 128, 256)
COMPONENTS = (1, 2, 4, 8)
FEATURES = ("plain", "causal", "mask", "dropout", "scales", "packed", "small", "one query", "shared keys")
LONG, SHORT = 2048, 64  # SHORT: of calls that count as small


class Call(NamedTuple):
    operator: str
    dtype: str
    width: int
    components: int
    feature: str

    def __str__(self) -> str:
        return f"{self.operator} {self.dtype} D {self.width} M {self.components} {self.feature}"


class Kernel(NamedTuple):
    """A compiled kernel, or why there is none."""

    name: str
    registers: int = 0
    local: int = 0  # bytes a thread
    shared: int = 0
    failure: str = ""

    def misfit(self, arch: int) -> str:
        if self.failure or self.shared <= SHARED[arch]:
            return self.failure
        return f"{self.shared} bytes of shared memory, there are {SHARED[arch]}"


class Absent:
    """As much of a Triton driver as a compiler asks for. The number of its device is the target's, since kernels keep
    what they have compiled by that."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def kernels(call: Call, arch: int) -> list[Kernel]:
    """All that a call launches, forward and backward."""
    seen: list[Kernel] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        name = f"{kernel.__name__} {kwargs.get('PATH', '')}".strip()
        try:
            compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
            seen.append(Kernel(name, *_usage(compiled.asm["cubin"]), compiled.metadata.shared))
        except Exception as problem:  # the compiler's; the others are still to be seen
            seen.append(Kernel(name, failure=str(problem).strip().splitlines()[-1][:150]))

    launcher = mock.patch.multiple(jit_cache, lookup=lambda *_: None, _compiled={})
    tma = mock.patch.object(launch, "supports_tma", return_value=arch >= FIRST_WITH_TMA)
    limit = launch.small_call_limit(1 << 20 if call.feature == "small" else 0)
    with (
        launcher, tma, limit, mock.patch.object(triton.runtime.driver, "_active", Absent(arch)),
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.dict(os.environ, TRITON_INTERPRET="1"),  # what lets tensors of the processor in
    ):  # fmt: skip
        _attend(call)
    return seen


def _usage(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def _attend(call: Call) -> None:
    """The operator called as a user would, with gradients; all numbers are whatever the memory holds."""
    family, _, hard = call.operator.partition("-")
    D, M, B, H, N = call.width, call.components, 2, 2, SHORT if call.feature == "small" else LONG
    decoding, packed = call.feature in ("one query", "shared keys"), call.feature == "packed"

    def tensor(*shape: int, dtype: torch.dtype = TYPES[call.dtype]) -> Tensor:
        return torch.empty(shape, dtype=dtype).requires_grad_(not decoding)

    B = 1 if packed else B
    keys = (tensor(B, H, N, D),) if family.startswith("s") else (tensor(B, H, M, N, D),)
    shift = (tensor(H, M, D, dtype=torch.float32),) if family.startswith("s") else ()
    options: dict[str, Any] = {"backend": "triton"}
    starts = torch.tensor([0, N // 2, N], dtype=torch.int32)
    linear = family.endswith("mlk")
    if not hard:
        options["log_prior"] = tensor(1, H, M, 1, dtype=torch.float32)
    if linear:
        options |= {"is_causal": call.feature in ("causal", "packed")} | ({"cu_seqlens": starts} if packed else {})
    else:
        options |= {"assignment": "hard" if hard else "soft", "is_causal": call.feature == "causal"}
        options |= {"dropout_p": 0.1} if call.feature == "dropout" else {}
        options |= {"scale": tensor(H, M, dtype=torch.float32)} if call.feature == "scales" else {}
        options |= {"attn_mask": tensor(1, 1, N, N, dtype=torch.float32)} if call.feature == "mask" else {}
        if packed:
            options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), starts)
            options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), N // 2)
    operator = getattr(mgk, f"{family}_attention")
    sharing = 2 if call.feature == "shared keys" else 1
    query = tensor(B, sharing * H, 1 if decoding and not linear else N, D)
    out = operator(query, *keys, tensor(B, H, N, D), *shift, **options)
    if not decoding:
        out.sum().backward()


def calls(args: argparse.Namespace) -> Iterator[Call]:
    choices = (args.operator, args.dtype, args.width, args.components, args.feature)
    every: tuple[tuple[Any, ...], ...] = (OPERATORS, tuple(TYPES), WIDTHS, COMPONENTS, FEATURES)
    kinds = (several if one is None else (one,) for one, several in zip(choices, every, strict=True))
    return (Call(*kind) for kind in itertools.product(*kinds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90, choices=list(SHARED), help="compute capability, as in sm_90")
    parser.add_argument("--operator", choices=OPERATORS)
    parser.add_argument("--dtype", choices=list(TYPES))
    parser.add_argument("--width", type=int, choices=WIDTHS)
    parser.add_argument("--components", type=int)
    parser.add_argument("--feature", choices=FEATURES)
    parser.add_argument("--part", default="1/1", help="K/N: only the K-th of N parts")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    misfits = []
    for call in list(calls(args))[part - 1 :: parts]:
        for kernel in kernels(call, args.arch):
            name, wrong = f"{call}: {kernel.name}", kernel.misfit(args.arch)
            print(f"{name}: {kernel.registers} registers, {kernel.local} local, {kernel.shared} shared", flush=True)
            misfits += [f"{name}: {wrong}"] if wrong else []
    print(*misfits, sep="\n")
    sys.exit(1 if misfits else 0)


if __name__ == "__main__":
    main()
