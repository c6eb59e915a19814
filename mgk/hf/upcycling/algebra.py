"""Optimal merges of key heads and value heads, from second moments of the calibration text.

A merge replaces the keys k_u of the heads u of a group by one key c = P [k_1; ...; k_g] and matrices A_u with
k_u ≈ A_u c. The logits q·k_u become (A_uᵀ q)·c: A_u moves into the query projection. Values are merged in the same way,
and their A_u moves into the output projection. All matrices are fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Directions whose energy is below this share of the largest are dropped: their inverse would amplify rounding errors.
NEGLIGIBLE = 1e-12


@dataclass(frozen=True)
class Planes:
    """Dimensions of a head that a rotary embedding rotates in pairs; the other dimensions are free.

    Attributes:
        first: Indices of the first dimension of every pair.
        second: Indices of the second dimension of every pair.
    """

    first: tuple[int, ...] = ()
    second: tuple[int, ...] = ()

    def free(self, head_dim: int) -> list[int]:
        """Return the dimensions that are not rotated."""
        return [i for i in range(head_dim) if i not in self.first and i not in self.second]


NO_PLANES = Planes()


@dataclass(frozen=True)
class Merge:
    """Merge of g heads.

    Attributes:
        compress: P [D, g·D].
        expand: A_u [g, D, D].
        loss: Weighted energy of the heads that the merge loses, per token.
        energy: Weighted energy of the heads, per token.
    """

    compress: Tensor
    expand: Tensor
    loss: float
    energy: float


def merge_svd(moment: Tensor, weights: Tensor, planes: Planes = NO_PLANES) -> Merge:
    """Merge heads with the least weighted squared error.

    Free dimensions of all heads are compressed together by a truncated SVD. A rotary embedding rotates a plane by an
    angle that depends on the position; only rotations and scalings of the same plane commute with it, so that a plane
    is compressed with the same plane of the other heads alone, by the first complex principal component.

    Args:
        moment: Second moment of the stacked heads [g·D, g·D], centred where a constant has no effect.
        weights: Importance of the directions of each head [g, D, D], positive semi-definite.
        planes: Dimensions that a rotary embedding rotates.

    Returns:
        The merge.
    """
    heads, dim = weights.shape[:2]
    compress = moment.new_zeros(dim, heads * dim)
    expand = moment.new_zeros(heads, dim, dim)
    loss = energy = 0.0
    free = planes.free(dim)
    if free:
        rows = torch.tensor([head * dim + i for head in range(heads) for i in free])
        index = torch.tensor(free)
        merge = _merge_free(moment[rows][:, rows], weights[:, index][:, :, index])
        compress[index[:, None], rows] = merge.compress
        expand[:, index[:, None], index] = merge.expand
        loss, energy = merge.loss, merge.energy
    for plane in zip(planes.first, planes.second, strict=True):
        plane_loss, plane_energy = _merge_plane(moment, weights, plane, compress, expand)
        loss, energy = loss + plane_loss, energy + plane_energy
    return Merge(compress, expand, loss, energy)


def merge_mean(moment: Tensor, weights: Tensor) -> Merge:
    """Replace heads by their mean, as grouped-query attention is initialized; the loss is that of `merge_svd`."""
    heads, dim = weights.shape[:2]
    identity = torch.eye(dim, dtype=moment.dtype)
    compress = identity.repeat(1, heads) / heads
    expand = identity.expand(heads, dim, dim).clone()
    difference = torch.eye(heads * dim, dtype=moment.dtype) - expand.reshape(heads * dim, dim) @ compress
    error = (difference @ moment @ difference.T).reshape(heads, dim, heads, dim)
    loss = sum(float((weights[u] * error[u, :, u]).sum()) for u in range(heads))
    return Merge(compress, expand, loss, _energy(moment, weights))


def merge_loss(moment: Tensor, weights: Tensor, planes: Planes = NO_PLANES) -> float:
    """Return the loss of `merge_svd` without its matrices: the energy of the truncated singular values."""
    heads, dim = weights.shape[:2]
    loss = 0.0
    free = planes.free(dim)
    if free:
        rows = torch.tensor([head * dim + i for head in range(heads) for i in free])
        index = torch.tensor(free)
        roots = matrix_root(weights[:, index][:, :, index])
        loss += float(_spectrum(moment[rows][:, rows], roots)[: -len(free)].sum())
    for plane in zip(planes.first, planes.second, strict=True):
        weighted, _, _ = _weighted_plane(moment, weights, plane)
        loss += float(torch.linalg.eigvalsh(weighted)[:-1].sum()) / 2
    return loss


def matrix_root(matrix: Tensor) -> Tensor:
    """Return the symmetric root of positive semi-definite matrices [..., D, D]."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.mT


def _energy(moment: Tensor, weights: Tensor) -> float:
    heads, dim = weights.shape[:2]
    blocks = moment.reshape(heads, dim, heads, dim)
    return sum(float((weights[u] * blocks[u, :, u]).sum()) for u in range(heads))


def _spectrum(moment: Tensor, roots: Tensor) -> Tensor:
    """Return the squared singular values of the weighted heads, ascending."""
    root = torch.block_diag(*roots)
    return torch.linalg.eigvalsh(root @ moment @ root).clamp(min=0)


def _merge_free(moment: Tensor, weights: Tensor) -> Merge:
    """Compress the d free dimensions of g heads, [g·d], to d."""
    heads, dim = weights.shape[:2]
    root = torch.block_diag(*matrix_root(weights))
    values, vectors = torch.linalg.eigh(root @ moment @ root)
    values = values.clamp(min=0)
    top, vectors = values[-dim:].flip(0), vectors[:, -dim:].flip(1)
    # The principal components vᵀ·root·k have variance λ. Keys and queries share the scale: both get λ^¼ per component.
    is_used = top > NEGLIGIBLE * values[-1]
    fourth_root = torch.where(is_used, top, torch.ones_like(top)) ** 0.25
    compress = (root @ vectors).T / fourth_root.unsqueeze(1) * is_used.unsqueeze(1)
    # Linear regression of the heads on c, whose variance is λ^½.
    expand = moment @ compress.T / fourth_root.square()
    return Merge(compress, expand.reshape(heads, dim, dim), float(values[:-dim].sum()), float(values.sum()))


def _weighted_plane(moment: Tensor, weights: Tensor, plane: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted complex second moment of a plane [g, g], the unweighted one, and the roots of the weights."""
    heads, dim = weights.shape[:2]
    i, j = plane
    blocks = moment.reshape(heads, dim, heads, dim)
    real = blocks[:, i, :, i] + blocks[:, j, :, j]
    imaginary = blocks[:, j, :, i] - blocks[:, i, :, j]
    complex_moment = torch.complex(real, imaginary)
    roots = (weights[:, i, i] + weights[:, j, j]).clamp(min=0).sqrt()
    return roots[:, None] * complex_moment * roots, complex_moment, roots


def _merge_plane(
    moment: Tensor, weights: Tensor, plane: tuple[int, int], compress: Tensor, expand: Tensor
) -> tuple[float, float]:
    """Write the entries of a plane into P and A; return the loss and the energy."""
    heads, dim = weights.shape[:2]
    weighted, complex_moment, roots = _weighted_plane(moment, weights, plane)
    values, vectors = torch.linalg.eigh(weighted)
    values = values.clamp(min=0)
    # A query of random direction has half of its squared product with a difference in each of the two dimensions.
    loss, energy = float(values[:-1].sum()) / 2, float(values.sum()) / 2
    if not values[-1] > 0:
        return loss, energy
    scale = values[-1] ** 0.25
    combination = vectors[:, -1].conj() * roots / scale  # c = Σ_u combination_u z_u, with variance λ^½
    factors = complex_moment @ combination.conj() / scale**2  # z_u ≈ factor_u c
    for u in range(heads):
        _set_plane(compress[:, u * dim : (u + 1) * dim], plane, combination[u])
        _set_plane(expand[u], plane, factors[u])
    return loss, energy


def _set_plane(matrix: Tensor, plane: tuple[int, int], factor: Tensor) -> None:
    """Make a matrix [D, D] multiply a plane by a complex factor."""
    i, j = plane
    matrix[i, i] = matrix[j, j] = factor.real
    matrix[i, j], matrix[j, i] = -factor.imag, factor.imag


def select_heads(moment: Tensor, heads: Sequence[int], dim: int) -> Tensor:
    """Return the second moment [g·D, g·D] of g of the n heads of a second moment [n·D, n·D]."""
    rows = torch.tensor([head * dim + i for head in heads for i in range(dim)])
    return moment[rows][:, rows]
