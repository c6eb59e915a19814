"""Temporary eval mode of a module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch to eval mode without gradients, and restore the mode of every submodule on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
