"""Rank and effective rank of matrices, many at once, in fp64.

The rank is the number of singular values above a threshold, 1e-6 in the paper. For large matrices it is counted from
the eigenvalues of AᵀA, which cost a fraction of the singular values of A but are known only to about eps·‖A‖², where
the threshold is 1e-12: where that could change the count, the large directions are taken out of A and the rest is
counted again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

THRESHOLD = 1e-6
# Smaller matrices are decomposed themselves: LAPACK takes as little time for that.
DIRECT = 128
# How far an eigenvalue of an n × n Gram matrix may be off, in units of eps·‖A‖²·√n: below 1 on matrices of known rank.
ROUNDING = 4.0
# A GPU decomposes one matrix after another and is mostly idle meanwhile: so many at once, each on a stream of its own.
STREAMS = 8


class Spectra(NamedTuple):
    """For each matrix."""

    rank: Tensor  # int64 [n]
    effective_rank: Tensor  # fp64 [n]: exp of the entropy of the normalised singular values


def spectra(matrices: Tensor, *, threshold: float = THRESHOLD) -> Spectra:
    """Ranks of [n, L, S], computed in fp64 whatever the type given."""
    if matrices.dim() != 3 or not matrices.is_floating_point():
        raise ValueError(f"matrices must be a floating-point tensor [n, L, S], got {list(matrices.shape)}")
    matrices = matrices.double()
    if min(matrices.shape[1:]) <= DIRECT:
        values = torch.linalg.svdvals(matrices)
        return Spectra((values > threshold).sum(-1), effective_rank(values))
    return _from_gram(matrices, threshold)


def effective_rank(values: Tensor) -> Tensor:
    """exp(−Σ p log p), p the singular values [n, k] over their sum (Roy and Vetterli 2007). 0 for the zero matrix."""
    total = values.sum(-1, keepdim=True)
    share = values / total.masked_fill(total == 0, 1)
    return torch.special.entr(share).sum(-1).exp().masked_fill(total.squeeze(-1) == 0, 0)


def _gram(matrices: Tensor) -> Tensor:
    """AᵀA, or AAᵀ where that is smaller: the squares of the singular values are its eigenvalues."""
    tall = matrices.shape[1] >= matrices.shape[2]
    return matrices.mT @ matrices if tall else matrices @ matrices.mT


def _from_gram(matrices: Tensor, threshold: float) -> Spectra:
    squares = _eigenvalues(_gram(matrices))
    rounding = ROUNDING * squares.shape[-1] ** 0.5 * torch.finfo(torch.float64).eps
    noise = rounding * squares[:, -1:].clamp(min=0)
    above = (squares > threshold**2).sum(-1)
    unsure = ((squares - threshold**2).abs() <= noise).any(-1)
    unclear = unsure.nonzero().flatten()
    if len(unclear):
        counts = _at_once(lambda matrix: _count_deflated(matrix, threshold), list(matrices[unclear]))
        above[unclear] = torch.stack(counts)
    return Spectra(above, effective_rank(squares.clamp(min=0).sqrt()))


def _eigenvalues(gram: Tensor) -> Tensor:
    """Ascending, [n, k]."""
    return torch.cat(_at_once(torch.linalg.eigvalsh, gram.tensor_split(min(STREAMS, len(gram)))))


@cache
def _load_solvers(device: torch.device) -> None:
    """PyTorch loads what it decomposes matrices with on a GPU at the first call, which two threads must not make."""
    torch.linalg.eigh(torch.eye(2, dtype=torch.float64, device=device))


def _at_once(function: Callable[[Tensor], Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    """function(part) for each part; on a GPU up to STREAMS of them at the same time."""
    if parts[0].device.type != "cuda" or len(parts) == 1 or STREAMS == 1:
        return [function(part) for part in parts]
    device = parts[0].device
    _load_solvers(device)
    ready = torch.cuda.current_stream(device)

    def run(part: Tensor) -> Tensor:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(ready)
        with torch.cuda.stream(stream):
            found = function(part)
        stream.synchronize()
        return found

    with ThreadPoolExecutor(min(STREAMS, len(parts))) as pool:
        return list(pool.map(run, parts))


def _count_deflated(matrix: Tensor, threshold: float) -> Tensor:
    """The singular values above the threshold: those of the large directions, and those of what is left without them.

    What is left has a norm near the geometric mean of ‖A‖ and the threshold, so that its square is precise enough.
    """
    if matrix.shape[0] < matrix.shape[1]:
        matrix = matrix.mT
    squares, directions = torch.linalg.eigh(matrix.mT @ matrix)
    cut = max(float(squares[-1]), 0.0) ** 0.5 * threshold
    large = directions[:, squares > cut]
    rest = matrix - (matrix @ large) @ large.mT
    # Once more: the first pass leaves eps·‖A‖ of the large directions behind.
    rest = rest - (rest @ large) @ large.mT
    return (torch.linalg.eigvalsh(rest.mT @ rest) > threshold**2).sum() + large.shape[1]


def matrices_at_once(rows: int, columns: int, memory: int) -> int:
    """How many matrices can be ranked together within `memory` bytes; 0 if not one."""
    # The matrix, its Gram matrix, the workspace of the eigenvalues and, for a deflation, two more.
    one = 8 * (3 * rows * columns + 3 * min(rows, columns) ** 2)
    return memory // one


def in_batches(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, max(1, size)):
        yield slice(start, min(start + max(1, size), count))
