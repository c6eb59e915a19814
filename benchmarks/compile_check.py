"""Compile a list of calls for every supported GPU architecture, without a GPU, and check registers, spills and memory.

    python benchmarks/compile_check.py --out results/compiled.csv      # all calls (make compile-check)
    python benchmarks/compile_check.py --sample --arch gfx942          # the calls that CI compiles
    python benchmarks/compile_check.py --out results/compiled.csv --page docs/hardware.md --no-compile

Each architecture is compiled in a process of its own, because a compiler may end it. Exits with 1 if a kernel does not
compile, does not fit the shared memory, or spills more than `spill_limit` bytes per thread.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Maximum bytes of local memory of a kernel, per thread. On Hopper block sizes are chosen by time, and some of them
# spill. Above width 128 all kernels do, after their loops, where a tile and an accumulator of 128 x 256 meet; the main
# loops of these calls have at most 9 spill instructions on sm_90.
SPILL_LIMIT, HOPPER_SPILL_LIMIT, WIDE_SPILL_LIMIT = 320, 768, 1024
ARCHITECTURES = ("80", "86", "89", "90", "100", "120", "gfx942")
# Fields of `compiled.Call`: operator, dtype, head dimension, components, feature.
COMPLETE = (
    ("smgk", "bf16", 64, 2, "causal"),
    ("smgk", "bf16", 128, 2, "causal"),
    ("smgk", "bf16", 256, 2, "causal"),
    ("smgk", "bf16", 32, 2, "one pass, causal"),
    ("mgk", "bf16", 64, 2, "causal"),
    ("mgk", "bf16", 128, 2, "causal"),
    ("mgk", "bf16", 256, 2, "causal"),
    ("smgk", "bf16", 64, 2, "counts"),
    ("smgk", "bf16", 64, 2, "one query"),
    ("smlk", "bf16", 64, 2, "causal"),
)
WIDTHS = sorted({width for _, _, width, _, _ in COMPLETE})
# CI compiles the first path of each kernel of these calls: the general form follows the fast one in registers.
SAMPLE = (("smgk", "bf16", 64, 2, "causal"), ("smgk", "bf16", 64, 2, "one query"))
SAMPLE_MORE = {
    "80": (("mgk", "bf16", 64, 2, "causal"),),
    "100": (("mgk", "bf16", 64, 2, "causal"), ("smgk", "bf16", 64, 4, "plain")),
    "gfx942": (("smgk", "bf16", 64, 2, "counts"),),
}
COLUMNS = (
    "arch", "operator", "dtype", "head_dim", "components", "feature", "kernel", "registers", "spill_bytes",
    "shared_bytes", "failure", "triton", "torch", "date", "commit",
)  # fmt: skip
CALL = COLUMNS[1:6]
# Names of the values of the constexpr PATH that follow a kernel's name.
PATHS = {"0": "general", "1": "fast", "2": "fallback", "3": "both", "4": "prepare", "5": "finish", "6": "running"}

Row = dict[str, Any]


def spill_limit(arch: str, width: int) -> int:
    if width > 128:
        return WIDE_SPILL_LIMIT
    return HOPPER_SPILL_LIMIT if arch == "90" else SPILL_LIMIT


def compile_calls(arch: str, sample: bool, width: int | None = None) -> Iterable[Row]:
    """Yield a row for each kernel of the calls, compiled in this process."""
    import compiled

    target = int(arch) if arch.isdigit() else arch
    calls = (*SAMPLE, *SAMPLE_MORE.get(arch, ())) if sample else COMPLETE
    for call in (compiled.Call(*values) for values in calls):
        if width is not None and call.width != width:
            continue
        for kernel in compiled.kernels(call, target, first_paths=sample):
            reason = kernel.misfit(target)
            limit = spill_limit(arch, call.width)
            if not reason and kernel.local > limit:
                reason = f"{kernel.local} bytes of spills, the limit is {limit}"
            yield {
                "arch": arch, **dict(zip(CALL, call, strict=True)), "kernel": kernel.name,
                "registers": kernel.registers, "spill_bytes": kernel.local, "shared_bytes": kernel.shared,
                "failure": reason,
            }  # fmt: skip


def compile_architecture(arch: str, sample: bool, width: int | None = None) -> list[Row]:
    """Return the rows of an architecture, compiled in another process; the last one has the failure of the process."""
    command = [sys.executable, __file__, "--worker", "--arch", arch, *(["--sample"] if sample else [])]
    command += [] if width is None else ["--width", str(width)]
    process = subprocess.run(command, capture_output=True, text=True)
    rows = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    if process.returncode:
        message = (process.stderr.strip().splitlines() or ["no message"])[-1][:200]
        failure = f"the process ended with code {process.returncode}: {message}"
        rows.append(dict.fromkeys(COLUMNS, "") | {"arch": arch, "failure": failure})
    return rows


def write_rows(path: Path, rows: list[Row], environment: Row, width: int | None = None) -> None:
    """Replace the rows of the compiled architectures in a CSV file, or those of a head dimension."""
    from mgk._core.io import replacing

    compiled = {row["arch"] for row in rows}

    def is_compiled(row: Row) -> bool:
        return row["arch"] in compiled and width in (None, int(row["head_dim"] or 0))

    kept_rows = [row for row in read_rows(path) if not is_compiled(row)] if path.exists() else []
    positions = {tuple(map(str, call)): index for index, call in enumerate(COMPLETE)}

    def position(row: Row) -> tuple[int, int]:
        call = tuple(str(row[name]) for name in CALL)
        return ARCHITECTURES.index(row["arch"]), positions.get(call, len(positions))

    rows = sorted([*kept_rows, *(row | environment for row in rows)], key=position)
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_rows(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def architecture_name(arch: str) -> str:
    return f"sm_{arch}" if arch.isdigit() else arch


def table(rows: list[Row]) -> str:
    """Return the table of registers, spills and shared memory by kernel and architecture.

    Rows without a kernel, of processes that ended early, are listed below it.
    """
    from mgk._core.markdown import markdown_table

    ended_early = [f"{architecture_name(row['arch'])}: {row['failure']}." for row in rows if not row["kernel"]]
    rows = [row for row in rows if row["kernel"]]
    cells: dict[tuple[str, str], dict[str, tuple[int, str]]] = {}
    for row in rows:
        name, _, path = row["kernel"].partition(" ")
        feature = "" if row["feature"] == "causal" else f", {row['feature']}"
        call = f"{row['operator']} D {row['head_dim']}{feature}"
        kernel = f"`{name}`" + (f" {PATHS[path]}" if path else "")
        resources = f"{row['registers']} / {row['spill_bytes']} / {int(row['shared_bytes'] or 0) / 1024:.0f}"
        # A call may launch a kernel twice, for dk and for dv: the table has the one with more spills.
        by_arch = cells.setdefault((call, kernel), {})
        spills = int(row["spill_bytes"])
        if row["arch"] not in by_arch or spills > by_arch[row["arch"]][0]:
            by_arch[row["arch"]] = spills, row["failure"] or resources
    architectures = [arch for arch in ARCHITECTURES if any(row["arch"] == arch for row in rows)]
    lines = [["call", "kernel", *map(architecture_name, architectures)]]
    calls = list(dict.fromkeys(call for call, _ in cells))
    for (call, kernel), by_arch in sorted(cells.items(), key=lambda item: calls.index(item[0][0])):
        lines.append([call, kernel, *(by_arch[arch][1] if arch in by_arch else "–" for arch in architectures)])
    versions = sorted({f"Triton {row['triton']}, commit {row['commit']}, {row['date']}" for row in rows})
    note = f"Registers / bytes of spills per thread / KB of shared memory. Compiled, not run:\n{'; '.join(versions)}."
    return "\n\n".join([note, markdown_table(lines), *ended_early])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=ARCHITECTURES, help="only this architecture")
    parser.add_argument("--width", type=int, choices=WIDTHS, help="only calls of this head dimension")
    parser.add_argument("--sample", action="store_true", help="only the calls and kernels that CI compiles")
    parser.add_argument("--out", type=Path, help="CSV file in which the rows of the architectures are replaced")
    parser.add_argument("--page", type=Path, help="page whose marked table is written from --out")
    parser.add_argument("--no-compile", action="store_true", help="only write the page")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="architectures at the same time")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.page and not args.out:
        parser.error("--page needs --out, the file that the table is made from")
    if args.worker:
        for row in compile_calls(args.arch, args.sample, args.width):
            print(json.dumps(row), flush=True)
        return 0
    from mgk._core.io import write_atomically
    from mgk._core.markdown import fill_marked_parts
    from mgk.training import results

    rows: list[Row] = []
    if not args.no_compile:
        environment = {"triton": results.version_of("triton"), **results.environment()}
        environment = {name: environment[name] for name in ("triton", "torch", "date", "commit")}
        architectures = [args.arch] if args.arch else ARCHITECTURES
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            parts = pool.map(lambda arch: compile_architecture(arch, args.sample, args.width), architectures)
            for arch, part in zip(architectures, parts, strict=True):
                rows += part
                failures = [row for row in part if row["failure"]]
                print(f"{architecture_name(arch)}: {len(part)} kernels, {len(failures)} failures", flush=True)
                for row in failures:
                    print("  " + " ".join(str(row[name]) for name in (*CALL, "kernel", "failure")), flush=True)
        if args.out:
            write_rows(args.out, rows, environment, args.width)
    if args.page:
        page = args.page.read_text(encoding="utf-8")
        write_atomically(args.page, fill_marked_parts(page, {"compiled": table(read_rows(args.out))}, keep_others=True))
    return int(any(row["failure"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
