"""Check and time the experimental kernels against the ordinary ones, on a GPU.

    python benchmarks/experimental_kernels.py --out results/experimental_kernels.csv
    python benchmarks/experimental_kernels.py --kernels one-pass --shapes 32x8x2048x32 32x8x4096x32

MGK_ONE_PASS_BACKWARD=1 enables the kernels "one-pass" for users.

For each shape BxHxNxD, the operators have H/2 heads and two components. Outputs and gradients are first compared with
the equations in fp64 and with the ordinary kernels. Prints the device time (CUDA graph replay) and the time of plain
calls of both, and their ratio: below 1, the experimental kernels are faster. The best SDPA with H heads is the
reference of the targets.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from mgk.bench.implementations import Implementation, Shape, find_errors, make_case
from mgk.bench.timing import PASSES, Timing, measure_time
from mgk.kernels.mixture import experimental
from mgk.training import results


class Kernels(NamedTuple):
    """Experimental kernels, and the variants and shapes that they are for."""

    switch: experimental.Switch
    variants: tuple[str, ...]
    shapes: tuple[str, ...]


KERNELS = {
    "one-pass": Kernels(
        experimental.one_pass_backward, ("smgk",),
        ("32x8x2048x32", "32x8x4096x32", "32x8x2048x32xcausal", "32x8x4096x32xcausal"),
    ),
}  # fmt: skip
MAX_DIFFERENCE = 0.03  # maximum relative difference between the results in bf16


def outputs_and_gradients(
    kernels: Kernels, implementation: Implementation, shape: Shape, enabled: bool
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    case = make_case(implementation, shape, "cuda", torch.bfloat16)
    with kernels.switch(enabled):
        out = case.forward()
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), case.inputs)]


def largest_difference(kernels: Kernels, implementation: Implementation, shape: Shape) -> float:
    """Return the largest relative difference between the results of both kernels."""
    both = (outputs_and_gradients(kernels, implementation, shape, enabled) for enabled in (False, True))
    return max(((a.float() - b.float()).norm() / a.float().norm()).item() for a, b in zip(*both, strict=True))


def check(kernels: Kernels, implementation: Implementation, shape: Shape) -> None:
    """Exit if results of the experimental kernels are wrong."""
    with kernels.switch():
        errors = find_errors(implementation, shape, "cuda", torch.bfloat16)
    if errors:
        sys.exit("\n".join(errors))
    difference = largest_difference(kernels, implementation, shape)
    if not difference <= MAX_DIFFERENCE:
        sys.exit(f"{implementation.variant} {shape}: the results differ by {difference:.3f}")


def time_both(kernels: Kernels, implementation: Implementation, shape: Shape) -> dict[bool, dict[str, Timing]]:
    timings = {}
    for enabled in (False, True):
        with kernels.switch(enabled):
            timings[enabled] = measure_time(make_case(implementation, shape, "cuda", torch.bfloat16), "cuda")
    return timings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=list(KERNELS), default=list(KERNELS))
    parser.add_argument("--shapes", nargs="+", help="BxHxNxD or BxHxNxDxcausal; default: those the kernels are for")
    parser.add_argument("--out", type=Path, help="the CSV file to append to, such as results/experimental_kernels.csv")
    args = parser.parse_args()
    if args.out is not None:
        results.check_file("--out", args.out)
    if not torch.cuda.is_available():
        sys.exit("benchmarks/experimental_kernels.py requires a GPU")
    for kernel in args.kernels:
        for variant in KERNELS[kernel].variants:
            compare(kernel, variant, args.shapes or KERNELS[kernel].shapes, args.out)


def compare(kernel: str, variant: str, shapes: Iterable[str], out: Path | None) -> None:
    """Check and time the kernels of a variant at all shapes."""
    kernels, ratios = KERNELS[kernel], {name: list[float]() for name in PASSES}
    for shape in map(Shape.parse, shapes):
        heads = shape.heads // 2
        implementation = Implementation(variant, "triton", heads, heads, 2)
        check(kernels, implementation, shape)
        timings, rows = time_both(kernels, implementation, shape), []
        for name in PASSES:
            ordinary, new = timings[False][name], timings[True][name]
            ratios[name].append(new.device_ms / ordinary.device_ms)
            print(
                f"{kernel} {variant} {shape} {name}: device {new.device_ms:.4f} / {ordinary.device_ms:.4f} ms ="
                f" {ratios[name][-1]:.2f}, plain calls {new.eager_ms / ordinary.eager_ms:.2f}", flush=True,
            )  # fmt: skip
            for backend, timing in (("triton", ordinary), (f"triton-{kernel}", new)):
                rows.append(
                    {
                        "recipe": f"{kernel}-kernels", "task": str(shape), "variant": variant, "backend": backend,
                        "split": name, "components": 2, "heads": heads, "kv_heads": heads, "batch": shape.batch,
                        "length": shape.length, "dtype": "bf16", "metric": "device_ms",
                        "value": f"{timing.device_ms:.5f}", "step_ms": f"{timing.eager_ms:.5f}",
                        "setup": f"triton {triton.__version__}", "command": shlex.join(["python", *sys.argv]),
                        **results.environment(),
                    }
                )  # fmt: skip
        if out is not None:
            results.append(out, rows)
    for name, values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        print(f"{kernel} {variant} {name}: geometric mean {mean:.2f} of the ordinary kernels' device time")


if __name__ == "__main__":
    main()
