"""The balanced split of a sequence over the ranks of a mesh, and its inverse.

The sequence is cut into 2R chunks of equal length. Rank r of R has chunks r and 2R - 1 - r, so that all ranks have the
same number of causal pairs. The order of the rows of a rank is that of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mgk._core.integers import ceil_div
from mgk._core.masks import cu_seqlens_to_segments
from mgk._core.validation import fail


def check_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Check that a mesh has one dimension, which its process group needs."""
    if not isinstance(mesh, DeviceMesh):
        fail("mesh", f"must be a torch.distributed DeviceMesh (init_device_mesh), got {type(mesh).__name__}")
    if mesh.ndim != 1:
        example = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "cp"
        fail("mesh", f"must have one dimension, got {mesh.ndim}: pass one of them, such as mesh[{example!r}]")
    return mesh


def chunk_starts(rank: int, ranks: int, chunk: int) -> tuple[int, int]:
    """Return the positions in the sequence at which the two chunks of a rank start."""
    return rank * chunk, (2 * ranks - 1 - rank) * chunk


def rows_of_rank(rank: int, ranks: int, length: int, device: torch.device | None = None) -> Tensor:
    """Return the positions in the sequence of the `length` rows of a rank."""
    chunk = length // 2
    steps = torch.arange(chunk, device=device)
    first, second = chunk_starts(rank, ranks, chunk)
    return torch.cat([first + steps, second + steps])


def check_local_length(name: str, length: int) -> int:
    """Check that the rows of a rank are two chunks of equal length."""
    if length % 2:
        fail(name, f"has {length} rows on this rank, but the balanced split has two chunks of equal length: use shard")
    return length


def shard(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """Return the rows of a sequence that belong to this rank.

    Args:
        x: The whole sequence, equal on all ranks: tokens [B, L], embeddings [B, L, d], targets, or a padding mask.
        mesh: One-dimensional mesh of the R ranks.
        dim: Dimension of length L, a multiple of 2R.

    Returns:
        The chunks r and 2R - 1 - r of 2R, concatenated: length L / R.

    Examples:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # under torchrun: the number of ranks
        >>> mgk.distributed.shard(torch.arange(6)[None], mesh)
        tensor([[0, 1, 2, 3, 4, 5]])
    """
    ranks = check_mesh(mesh).size()
    length = x.shape[dim]
    if length % (2 * ranks):
        needed = ceil_div(length, 2 * ranks) * 2 * ranks
        fail("x", f"has length {length}, which is not a multiple of 2 × {ranks} ranks: pad it to {needed}")
    return x.index_select(dim, rows_of_rank(mesh.get_local_rank(), ranks, length // ranks, x.device))


def local_positions(length: int, mesh: DeviceMesh, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return the positions of this rank's rows, [length].

    Args:
        length: Number of rows of this rank.
        mesh: One-dimensional mesh of the ranks.
        cu_seqlens: Offsets of packed sequences in the whole length; positions then count from the start of each.

    Examples:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # under torchrun: the number of ranks
        >>> mgk.distributed.local_positions(6, mesh, torch.tensor([0, 4, 6]))
        tensor([0, 1, 2, 3, 0, 1])
    """
    check_local_length("length", length)
    device = None if cu_seqlens is None else cu_seqlens.device
    rows = rows_of_rank(check_mesh(mesh).get_local_rank(), mesh.size(), length, device)
    if cu_seqlens is None:
        return rows.to(mesh.device_type)
    return cu_seqlens_to_segments(cu_seqlens, length * mesh.size())[1][rows]


@torch.no_grad()
def unshard(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """Gather the rows of all ranks in the order of the sequence, without gradients.

    Args:
        x: The rows of this rank, as `shard` returns them.
        mesh: One-dimensional mesh of the ranks.
        dim: Dimension of the rows.

    Examples:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # under torchrun: the number of ranks
        >>> x = torch.randn(2, 8, 3)
        >>> torch.equal(mgk.distributed.unshard(mgk.distributed.shard(x, mesh), mesh), x)
        True
    """
    ranks = check_mesh(mesh).size()
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(parts, x.contiguous(), group=mesh.get_group())
    rows = torch.cat([rows_of_rank(rank, ranks, x.shape[dim], x.device) for rank in range(ranks)])
    return torch.cat(parts, dim).index_select(dim, rows.argsort())


@torch.no_grad()
def reduce_gradients(parameters: nn.Module | Iterable[Tensor], mesh: DeviceMesh) -> None:
    """Sum the gradients of parameters over the ranks of a mesh, in place.

    Not needed if the ranks are part of the mesh of DDP or FSDP, which average gradients: their loss is then the mean
    over the tokens of a rank, here the sum over them divided by the number of tokens of all ranks.

    Args:
        parameters: A module or its parameters, equal on all ranks. All ranks must have gradients for the same ones.
        mesh: One-dimensional mesh of the ranks.

    Examples:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # under torchrun: the number of ranks
        >>> layer = mgk.distributed.context_parallel(mgk.Attention(32, 4), mesh)
        >>> layer(torch.randn(1, 8, 32)).sum().backward()
        >>> mgk.distributed.reduce_gradients(layer, mesh)
    """
    group = check_mesh(mesh).get_group()
    for parameter in parameters.parameters() if isinstance(parameters, nn.Module) else parameters:
        if parameter.grad is not None:
            gradient = parameter.grad
            dist.all_reduce(gradient.to_local() if hasattr(gradient, "to_local") else gradient, group=group)
