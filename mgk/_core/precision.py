"""The dtype that backends compute in, and the handling of autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp32 for half precision and fp32, fp64 for fp64."""
    return dtype if dtype == torch.float64 else torch.float32


def is_autocast_enabled(device_type: str) -> bool:
    """Return whether autocast is on for a type of device; the meta device has no autocast."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def without_autocast(like: Tensor) -> AbstractContextManager[Any]:
    """Return a context manager that disables autocast on the device of `like`."""
    device_type = like.device.type
    # The region is opened only if autocast is on: torch 2.6 cannot save an exported program that contains one.
    return torch.autocast(device_type, enabled=False) if is_autocast_enabled(device_type) else nullcontext()


def autocast_inputs(query: Tensor, keys: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert query, keys and value to the autocast dtype if autocast is on."""
    device_type = query.device.type
    if not is_autocast_enabled(device_type):
        return query, keys, value
    dtype = torch.get_autocast_dtype(device_type)
    return query.to(dtype), keys.to(dtype), value.to(dtype)
