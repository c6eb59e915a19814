"""Tied token embedding and softmax, adaptive for large vocabularies.

Adaptive softmax: frequent tokens and one entry per tail cluster share the first softmax. A second softmax within the
cluster separates its tokens, and is computed only for positions whose target is in the cluster. Token ids are sorted by
decreasing frequency. No [N, V] tensor is held: logits are computed in chunks of rows, and recomputed in the backward.
N is the number of positions, V the vocabulary size, d the dimension of the token vectors.
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

from mgk._core.precision import is_autocast_enabled
from mgk._core.validation import fail, positive_integer

# Maximum number of logits in memory.
MAX_LOGITS = 1 << 27
# Numbers of classes with compiled code of their own; others share code for any number.
MAX_COMPILED_CLASSES = 4
# GEMMs are fast if rows of 16-bit numbers start at multiples of 16 bytes.
ALIGNMENT = 64
# For larger vocabularies the GEMM with the one-hot matrix is slower than the scatter.
MAX_ONE_HOT = 1024


class TiedEmbedding(nn.Module):
    """Token vectors [V, d] that serve as input embedding and as softmax weights.

    Args:
        vocab_size: Number of tokens V.
        width: Dimension d of the vectors.
        cutoffs: First token ids of the tail clusters; empty for a full softmax.
        bias: Whether to add a learned bias to each logit.
    """

    def __init__(self, vocab_size: int, width: int, cutoffs: Sequence[int] = (), *, bias: bool = True) -> None:
        super().__init__()
        self.vocab_size, self.cutoffs = vocab_size, check_cutoffs(cutoffs, vocab_size)
        edges = [0, *self.cutoffs, vocab_size]
        self.sizes = [high - low for low, high in pairwise(edges)]
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if bias else None
        # Without cutoffs these two are empty; they stay in the state dict.
        self.cluster_weight = nn.Parameter(torch.empty(len(self.cutoffs), width))
        self.cluster_bias = nn.Parameter(torch.empty(len(self.cutoffs))) if bias else None
        self.reset_parameters()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, also one that replaces another on loading; freeze it if it is empty.

        An empty parameter is not used and has no gradient, for which DDP would wait.
        """
        super().register_parameter(name, param)
        if param is not None and not param.numel():
            param.requires_grad_(False)

    def reset_parameters(self, std: float = 0.02) -> None:
        for weight in (self.weight, self.cluster_weight):
            nn.init.normal_(weight, std=std)
        for bias in (self.bias, self.cluster_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the vectors [..., d] of token ids [...]."""
        return embed_tokens(tokens, self.weight)

    def cluster_capacities(self, targets: Any) -> list[int]:
        """Return a capacity for each tail cluster that fits the targets. Synchronizes with the device."""
        clusters = self._clusters(torch.as_tensor(targets).reshape(-1))
        counts = torch.bincount(clusters, minlength=len(self.sizes)).tolist()[1:]
        return [round_capacity(int(count)) for count in counts]

    def losses(self, hidden: Tensor, targets: Tensor, capacities: Sequence[int] | None = None) -> Tensor:
        """Compute -log p(target) of each position in fp32.

        Args:
            hidden: Outputs of the model, [..., d].
            targets: Token ids [...]; no id is ignored.
            capacities: Maximum number of targets in each tail cluster; all shapes follow from them. Default:
                `cluster_capacities(targets)`, which synchronizes with the device.

        Returns:
            Losses [...]. They are NaN if a cluster has more targets than its capacity or, on a GPU, if a target is
            out of range: an error would have to synchronize.
        """
        self._check(hidden, targets, capacities)
        shape = targets.shape
        hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        invalid = (targets < 0) | (targets >= self.vocab_size)
        targets = targets.clamp(0, self.vocab_size - 1)
        weights, biases = self._split_parameters()
        if not self.cutoffs:
            losses = cross_entropy(hidden, weights[0], biases[0], targets)
            return torch.where(invalid, math.nan, losses).view(shape)
        capacities = self.cluster_capacities(targets) if capacities is None else capacities
        clusters = self._clusters(targets)
        # In the first softmax, a tail token is represented by its cluster.
        head_targets = torch.where(clusters == 0, targets, self.cutoffs[0] + clusters - 1)
        losses = cross_entropy(hidden, weights[0], biases[0], head_targets)
        losses = torch.where(invalid, math.nan, losses)
        order = torch.argsort(clusters, stable=True)
        for n, (low, weight, bias, capacity) in enumerate(
            zip(self.cutoffs, weights[1:], biases[1:], capacities, strict=True), 1
        ):
            capacity = min(capacity, len(targets))
            if not capacity:
                losses = torch.where(clusters == n, math.nan, losses)
                continue
            # A fixed number of rows: first those of the cluster, then others, whose losses are replaced by 0.
            slots = torch.arange(capacity, device=targets.device)
            count = (clusters == n).sum()
            rows = order[(slots + (clusters < n).sum()).clamp(max=len(targets) - 1)]
            tail_targets = (targets.index_select(0, rows) - low).clamp(0, len(weight) - 1)
            tail_losses = cross_entropy(hidden.index_select(0, rows), weight, bias, tail_targets)
            tail_losses = torch.where(count > capacity, math.nan, tail_losses)
            losses = losses.index_add(0, rows, torch.where(slots < count, tail_losses, 0))
        return losses.view(shape)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V], or log probabilities of an adaptive softmax, from [..., d]. Meant for few rows."""
        if not self.cutoffs:
            return F.linear(hidden, self.weight, self.bias)
        # One GEMM for all tokens; concatenating logits moves fewer numbers than concatenating weights.
        frequent, *tails = F.linear(hidden, self.weight, self.bias).split(self.sizes, dim=-1)
        clusters = F.linear(hidden, self.cluster_weight, self.cluster_bias)
        head = _upcast(torch.cat([frequent, clusters], dim=-1)).log_softmax(-1)
        frequent, clusters = head.split([self.sizes[0], len(tails)], dim=-1)
        rare = [
            cluster + _upcast(tail).log_softmax(-1)
            for cluster, tail in zip(clusters.split(1, dim=-1), tails, strict=True)
        ]
        return torch.cat([frequent, *rare], dim=-1)

    def _check(self, hidden: Tensor, targets: Any, capacities: Any) -> None:
        if not isinstance(targets, Tensor) or targets.dtype not in (torch.int32, torch.int64):
            fail("targets", "must be an integer tensor of token ids")
        if targets.shape != hidden.shape[:-1]:
            fail("targets", f"must have shape {list(hidden.shape[:-1])}, one per position, got {list(targets.shape)}")
        if targets.device.type == "cpu" and targets.numel() and not torch.compiler.is_compiling():
            low, high = (int(bound) for bound in targets.aminmax())
            if low < 0 or high >= self.vocab_size:
                ids = f"token ids from 0 to {self.vocab_size - 1} (there is no ignored id)"
                fail("targets", f"must be {ids}, got {low if low < 0 else high}")
        if capacities is not None:
            is_integers = isinstance(capacities, (list, tuple)) and all(
                isinstance(capacity, int) and capacity >= 0 for capacity in capacities
            )
            if not is_integers or len(capacities) != len(self.cutoffs):
                count = f"{len(self.cutoffs)} integers, one for each tail cluster"
                fail("capacities", f"must be {count}, got {capacities!r}")

    def _clusters(self, targets: Tensor) -> Tensor:
        # Comparisons instead of searchsorted, which would copy the cutoffs to the device and synchronize.
        clusters = torch.zeros_like(targets)
        for cutoff in self.cutoffs:
            clusters = clusters + (targets >= cutoff)
        return clusters

    def _split_parameters(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return weights and biases of each softmax; the first includes the entries of the clusters."""
        # split() instead of slices: the gradient of each slice would have the size of the whole table.
        weights = list(self.weight.split(self.sizes))
        biases: list[Tensor | None] = [None] * len(self.sizes)
        if self.bias is not None:
            biases = list(self.bias.split(self.sizes))
        if self.cutoffs:
            weights[0] = torch.cat([weights[0], self.cluster_weight])
            if biases[0] is not None and self.cluster_bias is not None:
                biases[0] = torch.cat([biases[0], self.cluster_bias])
        return weights, biases


def round_capacity(count: int) -> int:
    """Round a number of targets up, so that few distinct shapes occur; above 64, at most a quarter is unused."""
    step = max(64, 1 << max(0, count.bit_length() - 3))
    return count + -count % step


def check_cutoffs(cutoffs: Any, vocab_size: int) -> tuple[int, ...]:
    """Return the cutoffs as a tuple, or raise a ValueError if they do not increase or exceed the vocabulary."""
    if not isinstance(cutoffs, list | tuple):
        fail("cutoffs", f"must be a list of token ids, got {cutoffs!r}")
    cutoffs = tuple(cutoffs)
    for cutoff in cutoffs:
        positive_integer("cutoffs", cutoff)
    if list(cutoffs) != sorted(set(cutoffs)) or (cutoffs and cutoffs[-1] >= vocab_size):
        fail("cutoffs", f"must increase and stay below vocab_size = {vocab_size}, got {list(cutoffs)}")
    return cutoffs


def cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """Compute the cross entropy of `hidden @ weight.T + bias` in memory linear in N.

    Returns:
        Losses [N] in fp32, or in fp64 for fp64 inputs.
    """
    device_type = hidden.device.type
    dtype = torch.get_autocast_dtype(device_type) if is_autocast_enabled(device_type) else hidden.dtype
    bias = weight.new_zeros(weight.shape[0]) if bias is None else bias
    # Pad with classes of probability 0, so that the GEMMs are aligned.
    padding = -weight.shape[0] % ALIGNMENT
    weight, bias = F.pad(weight, (0, 0, 0, padding)), F.pad(bias, (0, padding), value=-math.inf)
    losses: Tensor = _CrossEntropy.apply(hidden, weight, bias, target, dtype)
    return losses


class _CrossEntropy(torch.autograd.Function):
    """Save the inputs and one logsumexp per row; recompute the logits in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
        loss_and_lse = _compile_on_gpu(hidden, _loss_and_lse)
        cast_parameters = weight.to(dtype), bias.to(dtype)
        chunks = [
            loss_and_lse(F.linear(rows.to(dtype), *cast_parameters), targets)
            for rows, targets in zip(*_in_chunks(weight.shape[0], hidden, target), strict=True)
        ]
        losses, lse = (torch.cat(column) for column in zip(*chunks, strict=True))
        ctx.save_for_backward(hidden, weight, bias, target, lse)
        ctx.dtype = dtype
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, lse = ctx.saved_tensors
        logits_gradient = _compile_on_gpu(hidden, _logits_gradient)
        # Accumulated over chunks in the dtype of the parameters.
        d_weight, d_hidden = torch.zeros_like(weight), []
        # Without gradient if the model has no bias: the sum would read all logits again.
        d_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        cast_parameters = weight.to(ctx.dtype), bias.to(ctx.dtype)
        for rows, *columns in zip(*_in_chunks(weight.shape[0], hidden, lse, target, grad), strict=True):
            rows = rows.to(ctx.dtype)
            d_logits = logits_gradient(F.linear(rows, *cast_parameters), *columns)
            d_hidden.append((d_logits @ cast_parameters[0]).to(hidden.dtype))
            d_weight += d_logits.T @ rows
            if d_bias is not None:
                d_bias += d_logits.sum(0, dtype=torch.promote_types(bias.dtype, torch.float32))
        return torch.cat(d_hidden), d_weight, d_bias, None, None


def _in_chunks(num_classes: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Split tensors into chunks of rows with at most MAX_LOGITS logits."""
    return [tensor.split(max(1, MAX_LOGITS // num_classes)) for tensor in tensors]


def _upcast(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _loss_and_lse(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits = _upcast(logits)
    lse = logits.logsumexp(-1)
    return lse - logits.gather(-1, target.unsqueeze(-1)).squeeze(-1), lse


def _logits_gradient(logits: Tensor, lse: Tensor, target: Tensor, grad: Tensor) -> Tensor:
    probability = (logits.to(lse.dtype) - lse.unsqueeze(-1)).exp()
    is_target = torch.arange(logits.shape[-1], device=logits.device) == target.unsqueeze(-1)
    return ((probability - is_target.to(lse.dtype)) * grad.unsqueeze(-1)).to(logits.dtype)


_compiled_classes: set[int] = set()  # numbers of classes with code of their own


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function, dynamic=True)

    def call(logits: Tensor, *columns: Tensor) -> Any:
        _compile_for_classes(logits)
        return compiled(logits, *columns)

    return call


def _compile_for_classes(logits: Tensor) -> None:
    """Let the compiler generate code for this number of classes, but for any number of rows.

    With a symbolic number of classes, each element is located by a 64-bit division: 93 instead of 27 instructions per
    element of `_logits_gradient` (sm_90). Only the first few numbers have code of their own: torch.compile stops
    compiling a function after eight variants.
    """
    num_classes = logits.shape[-1]
    if num_classes in _compiled_classes or len(_compiled_classes) < MAX_COMPILED_CLASSES:
        _compiled_classes.add(num_classes)
        torch._dynamo.mark_static(logits, logits.dim() - 1)


def _compile_on_gpu(x: Tensor, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function on a GPU, to fuse element-wise passes over the logits, which are memory-bound there."""
    return _compiled(function) if x.device.type == "cuda" else function


class _OneHotEmbedding(torch.autograd.Function):
    """Embedding lookup whose backward is a GEMM with the one-hot matrix.

    On a GPU, the backward of nn.functional.embedding adds tens of thousands of tokens to a few rows with atomics, which
    is slow and not deterministic.
    """

    @staticmethod
    def forward(tokens: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(tokens, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        tokens, weight = inputs
        ctx.save_for_backward(tokens)
        ctx.num_rows = weight.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        ids = torch.arange(ctx.num_rows, device=grad.device)
        one_hot = (tokens.flatten() == ids[:, None]).to(grad.dtype)
        return None, one_hot @ grad.flatten(0, -2)


def embed_tokens(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return the rows [..., d] of `weight` [V, d] at token ids [...], with a fast gradient for a small V on a GPU."""
    if weight.is_cuda and weight.shape[0] <= MAX_ONE_HOT:
        embedded: Tensor = _OneHotEmbedding.apply(tokens, weight)
        return embedded
    try:
        return F.embedding(tokens, weight)
    except IndexError:
        # Caught instead of checked: reading the ids costs time, and on a GPU it would synchronize.
        fail("tokens", f"must hold ids from 0 to vocab_size - 1 = {weight.shape[0] - 1}")
