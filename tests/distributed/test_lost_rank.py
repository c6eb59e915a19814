"""A rank that ends or stops is an error on the other ranks within a time limit, in context and tensor parallelism."""

import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import mgk
from mgk.distributed import context_parallel, tensor_parallel
from tests.support.workers import start_workers

# The layer is sharded by one of these; three ranks need a number of heads that is a multiple of 3.
KINDS = {
    "ring": lambda mesh: context_parallel(mgk.Attention(8, 2, is_causal=True), mesh),
    "states": lambda mesh: context_parallel(mgk.Attention(8, 2, variant="mlk", is_causal=True), mesh),
    "tensor": lambda mesh: tensor_parallel(mgk.Attention(12, 3, is_causal=True), mesh),
}
MESSAGES = {
    "ring": r"context parallelism: rank . of 3 could not exchange keys with ranks",
    "states": r"context parallelism: rank . of 3 could not sum the gradients of the states",
    "tensor": r"[Tt]imed out|[Tt]imeout|closed by peer|reset by peer",
}


def lose_a_rank(rank, ranks, folder, kind, cause):
    """Run a layer on all ranks, then end the last rank, or stop it, before the backward pass of the others."""
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=120 if cause == "killed" else 5))
    layer = KINDS[kind](DeviceMesh.from_group(group, "cpu"))
    output = layer(torch.randn(1, 8, layer.embed_dim, requires_grad=True))
    if rank == ranks - 1:
        if cause == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(600):
            if all(Path(folder, f"{other}.json").exists() for other in range(rank)):
                return None
            time.sleep(0.1)
    output.sum().backward()
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cause"),
    [("ring", "killed"), ("ring", "stopped"), ("states", "killed"), ("tensor", "killed"), ("tensor", "stopped")],
)
def test_a_lost_rank_is_an_error_on_the_others(tmp_path, kind, cause):
    *others, _ = start_workers(lose_a_rank, 3, tmp_path, str(tmp_path), kind, cause)
    for result in others:
        # `start_workers` kills a rank that hangs, which then has no result.
        assert result is not None
        assert re.search(MESSAGES[kind], result["error"]), result
