"""Parameters and buffers whose heads are sharded over ranks (tensor parallelism)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def local_tensor(x: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, differentiably; return other tensors unchanged."""
    # By attribute: importing DTensor takes longer than the rest of the package.
    to_local = getattr(x, "to_local", None)
    return x if to_local is None else to_local()


class _SumGradient(torch.autograd.Function):
    """Identity whose gradient is summed over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _GatherHeads(torch.autograd.Function):
    """Concatenation of the heads [B, heads, ...] of all ranks, which all ranks use alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: HeadShards) -> Tensor:
        ctx.rows = shards.index * x.shape[1], x.shape[1]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(shards.count)]
        dist.all_gather(parts, x.contiguous(), group=shards.group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(1, *ctx.rows), None


@dataclass(frozen=True)
class HeadShards:
    """The part of the heads that a rank has: part `index` of `count` equal parts."""

    group: Any
    index: int
    count: int

    def sum_gradient(self, x: Tensor) -> Tensor:
        """Return a parameter that all heads share; its gradient is summed over the parts."""
        result: Tensor = _SumGradient.apply(x, self.group)
        return result

    def gather_heads(self, x: Tensor) -> Tensor:
        """Return a tensor [B, heads of this rank, ...] with the heads of all ranks."""
        result: Tensor = _GatherHeads.apply(x, self)
        return result

    def __deepcopy__(self, memo: Any) -> HeadShards:
        return self  # process groups cannot be copied

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Sum statistics [heads of this rank, ...] over all ranks that have the same heads."""
        # All ranks add to the statistics of all heads, so that no group of the ranks with equal heads is needed.
        heads = tensor.shape[0]
        rows = slice(self.index * heads, (self.index + 1) * heads)
        total = tensor.new_zeros(self.count * heads, *tensor.shape[1:])
        total[rows] = tensor
        dist.all_reduce(total)
        return total[rows]
