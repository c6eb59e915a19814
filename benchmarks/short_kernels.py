"""Time the kernels of short sequences (MGK_SHORT_KERNELS) against the ordinary ones, on a GPU.

    python benchmarks/short_kernels.py
    python benchmarks/short_kernels.py --variants smgk --shapes 16x16x1024x64xcausal --out results/short_kernels.csv

For each shape BxHxNxD, the operators have H/2 heads and two components. Outputs and gradients of both are compared
first. Prints the device time (CUDA graph replay) and the time of plain calls of both, and their ratio: below 1, the
kernels of short sequences are faster. The best SDPA with H heads is the reference of the targets.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from pathlib import Path

import torch

from mgk.bench.implementations import Implementation, Shape, make_case
from mgk.bench.timing import PASSES, Timing, measure_time
from mgk.kernels.mixture.short_calls import short_kernels
from mgk.training import results

SHAPES = (
    "16x16x1024x64xcausal", "64x12x512x64", "128x8x512x64xcausal", "8x16x2048x128xcausal", "64x12x128x64",
    "96x8x256x16xcausal", "32x8x2048x32",
)  # fmt: skip
MAX_DIFFERENCE = 0.03  # maximum relative difference between the results in bf16


def outputs_and_gradients(implementation: Implementation, shape: Shape, enabled: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    case = make_case(implementation, shape, "cuda", torch.bfloat16)
    with short_kernels(enabled):
        out = case.forward()
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), case.inputs)]


def largest_difference(implementation: Implementation, shape: Shape) -> float:
    """Return the largest relative difference between the results of both kernels."""
    pairs = zip(*(outputs_and_gradients(implementation, shape, enabled) for enabled in (False, True)), strict=True)
    return max(((a.float() - b.float()).norm() / a.float().norm()).item() for a, b in pairs)


def time_both(implementation: Implementation, shape: Shape) -> dict[bool, dict[str, Timing]]:
    timings = {}
    for enabled in (False, True):
        with short_kernels(enabled):
            timings[enabled] = measure_time(make_case(implementation, shape, "cuda", torch.bfloat16), "cuda")
    return timings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=("smgk", "mgk"), default=("smgk", "mgk"))
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--out", type=Path, help="the CSV file to append to, such as results/short_kernels.csv")
    args = parser.parse_args()
    if args.out is not None:
        results.check_file("--out", args.out)
    if not torch.cuda.is_available():
        sys.exit("benchmarks/short_kernels.py requires a GPU")
    for variant in args.variants:
        ratios: dict[str, list[float]] = {name: [] for name in PASSES}
        for shape in map(Shape.parse, args.shapes):
            heads = shape.heads // 2
            implementation = Implementation(variant, "triton", heads, heads, 2)
            difference = largest_difference(implementation, shape)
            if difference > MAX_DIFFERENCE:
                sys.exit(f"{variant} {shape}: the results differ by {difference:.3f}")
            timings, rows = time_both(implementation, shape), []
            for name in PASSES:
                ordinary, short = timings[False][name], timings[True][name]
                ratios[name].append(short.device_ms / ordinary.device_ms)
                print(
                    f"{variant} {shape} {name}: device {short.device_ms:.4f} / {ordinary.device_ms:.4f} ms ="
                    f" {ratios[name][-1]:.2f}, plain calls {short.eager_ms / ordinary.eager_ms:.2f}", flush=True,
                )  # fmt: skip
                for backend, timing in (("triton", ordinary), ("triton-short", short)):
                    rows.append(
                        {
                            "recipe": "short-kernels", "task": str(shape), "variant": variant, "backend": backend,
                            "split": name, "components": 2, "heads": heads, "kv_heads": heads, "batch": shape.batch,
                            "length": shape.length, "dtype": "bf16", "metric": "device_ms",
                            "value": f"{timing.device_ms:.5f}", "step_ms": f"{timing.eager_ms:.5f}",
                            "command": shlex.join(["python", *sys.argv]), **results.environment(),
                        }
                    )  # fmt: skip
            if args.out is not None:
                results.append(args.out, rows)
        for name, values in ratios.items():
            mean = math.exp(sum(map(math.log, values)) / len(values))
            print(f"{variant} {name}: geometric mean {mean:.2f} of the ordinary kernels' device time")


if __name__ == "__main__":
    main()
