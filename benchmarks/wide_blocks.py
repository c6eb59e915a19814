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

import compiled
import triton

from mgk.kernels.jit_cache import compile_options
from mgk.kernels.mixture import launch
from mgk.kernels.mixture.block_sizes import select_block, select_measured_block
from mgk.kernels.mixture.block_tables import WIDE
from mgk.kernels.mixture.tile import FALLBACK
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
    for spec, path, kernel in compiled.compile_call(compiled.Call(operator, "bf16", 256, 2, "causal"), arch):
        options = compile_options(spec, path)
        if not spec.kernel.__name__.startswith("mixture") or path == FALLBACK.value:
            continue
        if isinstance(kernel, Exception):
            raise kernel
        registers, local = compiled.resource_usage(kernel.asm["cubin"])
        loop = shortest_loop(kernel.asm["cubin"])
        per_pair = 32 * spec.num_warps / (options["BM"] * options["BN"])
        rows.append({
            "arch": arch, "operator": operator, "kernel": spec.kernel.__name__ + OUTPUTS[options.get("OUTPUTS", 0)],
            "block": " ".join(str(options[name]) for name in ("BM", "BN", "num_warps", "num_stages")),
            "registers": registers, "spill_bytes": local, "shared_bytes": kernel.metadata.shared,
            "instructions_per_pair": round(len(loop) * per_pair, 1),
            "exponentials_per_pair": round(count(loop, EXPONENTIAL) * per_pair, 2),
            "spills_in_loop": count(loop, SPILL),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arch", type=int, nargs="+", default=sorted(WIDE))
    args = parser.parse_args()
    environment = {"triton": results.version_of("triton"), **results.environment()}
    environment = {name: environment[name] for name in ("triton", "torch", "date", "commit")}
    rows = []
    for when, select in (("before", select_measured_block), ("after", select_block)):
        with launch.block_selection(select):
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
