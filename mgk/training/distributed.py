"""Helpers for runs of several processes (DDP and FSDP)."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn


def is_first_rank() -> bool:
    """Return whether this process writes the files of a run; valid before the process group exists."""
    return os.environ.get("RANK", "0") == "0"


def is_distributed() -> bool:
    """Return whether this process belongs to a distributed run."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def shutdown_distributed() -> None:
    """Destroy the process group after a barrier; a rank that exits early can abort the others."""
    if is_distributed():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the full state dict of a model; with FSDP, all ranks must call this together."""
    # Imported here: DTensor takes longer to import than the rest of the package.
    from mgk.distributed.checkpoint import gather_weights

    return gather_weights(model)
