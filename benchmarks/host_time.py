"""Measure the CPU time of plain calls of the Triton kernels, without a GPU.

    python benchmarks/host_time.py               # prints microseconds per call
    python benchmarks/host_time.py --out results/host_time.csv

Operators are called on CPU tensors, as a training loop calls them, and Triton launches the compiled kernels on a driver
that runs nothing (`stub_cuda.py`). So the time is that of validation, selection of the backend, launch configurations,
workspaces, TMA descriptors, Triton's launcher and autograd, without the CUDA driver. Every call is timed by itself; the
result is the minimum, which other processes disturb least.

Before a call is timed, the kernels that it launches and the values of their parameters are compared with those of
launches through Triton's tensor descriptors. Addresses are compared by the order in which they occur first.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

import mgk
from mgk.kernels import jit_cache
from mgk.kernels.linear import ops  # noqa: F401  (before TRITON_INTERPRET is set: Triton reads it on import)
from mgk.kernels.mixture import launch
from mgk.training import results

sys.path.insert(0, str(Path(__file__).parent))
from stub_cuda import TENSOR_MAP_BYTES, Launch, StubDriver, stub_cuda

B, H, N, D, M = 2, 4, 128, 64, 2
CALLS = ("smgk", "smgk, large call", "smgk, prior", "mgk", "mgk, large call")
EXTRA_COLUMNS = ("triton", "python", "system")
PASSES = ("forward, no gradients", "forward", "forward and backward")
DRIVER = "stub CUDA driver"
ADDRESS_BYTES = 8
MIN_ADDRESS = 1 << 32  # smaller parameters of 8 bytes are strides


def make_call(name: str, gradients: bool) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Return a call of an operator, and its tensors."""

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype).requires_grad_(gradients)

    query, value, shift = tensor(B, H, N, D), tensor(B, H, N, D), tensor(H, M, D, dtype=torch.float32)
    key = tensor(B, H, M, N, D) if name.startswith("mgk") else tensor(B, H, N, D)
    if name.startswith("mgk"):
        return lambda: mgk.mgk_attention(query, key, value, is_causal=True), [query, key, value]
    tensors = [query, key, value, shift]
    prior = tensor(H, M, 1, dtype=torch.float32) if name == "smgk, prior" else None
    tensors += [] if prior is None else [prior]
    return (
        lambda: mgk.smgk_attention(query, key, value, shift, log_prior=prior, is_causal=True),
        tensors,
    )


def microseconds(step: Callable[[], Any], repeats: int) -> float:
    """Return the minimal time of a step."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        step()
        times.append(time.perf_counter_ns() - start)
    return min(times[repeats // 10 :]) / 1000


def measure(name: str, pass_: str, repeats: int, stub: StubDriver) -> float:
    """Return the microseconds of one call.

    Raises:
        SystemExit: The launches differ from those through Triton's tensor descriptors.
    """
    call, tensors = make_call(name, gradients=pass_ != "forward, no gradients")
    with launch.small_call_limit(0 if "large call" in name else launch.SMALL_PAIRS):
        grad = torch.ones_like(call())

        def step() -> None:
            out = call()
            if pass_ == "forward and backward":
                torch.autograd.grad(out, tensors, grad)

        for _ in range(3):  # compiles the kernels, and stores them in the plan of the call
            step()
        with stub.recorded() as by_address:
            step()
        with jit_cache.observed_launches(lambda *_: None), stub.recorded() as ordinary:  # no launches by address
            step()
        if without_addresses(by_address) != without_addresses(ordinary):
            raise SystemExit(f"{name}, {pass_}: launches by address differ from those of Triton")
        return microseconds(step, repeats)


def without_addresses(launches: Sequence[Launch]) -> list[Launch]:
    """Replace the addresses of launches by their numbers in the order of their first occurrence."""
    numbers: dict[bytes, int] = {}

    def numbered(parameter: bytes) -> bytes:
        address = parameter[:ADDRESS_BYTES]
        is_address = len(parameter) in (ADDRESS_BYTES, TENSOR_MAP_BYTES)
        if not is_address or int.from_bytes(address, "little") < MIN_ADDRESS:
            return parameter
        number = numbers.setdefault(address, len(numbers))
        return number.to_bytes(ADDRESS_BYTES, "little") + parameter[ADDRESS_BYTES:]

    return [item._replace(parameters=tuple(map(numbered, item.parameters))) for item in launches]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=CALLS)
    parser.add_argument("--repeats", type=int, default=3000)
    parser.add_argument("--out", type=Path, help="the CSV file to append to, such as results/host_time.csv")
    args = parser.parse_args()
    if args.out is not None:
        results.check_file("--out", args.out, EXTRA_COLUMNS)
    torch.set_num_threads(1)
    records = []
    measured = {}
    with stub_cuda() as stub:
        for name in args.calls:
            row = measured[name] = {pass_: measure(name, pass_, args.repeats, stub) for pass_ in PASSES}
            print(f"{name:20s}", *(f"{pass_}: {value:6.1f} µs" for pass_, value in row.items()), sep="   ", flush=True)
    for name, row in measured.items():
        for pass_, value in row.items():
            records.append(
                {
                    "recipe": "host-time", "task": name, "dataset": DRIVER, "backend": "triton",
                    "batch": B, "heads": H, "length": N, "components": M, "dtype": "bfloat16", "split": pass_,
                    "metric": "host_us", "value": f"{value:.1f}", "n_examples": args.repeats,
                    "command": shlex.join(["python", *sys.argv]), **results.environment(),
                    "triton": triton.__version__, "python": platform.python_version(), "system": platform.platform(),
                }
            )  # fmt: skip
    if args.out is not None:
        results.append(args.out, records, EXTRA_COLUMNS)
        print(f"{len(records)} rows appended to {args.out}")


if __name__ == "__main__":
    main()
