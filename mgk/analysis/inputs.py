"""What a model is run on: examples of its task, token ids from a file, or text of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mgk._core.validation import fail
from mgk.models import Classifier
from mgk.tasks import Split, Task
from mgk.tasks.base import byte_tokens
from mgk.tasks.corpus import Corpus, TokenStream
from mgk.tasks.listops import SYMBOLS, ListOps

# Shorter samples say nothing about attention.
LEAST = 8
# What a text that is too short may have been.
NO_FILE = "a path that does not exist is read as text"
BYTES = 512  # the vocabulary of the tasks that read bytes


@dataclass(frozen=True)
class Samples:
    inputs: list[Any]  # what `analyse` takes
    tokens: list[str]  # of the first one, for the reader
    about: str


@dataclass(frozen=True)
class TextCodec:
    """Between text and the tokens of a run's model."""

    encode: Callable[[str], list[int]] | None  # None where the task has no text
    names: Callable[[Sequence[int]], list[str]]  # what the reader of a report sees for each id


def reader_of(task: Task, run: Path) -> TextCodec:
    if isinstance(task, Corpus):
        vocabulary = task.vocabulary_in(run)
        return TextCodec(
            lambda text: vocabulary.encode(text)[0].tolist(),
            lambda ids: [vocabulary.decode([i]).strip() or "␣" for i in ids],
        )
    if task.vocab_size == BYTES:
        return TextCodec(lambda text: byte_tokens(text.encode()).tolist(), lambda ids: [_byte(i - 1) for i in ids])
    symbols = ("·", *SYMBOLS) if isinstance(task, ListOps) else ()
    return TextCodec(None, lambda ids: [symbols[i] if i < len(symbols) else str(i) for i in ids])


def _byte(value: int) -> str:
    return chr(value) if 32 < value < 127 else "␣" if value == 32 else f"x{max(value, 0):02x}"


def from_split(
    model: nn.Module,
    split: Split | TokenStream,
    name: str,
    count: int,
    length: int | None,
    seed: int,
    reader: TextCodec,
) -> Samples:
    """`count` samples drawn at random; `length`: only documents at least as long, cut to it, or pieces of that size."""
    config: Any = model.config
    if isinstance(split, TokenStream):
        return _pieces(config, split, name, count, length, seed, reader)
    return _documents(config, split, name, count, length, seed, reader)


def _documents(
    config: Any, split: Split, name: str, count: int, length: int | None, seed: int, reader: TextCodec
) -> Samples:
    if length is not None and length > config.max_length:
        fail("--length", f"= {length} is more than the model's {config.max_length} positions")
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
        width = min(int(sizes.max()), config.max_length)
        inputs.append((tokens[..., :width], sizes.clamp(max=width)))
    first = inputs[0][0].flatten(0, -2)[0].tolist()
    return Samples(inputs, reader.names(first), f"{len(inputs)} examples of {name}")


def _pieces(
    config: Any, split: TokenStream, name: str, count: int, length: int | None, seed: int, reader: TextCodec
) -> Samples:
    length = length or config.max_length
    if len(split.tokens) < length:
        fail("--length", f"= {length} is more than the {len(split.tokens)} tokens of {name}")
    starts = np.random.default_rng(seed).integers(0, len(split.tokens) - length + 1, count)
    pieces = [np.asarray(split.tokens[start : start + length]).astype(np.int64) for start in starts.tolist()]
    inputs: list[Any] = [torch.from_numpy(piece)[None] for piece in pieces]
    return Samples(inputs, reader.names(pieces[0].tolist()), f"{count} pieces of {length} tokens of {name}")


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


def from_ids(model: nn.Module, rows: list[list[int]], reader: TextCodec) -> Samples:
    """Token ids for one of our own models."""
    config: Any = model.config
    highest, longest = max(max(row) for row in rows), max(len(row) for row in rows)
    if highest >= config.vocab_size:
        fail("--ids", f"holds {highest}, and the model's vocabulary ends at {config.vocab_size - 1}")
    if isinstance(model, Classifier) and longest > config.max_length:
        fail("--ids", f"has {longest} tokens, and the model has {config.max_length} positions: pass --length")
    pair = getattr(config, "documents", 1) == 2
    inputs: list[Any] = [torch.tensor([[row, row]] if pair else [row]) for row in rows]
    return Samples(inputs, reader.names(rows[0]), f"{len(rows)} samples of yours")


def read_text(model: nn.Module, texts: list[str], length: int | None, reader: TextCodec) -> list[list[int]]:
    """Text as the tokens of one of our own models, cut to `length`, by default to what it was trained at."""
    config: Any = model.config
    if reader.encode is None:
        fail("--text", "is not for this model, whose task has no text: give token ids with --ids")
    rows = [reader.encode(text)[: length or config.max_length] for text in texts]
    shortest, least = min(len(row) for row in rows), max(length or 0, LEAST)
    if shortest < least:
        fail("--text", f"is {shortest} tokens long, and at least {least} are needed; {NO_FILE}")
    return rows


def to_device(inputs: list[Any], device: torch.device | str) -> list[Any]:
    def move(sample: Any) -> Any:
        if isinstance(sample, Tensor):
            return sample.to(device)
        if isinstance(sample, dict):
            return {name: move(x) for name, x in sample.items()}
        return tuple(move(x) for x in sample)

    return [move(sample) for sample in inputs]
