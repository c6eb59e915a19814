"""Token embeddings whose gradient is fast for a small vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Above this many rows the product with the one-hot matrix costs more than it saves.
SMALL = 1024


class _Lookup(torch.autograd.Function):
    """weight[tokens], with the gradient as a product: on a GPU tens of thousands of tokens would otherwise be added to
    a few rows one after another, by atomic additions whose order, and so whose rounding, differs from run to run."""

    @staticmethod
    def forward(tokens: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        tokens, weight = inputs
        ctx.save_for_backward(tokens)
        ctx.rows = weight.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        rows = torch.arange(ctx.rows, device=grad.device)
        member = (tokens.flatten() == rows[:, None]).to(grad.dtype)
        return None, member @ grad.flatten(0, -2)


def lookup(tokens: Tensor, weight: Tensor) -> Tensor:
    """[...] token ids to their rows of weight, [..., d]."""
    if weight.is_cuda and weight.shape[0] <= SMALL:
        embedded: Tensor = _Lookup.apply(tokens, weight)
        return embedded
    return nn.functional.embedding(tokens, weight)
