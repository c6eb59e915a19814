"""Checks that end in a ValueError which names the argument and says what it should be."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

NESTED = "is a nested tensor: lay its sequences one after another, [1, T, ...], and pass cu_seqlens"


def fail(name: str, message: str) -> NoReturn:
    raise ValueError(f"{name} {message}")


def nearest(value: Any, known: Iterable[str], cutoff: float = 0.7) -> str:
    """Which of the known names was probably meant, as the end of a message; "" if none is near."""
    alike = difflib.get_close_matches(value, list(known), cutoff=cutoff) if isinstance(value, str) else []
    # Letters in another order come first.
    alike.sort(key=lambda other: sorted(other) != sorted(value))
    return f"; did you mean {alike[0]!r}?" if alike else ""


def one_of(name: str, value: Any, known: Iterable[str]) -> Any:
    """The value, if it is one of the known names; otherwise a ValueError that lists them and says which is nearest."""
    known = list(known)
    if not isinstance(value, str) or value not in known:
        fail(name, f"must be one of {', '.join(map(repr, known))}, got {value!r}{nearest(value, known)}")
    return value


def number(name: str, value: Any, least: float = -math.inf, below: float = math.inf, *, above: bool = False) -> float:
    """The value as a float in [least, below), or in (least, below) with `above`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        fail(name, f"must be a number, got {repr(value) if isinstance(value, str) else type(value).__name__}")
    result = float(value)
    if math.isnan(result) or math.isinf(result) or not least <= result < below or (above and result == least):
        bounds = "finite" if least == -math.inf else f"{'more than' if above else 'at least'} {least:g}"
        bounds += "" if below == math.inf else f" and below {below:g}"
        fail(name, f"must be {bounds}, got {value!r}")
    return result


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        fail(name, f"must be True or False, got {value!r}")
    return value


def positive_integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        fail(name, f"must be a positive integer, got {value!r}")
    return value


def check_input(name: str, x: Any, width: int, like: Tensor | None = None) -> Tensor:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        fail(name, f"must be a floating-point tensor [B, L, {width}], got {kind_of(x)}")
    if x.is_nested:
        fail(name, NESTED)
    if x.dim() != 3 or x.shape[-1] != width:
        fail(name, f"must have shape [B, L, {width}], got {list(x.shape)}")
    if like is not None and x.shape[0] != like.shape[0]:
        fail(name, f"must have query's batch {like.shape[0]}, got {list(x.shape)}")
    if like is not None and x.device != like.device:
        fail(name, f"is on {x.device} but query is on {like.device}: move it there")
    return x


def check_dtype(name: str, x: Tensor, projection: torch.nn.Module) -> None:
    """Inputs have the type of the weights, unless autocast is to convert both, or somebody has put another module in
    the projection's place: quantised, say."""
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return
    if x.dtype != weight.dtype and (x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type)):
        fail(
            name,
            f"has dtype {x.dtype}, but the layer's weights have {weight.dtype}: convert one of them, or use autocast",
        )


def kind_of(value: Any) -> str:
    """What it is, for a message: the type, of a tensor its dtype and shape."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def check_tokens(tokens: Any, dims: str) -> None:
    """Token ids, as many dimensions as `dims` names ('B L')."""
    whole = isinstance(tokens, Tensor) and tokens.dtype in (torch.int32, torch.int64)
    if not whole or tokens.dim() != len(dims.split()):
        fail("tokens", f"must be an int32 or int64 tensor [{dims.replace(' ', ', ')}], got {kind_of(tokens)}")


def check_padding(mask: Any, batch: int, length: int, like: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        fail("key_padding_mask", f"must be a bool tensor [B, S], True = padding, got {kind_of(mask)}")
    if mask.shape != (batch, length):
        fail("key_padding_mask", f"must have shape [B, S] = [{batch}, {length}], got {list(mask.shape)}")
    if mask.device != like.device:
        fail("key_padding_mask", f"is on {mask.device} but query is on {like.device}: move it there")
    return mask


def check_place(device: Any, dtype: Any) -> dict[str, Any]:
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        fail("dtype", f"must be a floating-point torch.dtype, got {dtype!r}")
    try:
        device = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be a torch device, got {device!r}") from error
    return {"device": device, "dtype": dtype}


def check_positions(position_ids: Any, query: Tensor) -> Tensor:
    if not isinstance(position_ids, Tensor) or position_ids.dtype not in (torch.int32, torch.int64):
        fail("position_ids", "must be an integer tensor [L] or [B, L]")
    batch, length = query.shape[:2]
    if position_ids.shape not in ((length,), (batch, length), (1, length)):
        fail("position_ids", f"must have shape [L] or [B, L] = [{batch}, {length}], got {list(position_ids.shape)}")
    if position_ids.device != query.device:
        fail("position_ids", f"is on {position_ids.device} but query is on {query.device}: move it there")
    return position_ids
