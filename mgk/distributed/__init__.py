"""Parallelism over several processes: sequences (context), heads (tensor), and checkpoints that change shape.

All functions take a one-dimensional `DeviceMesh` of torch.distributed.
"""

from mgk.distributed.context import context_parallel, sharded_attention
from mgk.distributed.sharding import local_positions, reduce_gradients, shard, unshard
from mgk.distributed.tensor import HeadParallel, tensor_parallel

__all__ = [
    "HeadParallel",
    "context_parallel",
    "local_positions",
    "reduce_gradients",
    "shard",
    "sharded_attention",
    "tensor_parallel",
    "unshard",
]
