"""mgk bench."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from mgk._core.validation import fail, one_of
from mgk.cli.app import app, check_results_file
from mgk.cli.help_texts import epilog

# Headers of the printed lines, and the legend above them.
COLUMNS = f"{'part':8} {'B x H x N x D':24} {'pass':16} {'variant, backend, heads':28}"
HEADERS = {
    "cuda": f"{COLUMNS} {'device':>12} {'ratio':>6}   {'plain calls':>18} {'ratio':>6}",
    "cpu": f"{COLUMNS} {'time':>12} {'ratio':>6}",
}
RATIO = (
    "ratio: time relative to the fastest SDPA with all H heads (below 1 is faster); our variants have H / 2 heads "
    "(groups: also H)."
)
LEGENDS = {
    "cuda": f"""\
device: time of the kernels alone; plain calls: time of eager calls, including the overhead of Python and PyTorch.
{RATIO} em: relative to the layer without EM.
memory: MB beyond inputs, outputs and gradients; ratio to SDPA-flash with the same number of heads.
""",
    "cpu": f"{RATIO}\n",
}


@app.command(epilog=epilog("bench"))
def bench(
    only: Annotated[
        str,
        typer.Option(
            help="Parts to run, separated by commas: speed, groups, linear, whole, decoding, em, memory, flex; "
            "default: all."
        ),
    ] = "",
    shapes: Annotated[
        str,
        typer.Option(
            help="Shapes BxHxNxD, separated by commas, e.g. 8x8x4096x64,2x8x16384x64xcausal; "
            "default: those of each part."
        ),
    ] = "",
    variants: Annotated[
        str,
        typer.Option(
            help="Variants, separated by commas, optionally with the number of components: "
            "smgk,smgk:4,mgk-hard,mlk; default: all."
        ),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="CSV file to append to; default: results/attention.csv on a GPU, otherwise none."),
    ] = None,
) -> None:
    """Benchmark the operators with half the heads against PyTorch's SDPA: time, memory, decoding.

    Outputs and gradients are checked first; implementations with wrong results are not timed.

    Without a GPU, only the speed of small shapes is measured, on the CPU.
    """
    import torch

    from mgk.bench import suite
    from mgk.bench.implementations import Shape, parse_variant
    from mgk.training import results

    has_gpu = torch.cuda.is_available()
    selected = [one_of("--only", name, suite.PARTS) for name in only.split(",") if name]
    if not has_gpu and set(selected) - set(suite.CPU_PARTS):
        fail("--only", f"{only} needs a CUDA GPU; without one, only {', '.join(suite.CPU_PARTS)} can run")
    variant_names = tuple(name for name in variants.split(",") if name)
    for name in variant_names:
        parse_variant(name)
    config = suite.BenchmarkConfig(
        "cuda" if has_gpu else "cpu",
        torch.bfloat16 if has_gpu else torch.float32,
        tuple(Shape.parse(text) for text in shapes.split(",") if text),
        variant_names,
        lambda line: print(line, flush=True),
    )
    if has_gpu and out is None:
        out = Path("results/attention.csv")
    if out is not None:
        check_results_file("--out", out, suite.EXTRA_COLUMNS)
    command = shlex.join(["mgk", *sys.argv[1:]] if Path(sys.argv[0]).stem in ("mgk", "__main__") else sys.argv)
    common_columns = suite.environment(config, command)
    torch.seed()  # other random inputs in each run
    parts = selected or [name for name in suite.PARTS if has_gpu or name in suite.CPU_PARTS]
    implementations = {name: suite.PARTS[name].implementations(config) for name in parts}
    measured = suite.measured_variants(implementations)
    if unused := [name for name in variant_names if parse_variant(name) not in measured]:
        fail("--variants", f"{', '.join(unused)}: not in any of the measured parts ({', '.join(parts)})")
    print("checking outputs and gradients" + (", which compiles every kernel" if has_gpu else ""), file=sys.stderr)
    correct, wrong = suite.select_correct(config, implementations)
    print(f"{LEGENDS[config.device]}\n{HEADERS[config.device]}")
    for name in parts:
        for row in suite.PARTS[name].measure(config, correct[name]):
            if out is not None:
                texts = {column: str(value) for column, value in (row | common_columns).items()}
                results.append(out, [texts], suite.EXTRA_COLUMNS)
    if out is not None:
        print(f"results: {out}")
    if wrong:
        raise ValueError("wrong results, not timed: " + "; ".join(wrong))
