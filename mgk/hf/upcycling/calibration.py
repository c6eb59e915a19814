"""Batches for calibration, distillation and measurements, from texts or from inputs of a model."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mgk._core.validation import fail
from mgk.hf.upcycling.fidelity import is_language_model, max_positions

Batch = dict[str, Any]
# Share of the samples that is held out to measure the fidelity.
HELD_OUT = 0.1


@dataclass(frozen=True)
class Calibration:
    """Batches for calibration and distillation, and held-out batches for measurements."""

    batches: list[Batch]
    held_out: list[Batch]

    def first_batches(self, tokens: int) -> list[Batch]:
        """Return the first batches, until they have a number of tokens; all, if the inputs are not tokens."""
        selected: list[Batch] = []
        for batch in self.batches:
            if sum(map(count_tokens, selected)) >= tokens:
                break
            selected.append(batch)
        return selected


def count_tokens(batch: Mapping[str, Any]) -> int:
    """Return the number of tokens of a batch without padding; 0 if the inputs are not tokens."""
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    return batch["input_ids"].numel() if "input_ids" in batch else 0


def make_calibration(
    model: PreTrainedModel, calibration: Any, tokenizer: Any, *, length: int, batch_size: int, seed: int
) -> Calibration:
    """Make batches of a calibration set and hold out a part of it.

    Args:
        model: The model.
        calibration: Texts, one text with a sample per line, or inputs of the model (dictionaries of tensors).
        tokenizer: Tokenizer of the texts.
        length: Maximum number of tokens per sample.
        batch_size: Samples per batch.
        seed: Seed of the order of the samples.
    """
    if isinstance(calibration, str):
        calibration = calibration.splitlines()
    items: list[Any] = [calibration] if isinstance(calibration, Mapping) else list(calibration)
    if all(isinstance(item, Mapping) for item in items):
        batches = [_to_device(item, model) for item in items]
        if len(batches) < 2:
            fail("calibration", f"must have at least 2 batches, got {len(batches)}: one is held out")
        held_out = max(1, round(len(batches) * HELD_OUT))
        return Calibration(batches[:-held_out], batches[-held_out:])
    if not all(isinstance(item, str) for item in items):
        fail("calibration", "must be texts, or inputs of the model as dictionaries of tensors")
    if model.main_input_name != "input_ids":
        fail(
            "calibration",
            f"is text, but a {type(model).__name__} needs {model.main_input_name}: call mgk.hf.upcycle with its inputs",
        )
    if tokenizer is None:
        fail("tokenizer", "is required for calibration texts")
    rows = _tokenize(model, items, tokenizer, length)
    if len(rows) < 2:
        fail("calibration", f"has {len(rows)} samples, and at least 2 are needed: add more text")
    random.Random(seed).shuffle(rows)
    held_out = max(1, round(len(rows) * HELD_OUT))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    parts = (rows[:-held_out], rows[-held_out:])
    train, test = ([_to_device(batch, model) for batch in _collate(part, batch_size, pad, seed)] for part in parts)
    return Calibration(train, test)


def _tokenize(model: PreTrainedModel, texts: Sequence[str], tokenizer: Any, length: int) -> list[list[int]]:
    """Return token ids: one sample per text for encoders, and blocks of `length` tokens for language models."""
    texts = [text for text in texts if text.strip()]
    length = min(length, max_positions(model) or length, getattr(tokenizer, "model_max_length", length))
    if not texts:
        return []
    is_stream = is_language_model(model)
    rows: list[list[int]] = tokenizer(list(texts), truncation=not is_stream, max_length=length)["input_ids"]
    if not is_stream:
        return [row for row in rows if len(row) > 1]
    separator = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    stream = [token for row in rows for token in [*row, *separator]]
    blocks = [stream[start : start + length] for start in range(0, len(stream), length)]
    return [block for block in blocks if len(block) > 1]


def _collate(rows: Sequence[list[int]], size: int, pad: int, seed: int) -> Iterable[Batch]:
    """Make batches of samples with similar lengths, in random order; padding is on the right."""
    rows = sorted(rows, key=len)
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    random.Random(seed).shuffle(groups)
    for group in groups:
        longest = max(map(len, group))
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in group])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in group])
        yield {"input_ids": ids, "attention_mask": mask}


def _to_device(batch: Mapping[str, Any], model: PreTrainedModel) -> Batch:
    return {name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
