"""Measure the CPU time of plain calls of the Triton kernels, without a GPU.

    python benchmarks/host_time.py               # prints microseconds per call
    python benchmarks/host_time.py --out results/host_time.csv

Operators are called on CPU tensors, as a training loop calls them, and Triton launches the compiled kernels on a driver
that runs nothing (`stub_cuda.py`). So the time is that of validation, selection of the backend, launch configurations,
workspaces, TMA descriptors, Triton's launcher and autograd, without the CUDA driver. Every call is timed by itself; the
result is the minimum, which other processes disturb least.

Before a call is timed, the kernels that it launches by address and the values of their parameters are compared with
those of launches through Triton's tensor descriptors. Addresses are compared by the tensor of the call and the offset
in it; those of workspaces by the order in which they occur first.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

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

B, H, N, D, COMPONENTS = 2, 4, 128, 64, 2
CALLS = ("smgk", "smgk, large call", "smgk, four components, large call", "smgk, prior", "mgk", "mgk, large call")
EXTRA_COLUMNS = ("triton", "python", "system")
PASSES = ("forward, no gradients", "forward", "forward and backward")
DRIVER = "stub CUDA driver"
ADDRESS_BYTES = 8
MIN_ADDRESS = 1 << 32  # smaller parameters of 8 bytes are strides


def make_call(name: str, gradients: bool) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Return a call of an operator, and its tensors."""

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype).requires_grad_(gradients)

    M = 4 if "four components" in name else COMPONENTS
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
        SystemExit: The call is not launched by address, or its launches differ from those through Triton.
    """
    call, tensors = make_call(name, gradients=pass_ != "forward, no gradients")
    with launch.small_call_limit(0 if "large call" in name else launch.SMALL_PAIRS):
        grad = torch.ones_like(call())

        def step() -> list[Tensor]:
            out = call()
            gradients = torch.autograd.grad(out, tensors, grad) if pass_ == "forward and backward" else ()
            return [out, *gradients]

        for _ in range(3):  # compiles the kernels, and stores them in the plan of the call
            step()
        by_address = recorded_launches(step, [*tensors, grad], stub)
        if not by_address.by_address:
            raise SystemExit(f"{name}, {pass_}: the kernels are not launched by address")
        with jit_cache.observed_launches(lambda *_: None):  # no launches by address
            ordinary = recorded_launches(step, [*tensors, grad], stub)
        if by_address.launches != ordinary.launches:
            raise SystemExit(f"{name}, {pass_}: launches by address differ from those of Triton")
        return microseconds(step, repeats)


class Recording(NamedTuple):
    """The launches of a call, with names in place of addresses, and the number of those by address."""

    launches: list[Launch]
    by_address: int


def recorded_launches(step: Callable[[], list[Tensor]], inputs: list[Tensor], stub: StubDriver) -> Recording:
    """Run a call and return its launches."""
    buffers: list[Tensor] = []
    count = 0

    def keeping(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        # A buffer that is freed within the call could have the address of another one.
        def make_and_keep(*args: Any, **kwargs: Any) -> Tensor:
            buffers.append(make(*args, **kwargs))
            return buffers[-1]

        return make_and_keep

    def count_launches(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code is jit_cache.launch_by_address.__code__

    with contextlib.ExitStack() as stack:
        for name in ("new_empty", "new_empty_strided"):
            stack.enter_context(mock.patch.object(Tensor, name, keeping(getattr(Tensor, name))))
        launches = stack.enter_context(stub.recorded())
        stack.callback(sys.setprofile, sys.getprofile())
        sys.setprofile(count_launches)
        outputs = step()
    return Recording(without_addresses(launches, [*inputs, *outputs]), count)


def without_addresses(launches: Sequence[Launch], tensors: Sequence[Tensor]) -> list[Launch]:
    """Replace the addresses of launches by tensor and offset, or by their number in the order of first occurrence."""
    numbers: dict[bytes, int] = {}

    def named(parameter: bytes) -> bytes:
        data = parameter[:ADDRESS_BYTES]
        address = int.from_bytes(data, "little")
        if len(parameter) not in (ADDRESS_BYTES, TENSOR_MAP_BYTES) or address < MIN_ADDRESS:
            return parameter
        for index, tensor in enumerate(tensors):
            offset = address - tensor.data_ptr()
            if 0 <= offset < tensor.untyped_storage().nbytes():
                return f"tensor {index} + {offset}".encode() + parameter[ADDRESS_BYTES:]
        number = numbers.setdefault(data, len(numbers))
        return number.to_bytes(ADDRESS_BYTES, "little") + parameter[ADDRESS_BYTES:]

    return [item._replace(parameters=tuple(map(named, item.parameters))) for item in launches]


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
                    "batch": B, "heads": H, "length": N,
                    "components": 4 if "four components" in name else COMPONENTS, "dtype": "bfloat16", "split": pass_,
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
