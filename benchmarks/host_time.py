"""Measure the CPU time of plain calls of the Triton kernels, without a GPU.

    python benchmarks/host_time.py               # prints microseconds per call
    python benchmarks/host_time.py --out results/host_time.csv

Operators are called on CPU tensors, as a training loop calls them. Kernels are neither compiled nor run: Triton's
compiler and driver are replaced by functions that do nothing, so the time is that of validation, selection of the
backend, launch configurations, workspaces, packing of arguments and autograd. Every call is timed by itself; the result
is the minimum, which other processes disturb least.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

import mgk
from mgk.kernels import jit_cache
from mgk.kernels.linear import ops  # noqa: F401  (before TRITON_INTERPRET is set: Triton reads it on import)
from mgk.kernels.mixture import launch
from mgk.training import results

B, H, N, D, M = 2, 4, 128, 64, 2
CALLS = ("smgk", "smgk, large call", "smgk, prior", "mgk")
EXTRA_COLUMNS = ("triton", "python", "system")
PASSES = ("forward, no gradients", "forward", "forward and backward")


class Compiled:
    """A compiled kernel whose launch does nothing."""

    function, packed_metadata = 0, ()

    @staticmethod
    def run(*_: Any) -> None:
        pass


@contextlib.contextmanager
def stub_driver(tma: bool = False) -> Iterator[None]:
    """Replace Triton's compiler and driver. tma: treat the tensors as those of a GPU with TMA."""
    driver = SimpleNamespace(get_current_stream=lambda device: 0)
    with (
        mock.patch.object(JITFunction, "run", return_value=Compiled()),
        mock.patch.object(triton.runtime.driver, "_active", driver),
        mock.patch.object(jit_cache, "_compiled", {}),
        mock.patch.object(launch, "supports_tma", (lambda *_: True) if tma else launch.supports_tma),
        mock.patch.dict(os.environ, TRITON_INTERPRET="1"),  # allows CPU tensors
    ):
        yield


def make_call(name: str, gradients: bool) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Return a call of an operator, and its tensors."""

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype).requires_grad_(gradients)

    query, value, shift = tensor(B, H, N, D), tensor(B, H, N, D), tensor(H, M, D, dtype=torch.float32)
    key = tensor(B, H, M, N, D) if name == "mgk" else tensor(B, H, N, D)
    if name == "mgk":
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


def measure(name: str, pass_: str, repeats: int) -> float:
    """Return the microseconds of one call."""
    call, tensors = make_call(name, gradients=pass_ != "forward, no gradients")
    large = name == "smgk, large call"
    with stub_driver(tma=large), launch.small_call_limit(0 if large else launch.SMALL_PAIRS):
        grad = torch.ones_like(call())

        def step() -> None:
            out = call()
            if pass_ == "forward and backward":
                torch.autograd.grad(out, tensors, grad)

        return microseconds(step, repeats)


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
    for name in args.calls:
        row = {pass_: measure(name, pass_, args.repeats) for pass_ in PASSES}
        print(f"{name:20s}", *(f"{pass_}: {value:6.1f} µs" for pass_, value in row.items()), sep="   ", flush=True)
        for pass_, value in row.items():
            records.append(
                {
                    "recipe": "host-time", "task": name, "backend": "triton",
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
