"""One kernel of the fused passes over block sizes: how the tables of mgk/kernels/triton_launch.py are found.

    python benchmarks/blocks.py --variant mgk-hard --shape 8,4,4096,64 --causal --kernel queries 64,64,4,2,0,1 ...

A block is rows, keys, warps, stages, registers a thread (0: the compiler's choice) and whether left operands stay in
registers. Medians in bf16 with M = 2, with what the compiler needed; appended to results/blocks.csv.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgk.kernels import triton_launch
from mgk.results import environment

# By name on the command line: the kernel, and the rows of the tables that are replaced.
KERNELS = {
    "forward": ("mixture_forward", ("forward",)),
    "queries": ("gradient_queries", ("queries", "hard queries")),
    "keys": ("gradient_keys", ("keys", "values")),
}
FIELDS = "date commit gpu torch triton variant B heads N D causal kernel part block ms registers spills".split()
Launch = tuple[Any, Any, tuple[Any, ...], dict[str, Any], int, dict[str, int]]


def draw(variant: str, B: int, H: int, N: int, D: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """query, keys, value, shift and log prior."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda")

    shifted, hard = variant.startswith("smgk"), variant.endswith("hard")
    keys = randn(B, H, N, D) if shifted else randn(B, H, 2, N, D)
    shift = 0.5 * randn(H, 2, D) if shifted else None
    prior = None if hard else randn(1, H, 2, 1).log_softmax(2)
    return randn(B, H, N, D).bfloat16(), keys.bfloat16(), randn(B, H, N, D).bfloat16(), shift, prior


def launches(variant: str, shape: list[int], causal: bool, kernel: str, block: tuple[Any, ...]) -> list[Launch]:
    """The first path's launches of a kernel with this block; everything before them has run."""
    name, kinds = KERNELS[kernel]
    table, launch = triton_launch.blocks, triton_launch.launch
    found: list[Launch] = []

    def note(
        of: Any, grid: Any, tensors: Any, floats: Any, numbers: Any, free: Any, switches: Any, paths: Any,
        warps: int, stages: int, registers: int | None = None,
    ) -> None:  # fmt: skip
        if of.__name__ != name:
            return launch(of, grid, tensors, floats, numbers, free, switches, paths, warps, stages, registers)
        options = {"num_warps": warps, "num_stages": stages} | ({} if registers is None else {"maxnreg": registers})
        found.append((of, grid, (*tensors, *floats, *numbers, *free), dict(switches), paths[0], options))
        return launch(of, grid, tensors, floats, numbers, free, switches, paths, warps, stages, registers)

    B, H, N, D = shape
    query, keys, value, shift, prior = draw(variant, B, H, N, D)
    hard, scale = variant.endswith("hard"), D**-0.5
    try:
        triton_launch.blocks = lambda kind, *rest: block if kind in kinds else table(kind, *rest)  # type: ignore[assignment]
        triton_launch.launch = note  # type: ignore[assignment]
        nothing = (None,) * 6
        out, lse, prepared, stats = triton_launch.launch_forward(
            query, keys, value, shift, prior, *nothing, scale, 1.0, 0.0, 0.0, int(causal), hard, N, N
        )
        triton_launch.launch_backward(
            torch.randn_like(out), None, out, lse, prepared, stats, query, keys, value, shift, *nothing, scale, 1.0,
            0.0, int(causal), hard, N, N, False,
        )  # fmt: skip
    finally:
        triton_launch.blocks, triton_launch.launch = table, launch
    return found


def median_ms(run: Callable[[], object], repeats: int = 7) -> float:
    for _ in range(3):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="smgk", choices=["smgk", "smgk-hard", "mgk", "mgk-hard"])
    parser.add_argument("--shape", default="8,4,4096,64", help="B, heads, N, D")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--kernel", default="queries", choices=list(KERNELS))
    parser.add_argument("--csv", type=Path, default=Path("results/blocks.csv"))
    parser.add_argument("blocks", nargs="+")
    args = parser.parse_args()
    import triton

    shape = [int(n) for n in args.shape.split(",")]
    common = environment() | {"triton": triton.__version__, "variant": args.variant, "kernel": args.kernel}
    common |= dict(zip(("B", "heads", "N", "D"), map(str, shape), strict=True)) | {"causal": str(args.causal)}
    new = not args.csv.exists()
    with args.csv.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        for text in args.blocks:
            rows, cols, warps, stages, registers, resident = map(int, text.split(","))
            block = (rows, cols, warps, stages, registers or None, resident)
            for kernel, grid, arguments, switches, path, options in launches(
                args.variant, shape, args.causal, args.kernel, block
            ):

                def run(k: Any = kernel, g: Any = grid, a: Any = arguments, s: Any = switches, p: Any = path,
                        o: Any = options) -> Any:  # fmt: skip
                    return k[g](*a, **s, PATH=p, **o)

                compiled, ms = run(), median_ms(run)
                part = switches.get("WANTED", 0)
                writer.writerow(
                    common
                    | {"part": part, "block": text, "ms": round(ms, 4), "registers": compiled.n_regs}
                    | {"spills": compiled.n_spills}
                )
                print(f"{args.variant} {args.kernel} {text} part {part}: {ms:.3f} ms, {compiled.n_regs} registers")


if __name__ == "__main__":
    main()
