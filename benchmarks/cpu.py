"""Measure speed and memory on the CPU against SDPA and a naive eager attention.

    python benchmarks/cpu.py            all measurements, appended to results/cpu.csv
    python benchmarks/cpu.py --quick    short lengths, printed only (unless --out names a file)

B 1, H 4, M 2, D 64, fp32. Three suites:
  time       MGK (backend "sdpa") and sMGK ("factored") against SDPA over the same number of (query, key) pairs, that
             is, a mixture of M components with a fraction of 1/M of the heads of softmax. Not causal: SDPA
             over M·N concatenated keys. Causal: SDPA cannot mask M concatenated key sets, so it runs M·H causal heads
             of N keys. SDPA computes no bias and no mixture: it is a reference for cost, not for results.
  memory     peak memory of one call, in a separate process, against the naive eager attention below.
  linearity  causal MLK (backend "chunked") over growing lengths.
Every implementation is checked against the eager backend in fp64 before it is timed. Implementations alternate, on
fresh random inputs each time, so that load on the machine affects all of them equally.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import mgk
from mgk._core.io import replacing

ROOT = Path(__file__).resolve().parent.parent
B, H, M, D = 1, 4, 2, 64
SEED = 0
CHECK_LENGTH, TOLERANCE = 1024, 1e-4
# The naive attention saves several tensors of B·H·M·N² elements for its backward: 2.1 GB each at 8,192.
NAIVE_LIMIT = 4096

# The columns of every file in results/, then those of this benchmark.
COLUMNS = (
    "recipe,task,dataset,variant,preset,components,heads,kv_heads,seed,steps,lr,batch,length,dtype,backend,split,"
    "n_examples,metric,value,params,flops,step_ms,peak_mem_mb,gpu,torch,date,commit,command,"
    "pass,causal,keys,fastest_ms,slowest_ms,repeats,cpu,threads,load,python,system"
).split(",")


def naive_mgk(query: Tensor, keys: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """Compute Eq. 9 directly, with all distances at once: memory quadratic in the length."""
    product = query.unsqueeze(2) @ keys.transpose(-1, -2)  # [B, H, M, L, S]
    distance = query.square().sum(-1)[:, :, None, :, None] - 2 * product + keys.square().sum(-1).unsqueeze(3)
    logits = torch.logsumexp(-distance / (2 * math.sqrt(D)), dim=2)  # [B, H, L, S]
    if is_causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return logits.softmax(-1) @ value


@dataclass(frozen=True)
class Implementation:
    """An attention function and the shapes of its inputs for length n."""

    variant: str
    backend: str
    heads: int
    components: int
    shapes: Callable[[int], Sequence[tuple[int, ...]]]
    call: Callable[..., Tensor]
    reference: Callable[..., Tensor] | None = None

    def inputs(self, n: int, seed: int, backward: bool = False) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(s, generator=generator).requires_grad_(backward) for s in self.shapes(n)]

    def keys(self, n: int) -> int:
        """Return the number of keys per query, over all components."""
        return self.components * self.shapes(n)[2][-2]


def shapes_independent(n: int) -> Sequence[tuple[int, ...]]:
    return (B, H, n, D), (B, H, M, n, D), (B, H, n, D)


def shapes_shifted(n: int) -> Sequence[tuple[int, ...]]:
    return (B, H, n, D), (B, H, n, D), (B, H, n, D), (H, M, D)


def mgk_by(backend: str) -> Callable[..., Tensor]:
    return lambda *x, is_causal: mgk.mgk_attention(*x, is_causal=is_causal, backend=backend)


def smgk_by(backend: str) -> Callable[..., Tensor]:
    return lambda *x, is_causal: mgk.smgk_attention(*x, is_causal=is_causal, backend=backend)


def mlk_by(backend: str) -> Callable[..., Tensor]:
    return lambda *x, is_causal: mgk.mlk_attention(*x, is_causal=is_causal, backend=backend)


IMPLEMENTATIONS = {
    "mgk": Implementation("mgk", "sdpa", H, M, shapes_independent, mgk_by("sdpa"), mgk_by("eager")),
    "smgk": Implementation("smgk", "factored", H, M, shapes_shifted, smgk_by("factored"), smgk_by("eager")),
    "naive": Implementation("mgk", "naive", H, M, shapes_independent, naive_mgk, mgk_by("eager")),
    "mlk": Implementation("mlk", "chunked", H, M, shapes_independent, mlk_by("chunked"), mlk_by("eager")),
    "sdpa-keys": Implementation(
        "softmax",
        "torch-sdpa",
        H,
        1,
        lambda n: ((B, H, n, D), (B, H, M * n, D), (B, H, M * n, D)),
        F.scaled_dot_product_attention,
    ),
    "sdpa-heads": Implementation(
        "softmax", "torch-sdpa", M * H, 1, lambda n: ((B, M * H, n, D),) * 3, F.scaled_dot_product_attention
    ),
}


def run_once(implementation: Implementation, n: int, causal: bool, backward: bool, seed: int) -> float:
    """Return the seconds of one call on fresh inputs, without the time to make them."""
    x = implementation.inputs(n, seed, backward)
    grad = torch.randn(B, implementation.heads, n, D) if backward else None
    with torch.set_grad_enabled(backward):
        start = time.perf_counter()
        out = implementation.call(*x, is_causal=causal)
        if backward:
            torch.autograd.grad(out, x, grad)
        return time.perf_counter() - start


def check(name: str, causal: bool) -> float:
    """Return the largest relative error of output and gradients against eager in fp64; exit if it is too large."""
    implementation = IMPLEMENTATIONS[name]
    assert implementation.reference is not None
    x = implementation.inputs(CHECK_LENGTH, SEED, backward=True)
    grad = torch.randn(B, H, CHECK_LENGTH, D)
    x64 = [t.detach().double().requires_grad_() for t in x]
    out, truth = implementation.call(*x, is_causal=causal), implementation.reference(*x64, is_causal=causal)
    actual = (out, *torch.autograd.grad(out, x, grad))
    expected = (truth, *torch.autograd.grad(truth, x64, grad.double()))
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(actual, expected, strict=True)]
    error = max(errors) if all(map(math.isfinite, errors)) else math.inf
    if error > TOLERANCE:
        sys.exit(f"{name}, causal {causal}: relative error {error:.1e} against eager exceeds {TOLERANCE:g}; not timed")
    return error


def measure_times(names: Sequence[str], n: int, causal: bool, backward: bool, budget: float) -> dict[str, list[float]]:
    """Return milliseconds per repeat by name: at least 3 repeats, at most 20 or `budget` seconds per implementation."""
    for name in names:
        run_once(IMPLEMENTATIONS[name], min(n, 4096), causal, backward, SEED)
    times: dict[str, list[float]] = {name: [] for name in names}
    start, repeat = time.perf_counter(), 0
    while repeat < 3 or (repeat < 20 and time.perf_counter() - start < budget * len(names)):
        repeat += 1
        for name in names:
            times[name].append(1e3 * run_once(IMPLEMENTATIONS[name], n, causal, backward, SEED + repeat))
    return times


def status_mb(field: str) -> float:
    """Return VmRSS (current) or VmHWM (peak) of this process in MB.

    The peak of getrusage is inherited from the parent process, so it cannot be used.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise OSError(f"no {field} in /proc/self/status")


def peak_memory_here(name: str, n: int, causal: bool, backward: bool) -> float:
    """Return the peak memory of one call beyond its inputs, in MB. Call this in a fresh process."""
    implementation = IMPLEMENTATIONS[name]
    run_once(implementation, 64, causal, backward, SEED)
    x = implementation.inputs(n, SEED + 1, backward)
    grad = torch.randn(B, implementation.heads, n, D) if backward else None
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    before = status_mb("VmRSS")
    with torch.set_grad_enabled(backward):
        out = implementation.call(*x, is_causal=causal)
        if backward:
            torch.autograd.grad(out, x, grad)
    return status_mb("VmHWM") - before


def peak_memory(name: str, n: int, causal: bool, backward: bool) -> float:
    command = [sys.executable, __file__, "--memory-of", name, str(n), str(int(causal)), str(int(backward))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def describe_cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def describe_commit() -> str:
    """Return the commit, with "-dirty" if a tracked file outside results/ is modified."""

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results")
    return (git("rev-parse", "--short=12", "HEAD") or "none") + ("-dirty" if changed else "")


class Results:
    """Rows of a CSV file, which is rewritten atomically with every new row."""

    def __init__(self, path: Path | None) -> None:
        # Imported here, so that the processes that measure memory do not load it.
        from mgk.training.results import check_file

        # The target of a symbolic link, because the file is replaced by a new one.
        self.path = path = None if path is None else Path(os.path.realpath(path))
        self.rows: list[dict[str, str]] = []
        if path is not None and path.exists():
            try:
                check_file("--out", path, COLUMNS)
            except ValueError as error:
                sys.exit(str(error))
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                if reader.fieldnames != COLUMNS:
                    sys.exit(f"{path} does not have the columns of this benchmark: move it away first")
                self.rows = list(reader)
        self.constant = {
            "recipe": "benchmark-cpu",
            "dataset": "random normal",
            "seed": SEED,
            "batch": B,
            "dtype": "float32",
            "torch": torch.__version__,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
            "commit": describe_commit(),
            "command": " ".join(["python", "benchmarks/cpu.py", *sys.argv[1:]]),
            "cpu": describe_cpu(),
            "threads": torch.get_num_threads(),
            "load": f"{os.getloadavg()[0]:.1f}",
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        }

    def add(self, task: str, name: str, n: int, causal: bool, backward: bool, **measured: object) -> None:
        implementation = IMPLEMENTATIONS[name]
        row = self.constant | {
            "task": task,
            "variant": implementation.variant,
            "components": implementation.components,
            "heads": implementation.heads,
            "kv_heads": implementation.heads,
            "length": n,
            "backend": implementation.backend,
            "pass": "forward+backward" if backward else "forward",
            "causal": causal,
            "keys": implementation.keys(n),
        }
        self.rows.append({c: str((row | measured).get(c, "")) for c in COLUMNS})
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as temporary, temporary.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(self.rows)

    def add_times(self, task: str, n: int, causal: bool, backward: bool, times: dict[str, list[float]]) -> None:
        for name, ms in times.items():
            median = f"{statistics.median(ms):.3f}"
            spread = {"fastest_ms": f"{min(ms):.3f}", "slowest_ms": f"{max(ms):.3f}", "repeats": len(ms)}
            self.add(task, name, n, causal, backward, metric="time_ms", value=median, step_ms=median, **spread)


def print_row(task: str, n: int | str, causal: bool, backward: bool, text: str) -> None:
    kind = f"{'causal' if causal else 'full':6}  {'forward+backward' if backward else 'forward':16}"
    length = f"N {n:6,}" if isinstance(n, int) else f"{n:8}"
    print(f"{task:9}  {length}  {kind}  {text}", flush=True)


def growth(values: dict[int, float]) -> str:
    """Format the exponents p of N^p between successive lengths."""
    lengths = sorted(values)
    slopes = [math.log(max(values[b], 1e-3) / max(values[a], 1e-3), b / a) for a, b in pairwise(lengths)]
    return "grows as N to the power " + ", ".join(f"{p:.2f}" for p in slopes)


def bench_time(results: Results, lengths: Sequence[int], budget: float) -> None:
    for n in lengths:
        for causal in (False, True):
            peer = "sdpa-heads" if causal else "sdpa-keys"
            for backward in (False, True):
                times = measure_times(("mgk", "smgk", peer), n, causal, backward, budget)
                results.add_times("time", n, causal, backward, times)
                parts = []
                for name, ms in times.items():
                    ratio = statistics.median(a / b for a, b in zip(ms, times[peer], strict=True))
                    parts.append(
                        f"{name} {statistics.median(ms):9.2f} ms" + ("" if name == peer else f" ({ratio:.2f} x)")
                    )
                    if name != peer:
                        measured = {"metric": "time_ratio_to_sdpa", "value": f"{ratio:.3f}", "repeats": len(ms)}
                        results.add("time", name, n, causal, backward, **measured)
                print_row("time", n, causal, backward, "   ".join(parts))


def bench_memory(results: Results, lengths: Sequence[int]) -> None:
    for causal in (False, True):
        for backward in (False, True):
            for name in ("mgk", "smgk", "naive"):
                peaks = {}
                for n in lengths:
                    if name == "naive" and n > NAIVE_LIMIT:
                        continue
                    mb = peaks[n] = peak_memory(name, n, causal, backward)
                    results.add(
                        "memory",
                        name,
                        n,
                        causal,
                        backward,
                        metric="peak_mem_mb",
                        value=f"{mb:.1f}",
                        peak_mem_mb=f"{mb:.1f}",
                    )
                    print_row("memory", n, causal, backward, f"{name} {mb:9.1f} MB")
                print_row("memory", "growth", causal, backward, f"{name} {growth(peaks)}")


def bench_linearity(results: Results, lengths: Sequence[int], budget: float) -> None:
    for backward in (False, True):
        medians = {}
        for n in lengths:
            times = measure_times(("mlk",), n, True, backward, budget)
            results.add_times("linearity", n, True, backward, times)
            medians[n] = statistics.median(times["mlk"])
            print_row(
                "linearity", n, True, backward, f"mlk {medians[n]:9.2f} ms   {1e3 * medians[n] / n:.2f} µs per token"
            )
        print_row("linearity", "growth", True, backward, f"mlk {growth(medians)}")


def import_seconds() -> float:
    """Return the median processor time of `import mgk` after `import torch`, in fresh interpreters."""
    code = "import time, torch; t = time.process_time(); import mgk; print(time.process_time() - t)"
    command = [sys.executable, "-c", code]
    return statistics.median(float(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="lengths up to 1,024, few repeats, no file unless --out is given"
    )
    parser.add_argument("--out", type=Path, help="the CSV file to append to (default: results/cpu.csv)")
    parser.add_argument("--only", choices=("import", "time", "memory", "linearity"), help="run one suite")
    parser.add_argument("--threads", type=int, help="threads of torch (default: torch's default)")
    parser.add_argument("--memory-of", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        name, *numbers = args.memory_of
        n, causal, backward = map(int, numbers)
        print(peak_memory_here(name, n, bool(causal), bool(backward)))
        return
    if args.threads:
        torch.set_num_threads(args.threads)

    results = Results(args.out or (None if args.quick else ROOT / "results" / "cpu.csv"))
    print(f"{results.constant['cpu']}, {torch.get_num_threads()} threads, torch {torch.__version__}", flush=True)
    if os.getloadavg()[0] > 0.5 and torch.get_num_threads() > 1:
        # OpenMP threads lose a time slice where another process holds a core: up to 90 ms per call.
        print(f"WARNING: load {os.getloadavg()[0]:.1f}: use an idle machine or --threads 1", flush=True)
    for name in ("mgk", "smgk", "naive", "mlk"):
        for causal in (False, True) if name != "mlk" else (True,):
            print_row("check", CHECK_LENGTH, causal, True, f"{name} relative error {check(name, causal):.1e}")
    if args.only in (None, "import"):
        print(f"import    mgk adds {import_seconds():.2f} s to torch (target: at most 0.3)", flush=True)
    budget = 1.0 if args.quick else 10.0
    if args.only in (None, "time"):
        bench_time(results, (256, 1024) if args.quick else (256, 1024, 4096, 16384), budget)
    if args.only in (None, "memory"):
        if sys.platform == "linux":
            bench_memory(results, (256, 512, 1024) if args.quick else (1024, 2048, 4096, 8192, 16384))
        else:
            print("memory: skipped, it needs Linux's /proc")
    if args.only in (None, "linearity"):
        bench_linearity(results, (256, 512, 1024) if args.quick else [1024 << i for i in range(7)], budget)
    if results.path:
        print(f"written to {results.path}")


if __name__ == "__main__":
    main()
