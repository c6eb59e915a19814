"""Run functions in several processes that form a gloo process group.

Processes are forked from a server that has imported torch and mgk.distributed once: importing them in each process
takes longer than the tests.
"""

import json
import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

PRELOAD = ["torch", "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "mgk.distributed", __name__]


def _work(target: Callable[..., Any], rank: int, ranks: int, folder: str, timeout: float, args: tuple[Any, ...]):
    torch.set_num_threads(1)
    result = Path(folder, f"{rank}.json")
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout),
        )
        value = target(rank, ranks, *args)
        result.write_text(json.dumps({"value": value}))
        dist.barrier()  # torch 2.6 may hang if a thread of gloo still holds a tensor
        dist.destroy_process_group()
    except BaseException as error:
        if not result.exists():
            result.write_text(json.dumps({"error": str(error), "traceback": traceback.format_exc()}))


def start_workers(
    target: Callable[..., Any], ranks: int, folder: Path, *args: Any, timeout: float = 120
) -> list[dict[str, Any] | None]:
    """Return what each rank wrote: {"value": target(rank, ranks, *args)}, {"error": ...}, or None if it was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes = [
        context.Process(target=_work, args=(target, rank, ranks, str(folder), timeout, args), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(5 * timeout)
        if process.is_alive():
            process.kill()
    paths = [Path(folder, f"{rank}.json") for rank in range(ranks)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def run_workers(target: Callable[..., Any], ranks: int, folder: Path, *args: Any) -> list[Any]:
    """Return target(rank, ranks, *args) of every rank; fail with the traceback of a rank that raised."""
    results = start_workers(target, ranks, folder, *args)
    for rank, result in enumerate(results):
        if result is None or "error" in result:
            pytest.fail(f"rank {rank}: {'killed' if result is None else result['traceback']}")
    return [result["value"] for result in results if result is not None]
