"""mgk bench."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from mgk._core.validation import fail, one_of
from mgk.cli.app import app, check_output_file

# What stands above the lines of the parts, and what it means.
COLUMNS = f"{'part':8} {'B x H x N x D':24} {'pass':16} {'variant, backend, heads':28}"
HEADERS = {
    "cuda": f"{COLUMNS} {'device':>12} {'ratio':>6}   {'plain calls':>18} {'ratio':>6}",
    "cpu": f"{COLUMNS} {'time':>12} {'ratio':>6}",
}
RATIO = "ratio: over the fastest SDPA with all H heads, below 1 is faster; ours have H / 2."
MEANINGS = {
    "cuda": f"""\
device: the time of the kernels alone; plain calls (eager): with what Python and PyTorch take to launch them.
{RATIO} em: over the layer without EM.
memory: MB beyond inputs, outputs and gradients, over SDPA-flash with as many heads.
""",
    "cpu": f"{RATIO}\n",
}


@app.command()
def bench(
    only: Annotated[str, typer.Option(help="Parts: speed,linear,whole,decoding,em,memory,flex; default: all.")] = "",
    shapes: Annotated[
        str, typer.Option(help="B x H x N x D: 8x8x4096x64,2x8x16384x64xcausal; default: each part's own.")
    ] = "",
    variants: Annotated[str, typer.Option(help="smgk,smgk:4,mgk-hard,mlk,…, M after the colon; default: all.")] = "",
    out: Annotated[
        Path | None, typer.Option(help="CSV to append to; default on a GPU: results/attention.csv, else none.")
    ] = None,
) -> None:
    """Measure our operators with half the heads against PyTorch's SDPA: time, memory, decoding.

    Outputs and gradients are checked first, and nothing wrong is timed. Without a GPU only the speed of small shapes is
    measured, on the processor.
    """
    import torch

    from mgk.bench import suite
    from mgk.bench.implementations import Shape, variant_and_components
    from mgk.training import results

    gpu = torch.cuda.is_available()
    chosen = [one_of("--only", name, suite.PARTS) for name in only.split(",") if name]
    if not gpu and set(chosen) - set(suite.CPU_PARTS):
        fail("--only", f"{only} needs a CUDA GPU; without one there is {', '.join(suite.CPU_PARTS)}")
    asked = tuple(name for name in variants.split(",") if name)
    for name in asked:
        variant_and_components(name)
    setting = suite.Setting(
        "cuda" if gpu else "cpu",
        torch.bfloat16 if gpu else torch.float32,
        tuple(Shape.parse(text) for text in shapes.split(",") if text),
        asked,
        lambda line: print(line, flush=True),
    )
    if gpu:
        out = out or Path("results/attention.csv")
    if out is not None:
        check_output_file("--out", out)
    command = shlex.join(["mgk", *sys.argv[1:]] if Path(sys.argv[0]).stem in ("mgk", "__main__") else sys.argv)
    common = suite.environment(setting, command)
    torch.seed()
    names = chosen or [name for name in suite.PARTS if gpu or name in suite.CPU_PARTS]
    ours = {name: suite.PARTS[name].ours(setting) for name in names}
    known = {(c.variant, c.components) for some in ours.values() for each in some.values() for c in each}
    if left_out := [name for name in asked if variant_and_components(name) not in known]:
        fail("--variants", f"{', '.join(left_out)} is in none of the parts measured: {', '.join(names)}")
    print("checking outputs and gradients" + (", which compiles every kernel" if gpu else ""), file=sys.stderr)
    right, wrong = suite.without_the_wrong(setting, ours)
    print(f"{MEANINGS[setting.device]}\n{HEADERS[setting.device]}")
    for name in names:
        for row in suite.PARTS[name].rows(setting, right[name]):
            row = {key: str(value) for key, value in (row | common).items()}
            if out is not None:
                results.append(out, [row], suite.EXTRA)
    if out is not None:
        print(f"results: {out}")
    if wrong:
        raise ValueError("what is wrong was not timed: " + "; ".join(wrong))
