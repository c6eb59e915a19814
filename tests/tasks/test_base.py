"""Splits on disk, and their batches."""

import numpy as np
import pytest
import torch

from mgk.tasks import PAD, Split
from mgk.tasks.base import write_split
from tests.support.task_data import GENERATED


@pytest.mark.parametrize("per_example", [1, 2])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("length", [None, 3, 50])
def test_batch_is_truncated_and_padded(tmp_path, per_example, dtype, length):
    random = np.random.default_rng(0)
    examples = [
        ([random.integers(1, 200, random.integers(1, 9)).astype(dtype) for _ in range(per_example)], n % 3)
        for n in range(7)
    ]
    assert write_split(tmp_path, "train", iter(examples), per_example) == 7
    arrays = (np.load(tmp_path / f"train.{name}.npy", allow_pickle=False) for name in ("tokens", "offsets", "labels"))
    split = Split(*arrays, documents=per_example)
    assert split.tokens.dtype == dtype
    assert len(split) == 7
    chosen = [5, 0, 5, 2]
    tokens, lengths, labels = split.batch(chosen, length)
    assert tokens.dtype == lengths.dtype == labels.dtype == torch.int64
    assert labels.tolist() == [n % 3 for n in chosen]
    width = length or max(len(part) for n in chosen for part in examples[n][0])
    assert tokens.shape == ((4, width) if per_example == 1 else (4, 2, width))
    for row, size, part in zip(
        tokens.reshape(-1, width), lengths.reshape(-1), [p for n in chosen for p in examples[n][0]], strict=True
    ):
        truncated = part[:width].tolist()
        assert row.tolist() == truncated + [PAD] * (width - len(truncated))
        assert size == len(truncated)


def test_batch_accepts_indices_of_any_kind(tmp_path):
    split = GENERATED.split(tmp_path, "train")
    for indices in (range(3), torch.arange(3), np.arange(3), [0, 1, 2]):
        assert torch.equal(split.batch(indices)[0], split.batch([0, 1, 2])[0])
    assert split.batch([])[0].shape == (0, 0)
    for wrong in ([-1], [50], [0, 99]):
        with pytest.raises(ValueError, match="indices must be at least 0 and below 50"):
            split.batch(wrong)
    with pytest.raises(ValueError, match="length"):
        split.batch([0], 0)
    assert split.class_shares(10).sum() == pytest.approx(1)
    assert split.class_shares(10)[3] == np.mean(split.labels == 3)


def test_write_split_rejects_wrong_types_and_numbers_of_documents(tmp_path):
    for examples in ([([np.ones(3)], 0)], [([np.ones(3, np.uint8)] * 2, 0)]):
        with pytest.raises(ValueError, match="must"):
            write_split(tmp_path, "x", examples)
