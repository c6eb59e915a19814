"""Compare the blocks of width 256 with those that they replaced, compiled without a GPU.

    python benchmarks/wide_blocks.py --out results/wide_blocks.csv

Writes registers, bytes of spills, shared memory, and instructions, exponentials and spill instructions of the shortest
loop with matrix products, for bf16 and two components. "before" has the blocks without `block_tables.WIDE` and the
current code of the kernels.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import compiled
import triton
from triton.runtime.jit import JITFunction

from mgk.kernels import jit_cache
from mgk.kernels.mixture import block_sizes, launch
from mgk.kernels.mixture.block_tables import WIDE
from mgk.kernels.mixture.tile import FALLBACK
from mgk.kernels.offline import compiling_for
from mgk.training import results

OUTPUTS = {0: "", 1: " (dk)", 2: " (dv)"}
PRODUCT, EXPONENTIAL, SPILL = r"HGMMA|HMMA|UTC\w*MMA", r"MUFU\.EX2", r"\bLDL|\bSTL"


def shortest_loop(cubin: bytes) -> list[str]:
    """Return the instructions of the shortest loop with matrix products."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=True).stdout
    code: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(instruction[1])
            target = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction[1])
            if target and target[1] in labels:
                loops.append(code[labels[target[1]] :])
    return min((loop for loop in loops if count(loop, PRODUCT)), key=len, default=[])


def count(code: list[str], pattern: str) -> int:
    return sum(bool(re.search(pattern, instruction)) for instruction in code)


def measure(operator: str, arch: int) -> list[dict[str, Any]]:
    """Compile the kernels of a causal call and return a row for each."""
    rows: list[dict[str, Any]] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if not kernel.__name__.startswith("mixture") or kwargs["PATH"] == FALLBACK.value:
            return
        binary = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        registers, local = compiled._usage(binary.asm["cubin"])
        loop = shortest_loop(binary.asm["cubin"])
        per_pair = 32 * kwargs["num_warps"] / (kwargs["BM"] * kwargs["BN"])
        rows.append({
            "arch": arch, "operator": operator, "kernel": kernel.__name__ + OUTPUTS[kwargs.get("OUTPUTS", 0)],
            "block": " ".join(str(kwargs[name]) for name in ("BM", "BN", "num_warps", "num_stages")),
            "registers": registers, "spill_bytes": local, "shared_bytes": binary.metadata.shared,
            "instructions_per_pair": round(len(loop) * per_pair, 1),
            "exponentials_per_pair": round(count(loop, EXPONENTIAL) * per_pair, 2),
            "spills_in_loop": count(loop, SPILL),
        })  # fmt: skip

    launcher = mock.patch.multiple(jit_cache, lookup=lambda *_: None, compile_kernels=lambda *_: [], _compiled={})
    with launcher, launch.small_call_limit(0), compiling_for(arch), mock.patch.object(JITFunction, "run", compile_only):
        compiled._attend(compiled.Call(operator, "bf16", 256, 2, "causal"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arch", type=int, nargs="+", default=sorted(WIDE))
    args = parser.parse_args()
    environment = {"triton": results.version_of("triton"), **results.environment()}
    environment = {name: environment[name] for name in ("triton", "torch", "date", "commit")}
    rows = []
    for when, tables in (("before", {}), ("after", WIDE)):
        # A new function: configurations are cached by it.
        select = lambda *at: block_sizes.select_block.__wrapped__(*at)  # noqa: E731
        with mock.patch.object(block_sizes, "WIDE", tables), mock.patch.object(launch, "select_block", select):
            for arch in args.arch:
                for operator in ("smgk", "smgk-hard", "mgk", "mgk-hard"):
                    rows += [{"blocks": when} | row | environment for row in measure(operator, arch)]
                    print(when, arch, operator, flush=True)
    with args.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
