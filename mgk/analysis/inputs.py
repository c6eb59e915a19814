"""Inputs for an analysis: token ids from a file, or text.

Samples of a task's splits are drawn by `mgk.tasks.analysis_samples`.
"""

from __future__ import annotations

import tokenize
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mgk._core.validation import fail
from mgk.models import Classifier

MIN_LENGTH = 8  # minimum tokens per sample; attention over fewer is not informative
# Appended to the error for a text that is too short: it may be a misspelt path.
PATH_HINT = "a path that does not exist is read as text"


@dataclass(frozen=True)
class Samples:
    """Samples for `analyse` and their description for the report."""

    inputs: list[Any]  # in the format of `analyse`
    tokens: list[str]  # token names of the first sample
    about: str


@dataclass(frozen=True)
class TextCodec:
    """Conversion between text and the token ids of a model."""

    encode: Callable[[str], list[int]] | None  # None if the task has no text
    names: Callable[[Sequence[int]], list[str]]  # printable names of token ids


def read_ids(path: Path, length: int | None) -> list[list[int]]:
    """Read token ids from a .npy file of integers, [L] or [N, L], or from a text file with one sample per line."""
    if not path.is_file():
        fail("--ids", f"must name a file, got {path}")
    try:
        rows = _read_array(path) if path.suffix == ".npy" else _read_lines(path)
    except OSError as error:
        fail("--ids", f"{path} cannot be read: {error.strerror or error}")
    # Damaged headers of .npy files raise the errors of Python's parser.
    except (ValueError, EOFError, OverflowError, SyntaxError, tokenize.TokenError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(f"--ids: {path} must hold integers, [L] or [N, L]: {reason}") from error
    shortest = min((len(row) for row in rows), default=0)
    required = max(length or 0, MIN_LENGTH)
    if shortest < required:
        fail("--ids", f"has a sample of {shortest} tokens, and at least {required} are needed")
    if min(min(row) for row in rows) < 0:
        fail("--ids", "must hold non-negative integers")
    return [row[:length] for row in rows]


def _read_array(path: Path) -> list[list[int]]:
    with path.open("rb") as file:
        if file.read(len(np.lib.format.MAGIC_PREFIX)) != np.lib.format.MAGIC_PREFIX:
            # np.load would also read zip archives and pickles.
            raise ValueError("it is not a .npy file; save it with numpy.save")
    # Memory-mapped, so that a header with a huge shape is compared with the size of the file.
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise ValueError(f"it has {array.dtype} {list(array.shape)}")
    rows: list[list[int]] = np.atleast_2d(array).tolist()
    return rows


def _read_lines(path: Path) -> list[list[int]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [[int(word) for word in line.replace(",", " ").split()] for line in lines if line.strip()]


def from_ids(model: nn.Module, rows: list[list[int]], codec: TextCodec) -> Samples:
    """Check token ids against one of this package's models and make samples of them."""
    config: Any = model.config
    highest, longest = max(max(row) for row in rows), max(len(row) for row in rows)
    if highest >= config.vocab_size:
        fail("--ids", f"holds {highest}, and the model's vocabulary ends at {config.vocab_size - 1}")
    if isinstance(model, Classifier) and longest > config.max_length:
        fail("--ids", f"has {longest} tokens, and the model has {config.max_length} positions: pass --length")
    pair = getattr(config, "documents", 1) == 2
    inputs: list[Any] = [torch.tensor([[row, row]] if pair else [row]) for row in rows]
    return Samples(inputs, codec.names(rows[0]), f"{len(rows)} user-supplied samples")


def read_text(model: nn.Module, texts: list[str], length: int | None, codec: TextCodec) -> list[list[int]]:
    """Encode texts for one of this package's models, truncated to `length` tokens (default: training length)."""
    config: Any = model.config
    if codec.encode is None:
        fail("--text", "is not supported by this model, whose task has no text: pass token ids with --ids")
    rows = [codec.encode(text)[: length or config.max_length] for text in texts]
    shortest, required = min(len(row) for row in rows), max(length or 0, MIN_LENGTH)
    if shortest < required:
        fail("--text", f"is {shortest} tokens long, and at least {required} are needed; {PATH_HINT}")
    return rows


def to_device(inputs: list[Any], device: torch.device | str) -> list[Any]:
    """Move every tensor of the samples to a device."""

    def move(sample: Any) -> Any:
        if isinstance(sample, Tensor):
            return sample.to(device)
        if isinstance(sample, dict):
            return {name: move(x) for name, x in sample.items()}
        return tuple(move(x) for x in sample)

    return [move(sample) for sample in inputs]
