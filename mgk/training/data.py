"""Samplers and device-resident datasets.

The examples of a step are a pure function of the seed and the step number. A resumed run therefore sees the same
batches, and checkpoints store no sampler state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mgk._core.integers import ceil_div
from mgk._core.masks import cu_seqlens_to_segments
from mgk.models.adaptive_softmax import round_capacity

if TYPE_CHECKING:
    from mgk.tasks.base import Split
    from mgk.tasks.corpus import TokenStream


# The length of a packed batch is a multiple of this, which limits the number of distinct allocation sizes.
PACKED_MULTIPLE = 1024


def seed_of(*parts: int) -> int:
    """Derive one seed from several integers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


class EpochPermutation:
    """Order of the training examples: a new permutation each epoch, concatenated without gaps."""

    def __init__(self, examples: int, seed: int) -> None:
        self.examples, self.seed = examples, seed
        self._permutations: dict[int, np.ndarray] = {}

    def _epoch(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            # A batch spans at most two epochs unless it is larger than the data set.
            self._permutations = {e: p for e, p in self._permutations.items() if e >= epoch - 1}
            self._permutations[epoch] = np.random.default_rng(seed_of(self.seed, epoch)).permutation(self.examples)
        return self._permutations[epoch]

    def take(self, start: int, count: int) -> np.ndarray:
        """Return the indices at positions start to start + count."""
        positions = np.arange(start, start + count)
        epochs = positions // self.examples
        return np.concatenate([self._epoch(int(e))[positions[epochs == e] % self.examples] for e in np.unique(epochs)])


class TrainSampler:
    """Batches of training indices for one process; iteration starts at the current step of the run.

    Args:
        order: Order of the examples.
        batch_size: Examples per step, over all processes and micro-batches.
        accumulate: Micro-batches per step.
        rank: Rank of this process.
        world_size: Number of processes.
        micro_batches_done: Returns the number of micro-batches already trained on.
    """

    def __init__(
        self,
        order: EpochPermutation,
        batch_size: int,
        accumulate: int,
        rank: int,
        world_size: int,
        micro_batches_done: Callable[[], int],
    ) -> None:
        self.order, self.batch_size, self.accumulate = order, batch_size, accumulate
        self.rank, self.world_size, self.micro_batches_done = rank, world_size, micro_batches_done
        self.size = batch_size // (accumulate * world_size)

    def __iter__(self) -> Iterator[Tensor]:
        micro_batch = self.micro_batches_done()
        while True:
            step, part = divmod(micro_batch, self.accumulate)
            start = step * self.batch_size + (part * self.world_size + self.rank) * self.size
            yield torch.from_numpy(self.order.take(start, self.size))
            micro_batch += 1


class SequentialSampler:
    """Batches of indices of one pass over a split."""

    def __init__(self, examples: int, batch_size: int) -> None:
        self.batches = torch.arange(examples).split(batch_size)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


class DevelopmentSampler:
    """Batches of one process in one pass over a split, each with the number of examples that it counts for.

    All processes have the same number of batches, because FSDP communicates in each. A process with too few examples
    runs the first example again, which counts for 0.
    """

    def __init__(self, examples: int, batch_size: int, rank: int, world_size: int) -> None:
        batches = [part for part in torch.arange(examples)[rank::world_size].split(batch_size) if len(part)]
        most_examples = ceil_div(examples, world_size)
        missing = ceil_div(most_examples, batch_size) - len(batches)
        padding = [(torch.zeros(1, dtype=torch.long), 0)] * missing
        self.batches = [*((indices, len(indices)) for indices in batches), *padding]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter(self.batches)


class DeviceDataset:
    """A split stored on a device; batches are gathered there."""

    def __init__(self, split: Split, max_length: int, device: torch.device) -> None:
        self.documents, self.max_length = split.documents, max_length
        # Zeros after the last document: gathering `width` tokens may read past its end.
        flat = np.concatenate([np.asarray(split.tokens), np.zeros(max_length, dtype=split.tokens.dtype)])
        if flat.dtype == np.uint16:
            # torch cannot gather uint16. int16 needs half the memory of int32, if the ids fit.
            flat = flat.astype(np.int16 if flat.max() <= np.iinfo(np.int16).max else np.int32)
        self.tokens = torch.from_numpy(flat).to(device)
        self.offsets = torch.from_numpy(np.array(split.offsets)).to(device)
        self.labels = torch.from_numpy(np.array(split.labels)).to(device)
        lengths = np.minimum(np.diff(np.asarray(split.offsets)), max_length)
        self.lengths = lengths.reshape(-1, split.documents)
        # The padding of a packed batch counts as a document and must not be longer than one.
        self.packed_multiple = min(PACKED_MULTIPLE, max_length)

    def __len__(self) -> int:
        return self.labels.shape[0]

    def width(self, indices: np.ndarray) -> int:
        """Return the length of the longest document of these examples, rounded up to a multiple of 16."""
        longest = int(self.lengths[indices].max())
        return min(self.max_length, longest + -longest % 16)

    def batch(self, indices: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens [B, width] or [B, 2, width], lengths [B] or [B, 2], and labels [B]."""
        rows = indices if self.documents == 1 else indices[:, None] * 2 + torch.arange(2, device=indices.device)
        starts = self.offsets[rows]
        lengths = (self.offsets[rows + 1] - starts).clamp(max=width)
        positions = torch.arange(width, device=indices.device)
        tokens = self.tokens[starts.unsqueeze(-1) + positions].long()
        return tokens.masked_fill(positions >= lengths.unsqueeze(-1), 0), lengths, self.labels[indices]

    def packed(self, indices: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens [T], int32 document offsets [B + 1] or [2 B + 1], and labels [B].

        The documents are concatenated and padded at the end to T, a multiple of `packed_multiple`. The lengths are
        known on the host, so that there is no synchronization.
        """
        total = int(self.lengths[indices].sum())
        device = self.tokens.device
        examples = torch.from_numpy(indices).to(device, non_blocking=True)
        ends = self.lengths[indices].reshape(-1).cumsum()
        offsets = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)).to(device, non_blocking=True)
        rows = examples if self.documents == 1 else (examples[:, None] * 2 + torch.arange(2, device=device)).flatten()
        positions = torch.arange(total + -total % self.packed_multiple, device=device)
        document, offset = cu_seqlens_to_segments(offsets, len(positions))
        # The padding counts as one more document, which reads from the first token and is masked below.
        starts = torch.cat([self.offsets[rows], self.offsets[:1]])
        sources = (starts[document] + offset).clamp(max=self.tokens.shape[0] - 1)
        tokens = self.tokens[sources].long()
        return tokens.masked_fill(positions >= total, 0), offsets, self.labels[examples]


class TokenSegments:
    """A token stream on a device; a batch is a set of its segments.

    The targets of each segment in each tail cluster of the adaptive softmax are counted on the host, so that training
    does not synchronize with the device.
    """

    def __init__(self, stream: TokenStream, cutoffs: Sequence[int], device: torch.device) -> None:
        self.length = stream.length
        tokens = np.asarray(stream.tokens)
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(device)
        targets = tokens[1 : 1 + len(stream) * self.length].reshape(len(stream), self.length)
        # Targets at or above each cutoff; the differences of neighbours are the targets within each tail cluster.
        at_or_above = [*((targets >= cutoff).sum(1) for cutoff in cutoffs), np.zeros(len(stream), dtype=np.int64)]
        self.counts = -np.diff(np.stack(at_or_above, axis=1), axis=1)  # [segments, tail clusters]

    def __len__(self) -> int:
        return len(self.counts)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """Return tokens and targets [B, L], and the capacity for targets of each tail cluster."""
        device = self.tokens.device
        starts = indices.to(device, non_blocking=True) * self.length
        tokens = self.tokens[starts[:, None] + torch.arange(self.length + 1, device=device)].long()
        counts = self.counts[indices.numpy()].sum(0).tolist()
        return tokens[:, :-1], tokens[:, 1:], tuple(round_capacity(count) for count in counts)
