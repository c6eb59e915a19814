"""Time the ranking of attention matrices, many of 1,024 × 1,024 and one of 4,000 × 4,000; append to a CSV file.

    python benchmarks/analysis.py                                        # on a GPU: 1,000 matrices
    python benchmarks/analysis.py --matrices 4 --size 256 --large 512    # small, on any machine

The matrices are softmax attention of random queries and keys, as sharp as in a trained layer. Every tenth matrix has a
sink, a key that takes nearly all attention, which is the expensive case. The ranks of two matrices are checked against
their singular values before anything is timed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from mgk.analysis import spectra
from mgk.analysis.ranks import STREAMS, THRESHOLD, max_matrices
from mgk.training import results


def random_attention(count: int, size: int, device: torch.device, first: int) -> Tensor:
    """Return `count` matrices in fp64, numbered from `first`; multiples of ten have a sink."""
    query, key = torch.randn(2, count, size, 32, device=device, dtype=torch.float64)
    logits = 1.5 * query @ key.mT / 32**0.5
    sinks = (torch.arange(first, first + count, device=device) % 10 == 0).double()
    logits[:, :, 0] += 15 * sinks[:, None]
    return logits.softmax(-1)


def clock(device: torch.device) -> float:
    """Return the time in seconds after all kernels have finished."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def check_ranks(size: int, device: torch.device) -> None:
    """Check the ranks of a matrix with a sink and of one without against their singular values."""
    matrices = random_attention(2, size, device, 0)
    expected = (torch.linalg.svdvals(matrices) > THRESHOLD).sum(-1)
    ranks = spectra(matrices).rank
    if not torch.equal(ranks, expected):
        raise SystemExit(f"ranks are {ranks.tolist()} instead of {expected.tolist()}; nothing was timed")


def time_ranking(
    count: int, size: int, device: torch.device, memory: int, limit: float, streams: int
) -> tuple[float, int, float]:
    """Return the time in seconds, the number of matrices (fewer than `count` after `limit` s) and their mean rank."""
    batch = max(1, min(max_matrices(size, size, memory), count))
    done, total, spent = 0, 0.0, 0.0
    while done < count and spent < limit:
        matrices = random_attention(min(batch, count - done), size, device, done)
        start = clock(device)
        total += float(spectra(matrices, streams=streams).rank.sum())
        spent += clock(device) - start
        done += len(matrices)
        print(f"{done} of {count} at {size} x {size}: {spent:.2f} s", flush=True)
    return spent, done, total / done


def fastest_streams(size: int, device: torch.device) -> int:
    """Return 1 or the default number of streams, whichever ranks 16 matrices faster."""
    seconds = {}
    for streams in (1, STREAMS):
        # Warm-up: libraries are loaded at the first call.
        spectra(random_attention(2, size, device, 1), streams=streams)
        matrices = random_attention(16, size, device, 0)
        start = clock(device)
        spectra(matrices, streams=streams)
        seconds[streams] = clock(device) - start
        print(f"16 matrices of {size} x {size}, {streams} streams: {seconds[streams]:.3f} s", flush=True)
    return min(seconds, key=lambda streams: seconds[streams])


def main() -> None:
    """Run the benchmark and append its results."""
    parser = argparse.ArgumentParser(description="Time the ranking of attention matrices.")
    parser.add_argument("--matrices", type=int, default=1000)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--large", type=int, default=4000)
    parser.add_argument("--memory", type=float, default=4.0, help="workspace in GiB")
    parser.add_argument("--limit", type=float, default=70.0, help="seconds after which no further batch is started")
    parser.add_argument("--streams", type=int, default=0, help="CUDA streams; 0: the fastest of 1 and the default")
    parser.add_argument("--out", type=Path, default=Path("results/analysis.csv"))
    options = parser.parse_args()
    results.check_file("--out", options.out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    memory = int(options.memory * 2**30)
    check_ranks(min(options.size, 512), device)
    streams = STREAMS
    if device.type == "cuda":
        streams = options.streams or fastest_streams(options.size, device)
    rows = []
    for count, size in ((options.matrices, options.size), (1, options.large)):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds, done, mean = time_ranking(count, size, device, memory, options.limit, streams)
        peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else float("nan")
        shared = {
            "task": "rank",
            "dataset": "random attention, every tenth with a sink",
            "seed": 0,
            "length": size,
            "dtype": "fp64",
            "backend": f"{streams} streams" if device.type == "cuda" else "",
            "n_examples": done,
            "peak_mem_mb": f"{peak:.0f}",
            "command": shlex.join(["python", "benchmarks/analysis.py", *sys.argv[1:]]),
            **results.environment(),
        }
        rows.append({**shared, "metric": "seconds", "value": f"{seconds:.3f}"})
        rows.append({**shared, "metric": "mean_rank", "value": f"{mean:.1f}"})
        print(f"{done} matrices of {size} x {size}: {seconds:.2f} s, mean rank {mean:.1f}")
    results.append(options.out, rows)
    print(options.out)


if __name__ == "__main__":
    main()
