"""Time the compilation of the kernels of a first training step, without a GPU, in one and in several threads.

    python benchmarks/compile_time.py --threads 1,2,8 --repeats 3

Every measurement is a process with an empty cache that compiles forward and backward of sMGK (bf16, D 64, causal) for
an architecture. The time is that of the CPU's work, without the GPU's. Appends to results/compile_time.csv.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mgk._core.io import append_durably
from mgk._core.validation import fail
from mgk.training import results

COLUMNS = ("arch", "threads", "kernels", "seconds", "cores", "load", "triton", "torch", "date", "commit")
PROGRAM = """
import sys, torch, mgk
query = torch.empty(8, 4, 4096, 64, dtype=torch.bfloat16, device="meta")
shift = torch.empty(4, 2, 64, device="meta")
result = mgk.warmup(
    mgk.smgk_attention, query, query, query, shift, is_causal=True, arch=int(sys.argv[1]), threads=int(sys.argv[2])
)
print(len(result.kernels), result.seconds)
"""


def measure(arch: int, threads: int) -> tuple[int, float]:
    """Return the number of kernels and the seconds of a compilation in a new process with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        command = [sys.executable, "-c", PROGRAM, str(arch), str(threads)]
        output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    kernels, seconds = output.split()
    return int(kernels), float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--threads", default=f"1,{os.cpu_count()}", help="numbers of threads, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/compile_time.csv"))
    args = parser.parse_args()
    environment = {"triton": results.version_of("triton"), **results.environment()}
    header = ",".join(COLUMNS)
    if not args.out.exists() or not args.out.stat().st_size:
        append_durably(args.out, header + "\n")
    elif args.out.read_text(encoding="utf-8", errors="replace").partition("\n")[0] != header:
        fail("--out", f"{args.out} is not a file of this script: its first line must be {header}")
    for _ in range(args.repeats):
        for threads in map(int, args.threads.split(",")):
            load = os.getloadavg()[0]
            kernels, seconds = measure(args.arch, threads)
            row = {"arch": args.arch, "threads": threads, "kernels": kernels, "seconds": f"{seconds:.1f}"}
            row |= {"cores": os.cpu_count() or 1, "load": f"{load:.1f}"}
            row |= {name: environment[name] or "" for name in ("triton", "torch", "date", "commit")}
            print(row, flush=True)
            append_durably(args.out, ",".join(str(row[name]) for name in COLUMNS) + "\n")


if __name__ == "__main__":
    main()
