"""One table of token vectors, for the input and for the softmax over a large vocabulary.

Adaptive softmax: frequent tokens have an output each, the rest share one output a cluster and are told apart by a
second softmax within it, which only the positions whose target lies there pay for. Ids are in order of frequency.
No [positions × vocabulary] tensor is ever held: logits are made some rows at a time, and again for the gradient.
N positions, d width, V vocabulary, C tail clusters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mgk._core.validation import fail, positive_integer
from mgk.models.embedding import lookup

# Logits held at once.
ELEMENTS = 1 << 27
# Matrix products are fast where rows of 16 bit numbers begin at multiples of 16 bytes.
ALIGNMENT = 64


class TiedEmbedding(nn.Module):
    """Vectors [V, d] that embed tokens and score them.

    cutoffs: ids at which tail clusters begin, none for a plain softmax. bias: a learned number added to each score.
    """

    def __init__(self, vocab_size: int, width: int, cutoffs: Sequence[int] = (), *, bias: bool = True) -> None:
        super().__init__()
        self.vocab_size, self.cutoffs = vocab_size, check_cutoffs(cutoffs, vocab_size)
        edges = [0, *self.cutoffs, vocab_size]
        self.sizes = [high - low for low, high in pairwise(edges)]
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if bias else None
        self.cluster_weight = nn.Parameter(torch.empty(len(self.cutoffs), width))
        self.cluster_bias = nn.Parameter(torch.empty(len(self.cutoffs))) if bias else None
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        for weight in (self.weight, self.cluster_weight):
            nn.init.normal_(weight, std=std)
        for bias in (self.bias, self.cluster_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def embed(self, tokens: Tensor) -> Tensor:
        """[...] to [..., d]."""
        return lookup(tokens, self.weight)

    def rooms(self, targets: Any) -> list[int]:
        """Room for the targets in each tail cluster, as `losses` wants it. Asks the device."""
        clusters = self._clusters(torch.as_tensor(targets).reshape(-1))
        return [room_for(int(count)) for count in torch.bincount(clusters, minlength=len(self.sizes)).tolist()[1:]]

    def losses(self, hidden: Tensor, targets: Tensor, rooms: Sequence[int] | None = None) -> Tensor:
        """−log p(target) in fp32 for each position: [..., d] and [...] to [...]. No target is ignored.

        rooms: for each tail cluster a number that its targets do not exceed, where the caller knows one (`rooms`, or
        `room_for` of their count). The shapes depend on nothing else. Without it the device is asked, and waited for.
        Where there are more targets than room, or a target is no token, the losses are NaN: the host does not wait to
        see it.
        """
        self._check(hidden, targets, rooms)
        shape = targets.shape
        hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        nothing = (targets < 0) | (targets >= self.vocab_size)
        targets = targets.clamp(0, self.vocab_size - 1)
        weights, biases = self._parts()
        if not self.cutoffs:
            losses = cross_entropy(hidden, weights[0], biases[0], targets)
            return torch.where(nothing, math.nan, losses).view(shape)
        rooms = self.rooms(targets) if rooms is None else rooms
        clusters = self._clusters(targets)
        # In the first softmax a rare token is its cluster.
        frequent = torch.where(clusters == 0, targets, self.cutoffs[0] + clusters - 1)
        losses = cross_entropy(hidden, weights[0], biases[0], frequent)
        losses = torch.where(nothing, math.nan, losses)
        order = torch.argsort(clusters, stable=True)
        for n, (low, weight, bias, room) in enumerate(
            zip(self.cutoffs, weights[1:], biases[1:], rooms, strict=True), 1
        ):
            room = min(room, len(targets))
            if not room:
                losses = torch.where(clusters == n, math.nan, losses)
                continue
            places = torch.arange(room, device=targets.device)
            filled = (clusters == n).sum()
            rows = order[(places + (clusters < n).sum()).clamp(max=len(targets) - 1)]
            within = (targets.index_select(0, rows) - low).clamp(0, len(weight) - 1)
            further = cross_entropy(hidden.index_select(0, rows), weight, bias, within)
            further = torch.where(filled > room, math.nan, further)
            losses = losses.index_add(0, rows, torch.where(places < filled, further, 0))
        return losses.view(shape)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., d] to [..., V]: scores, for the adaptive softmax log probabilities. Meant for few rows."""
        if not self.cutoffs:
            return F.linear(hidden, self.weight, self.bias)
        # One product for all tokens, and scores put side by side rather than weights, which are many more.
        frequent, *tails = F.linear(hidden, self.weight, self.bias).split(self.sizes, dim=-1)
        clusters = F.linear(hidden, self.cluster_weight, self.cluster_bias)
        first = _upcast(torch.cat([frequent, clusters], dim=-1)).log_softmax(-1)
        frequent, clusters = first.split([self.sizes[0], len(tails)], dim=-1)
        within = [
            cluster + _upcast(tail).log_softmax(-1)
            for cluster, tail in zip(clusters.split(1, dim=-1), tails, strict=True)
        ]
        return torch.cat([frequent, *within], dim=-1)

    def _check(self, hidden: Tensor, targets: Any, rooms: Any) -> None:
        if not isinstance(targets, Tensor) or targets.dtype not in (torch.int32, torch.int64):
            fail("targets", "must be an integer tensor of token ids")
        if targets.shape != hidden.shape[:-1]:
            fail("targets", f"must have the tokens' shape {list(hidden.shape[:-1])}, got {list(targets.shape)}")
        if targets.device.type == "cpu" and targets.numel() and not torch.compiler.is_compiling():
            low, high = (int(each) for each in targets.aminmax())
            if low < 0 or high >= self.vocab_size:
                ids = f"token ids from 0 to {self.vocab_size - 1} (there is none that is ignored)"
                fail("targets", f"must be {ids}, got {low if low < 0 else high}")
        if rooms is not None:
            whole = isinstance(rooms, (list, tuple)) and all(isinstance(room, int) and room >= 0 for room in rooms)
            if not whole or len(rooms) != len(self.cutoffs):
                fail("rooms", f"must be {len(self.cutoffs)} numbers, one for each tail cluster, got {rooms!r}")

    def _clusters(self, targets: Tensor) -> Tensor:
        # Comparisons rather than a search: that would copy the cutoffs to the device, and wait.
        clusters = torch.zeros_like(targets)
        for cutoff in self.cutoffs:
            clusters = clusters + (targets >= cutoff)
        return clusters

    def _parts(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Weights and biases of each softmax; the first has the clusters behind the frequent tokens."""
        # Split, not sliced: the gradient of a slice is as long as the whole table.
        weights = list(self.weight.split(self.sizes))
        biases: list[Tensor | None] = [None] * len(self.sizes)
        if self.bias is not None and self.cluster_bias is not None:
            first, *tails = self.bias.split(self.sizes)
            biases = [torch.cat([first, self.cluster_bias]), *tails]
        weights[0] = torch.cat([weights[0], self.cluster_weight]) if self.cutoffs else weights[0]
        return weights, biases


def room_for(count: int) -> int:
    """The next of a few round numbers: so many shapes are there, whatever the texts. At most a quarter is left empty
    above 64."""
    step = max(64, 1 << max(0, count.bit_length() - 3))
    return count + -count % step


def check_cutoffs(cutoffs: Any, vocab_size: int) -> tuple[int, ...]:
    cutoffs = tuple(cutoffs)
    for cutoff in cutoffs:
        positive_integer("cutoffs", cutoff)
    if list(cutoffs) != sorted(set(cutoffs)) or (cutoffs and cutoffs[-1] >= vocab_size):
        fail("cutoffs", f"must increase and stay below vocab_size = {vocab_size}, got {list(cutoffs)}")
    return cutoffs


def cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """logsumexp(hidden · weightᵀ + bias) − the target's score, [N] in fp32 (fp64 for fp64), in memory linear in N."""
    kind = hidden.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else hidden.dtype
    bias = weight.new_zeros(weight.shape[0]) if bias is None else bias
    # Outputs that nothing is, so that the products are fast.
    padding = -weight.shape[0] % ALIGNMENT
    weight, bias = F.pad(weight, (0, 0, 0, padding)), F.pad(bias, (0, padding), value=-math.inf)
    losses: Tensor = _CrossEntropy.apply(hidden, weight, bias, target, dtype)
    return losses


class _CrossEntropy(torch.autograd.Function):
    """Keeps the inputs and one number a row; the backward makes the logits again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
        measure = _on(hidden, _loss_and_lse)
        used = weight.to(dtype), bias.to(dtype)
        parts = [
            measure(F.linear(rows.to(dtype), *used), wanted)
            for rows, wanted in zip(*_in_chunks(weight.shape[0], hidden, target), strict=True)
        ]
        losses, lse = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, target, lse)
        ctx.dtype = dtype
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, lse = ctx.saved_tensors
        differentiate = _on(hidden, _score_gradient)
        # Sums over chunks are kept in the type of the parameters.
        of_weight, of_bias, of_hidden = torch.zeros_like(weight), torch.zeros_like(bias), []
        used = weight.to(ctx.dtype), bias.to(ctx.dtype)
        for rows, *columns in zip(*_in_chunks(weight.shape[0], hidden, lse, target, slope), strict=True):
            rows = rows.to(ctx.dtype)
            of_scores = differentiate(F.linear(rows, *used), *columns)
            of_hidden.append((of_scores @ used[0]).to(hidden.dtype))
            of_weight += of_scores.T @ rows
            of_bias += of_scores.sum(0, dtype=torch.promote_types(bias.dtype, torch.float32))
        return torch.cat(of_hidden), of_weight, of_bias, None, None


def _in_chunks(classes: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Each tensor in pieces of as many rows as may have their logits held at once."""
    return [tensor.split(max(1, ELEMENTS // classes)) for tensor in tensors]


def _upcast(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _loss_and_lse(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    scores = _upcast(scores)
    lse = scores.logsumexp(-1)
    return lse - scores.gather(-1, target.unsqueeze(-1)).squeeze(-1), lse


def _score_gradient(scores: Tensor, lse: Tensor, target: Tensor, slope: Tensor) -> Tensor:
    probability = (scores.to(lse.dtype) - lse.unsqueeze(-1)).exp()
    hit = torch.arange(scores.shape[-1], device=scores.device) == target.unsqueeze(-1)
    return ((probability - hit.to(lse.dtype)) * slope.unsqueeze(-1)).to(scores.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _on(like: Tensor, function: Callable[..., Any]) -> Callable[..., Any]:
    """Fused on a GPU, where each pass over the logits takes time."""
    return _compiled(function) if like.device.type == "cuda" else function
