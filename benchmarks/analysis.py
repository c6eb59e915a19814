"""How long ranking attention matrices takes: many of 1,024 × 1,024, and one of 4,000 × 4,000. Appends to a CSV file.

    python benchmarks/analysis.py                                        # on a GPU: 1,000 matrices
    python benchmarks/analysis.py --matrices 4 --size 256 --large 512    # a small one, anywhere

The matrices are softmax attention of random queries and keys, as sharp as a trained layer's; every tenth has a sink,
a key that nearly all attention goes to, which is the expensive case. Ranks of a few are checked against the singular
values before anything is timed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from mgk.analysis import ranks, spectra
from mgk.analysis.ranks import THRESHOLD, matrices_at_once
from mgk.training import results


def attention(count: int, size: int, device: torch.device, first: int) -> Tensor:
    """`count` matrices in fp64; the one numbered n has a sink where n is a multiple of ten."""
    query, key = torch.randn(2, count, size, 32, device=device, dtype=torch.float64)
    logits = 1.5 * query @ key.mT / 32**0.5
    sinks = (torch.arange(first, first + count, device=device) % 10 == 0).double()
    logits[:, :, 0] += 15 * sinks[:, None]
    return logits.softmax(-1)


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def check(size: int, device: torch.device) -> None:
    """The first has a sink, the second has none."""
    matrices = attention(2, size, device, 0)
    truth = (torch.linalg.svdvals(matrices) > THRESHOLD).sum(-1)
    found = spectra(matrices).rank
    if not torch.equal(found, truth):
        raise SystemExit(f"ranks {found.tolist()} instead of {truth.tolist()}: nothing is timed")


def timed(count: int, size: int, device: torch.device, memory: int, limit: float) -> tuple[float, int, float]:
    """Seconds for all, how many were ranked (fewer than `count` past `limit` seconds), and their mean rank."""
    at_once = max(1, min(matrices_at_once(size, size, memory), count))
    done, total, spent = 0, 0.0, 0.0
    while done < count and spent < limit:
        matrices = attention(min(at_once, count - done), size, device, done)
        start = clock(device)
        total += float(spectra(matrices).rank.sum())
        spent += clock(device) - start
        done += len(matrices)
        print(f"{done} of {count} at {size} x {size}: {spent:.2f} s", flush=True)
    return spent, done, total / done


def fastest_streams(size: int, device: torch.device) -> int:
    """1 or the package's own number, whichever ranks 16 matrices faster."""
    seconds = {}
    for streams in (1, ranks.STREAMS):
        ranks.STREAMS = streams
        # Libraries load and plan at the first call.
        spectra(attention(2, size, device, 1))
        matrices = attention(16, size, device, 0)
        start = clock(device)
        spectra(matrices)
        seconds[streams] = clock(device) - start
        print(f"16 matrices of {size} x {size}, {streams} streams: {seconds[streams]:.3f} s", flush=True)
    return min(seconds, key=lambda streams: seconds[streams])


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of ranking attention matrices.")
    parser.add_argument("--matrices", type=int, default=1000)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--large", type=int, default=4000)
    parser.add_argument("--memory", type=float, default=4.0, help="GiB to work in")
    parser.add_argument("--limit", type=float, default=70.0, help="seconds after which no further batch is begun")
    parser.add_argument("--streams", type=int, default=0, help="on a GPU; 0: as many as prove fastest")
    parser.add_argument("--out", type=Path, default=Path("results/analysis.csv"))
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    memory = int(given.memory * 2**30)
    check(min(given.size, 512), device)
    if device.type == "cuda":
        ranks.STREAMS = given.streams or fastest_streams(given.size, device)
    rows = []
    for count, size in ((given.matrices, given.size), (1, given.large)):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds, done, mean = timed(count, size, device, memory, given.limit)
        peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else float("nan")
        shared = {
            "task": "rank",
            "dataset": "random attention, every tenth with a sink",
            "seed": 0,
            "length": size,
            "dtype": "fp64",
            "backend": f"{ranks.STREAMS} streams" if device.type == "cuda" else "",
            "n_examples": done,
            "peak_mem_mb": f"{peak:.0f}",
            "command": shlex.join(["python", "benchmarks/analysis.py", *sys.argv[1:]]),
            **results.environment(),
        }
        rows.append({**shared, "metric": "seconds", "value": f"{seconds:.3f}"})
        rows.append({**shared, "metric": "mean_rank", "value": f"{mean:.1f}"})
        print(f"{done} matrices of {size} x {size}: {seconds:.2f} s, mean rank {mean:.1f}")
    results.append(given.out, rows)
    print(given.out)


if __name__ == "__main__":
    main()
