"""The ring starts the transfer of the next block before it computes on the current one."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

import mgk
from mgk import functional
from mgk._core.calls import mixture_call
from mgk.distributed import ring


def record_events(monkeypatch):
    """Replace transfers by copies from this rank to itself; return the list of sends, waits and computed blocks."""
    events = []

    def batch_isend_irecv(operations):
        events.append("send")
        for sent, received in zip(operations[::2], operations[1::2], strict=True):
            assert (sent.op, received.op) == (dist.isend, dist.irecv)
            received.tensor.copy_(sent.tensor)
        return [SimpleNamespace(wait=lambda: events.append("wait"))]

    def run_mixture(call, backend, run=functional.run_mixture):
        events.append("compute")
        return run(call, backend)

    monkeypatch.setattr(dist, "P2POp", lambda op, tensor, peer, group: SimpleNamespace(op=op, tensor=tensor))
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(dist, "batch_isend_irecv", batch_isend_irecv)
    monkeypatch.setattr(functional, "run_mixture", run_mixture)
    return events


def test_transfers_start_before_the_computation(monkeypatch):
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 4, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    shift = torch.randn(2, 2, 5, dtype=torch.float64)
    arguments = functional.bind_arguments(mgk.smgk_attention, *tensors, shift)
    backend = arguments.pop("backend")
    events = record_events(monkeypatch)
    shards = ring.Shards(None, 1, 3)
    output = ring.run_ring(shards, mixture_call(**arguments), backend)
    block = ["send", "compute", "wait"]
    assert events == [*block, *block, "compute"]
    events.clear()
    output.sum().backward()
    # The gradients of a block are sent after its computation, and are awaited after that of the next block; only the
    # last transfer, of the gradients to their owner, has no computation to overlap with.
    first, second, last = ["send", "compute"], ["send", "compute", "wait"], ["compute", "wait"]
    assert events == [*first, "send", "wait", *second, "send", "wait", *last, "send", "wait"]
