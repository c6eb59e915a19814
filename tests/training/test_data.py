"""Samplers and datasets on the device."""

import numpy as np
import pytest
import torch

from mgk.tasks.base import Split
from mgk.training.data import DevelopmentSampler, DeviceDataset, EpochPermutation, TrainSampler


def test_order_is_a_permutation_per_epoch_and_depends_on_seed_and_position():
    order = EpochPermutation(10, seed=5)
    taken = order.take(0, 30)
    for epoch in range(3):
        assert sorted(taken[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert (taken[:10] != taken[10:20]).any()
    assert (EpochPermutation(10, seed=5).take(7, 16) == taken[7:23]).all()
    assert (EpochPermutation(10, seed=6).take(0, 30) != taken).any()


@pytest.mark.parametrize(("examples", "world_size"), [(10, 1), (10, 3), (9, 3), (2, 3), (7, 2), (0, 2)])
def test_development_batches_count_each_example_once(examples, world_size):
    samplers = [DevelopmentSampler(examples, 3, rank, world_size) for rank in range(world_size)]
    assert len({len(sampler) for sampler in samplers}) == 1
    batches = [batch for sampler in samplers for batch in sampler]
    assert all(len(indices) >= max(1, count) for indices, count in batches)
    assert sorted(int(index) for indices, count in batches for index in indices[:count]) == list(range(examples))


@pytest.mark.parametrize(("accumulate", "world_size"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_micro_batches_of_all_processes_make_up_the_batch(accumulate, world_size):
    whole = EpochPermutation(20, seed=1).take(0, 24)
    samplers = [
        iter(TrainSampler(EpochPermutation(20, seed=1), 8, accumulate, rank, world_size, lambda: 0))
        for rank in range(world_size)
    ]
    batches = [next(sampler).tolist() for _ in range(3 * accumulate) for sampler in samplers]
    assert [index for batch in batches for index in batch] == whole.tolist()
    # A sampler that starts later continues at that step.
    later = iter(TrainSampler(EpochPermutation(20, seed=1), 8, accumulate, 0, world_size, lambda: 2 * accumulate))
    assert next(later).tolist() == batches[2 * accumulate * world_size]


@pytest.mark.parametrize("documents", [1, 2])
def test_device_batches_equal_batches_of_the_split(documents):
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 12, 6 * documents)
    tokens = draw.integers(1, 200, lengths.sum()).astype(np.uint8)
    split = Split(tokens, np.concatenate([[0], lengths.cumsum()]), draw.integers(0, 3, 6), documents)
    examples = DeviceDataset(split, 9, torch.device("cpu"))
    indices = [4, 0, 5]
    for actual, expected in zip(examples.batch(torch.tensor(indices), 9), split.batch(indices, 9), strict=True):
        assert torch.equal(actual, expected)


def test_uint16_tokens_keep_all_bits():
    tokens = np.array([0, 32767, 32768, 65535, 5], dtype=np.uint16)
    examples = DeviceDataset(Split(tokens, np.array([0, 4, 5]), np.array([0, 1])), 4, torch.device("cpu"))
    assert examples.batch(torch.tensor([0]), 4)[0].tolist() == [[0, 32767, 32768, 65535]]
    assert examples.packed(np.array([0]))[0].tolist() == [0, 32767, 32768, 65535]
