"""Ours with H/2 heads against SDPA with H, on one GPU: forward, and forward with every gradient.

    python benchmarks/attention.py [--csv results/attention.csv] [--variants smgk,mgk] [--shapes 0,1]

Checks outputs and gradients first and times nothing that is wrong. Times are medians: `ms` of replays of a CUDA graph
(what the device
needs, for every contender alike), `eager_ms` of plain calls (where small shapes wait for Python). SDPA stands for the
faster of cuDNN and flash.
"""

import argparse
import concurrent.futures
import csv
import datetime
import math
import multiprocessing
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mgk.arguments import MixtureCall
from mgk.kernels import fused

# B, H, N, D, causal: the shapes that the project's goal names, and the paper's language model.
SHAPES = [
    (8, 8, 4096, 64, False), (8, 8, 4096, 64, True), (2, 8, 16384, 64, True), (4, 16, 4096, 128, True), (2, 16, 16384,
    128, True),
    (32, 8, 2048, 32, False), (32, 8, 4096, 32, False), (96, 8, 256, 16, True),
]  # fmt: skip
GOAL = 7  # shapes in the geometric mean
VARIANTS = {"smgk": (True, False), "smgk-hard": (True, True), "mgk": (False, False), "mgk-hard": (False, True)}
# ||ours - fp64|| / ||fp64||. The prior's gradient is a sum that nearly cancels.
LIMIT = {"log_prior": 5e-2}
FIELDS = (
    "date commit gpu torch triton dtype contender B H heads N D causal components pass "
    "ms eager_ms ratio eager_ratio peak_mb"
).split()


def draw(variant: str, B: int, H: int, N: int, D: int, components: int = 2) -> tuple[dict[str, Tensor], Tensor]:
    g = torch.Generator("cuda").manual_seed(N + D)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=g)

    shifted, hard = VARIANTS[variant]
    x = {"query": randn(B, H, N, D).bfloat16(), "value": randn(B, H, N, D).bfloat16()}
    x["keys"] = randn(*((B, H, N, D) if shifted else (B, H, components, N, D))).bfloat16()
    if shifted:
        x["shift"] = 0.5 * randn(H, components, D)
    if not hard:
        x["log_prior"] = randn(1, H, components, 1).log_softmax(2)
    return {name: t.requires_grad_() for name, t in x.items()}, randn(B, H, N, D).bfloat16()


def ours(variant: str, x: dict[str, Tensor], causal: bool) -> Tensor:
    call = MixtureCall(
        query=x["query"], keys=x["keys"], value=x["value"], shift=x.get("shift"), attn_mask=None,
        causal="top-left" if causal else None, dropout_p=0.0,
        scale=x["query"].shape[-1] ** -0.5, log_prior=x.get("log_prior"), tau=1.0, hard=VARIANTS[variant][1],
        packed=None, return_weights=False,
        return_lse=False,
    )  # fmt: skip
    return fused.run(call)[0]


def literal(variant: str, x: dict[str, Tensor], causal: bool) -> Tensor:
    """Eq. 9, 10 and 12 in float64, with the whole matrix."""
    q, v = x["query"], x["value"]
    keys = x["keys"].unsqueeze(2) + x["shift"].unsqueeze(-2) if "shift" in x else x["keys"]
    scores = -(q.unsqueeze(2).unsqueeze(-2) - keys.unsqueeze(-3)).square().sum(-1) / (2 * q.shape[-1] ** 0.5)
    if "log_prior" in x:
        scores = scores + x["log_prior"].unsqueeze(-2)
    scores = scores.amax(2) if VARIANTS[variant][1] else scores.logsumexp(2)
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
    return scores.softmax(-1) @ v


def wrong(variant: str, D: int, causal: bool) -> list[str]:
    x, grad = draw(variant, 1, 2, 333, D)
    exact = {name: t.detach().double().requires_grad_() for name, t in x.items()}
    got, want = ours(variant, x, causal), literal(variant, exact, causal)
    pairs = {"out": (got, want)}
    grads = zip(
        x,
        torch.autograd.grad(got, list(x.values()), grad),
        torch.autograd.grad(want, list(exact.values()), grad.double()),
        strict=True,
    )
    pairs |= {name: (a, b) for name, a, b in grads}
    errors = {name: ((a.double() - b).norm() / b.norm()).item() for name, (a, b) in pairs.items()}
    return [
        f"{variant} D={D} causal={causal} {name}: {error:.1e}"
        for name, error in errors.items()
        if not error < LIMIT.get(name, 1e-2)
    ]


def compile_kernels(task: tuple[str, int, bool]) -> list[str]:
    """The check also compiles what the timing needs, one process a kernel set; the compiled kernels stay in Triton's
    cache."""
    return wrong(*task)


def eager_ms(f: Callable[[], object], repeats: int = 12) -> float:
    for _ in range(3):
        f()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        f()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def graph_ms(f: Callable[[], object]) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return eager_ms(graph.replay)


def measure(forward: Callable[[], Tensor], inputs: list[Tensor], grad: Tensor) -> dict[str, tuple[float, float, float]]:
    def without_gradients() -> None:
        with torch.no_grad():
            forward()

    def with_gradients() -> None:
        torch.autograd.grad(forward(), inputs, grad)

    found = {}
    for name, f in (("forward", without_gradients), ("forward+backward", with_gradients)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        eager = eager_ms(f)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        found[name] = graph_ms(f), eager, peak
    return found


def sdpa(
    B: int, H: int, kv_heads: int, N: int, D: int, causal: bool
) -> dict[str, dict[str, tuple[float, float, float]]]:
    q, grad = (torch.randn(B, H, N, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    k, v = (torch.randn(B, kv_heads, N, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    found = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                run = partial(scaled_dot_product_attention, q, k, v, is_causal=causal, enable_gqa=kv_heads < H)
                found[name] = measure(run, [q, k, v], grad.detach())
        except RuntimeError as error:
            print(f"sdpa-{name} H={H}:{kv_heads} D={D}: {str(error)[:80]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", default="results/attention.csv")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--shapes", default=",".join(map(str, range(len(SHAPES)))))
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    import triton

    shapes = [SHAPES[int(n)] for n in args.shapes.split(",")]
    variants = args.variants.split(",")
    tasks = sorted({(v, D, c) for v in variants for *_, D, c in shapes}, key=lambda t: (t[0][0] == "s", -t[1]))
    with concurrent.futures.ProcessPoolExecutor(15, mp_context=multiprocessing.get_context("spawn")) as pool:
        failures = [line for lines in pool.map(compile_kernels, tasks) for line in lines]
    if failures:
        sys.exit("wrong, so not timed:\n" + "\n".join(failures))
    print(f"correct: {len(tasks)} combinations of variant, width and mask", flush=True)
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = (
        args.commit or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "uncommitted"
    )
    common = {
        "date": datetime.date.today().isoformat(), "commit": commit, "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__, "triton": triton.__version__,
        "dtype": "bfloat16",
    }  # fmt: skip
    path = pathlib.Path(args.csv)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    ratios: dict[tuple[str, str], list[float]] = {}
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        for shape in shapes:
            B, H, N, D, causal = shape
            contenders = {f"sdpa-{name}": (H, 1, times) for name, times in sdpa(B, H, H, N, D, causal).items()}
            best = {
                p: [min(times[p][i] for _, _, times in contenders.values()) for i in (0, 1)]
                for p in ("forward", "forward+backward")
            }
            contenders |= {
                f"sdpa-{name} gqa": (H, 1, times) for name, times in sdpa(B, H, H // 2, N, D, causal).items()
            }
            contenders |= {
                f"sdpa-{name} half": (H // 2, 1, times) for name, times in sdpa(B, H // 2, H // 2, N, D, causal).items()
            }
            for variant in variants:
                x, grad = draw(variant, B, H // 2, N, D)
                contenders[variant] = H // 2, 2, measure(partial(ours, variant, x, causal), list(x.values()), grad)
            for name, (heads, components, times) in contenders.items():
                for p, (ms, eager, peak) in times.items():
                    ratio, eager_ratio = ms / best[p][0], eager / best[p][1]
                    if name in VARIANTS and shape in SHAPES[:GOAL]:
                        ratios.setdefault((name, p), []).append(ratio)
                    writer.writerow(common | {
                        "contender": name, "B": B, "H": H, "heads": heads, "N": N, "D": D, "causal": causal,
                        "components": components, "pass": p,
                        "ms": round(ms, 4), "eager_ms": round(eager, 4), "ratio": round(ratio, 3),
                        "eager_ratio": round(eager_ratio, 3),
                        "peak_mb": round(peak, 1),
                    })  # fmt: skip
                    words = f"{ms:8.3f} ms {ratio:6.3f}   eager {eager:8.3f} ms {eager_ratio:6.3f}"
                    print(f"{name:16} {shape!s:28} {p:17} {words}", flush=True)
            file.flush()
            torch.cuda.empty_cache()
    for (name, p), values in ratios.items():
        mean = math.exp(statistics.mean(map(math.log, values)))
        print(f"{name:12} {p:17} geometric mean {mean:.3f}  largest {max(values):.3f}")


if __name__ == "__main__":
    main()
