"""What a layer remembers between decoding steps: keys and values, or the constant-size state of linear attention."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mgk._core.validation import fail


@dataclass(frozen=True)
class DevicePosition:
    """Where the next token goes, as numbers on the device: steps that know it from there alone have the same shapes and
    the same memory whatever the length, and can be recorded once for all tokens."""

    index: Tensor  # int64 [1]: how many tokens are held
    count: Tensor  # int32 [1]: one more


class Cache(ABC):
    """Made by `Attention.make_cache` and passed to every forward; each appends its keys."""

    def __init__(self, batch_size: int, max_length: int) -> None:
        self.batch_size, self.max_length, self.length = batch_size, max_length, 0
        # Where it is set, a forward is of one token: it reads the place, not `length`, works in the memory that there
        # is, and leaves `length` to who set it.
        self.place: DevicePosition | None = None

    def check_padding(self, given: bool) -> None:  # noqa: B027  (a state has no padding left in it)
        """What an earlier mask asks of this call."""

    @property
    @abstractmethod
    def memory(self) -> Sequence[Tensor]:
        """What it holds, where a step at a `place` reads and writes it."""

    @abstractmethod
    def move_to(self, memory: Sequence[Tensor]) -> bool:
        """Goes on in memory that was its own before, where it still fits; keys and values stay where they are."""

    @property
    def nbytes(self) -> int:
        """The memory it holds."""
        return sum(part.nbytes for part in self.memory)

    @property
    def count(self) -> Tensor | None:
        """How many of the keys that `append` returns are there, the new one included, where only the device knows."""
        return None if self.place is None else self.place.count

    def next_positions(self, x: Tensor) -> Tensor:
        """Of the tokens of x [B, L, ...], which come next: [L]."""
        if self.place is not None:
            return self.place.index
        return torch.arange(self.length, self.length + x.shape[1], device=x.device)

    @abstractmethod
    def reorder(self, rows: Tensor) -> None:
        """Makes row n what row rows[n] was, as beam search asks for."""

    @abstractmethod
    def take(self, rows: Tensor) -> None:
        """Makes row n what row rows[n] was; there may be more or fewer of them than before."""

    @abstractmethod
    def crop(self, length: int) -> None:
        """Forgets all but the first `length` tokens."""

    def enlarge(self, max_length: int) -> None:
        """Makes room for max_length tokens; what is held stays."""
        if max_length < self.max_length:
            fail("max_length", f"must be at least the {self.max_length} that there is room for, got {max_length}")
        self.max_length = max_length

    @abstractmethod
    def reset(self) -> None:
        """Forgets everything; the memory is kept."""

    def grow(self, batch: int, new: int) -> int:
        """Counts new tokens, and returns how many there were."""
        if batch != self.batch_size:
            fail("cache", f"was made for a batch of {self.batch_size}, got {batch}")
        if self.length + new > self.max_length:
            fail("cache", f"holds {self.length} of at most {self.max_length} tokens: {new} more do not fit")
        self.length += new
        return self.length - new

    def _check_rows(self, rows: Tensor, *, as_many: bool = True) -> Tensor:
        if not isinstance(rows, Tensor) or rows.dtype not in (torch.int32, torch.int64):
            fail("rows", "must be an integer tensor of row numbers")
        if rows.device.type == "cpu" and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < self.batch_size:
            fail("rows", f"must be numbers from 0 to {self.batch_size - 1}, got {rows.tolist()}")
        if rows.dim() != 1 or (as_many and rows.numel() != self.batch_size):
            count = f"{self.batch_size} indices, one for each row" if as_many else "indices in one dimension"
            fail("rows", f"must be {count}, got shape {list(rows.shape)}")
        return rows

    def _check_length(self, length: int) -> int:
        try:
            number = -1 if isinstance(length, bool) else operator.index(length)
        except TypeError:
            number = -1
        if not 0 <= number <= self.length:
            fail("length", f"must be a whole number between 0 and the {self.length} tokens held, got {length!r}")
        return number


class KeyValueCache(Cache):
    """Keys [B, Hk, (M,) S, D] before any shift, values [B, Hk, S, E] and, where the prior asks, positions [B, S]."""

    def __init__(self, max_length: int, keys: Tensor, value: Tensor, positions: Tensor | None) -> None:
        super().__init__(keys.shape[0], max_length)
        self._buffers = [keys, value] if positions is None else [keys, value, positions]
        self.padded = False  # whether the last call came with a padding mask
        # The axis along which each grows.
        self._axes = [keys.dim() - 2, 2, 1][: len(self._buffers)]

    @property
    def memory(self) -> Sequence[Tensor]:
        return self._buffers

    def move_to(self, memory: Sequence[Tensor]) -> bool:
        return all(part is mine for part, mine in zip(memory, self._buffers, strict=True))

    def check_padding(self, given: bool) -> None:
        """A mask given with earlier tokens is of all keys: without it, their padding would be attended to."""
        if self.padded and not given:
            fail("key_padding_mask", "was given for earlier tokens of this cache: give it for all keys held")

    def append(self, keys: Tensor, value: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Everything held, the new at the end."""
        for buffer, new in ((self._buffers[0], keys), (self._buffers[1], value)):
            old, given = buffer.shape, new.shape
            if old[:-2] != given[:-2] or old[-1] != given[-1]:
                fail("cache", "was made by a layer of other sizes")
        parts = (keys, value, positions)
        held = list(self._buffers)
        if self.place is not None:
            for buffer, axis, part in zip(self._buffers, self._axes, parts, strict=False):
                assert part is not None
                buffer.index_copy_(axis, self.place.index, part.to(buffer.dtype))
        else:
            new_tokens = keys.shape[-2]
            start = self.grow(keys.shape[0], new_tokens)
            for n, (buffer, axis, part) in enumerate(zip(self._buffers, self._axes, parts, strict=False)):
                assert part is not None
                held[n] = buffer.narrow(axis, 0, self.length)
                held[n].narrow(axis, start, new_tokens).copy_(part)
        if held[0].dtype != keys.dtype:
            held[:2] = held[0].to(keys.dtype), held[1].to(value.dtype)
        return held[0], held[1], held[2] if len(held) == 3 else None

    def reorder(self, rows: Tensor) -> None:
        self._check_rows(rows)
        for buffer in self._buffers:
            buffer.copy_(buffer.index_select(0, rows.to(buffer.device)))

    def take(self, rows: Tensor) -> None:
        self._check_rows(rows, as_many=False)
        self._buffers = [buffer.index_select(0, rows.to(buffer.device)) for buffer in self._buffers]
        self.batch_size = len(rows)

    def enlarge(self, max_length: int) -> None:
        super().enlarge(max_length)
        for n, (held, axis) in enumerate(zip(self._buffers, self._axes, strict=True)):
            shape = list(held.shape)
            shape[axis] = max_length
            self._buffers[n] = held.new_zeros(shape)
            self._buffers[n].narrow(axis, 0, held.shape[axis]).copy_(held)

    def crop(self, length: int) -> None:
        self.length = self._check_length(length)
        # A mask of earlier tokens says nothing where there are none.
        self.padded = self.padded and length > 0

    def reset(self) -> None:
        self.length, self.padded = 0, False


class StateCache(Cache):
    """The sums Z and z of linear attention: the same size whatever the length."""

    state: tuple[Tensor, ...]

    def __init__(self, batch_size: int, max_length: int, state: tuple[Tensor, ...]) -> None:
        super().__init__(batch_size, max_length)
        self._empty = state
        self.reset()

    @property
    def memory(self) -> Sequence[Tensor]:
        return self.state

    def move_to(self, memory: Sequence[Tensor]) -> bool:
        if any(part.shape != mine.shape for part, mine in zip(memory, self.state, strict=True)):
            return False
        if self.state is not memory:
            for part, mine in zip(memory, self.state, strict=True):
                part.copy_(mine)
            self.state = tuple(memory)
        return True

    def replace(self, state: tuple[Tensor, ...], new: int) -> None:
        if self.place is None:
            self.grow(state[0].shape[0], new)
            self.state = state
        else:
            for mine, part in zip(self.state, state, strict=True):
                mine.copy_(part)

    def reorder(self, rows: Tensor) -> None:
        self._check_rows(rows)
        self.state = tuple(part.index_select(0, rows.to(part.device)) for part in self.state)

    def take(self, rows: Tensor) -> None:
        self._check_rows(rows, as_many=False)
        self.state, self._empty = (
            tuple(part.index_select(0, rows.to(part.device)) for part in parts) for parts in (self.state, self._empty)
        )
        self.batch_size = len(rows)

    def crop(self, length: int) -> None:
        if self._check_length(length) not in (0, self.length):
            fail("length", f"must be 0 or {self.length}: a sum over tokens cannot forget some of them")
        if length == 0:
            self.reset()

    def reset(self) -> None:
        self.length = 0
        # Not the empty state itself: a step at a place writes to what it finds.
        self.state = tuple(part.clone() for part in self._empty)
