"""What a model is run on: examples of its task, token ids from a file, or text of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mgk.checks import fail
from mgk.models import Classifier
from mgk.tasks import PAD, Split
from mgk.tasks.listops import SYMBOLS
from mgk.tasks.store import byte_tokens

# Shorter samples say nothing about attention.
LEAST = 8
BYTES = 512  # the vocabulary of the tasks that read bytes


@dataclass(frozen=True)
class Samples:
    inputs: list[Any]  # what `analyse` takes
    tokens: list[str]  # of the first one, for the reader
    about: str


def token_names(vocabulary: int, ids: Sequence[int]) -> list[str]:
    """What the reader sees for each id."""
    known = {len(SYMBOLS): SYMBOLS, 32: SYMBOLS}.get(vocabulary)
    if known is not None and max(ids, default=0) <= len(known):
        return [known[i - 1] if i != PAD else "·" for i in ids]
    if vocabulary == BYTES:
        return [chr(i - 1) if 33 <= i - 1 < 127 else "␣" if i - 1 == 32 else f"x{i - 1:02x}" for i in ids]
    return [str(i) for i in ids]


def from_split(model: nn.Module, split: Split, name: str, count: int, length: int | None, seed: int) -> Samples:
    """`count` examples drawn at random; with `length` only those at least as long, cut to it."""
    if isinstance(model, Classifier):
        return _documents(model, split, name, count, length, seed)
    return _windows(model, split, name, count, length, seed)


def _documents(model: Classifier, split: Split, name: str, count: int, length: int | None, seed: int) -> Samples:
    if length is not None and length > model.config.max_length:
        fail("--length", f"= {length} is more than the model's {model.config.max_length} positions")
    lengths = split.lengths.reshape(len(split), -1).min(1)
    enough = np.flatnonzero(lengths >= max(length or 0, LEAST))
    if not len(enough):
        wanted = f"at least {max(length or 0, LEAST)} tokens are needed"
        fail("--length", f"finds no example of {name}: {wanted}, and the longest has {lengths.max(initial=0)}")
    drawn: list[int] = np.random.default_rng(seed).permutation(enough)[:count].tolist()
    # The longest comes first and is the one shown: short ones have little to see.
    chosen = sorted(drawn, key=lambda row: -int(lengths[row])) if length is None else drawn
    inputs = []
    for row in chosen:
        tokens, sizes, _ = split.batch([row], length)
        width = min(int(sizes.max()), model.config.max_length)
        inputs.append((tokens[..., :width], sizes.clamp(max=width)))
    first = inputs[0][0].flatten(0, -2)[0].tolist()
    return Samples(inputs, token_names(model.config.vocab_size, first), f"{len(inputs)} examples of {name}")


def _windows(model: nn.Module, split: Any, name: str, count: int, length: int | None, seed: int) -> Samples:
    """Of a language model: pieces of its text."""
    config: Any = model.config
    length = length or config.max_length
    tokens = split.tokens
    if len(tokens) < length:
        fail("--length", f"= {length} is more than the {len(tokens)} tokens of {name}")
    starts = np.random.default_rng(seed).integers(0, len(tokens) - length + 1, count)
    pieces = [np.asarray(tokens[start : start + length]).astype(np.int64) for start in starts.tolist()]
    inputs: list[Any] = [torch.from_numpy(piece)[None] for piece in pieces]
    names = token_names(config.vocab_size, pieces[0].tolist())
    return Samples(inputs, names, f"{count} pieces of {length} tokens of {name}")


def read_ids(path: Path, length: int | None) -> list[list[int]]:
    """Token ids: a .npy file, [L] or [N, L], or a text file with a sample of integers on each line."""
    if not path.is_file():
        fail("--ids", f"names {path}, which is no file")
    try:
        if path.suffix == ".npy":
            rows = np.atleast_2d(np.load(path, allow_pickle=False)).astype(np.int64).tolist()
        else:
            lines = path.read_text(encoding="utf-8").splitlines()
            rows = [[int(word) for word in line.replace(",", " ").split()] for line in lines if line.strip()]
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"--ids: {path} must hold integers: {str(error).splitlines()[0]}") from error
    shortest = min((len(row) for row in rows), default=0)
    least = max(length or 0, LEAST)
    if shortest < least:
        fail("--ids", f"has a sample of {shortest} tokens, and at least {least} are needed")
    if min(min(row) for row in rows) < 0:
        fail("--ids", "must hold integers from 0 on")
    return [row[:length] for row in rows]


def from_ids(model: nn.Module, rows: list[list[int]]) -> Samples:
    """Token ids for one of our own models."""
    config: Any = model.config
    highest, longest = max(max(row) for row in rows), max(len(row) for row in rows)
    if highest >= config.vocab_size:
        fail("--ids", f"holds {highest}, and the model's vocabulary ends at {config.vocab_size - 1}")
    if longest > config.max_length:
        fail("--ids", f"has {longest} tokens, and the model has {config.max_length} positions: pass --length")
    pair = getattr(config, "documents", 1) == 2
    inputs: list[Any] = [torch.tensor([[row, row]] if pair else [row]) for row in rows]
    return Samples(inputs, token_names(config.vocab_size, rows[0]), f"{len(rows)} samples of token ids")


def text_ids(model: nn.Module, texts: list[str], length: int | None) -> list[list[int]]:
    """Text for one of our own models that read bytes."""
    config: Any = model.config
    if config.vocab_size != BYTES:
        fail("--text", "needs a model that reads bytes: give this one token ids with --ids")
    rows = [byte_tokens(text.encode()).tolist()[: length or config.max_length] for text in texts]
    shortest, least = min(len(row) for row in rows), max(length or 0, LEAST)
    if shortest < least:
        fail("--text", f"is {shortest} tokens long, and at least {least} are needed")
    return rows


def to_device(inputs: list[Any], device: torch.device | str) -> list[Any]:
    def move(sample: Any) -> Any:
        if isinstance(sample, Tensor):
            return sample.to(device)
        if isinstance(sample, dict):
            return {name: move(x) for name, x in sample.items()}
        return tuple(move(x) for x in sample)

    return [move(sample) for sample in inputs]
