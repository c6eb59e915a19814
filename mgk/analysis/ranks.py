"""Rank and effective rank of batches of matrices, in fp64.

The rank is the number of singular values above a threshold, 1e-6 in the paper. For large matrices it is computed from
the eigenvalues of AᵀA, which are much cheaper than the singular values of A but exact only to about eps·‖A‖², while
the squared threshold is 1e-12. If that error could change the rank, the large directions are projected out of A and
the singular values of the remainder are counted separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

THRESHOLD = 1e-6
# Up to this size the SVD is used: in LAPACK it is as fast as computing the eigenvalues.
MAX_SVD_SIZE = 128
# Error bound of an eigenvalue of an n × n Gram matrix, in units of eps·‖A‖²·√n; measured on known ranks: below 1.
ROUNDING = 4.0
# Concurrent CUDA streams: a GPU is mostly idle while it decomposes a single matrix.
STREAMS = 8


class Spectra(NamedTuple):
    """Ranks of a batch of matrices.

    Examples:
        >>> mgk.analysis.spectra(torch.zeros(1, 3, 3)).rank
        tensor([0])
    """

    rank: Tensor  # int64 [n]
    effective_rank: Tensor  # fp64 [n]: exp of the entropy of the normalized singular values


def spectra(matrices: Tensor, *, threshold: float = THRESHOLD, streams: int = STREAMS) -> Spectra:
    """Compute rank and effective rank of each matrix, in fp64.

    Args:
        matrices: Floating-point tensor [n, L, S].
        threshold: The rank is the number of singular values above this.
        streams: CUDA streams that decompose matrices concurrently.

    Examples:
        >>> mgk.analysis.spectra(torch.eye(4).expand(2, 4, 4)).effective_rank
        tensor([4., 4.], dtype=torch.float64)
    """
    if matrices.dim() != 3 or not matrices.is_floating_point():
        raise ValueError(f"matrices must be a floating-point tensor [n, L, S], got {list(matrices.shape)}")
    matrices = matrices.double()
    if not matrices.isfinite().all():
        raise ValueError("the attention weights are not finite: the model has diverged, or its weights are damaged")
    if min(matrices.shape[1:]) <= MAX_SVD_SIZE:
        values = torch.linalg.svdvals(matrices)
        return Spectra((values > threshold).sum(-1), effective_rank(values))
    return _spectra_from_gram(matrices, threshold, streams)


def effective_rank(values: Tensor) -> Tensor:
    """Compute exp(−Σ p log p), p = singular values [n, k] over their sum (Roy and Vetterli 2007); 0 if all are 0."""
    total = values.sum(-1, keepdim=True)
    share = values / total.masked_fill(total == 0, 1)
    return torch.special.entr(share).sum(-1).exp().masked_fill(total.squeeze(-1) == 0, 0)


def _gram(matrices: Tensor) -> Tensor:
    """Compute the smaller of AᵀA and AAᵀ; its eigenvalues are the squared singular values."""
    tall = matrices.shape[1] >= matrices.shape[2]
    return matrices.mT @ matrices if tall else matrices @ matrices.mT


def _spectra_from_gram(matrices: Tensor, threshold: float, streams: int) -> Spectra:
    squares = _eigenvalues(_gram(matrices), streams)
    rounding = ROUNDING * squares.shape[-1] ** 0.5 * torch.finfo(torch.float64).eps
    noise = rounding * squares[:, -1:].clamp(min=0)
    rank = (squares > threshold**2).sum(-1)
    ambiguous = ((squares - threshold**2).abs() <= noise).any(-1).nonzero().flatten()
    if len(ambiguous):
        counts = _map_on_streams(
            lambda matrix: _count_after_deflation(matrix, threshold), list(matrices[ambiguous]), streams
        )
        rank[ambiguous] = torch.stack(counts)
    return Spectra(rank, effective_rank(squares.clamp(min=0).sqrt()))


def _eigenvalues(gram: Tensor, streams: int) -> Tensor:
    """Compute eigenvalues [n, k], ascending."""
    return torch.cat(_map_on_streams(torch.linalg.eigvalsh, gram.tensor_split(min(streams, len(gram))), streams))


@cache
def _load_solvers(device: torch.device) -> None:
    """Run one decomposition: the first call loads the CUDA solver library and must not run in two threads at once."""
    torch.linalg.eigh(torch.eye(2, dtype=torch.float64, device=device))


def _map_on_streams(function: Callable[[Tensor], Tensor], parts: Sequence[Tensor], streams: int) -> list[Tensor]:
    """Apply the function to each part; on a GPU with up to `streams` parts at the same time."""
    if parts[0].device.type != "cuda" or len(parts) == 1 or streams == 1:
        return [function(part) for part in parts]
    device = parts[0].device
    _load_solvers(device)
    ready = torch.cuda.current_stream(device)

    def run(part: Tensor) -> Tensor:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(ready)
        with torch.cuda.stream(stream):
            result = function(part)
        stream.synchronize()
        return result

    with ThreadPoolExecutor(min(streams, len(parts))) as pool:
        return list(pool.map(run, parts))


def _count_after_deflation(matrix: Tensor, threshold: float) -> Tensor:
    """Count singular values above the threshold: the large directions, plus those of the matrix without them.

    The remainder has a norm near the geometric mean of ‖A‖ and the threshold, so its Gram matrix is precise enough.
    """
    if matrix.shape[0] < matrix.shape[1]:
        matrix = matrix.mT
    squares, directions = torch.linalg.eigh(matrix.mT @ matrix)
    cut = max(float(squares[-1]), 0.0) ** 0.5 * threshold
    large = directions[:, squares > cut]
    remainder = matrix - (matrix @ large) @ large.mT
    # Project twice: the first projection leaves a residual of eps·‖A‖ in the large directions.
    remainder = remainder - (remainder @ large) @ large.mT
    return (torch.linalg.eigvalsh(remainder.mT @ remainder) > threshold**2).sum() + large.shape[1]


def bytes_per_matrix(rows: int, columns: int) -> int:
    """Return the memory that ranking a matrix needs."""
    # Matrix, Gram matrix, workspace of the eigenvalue solver and, for a deflation, two more.
    return 8 * (3 * rows * columns + 3 * min(rows, columns) ** 2)


def max_matrices(rows: int, columns: int, memory: int) -> int:
    """Return the number of matrices that can be ranked together within `memory` bytes; 0 if none fits."""
    return memory // bytes_per_matrix(rows, columns)


def split_range(count: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` elements that cover range(count)."""
    for start in range(0, count, max(1, size)):
        yield slice(start, min(start + max(1, size), count))
