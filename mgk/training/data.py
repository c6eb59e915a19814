"""Which examples a step sees, and how they become tensors: pure functions of the seed and the step.

That is what makes a resumed run the same run: nothing about the data has to be saved but the number of steps done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mgk._core.masks import cu_seqlens_to_segments
from mgk.models.adaptive_softmax import room_for

if TYPE_CHECKING:
    from mgk.tasks.base import Split
    from mgk.tasks.corpus import TokenStream


# Packed batches are as long as the next multiple of this, so that memory is allocated in few sizes.
ROUND = 1024


def seed_of(*parts: int) -> int:
    """One seed out of several numbers, well mixed."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


class EpochPermutation:
    """The examples in the order of training: a new permutation every epoch, one after another without gaps."""

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
        """The indices at positions start to start + count."""
        places = np.arange(start, start + count)
        epochs = places // self.examples
        return np.concatenate([self._epoch(int(e))[places[epochs == e] % self.examples] for e in np.unique(epochs)])


class TrainSampler:
    """The index batches of a run, for one process of several: an iterable that starts where the run stands."""

    def __init__(
        self, order: EpochPermutation, batch: int, parts: int, rank: int, world: int, done: Callable[[], int]
    ) -> None:
        """batch: examples a step over all processes and `parts` accumulated parts. done: parts already trained on."""
        self.order, self.batch, self.parts, self.rank, self.world, self.done = order, batch, parts, rank, world, done
        self.size = batch // (parts * world)

    def __iter__(self) -> Iterator[Tensor]:
        part = self.done()
        while True:
            step, within = divmod(part, self.parts)
            start = step * self.batch + (within * self.world + self.rank) * self.size
            yield torch.from_numpy(self.order.take(start, self.size))
            part += 1


class SequentialSampler:
    """The index batches of one pass over a split, for one process of several."""

    def __init__(self, examples: int, batch: int, rank: int = 0, world: int = 1) -> None:
        self.batches = torch.arange(examples)[rank::world].split(batch)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


class DeviceDataset:
    """A split in the memory of a device: batches are gathered there."""

    def __init__(self, split: Split, max_length: int, device: torch.device) -> None:
        self.documents, self.max_length = split.documents, max_length
        # Zeros behind the last document, so that a row may be read past its end.
        flat = np.concatenate([np.asarray(split.tokens), np.zeros(max_length, dtype=split.tokens.dtype)])
        if flat.dtype == np.uint16:
            # torch gathers no uint16. int16 takes half the memory of int32, where the ids fit.
            flat = flat.astype(np.int16 if flat.max() <= np.iinfo(np.int16).max else np.int32)
        self.tokens = torch.from_numpy(flat).to(device)
        self.offsets = torch.from_numpy(np.array(split.offsets)).to(device)
        self.labels = torch.from_numpy(np.array(split.labels)).to(device)
        lengths = np.minimum(np.diff(np.asarray(split.offsets)), max_length)
        self.lengths = lengths.reshape(-1, split.documents)
        # The padding of a packed batch counts as a document: it may not be longer than one.
        self.round_to = min(ROUND, max_length)

    def __len__(self) -> int:
        return self.labels.shape[0]

    def width(self, indices: np.ndarray) -> int:
        """The longest document among these examples, up to a multiple of 16."""
        longest = int(self.lengths[indices].max())
        return min(self.max_length, longest + -longest % 16)

    def batch(self, indices: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [n, width] or [n, 2, width], lengths [n] or [n, 2], labels [n]."""
        rows = indices if self.documents == 1 else indices[:, None] * 2 + torch.arange(2, device=indices.device)
        starts = self.offsets[rows]
        lengths = (self.offsets[rows + 1] - starts).clamp(max=width)
        places = torch.arange(width, device=indices.device)
        tokens = self.tokens[starts.unsqueeze(-1) + places].long()
        return tokens.masked_fill(places >= lengths.unsqueeze(-1), 0), lengths, self.labels[indices]

    def packed(self, indices: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [T], int32 offsets [n + 1] or [2 n + 1] of the documents lying one after another, labels [n].

        T is a multiple of `round_to`: the rest is padding. The lengths are known here, so nothing waits for the device.
        """
        total = int(self.lengths[indices].sum())
        device = self.tokens.device
        chosen = torch.from_numpy(indices).to(device, non_blocking=True)
        ends = self.lengths[indices].reshape(-1).cumsum()
        edges = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)).to(device, non_blocking=True)
        rows = chosen if self.documents == 1 else (chosen[:, None] * 2 + torch.arange(2, device=device)).flatten()
        places = torch.arange(total + -total % self.round_to, device=device)
        document, position = cu_seqlens_to_segments(edges, len(places))
        starts = torch.cat([self.offsets[rows], self.offsets[:1]])
        sources = (starts[document] + position).clamp(max=self.tokens.shape[0] - 1)
        tokens = self.tokens[sources].long()
        return tokens.masked_fill(places >= total, 0), edges, self.labels[chosen]


class TokenSegments:
    """A running text in the memory of a device: a batch is some of its segments.

    How many targets of each segment lie in each tail cluster of an adaptive softmax is counted here, on the host, so
    that training never waits for the device to count them.
    """

    def __init__(self, stream: TokenStream, cutoffs: Sequence[int], device: torch.device) -> None:
        self.length = stream.length
        tokens = np.asarray(stream.tokens)
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(device)
        targets = tokens[1 : 1 + len(stream) * self.length].reshape(len(stream), self.length)
        beyond = [*((targets >= cutoff).sum(1) for cutoff in cutoffs), np.zeros(len(stream), dtype=np.int64)]
        self.counts = -np.diff(np.stack(beyond, axis=1), axis=1)  # [segments, tail clusters]

    def __len__(self) -> int:
        return len(self.counts)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """tokens and their successors [n, length], and room for the successors in each cluster but the first."""
        device = self.tokens.device
        starts = indices.to(device, non_blocking=True) * self.length
        both = self.tokens[starts[:, None] + torch.arange(self.length + 1, device=device)].long()
        counts = self.counts[indices.numpy()].sum(0).tolist()
        return both[:, :-1], both[:, 1:], tuple(room_for(count) for count in counts)
