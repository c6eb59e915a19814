"""Run the kernels under the tools of compute-sanitizer, on a GPU.

    python benchmarks/sanitize.py                               # prints one line per tool
    python benchmarks/sanitize.py --out results/sanitizer.csv

Each tool checks one process that runs all of `CALLS`, forward and backward: memcheck finds accesses out of bounds,
racecheck hazards in shared memory, and synccheck invalid barriers. The calls are small, because the tools slow kernels
down by one to two orders of magnitude. The result is the number of errors and hazards that the tool reports.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

import mgk
from mgk.training import results

TOOLS = ("memcheck", "racecheck", "synccheck")
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+)|RACECHECK SUMMARY: (\d+)")
COMPLETED = "all calls completed"
SHOWN = 30  # printed lines of a tool that reports errors


class Call(NamedTuple):
    """A call of an operator: heads, shape and options."""

    variant: str = "smgk"
    length: int = 200
    width: int = 64
    dtype: torch.dtype = torch.bfloat16
    components: int = 2
    heads: int = 2
    key_heads: int = 2
    options: Mapping[str, Any] = MappingProxyType({})

    def run(self) -> None:
        """Run forward and backward with random inputs."""
        B, N, D, M, Hk = 1, self.length, self.width, self.components, self.key_heads

        def tensor(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.randn(shape, dtype=dtype, device="cuda").requires_grad_()

        query, value = tensor(B, self.heads, N, D), tensor(B, Hk, N, D)
        if self.variant == "mgk":
            tensors = [query, tensor(B, Hk, M, N, D), value]
            out = mgk.mgk_attention(*tensors, backend="triton", **self.options)
        else:
            tensors = [query, tensor(B, Hk, N, D), value, tensor(Hk, M, D, dtype=torch.float32)]
            out = mgk.smgk_attention(*tensors, backend="triton", **self.options)
        torch.autograd.grad(out, tensors, torch.randn_like(out))
        torch.cuda.synchronize()


CAUSAL = {"is_causal": True}
CALLS = (
    Call(),
    Call(options=CAUSAL),
    Call(width=32, options=CAUSAL),
    Call(width=128, options=CAUSAL),
    Call(width=256, length=130, options=CAUSAL),
    Call(width=80, length=130),
    Call(dtype=torch.float16, options=CAUSAL),
    Call(dtype=torch.float32, length=130, options=CAUSAL),
    Call(components=4, length=130, options=CAUSAL),
    Call(heads=4, key_heads=2, length=130, options=CAUSAL),
    Call("mgk", options=CAUSAL),
    Call("mgk", width=128, length=130),
    Call("mgk", width=256, length=130, options=CAUSAL),
    Call("mgk", length=130, options={"assignment": "hard"}),
    Call(length=130, options={"dropout_p": 0.1}),
)


def check(tool: str) -> dict[str, Any]:
    """Run all calls under a tool and return its result row.

    Raises:
        SystemExit: The calls did not complete, or the tool printed no summary.
    """
    # Freed blocks are returned, so that accesses to freed memory are found too.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = ["compute-sanitizer", "--tool", tool, sys.executable, __file__, "--calls"]
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    found = [int(first or second) for first, second in SUMMARY.findall(done.stdout)]
    if COMPLETED not in done.stdout or not found:
        raise SystemExit(f"{tool} did not complete:\n{done.stdout[-4000:]}")
    if sum(found):
        print("\n".join(done.stdout.splitlines()[:SHOWN]))
    return {
        "recipe": "sanitizer",
        "backend": "triton",
        "n_examples": len(CALLS),
        "metric": f"{tool}, errors",
        "value": sum(found),
        **results.environment(),
        "command": shlex.join(["python", "benchmarks/sanitize.py", *sys.argv[1:]]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    parser.add_argument("--tools", default=",".join(TOOLS), help="tools, separated by commas (default: %(default)s)")
    parser.add_argument("--calls", action="store_true", help="run the calls without a tool")
    arguments = parser.parse_args()
    if arguments.calls:
        for call in CALLS:
            call.run()
        print(COMPLETED)
        return
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH: install the CUDA toolkit")
    for tool in arguments.tools.split(","):
        row = check(tool)
        print(f"{tool}: {row['n_examples']} calls, {row['value']} errors")
        if arguments.out is not None:
            results.append(arguments.out, [row])


if __name__ == "__main__":
    main()
