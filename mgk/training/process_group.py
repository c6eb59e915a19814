"""The process group of a run of several processes (DDP and FSDP): rank, presence and end."""

from __future__ import annotations

import os

import torch


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
