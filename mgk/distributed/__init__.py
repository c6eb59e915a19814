"""Parallelism over several processes: sequences (context), heads (tensor), and checkpoints that change shape.

All functions take a one-dimensional `DeviceMesh` of torch.distributed.
"""

from mgk.distributed.checkpoint import gather_weights, load_checkpoint, save_checkpoint
from mgk.distributed.context import context_parallel, sharded_attention
from mgk.distributed.sharding import local_positions, reduce_gradients, shard, unshard
from mgk.distributed.tensor import HeadParallel, tensor_parallel

__all__ = [
    "HeadParallel",
    "context_parallel",
    "gather_weights",
    "load_checkpoint",
    "local_positions",
    "reduce_gradients",
    "save_checkpoint",
    "shard",
    "sharded_attention",
    "tensor_parallel",
    "unshard",
]
