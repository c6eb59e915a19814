"""Time one kernel with several block sizes: the source of the tables in mgk/kernels/mixture/block_tables.py.

    python benchmarks/block_sizes.py --variant mgk-hard --shape 8,4,4096,64 --causal --kernel queries 64x64,w4,s2 ...
    python benchmarks/block_sizes.py --variant smgk --shape 16,4,32768,64 --kernel decode 64,4,4,4 ...
    python benchmarks/block_sizes.py --candidates

A block such as 64x64,w4,s3,r168,tma_rows has the fields of BlockConfig: block_m x block_n, warps, stages, maxnreg
(omitted: chosen by the compiler) and the code variants. For decoding, it lists the fields of DecodeConfig. "table"
stands for the entry of the tables. Older rows of results/blocks.csv list numbers: block_m, block_n, warps, stages,
maxnreg or 0, and a sum of 1 operand_in_registers, 2 component_gemm or per_component, 4 tma_rows.

Medians in bf16, with registers and spills, are appended to results/blocks.csv. If "table" comes first, a block with
different results is not timed. `--candidates` measures all of CANDIDATES, `--part K/N` one part of N. `--compile` only
compiles: start N processes with it, then measure in one.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk.kernels import jit_cache
from mgk.kernels.mixture import block_sizes, experimental, launch, launch_config
from mgk.kernels.mixture.args import MixtureArgs
from mgk.kernels.mixture.block_config import BlockConfig, BlockKey, format_block, parse_block
from mgk.kernels.mixture.block_sizes import DecodeConfig
from mgk.kernels.mixture.query_walk import DV_ONLY
from mgk.training.results import environment

# By name on the command line: the kernel, and the pass whose block sizes are replaced.
KERNELS = {
    "forward": ("mixture_forward", "fwd"),
    "queries": ("mixture_backward_dq", "dq"),
    "keys": ("mixture_backward_dkdv", "dkdv"),
    "values": ("mixture_backward_dkdv", "dv"),
    "one-pass": ("mixture_backward_dkdv", "onepass"),
    "decode": ("decode_row", ""),
}
FIELDS = "date commit gpu torch triton variant B heads N D causal kernel part block ms registers spills".split()
MAX_DIFFERENCE = 0.03  # maximum relative difference between the results of two blocks in bf16


class Launch(NamedTuple):
    """A launch of a kernel: its arguments, and its options, constexprs and those of the compiler."""

    kernel: Any
    grid: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> Any:
        """Launch the kernel and return its compiled form."""
        return self.kernel[self.grid](*self.arguments, **self.options)


class Case(NamedTuple):
    variant: str
    components: int
    shape: str  # B, heads, N, D
    causal: bool
    kernel: str
    blocks: str


N512, N1024, N2048, N4096 = "64,6,512,64", "16,8,1024,64", "16,4,2048,64", "8,4,4096,64"
D32, N2048_D32, D128 = "64,4,512,32", "32,4,2048,32", "8,8,2048,128"
CANDIDATES = (
    Case("smgk", 2, N2048, True, "keys", "table 64x64,w4,s3,tma_rows 64x64,w4,s3,r168,tma_rows"),
    Case("smgk", 2, N2048, False, "keys", "table 64x64,w4,s3,tma_rows 64x64,w4,s3,r168,tma_rows"),
    Case(
        "smgk", 2, N2048, False, "queries",
        "table 64x128,w4,s3,operand_in_registers 64x64,w4,s3,r168,operand_in_registers "
        "64x64,w4,s3,operand_in_registers",
    ),
    Case("smgk", 2, N4096, True, "keys", "table 64x64,w4,s3,tma_rows 64x64,w4,s3,r168,tma_rows"),
    Case(
        "smgk", 2, N4096, False, "queries",
        "table 64x128,w4,s3,operand_in_registers 64x64,w4,s3,operand_in_registers",
    ),
    Case(
        "smgk", 2, N4096, True, "queries",
        "table 64x64,w4,s3,operand_in_registers 64x64,w4,s3,r168,operand_in_registers "
        "64x128,w4,s3,operand_in_registers",
    ),
    Case("smgk", 2, N1024, True, "keys", "table 64x64,w4,s3,r168,tma_rows 64x64,w4,s3,tma_rows"),
    Case("smgk-hard", 2, N1024, True, "keys", "table 64x64,w4,s3,tma_rows 64x64,w4,s3,r168,tma_rows"),
    Case(
        "smgk-hard", 2, N4096, True, "queries",
        "table 64x128,w4,s3,operand_in_registers 64x64,w4,s3,operand_in_registers "
        "64x64,w4,s3,r168,operand_in_registers",
    ),
    Case(
        "smgk", 4, N1024, True, "keys",
        "table 64x64,w4,s3,component_gemm,tma_rows 64x64,w4,s3,r168,component_gemm,tma_rows",
    ),
    Case(
        "mgk", 2, N512, False, "queries",
        "table 64x64,w4,s3,operand_in_registers 64x64,w4,s3,r168,operand_in_registers",
    ),
    Case(
        "smgk", 2, D32, True, "keys",
        "table 128x64,w4,s3 64x64,w4,s3,tma_rows 64x64,w4,s3,r168,tma_rows 64x64,w4,s3,r128,tma_rows",
    ),
    Case(
        "smgk", 2, D32, True, "forward",
        "table 64x128,w4,s3,operand_in_registers 64x64,w4,s3,r128,operand_in_registers "
        "64x64,w4,s3,operand_in_registers",
    ),
    Case(
        "smgk", 2, D128, True, "forward",
        "table 64x64,w4,s3,operand_in_registers 64x64,w4,s3,r168,operand_in_registers",
    ),
    Case(
        "smgk", 2, N2048_D32, False, "one-pass",
        "table 64x64,w4,s3 64x64,w4,s3,component_gemm 64x64,w4,s2,r168,component_gemm "
        "64x64,w4,s3,r168,component_gemm",
    ),
    Case(
        "smgk", 2, N2048_D32, True, "one-pass",
        "table 64x64,w4,s3 64x64,w4,s3,component_gemm 64x64,w4,s2,r168,component_gemm "
        "64x64,w4,s3,r168,component_gemm",
    ),
)  # fmt: skip


def draw(
    variant: str, components: int, B: int, H: int, N: int, D: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return random query, keys, value, shift and log prior."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda")

    shifted, hard = variant.startswith("smgk"), variant.endswith("hard")
    keys = randn(B, H, N, D) if shifted else randn(B, H, components, N, D)
    shift = 0.5 * randn(H, components, D) if shifted else None
    prior = None if hard else randn(1, H, components, 1).log_softmax(2)
    return randn(B, H, N, D).bfloat16(), keys.bfloat16(), randn(B, H, N, D).bfloat16(), shift, prior


def run_passes(case: Case, B: int, H: int, N: int, D: int) -> tuple[Tensor, ...]:
    """Run the launches of a user's call and return their results."""
    torch.manual_seed(0)
    query, keys, value, shift, prior = draw(case.variant, case.components, B, H, N, D)
    args = MixtureArgs(
        query, keys, value, shift, prior, *(None,) * 6, scale=D**-0.5, tau=1.0, constant=0.0, dropout_p=0.0,
        causal=int(case.causal), hard=case.variant.endswith("hard"), max_q=N, max_k=N,
    )  # fmt: skip
    if case.kernel == "decode":
        return launch.launch_decode(args._replace(query=query[:, :, :1], causal=0))
    out, lse, prepared, stats = launch.launch_forward(args)
    if case.kernel == "forward":
        return out, lse
    prior_grad = launch_config.NO_PRIOR_GRAD if prior is None else launch_config.SUMMED_PRIOR_GRAD
    gradients = launch.launch_backward(torch.randn_like(out), None, out, lse, prepared, stats, args, False, prior_grad)
    # Summed gradients that a variant does not use are not written.
    return gradients[:3]


def parse_argument(case: Case, text: str) -> BlockConfig | DecodeConfig | None:
    """Return the block sizes of an argument, None for "table"."""
    if text == "table":
        return None
    return DecodeConfig(*map(int, text.split(","))) if case.kernel == "decode" else parse_block(text)


def launches(case: Case, block: BlockConfig | DecodeConfig | None) -> tuple[list[Launch], tuple[Tensor, ...]]:
    """Run a call with this block; return the launches of the kernel's first path, and the results of the call."""
    name, pass_ = KERNELS[case.kernel]
    recorded: list[Launch] = []

    def record(spec: Any, tensors: Any, floats: Any) -> None:
        if spec.kernel.__name__ == name:
            arguments = (*tensors, *floats, *spec.scalars, *spec.unspecialized)
            options = jit_cache.compile_options(spec, spec.paths[0])
            recorded.append(Launch(spec.kernel, spec.grid, arguments, options))

    def select_block(key: BlockKey, *sizes: Any) -> Any:
        return block if block and key.pass_ == pass_ else block_sizes.select_block(key, *sizes)

    def select_decode_config(*sizes: Any) -> Any:
        return block or block_sizes.select_decode_config(*sizes)

    selection = launch.block_selection(select_block, select_decode_config)
    one_pass = experimental.one_pass_backward(case.kernel == "one-pass")
    with selection, one_pass, jit_cache.observed_launches(record):
        results = run_passes(case, *map(int, case.shape.split(",")))
    return recorded, results


# The results with the block of the tables.
_expected: dict[Case, tuple[Tensor, ...]] = {}


def difference(case: Case, results: tuple[Tensor, ...], is_table: bool) -> float:
    """Return the largest difference from the results with the tables' block, relative to their maximum."""
    if is_table:
        _expected[case] = results
    pairs = [(x.float(), y.float()) for x, y in zip(results, _expected.get(case, results), strict=True) if x.numel()]
    errors = [((x - y).abs().max() / y.abs().max()).item() for x, y in pairs]
    return max(math.inf if math.isnan(x) else x for x in errors)


def median_ms(run: Callable[[], object], repeats: int = 7, launches_per_graph: int = 5) -> float:
    """Return the median time of a launch, from several in one CUDA graph: small kernels end before the next launch."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches_per_graph):
            run()
    graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / launches_per_graph


def measure(case: Case, text: str, compile_only: bool) -> Iterator[dict[str, Any]]:
    """Yield a row per launch of the kernel; none if the block does not fit the GPU or its results are wrong."""
    block = parse_argument(case, text)
    try:
        recorded, results = launches(case, block)
    except Exception as error:  # out of resources or a compiler failure: continue with the other blocks
        print(f"{case.variant} M {case.components} {case.kernel} {text}: {str(error).splitlines()[0][:100]}")
        return
    if not compile_only and (distance := difference(case, results, block is None)) > MAX_DIFFERENCE:
        print(
            f"{case.variant} M {case.components} {case.shape} {case.kernel} {text}: WRONG by {distance:.3g}", flush=True
        )
        return
    for item in [] if compile_only else recorded:
        part = item.options.get("OUTPUTS", 0)
        if (part == DV_ONLY.value) != (case.kernel == "values"):
            continue
        compiled, ms = item.run(), median_ms(item.run)
        print(
            f"{case.variant} M {case.components} {case.shape} {case.kernel} {text} part {part}: "
            f"{ms:.4f} ms, {compiled.n_regs} registers, {compiled.n_spills} spills",
            flush=True,
        )
        yield {
            "part": part,
            "block": format_block(block) if isinstance(block, BlockConfig) else text,
            "ms": round(ms, 4),
            "registers": compiled.n_regs,
            "spills": compiled.n_spills,
        }


def has_header(path: Path) -> bool:
    """Return whether the first line of a file names this script's columns."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline(1 << 16).rstrip("\r\n") == ",".join(FIELDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="smgk", choices=["smgk", "smgk-hard", "mgk", "mgk-hard"])
    parser.add_argument("--components", type=int, default=2)
    parser.add_argument("--shape", default="8,4,4096,64", help="B, heads, N, D")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--kernel", default="queries", choices=list(KERNELS))
    parser.add_argument("--candidates", action="store_true", help="measure all of CANDIDATES")
    parser.add_argument("--part", default="1/1", help="K/N: only the K-th of N parts")
    parser.add_argument("--compile", action="store_true", help="compile without measuring")
    parser.add_argument("--csv", type=Path, default=Path("results/blocks.csv"))
    parser.add_argument("blocks", nargs="*")
    args = parser.parse_args()
    is_new = not args.csv.exists() or not args.csv.stat().st_size
    if not is_new and not has_header(args.csv):
        parser.error(f"--csv {args.csv} is not a file of this script (its first line must be {','.join(FIELDS)})")
    import triton

    single = Case(args.variant, args.components, args.shape, args.causal, args.kernel, " ".join(args.blocks))
    cases = CANDIDATES if args.candidates else (single,)
    part, parts = map(int, args.part.split("/"))
    pairs = [(case, text) for case in cases for text in case.blocks.split()][part - 1 :: parts]
    with args.csv.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        for case, text in pairs:
            name = case.variant if case.components == 2 else f"{case.variant} M {case.components}"
            common = environment() | {"triton": triton.__version__, "variant": name, "kernel": case.kernel}
            common |= dict(zip(("B", "heads", "N", "D"), case.shape.split(","), strict=True))
            for row in measure(case, text, args.compile):
                writer.writerow(common | {"causal": str(case.causal)} | row)


if __name__ == "__main__":
    main()
