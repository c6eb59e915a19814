"""Inputs for `mgk analyze` from prepared data: samples of a split, and the text codec of a task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mgk._core.validation import fail
from mgk.analysis.inputs import MIN_LENGTH, Samples, TextCodec
from mgk.models import VisionTransformer
from mgk.models.vocabulary import check_size
from mgk.tasks.base import Split, Task, byte_tokens
from mgk.tasks.corpus import Corpus, TokenStream
from mgk.tasks.listops import SYMBOLS, ListOps

BYTE_VOCAB_SIZE = 512  # vocabulary size of the byte-level classification tasks


def text_codec(task: Task, run: Path, vocab_size: int) -> TextCodec:
    """Return the codec of a task.

    Args:
        task: The task.
        run: Run directory, which has the vocabulary of a word-level corpus.
        vocab_size: Vocabulary size of the model.
    """
    if isinstance(task, Corpus):
        vocabulary = task.load_vocabulary(run)
        check_size(vocabulary, run, vocab_size)
        return TextCodec(
            lambda text: vocabulary.encode(text)[0].tolist(),
            lambda ids: [vocabulary.decode([i]).strip() or "␣" for i in ids],
        )
    if task.vocab_size == BYTE_VOCAB_SIZE:
        return TextCodec(lambda text: byte_tokens(text.encode()).tolist(), lambda ids: [_byte_name(i - 1) for i in ids])
    symbols = ("·", *SYMBOLS) if isinstance(task, ListOps) else ()
    return TextCodec(None, lambda ids: [symbols[i] if i < len(symbols) else str(i) for i in ids])


def _byte_name(value: int) -> str:
    return chr(value) if 32 < value < 127 else "␣" if value == 32 else f"x{max(value, 0):02x}"


def sample_split(
    model: nn.Module,
    split: Split | TokenStream,
    name: str,
    count: int,
    length: int | None,
    seed: int,
    codec: TextCodec,
) -> Samples:
    """Draw random samples from a split.

    Args:
        model: The model; its configuration limits the length.
        split: Labelled examples, or a token stream to cut segments from.
        name: Name of the split, for messages and for the report.
        count: Maximum number of samples.
        length: Skip shorter documents and truncate longer ones to this length; for a token stream, the segment length.
        seed: Random seed.
        codec: Codec that names the tokens of the first sample.
    """
    config: Any = model.config
    if isinstance(model, VisionTransformer):
        if length is not None:
            fail("--length", "is not supported for images, which have one size")
        return _images(config, split, name, count, seed)
    if isinstance(split, TokenStream):
        return _segments(config, split, name, count, length, seed, codec)
    return _documents(config, split, name, count, length, seed, codec)


def _documents(
    config: Any, split: Split, name: str, count: int, length: int | None, seed: int, codec: TextCodec
) -> Samples:
    if length is not None and length > config.max_length:
        fail("--length", f"= {length} is more than the model's {config.max_length} positions")
    lengths = split.lengths.reshape(len(split), -1).min(1)
    shortest = max(length or 0, MIN_LENGTH)
    eligible = np.flatnonzero(lengths >= shortest)
    if not len(eligible):
        required = f"at least {shortest} tokens are needed"
        fail("--length", f"matches no example of {name}: {required}, and the longest has {lengths.max(initial=0)}")
    drawn: list[int] = np.random.default_rng(seed).permutation(eligible)[:count].tolist()
    # The report shows the maps of the first sample, so the longest one comes first.
    indices = sorted(drawn, key=lambda index: -int(lengths[index])) if length is None else drawn
    inputs = []
    for index in indices:
        tokens, sizes, _ = split.batch([index], length)
        width = min(int(sizes.max()), config.max_length)
        inputs.append((tokens[..., :width], sizes.clamp(max=width)))
    first = inputs[0][0].flatten(0, -2)[0].tolist()
    return Samples(inputs, codec.names(first), f"{len(inputs)} examples of {name}")


def _segments(
    config: Any, split: TokenStream, name: str, count: int, length: int | None, seed: int, codec: TextCodec
) -> Samples:
    length = length or config.max_length
    if len(split.tokens) < length:
        fail("--length", f"= {length} is more than the {len(split.tokens)} tokens of {name}")
    starts = np.random.default_rng(seed).integers(0, len(split.tokens) - length + 1, count)
    segments = [np.asarray(split.tokens[start : start + length]).astype(np.int64) for start in starts.tolist()]
    inputs: list[Any] = [torch.from_numpy(segment)[None] for segment in segments]
    return Samples(inputs, codec.names(segments[0].tolist()), f"{count} segments of {length} tokens of {name}")


def _images(config: Any, split: Any, name: str, count: int, seed: int) -> Samples:
    indices = np.random.default_rng(seed).permutation(len(split))[:count]
    pixels = split.batch(indices)[0].to(torch.uint8)
    images = pixels.reshape(-1, 1, config.channels, config.image_size, config.image_size)
    side = config.image_size // config.patch_size
    patches = [f"{row},{column}" for row in range(side) for column in range(side)]
    return Samples(list(images), patches, f"{len(images)} images of {name}")
