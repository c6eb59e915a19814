"""Checks of numbers, flags, names and tensors.

A failed check raises ValueError("<argument> <what it should be>, got ...").
`operator_checks` and `layer_checks` check the arguments of the operators and of the layers with these.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, NoReturn

from torch import Tensor

NESTED = "is a nested tensor: concatenate its sequences to [1, T, ...] and pass cu_seqlens"


# Numbers, flags and names


def fail(name: str, message: str) -> NoReturn:
    """Raise a ValueError about the argument `name`."""
    raise ValueError(f"{name} {message}")


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error, or the name of its class if it has no message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def spelling_hint(value: Any, known: Iterable[str], cutoff: float = 0.7) -> str:
    """Return the end of a message about a misspelt name ("; did you mean 'x'?"), or an empty string."""
    alike = difflib.get_close_matches(value, list(known), cutoff=cutoff) if isinstance(value, str) else []
    # Names with the same letters in another order come first.
    alike.sort(key=lambda name: sorted(name) != sorted(value))
    return f"; did you mean {alike[0]!r}?" if alike else ""


def one_of(name: str, value: Any, known: Iterable[str]) -> Any:
    """Check that the value is one of the known names."""
    known = list(known)
    if not isinstance(value, str) or value not in known:
        fail(name, f"must be one of {', '.join(map(repr, known))}, got {value!r}{spelling_hint(value, known)}")
    return value


def number(name: str, value: Any, least: float = -math.inf, below: float = math.inf, *, above: bool = False) -> float:
    """Check that the value is in [least, below), or in (least, below) with `above`; return it as a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        fail(name, f"must be a number, got {repr(value) if isinstance(value, str) else type(value).__name__}")
    # float() cannot convert integers above 1.8e308.
    result = math.inf if isinstance(value, int) and abs(value) > 1 << 1000 else float(value)
    if math.isnan(result) or math.isinf(result) or not least <= result < below or (above and result == least):
        bounds = "finite" if least == -math.inf else f"{'more than' if above else 'at least'} {least:g}"
        bounds += "" if below == math.inf else f" and below {below:g}"
        fail(name, f"must be {bounds}, got {value!r}")
    return result


def flag(name: str, value: Any) -> bool:
    """Check that the value is a bool."""
    if not isinstance(value, bool):
        fail(name, f"must be True or False, got {value!r}")
    return value


def positive_integer(name: str, value: Any) -> int:
    """Check that the value is an int from 1 to 2⁶³ - 1, the largest size of a tensor."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        fail(name, f"must be a positive integer, got {value!r}")
    if value >= 1 << 63:
        fail(name, f"must be below 2^63, got {value:.3g}")
    return value


# Tensors


def describe(value: Any) -> str:
    """Describe a value in a message: dtype and shape of a tensor, otherwise the type."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def check_device(name: str, tensor: Tensor, query: Tensor) -> None:
    """Check that a tensor is on the device of the query."""
    if tensor.device != query.device:
        fail(name, f"is on {tensor.device} but query is on {query.device}: move it there")


def check_tensor(name: str, value: Any, dims: str | None = None, *, like: Tensor | None = None) -> Tensor:
    """Check a floating-point tensor with the dimensions `dims` ("B H L D"), on the device of `like`."""
    if not isinstance(value, Tensor):
        fail(name, f"must be a tensor, got {type(value).__name__}")
    if value.is_nested:
        fail(name, NESTED)
    if not value.is_floating_point():
        fail(name, f"must be a floating-point tensor, got {value.dtype}")
    if dims is not None and value.dim() != dims.count(" ") + 1:
        fail(name, f"must have shape [{dims.replace(' ', ', ')}], got {list(value.shape)}")
    if like is not None:
        check_device(name, value, like)
    return value


def broadcasts_to(tensor: Tensor, target: tuple[int, ...]) -> bool:
    """Return whether each dimension is 1 or that of the target."""
    return all(size in (1, full) for size, full in zip(tensor.shape, target, strict=True))


def broadcast_to_4d(name: str, tensor: Tensor, target: tuple[int, ...], dims: str) -> Tensor:
    """Add leading dimensions up to four and check that the tensor broadcasts to `target`."""
    missing = 4 - tensor.dim()
    if missing >= 0 and broadcasts_to(tensor, target[missing:]):
        # No view of a 4-d tensor: it would add an autograd node.
        return tensor[(None,) * missing] if missing else tensor
    fail(name, f"must broadcast to [{dims}] = {list(target)}, got {list(tensor.shape)}")
