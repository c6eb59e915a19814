"""Caches for decoding: keys and values, or the constant-size state of linear attention."""

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
    """Position of the next token as tensors on the device.

    A decoding step that reads the position from the device has the same shapes and buffers for every length, so that
    one captured CUDA graph serves all tokens.
    """

    index: Tensor  # int64 [1]: number of tokens in the cache
    length: Tensor  # int32 [1]: index + 1


class Cache(ABC):
    """Keys and values, or a state, of the tokens that a layer has processed.

    Made by `Attention.make_cache` and passed to every forward, which appends its tokens.

    Attributes:
        batch_size: Number of sequences.
        max_length: Maximum number of tokens per sequence.
        length: Number of tokens in the cache.
        device_position: If set, a forward processes one token at this position, writes to the existing buffers and
            does not change `length`, which the caller updates.

    Examples:
        >>> attention = mgk.Attention(64, 4, num_kv_heads=2, is_causal=True).eval()
        >>> cache = attention.make_cache(batch_size=1, max_length=20)
        >>> with torch.no_grad():
        ...     prompt = attention(torch.randn(1, 10, 64), cache=cache)
        ...     token = attention(torch.randn(1, 1, 64), cache=cache)
        >>> cache.length, cache.nbytes  # keys and values of 2 heads of width 16, fp32
        (11, 5120)
    """

    def __init__(self, batch_size: int, max_length: int) -> None:
        self.batch_size, self.max_length, self.length = batch_size, max_length, 0
        self.device_position: DevicePosition | None = None

    @property
    @abstractmethod
    def buffers(self) -> Sequence[Tensor]:
        """Tensors that hold the contents."""

    @abstractmethod
    def use_buffers(self, buffers: Sequence[Tensor]) -> bool:
        """Move the contents to buffers that the cache used before; return False if they do not fit."""

    @property
    def nbytes(self) -> int:
        """Size of the buffers in bytes.

        Examples:
            >>> cache = mgk.Attention(64, 2, is_causal=True).make_cache(batch_size=1, max_length=100)
            >>> cache.nbytes  # 100 keys and 100 values of 64 numbers of 4 bytes
            51200
        """
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def num_valid_keys(self) -> Tensor | None:
        """Number of valid keys among those that `append` returns, int32 [1]; None if all are valid."""
        return None if self.device_position is None else self.device_position.length

    def next_positions(self, x: Tensor) -> Tensor:
        """Return the positions [L] of the new tokens x [B, L, ...]."""
        if self.device_position is not None:
            return self.device_position.index
        return torch.arange(self.length, self.length + x.shape[1], device=x.device)

    @abstractmethod
    def reorder(self, rows: Tensor) -> None:
        """Replace row n by row rows[n], as in beam search.

        Args:
            rows: Integer tensor [B].

        Examples:
            >>> attention = mgk.Attention(64, 2, is_causal=True)
            >>> cache = attention.make_cache(batch_size=3, max_length=10)
            >>> with torch.no_grad():
            ...     output = attention(torch.randn(3, 4, 64), cache=cache)
            >>> cache.reorder(torch.tensor([2, 2, 0]))  # continue the last sequence twice, and the first
        """

    @abstractmethod
    def take(self, rows: Tensor) -> None:
        """Select rows of the batch; the batch size becomes their number.

        Args:
            rows: Integer tensor of row indices, of any length.

        Examples:
            >>> cache = mgk.Attention(64, 2, is_causal=True).make_cache(batch_size=3, max_length=10)
            >>> cache.take(torch.tensor([0, 2]))  # the second sequence has ended
            >>> cache.batch_size
            2
        """

    @abstractmethod
    def crop(self, length: int) -> None:
        """Discard all but the first `length` tokens.

        Examples:
            >>> attention = mgk.Attention(64, 2, is_causal=True)
            >>> cache = attention.make_cache(batch_size=1, max_length=10)
            >>> with torch.no_grad():
            ...     output = attention(torch.randn(1, 6, 64), cache=cache)
            >>> cache.crop(4)
            >>> cache.length
            4
        """

    def enlarge(self, max_length: int) -> None:
        """Raise the maximum length; the contents stay.

        Examples:
            >>> cache = mgk.Attention(64, 2, is_causal=True).make_cache(batch_size=1, max_length=10)
            >>> cache.enlarge(20)
            >>> cache.max_length
            20
        """
        if max_length < self.max_length:
            fail("max_length", f"must be at least the current {self.max_length}, got {max_length}")
        self.max_length = max_length

    @abstractmethod
    def reset(self) -> None:
        """Discard all tokens; the buffers stay allocated.

        Examples:
            >>> attention = mgk.Attention(64, 2, is_causal=True)
            >>> cache = attention.make_cache(batch_size=1, max_length=10)
            >>> with torch.no_grad():
            ...     output = attention(torch.randn(1, 6, 64), cache=cache)
            >>> cache.reset()
            >>> cache.length
            0
        """

    def advance(self, batch: int, new_tokens: int) -> int:
        """Increase the length by `new_tokens`, and return the previous length."""
        if batch != self.batch_size:
            fail("cache", f"was made for batch size {self.batch_size}, got {batch}")
        if self.length + new_tokens > self.max_length:
            fail("cache", f"holds {self.length} of at most {self.max_length} tokens: {new_tokens} more do not fit")
        self.length += new_tokens
        return self.length - new_tokens

    def check_padding_mask(self, has_mask: bool) -> None:  # noqa: B027  (a state has no padding)
        """Check that a call has a padding mask if an earlier call had one."""

    def check_inference(self, *tensors: Tensor) -> None:
        """Check that no new token requires a gradient."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            fail("cache", "is for inference: wrap the call in torch.no_grad()")

    def _check_rows(self, rows: Tensor, *, same_number: bool = True) -> Tensor:
        if not isinstance(rows, Tensor) or rows.dtype not in (torch.int32, torch.int64):
            fail("rows", "must be an integer tensor of row indices")
        if rows.device.type == "cpu" and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < self.batch_size:
            fail("rows", f"must be indices from 0 to {self.batch_size - 1}, got {rows.tolist()}")
        if rows.dim() != 1 or (same_number and rows.numel() != self.batch_size):
            form = f"{self.batch_size} indices, one for each row" if same_number else "indices in one dimension"
            fail("rows", f"must be {form}, got shape {list(rows.shape)}")
        return rows

    def _check_length(self, length: int) -> int:
        try:
            number = -1 if isinstance(length, bool) else operator.index(length)
        except TypeError:
            number = -1
        if not 0 <= number <= self.length:
            fail("length", f"must be an integer from 0 to the {self.length} tokens in the cache, got {length!r}")
        return number


class KeyValueCache(Cache):
    """Keys [B, Hk, (M,) S, D] before any shift, values [B, Hv, S, E] and optionally positions [B, S].

    Examples:
        >>> cache = mgk.Attention(64, 4, num_kv_heads=2, is_causal=True).make_cache(batch_size=1, max_length=20)
        >>> keys, values = cache.buffers
        >>> keys.shape, values.shape
        (torch.Size([1, 2, 20, 16]), torch.Size([1, 2, 20, 16]))
    """

    def __init__(self, max_length: int, keys: Tensor, value: Tensor, *, with_positions: bool = False) -> None:
        super().__init__(keys.shape[0], max_length)
        self._buffers = [keys, value]
        # Axis of the tokens in each buffer.
        self._axes = [keys.dim() - 2, 2]
        if with_positions:
            self._buffers.append(torch.zeros(self.batch_size, max_length, dtype=torch.long, device=keys.device))
            self._axes.append(1)
        self.padded = False  # whether the last call had a padding mask

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Keys, values and, for per-position priors, positions."""
        return self._buffers

    def use_buffers(self, buffers: Sequence[Tensor]) -> bool:
        """Return whether the buffers are the current ones; keys and values are never moved."""
        return all(new is current for new, current in zip(buffers, self._buffers, strict=True))

    def check_padding_mask(self, has_mask: bool) -> None:
        """Check that a call has a padding mask if the last one had: without it, padding would be attended to."""
        if self.padded and not has_mask:
            fail("key_padding_mask", "was given for earlier tokens of this cache: pass it for all keys in the cache")

    def append(self, keys: Tensor, value: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append keys, values and positions, and return the contents.

        At a device position the whole buffers are returned, of which `num_valid_keys` tokens are valid.
        """
        for buffer, new in ((self._buffers[0], keys), (self._buffers[1], value)):
            if buffer.shape[:-2] != new.shape[:-2] or buffer.shape[-1] != new.shape[-1]:
                fail("cache", "was made by a layer with different sizes: use make_cache of this layer")
        parts = (keys, value, positions)
        contents = list(self._buffers)
        if self.device_position is not None:
            for buffer, axis, part in zip(self._buffers, self._axes, parts, strict=False):
                assert part is not None
                buffer.index_copy_(axis, self.device_position.index, part.to(buffer.dtype))
        else:
            new_tokens = keys.shape[-2]
            start = self.advance(keys.shape[0], new_tokens)
            for n, (buffer, axis, part) in enumerate(zip(self._buffers, self._axes, parts, strict=False)):
                assert part is not None
                contents[n] = buffer.narrow(axis, 0, self.length)
                contents[n].narrow(axis, start, new_tokens).copy_(part)
        if contents[0].dtype != keys.dtype:
            contents[:2] = contents[0].to(keys.dtype), contents[1].to(value.dtype)
        return contents[0], contents[1], contents[2] if len(contents) == 3 else None

    def reorder(self, rows: Tensor) -> None:
        """Replace row n by row rows[n]."""
        self._check_rows(rows)
        for buffer in self._buffers:
            buffer.copy_(buffer.index_select(0, rows.to(buffer.device)))

    def take(self, rows: Tensor) -> None:
        """Select rows; the batch size becomes their number."""
        self._check_rows(rows, same_number=False)
        self._buffers = [buffer.index_select(0, rows.to(buffer.device)) for buffer in self._buffers]
        self.batch_size = len(rows)

    def enlarge(self, max_length: int) -> None:
        """Copy the contents to buffers for max_length tokens."""
        super().enlarge(max_length)
        for n, (buffer, axis) in enumerate(zip(self._buffers, self._axes, strict=True)):
            shape = list(buffer.shape)
            shape[axis] = max_length
            self._buffers[n] = buffer.new_zeros(shape)
            self._buffers[n].narrow(axis, 0, buffer.shape[axis]).copy_(buffer)

    def crop(self, length: int) -> None:
        """Discard all but the first `length` tokens."""
        self.length = self._check_length(length)
        self.padded = self.padded and length > 0

    def reset(self) -> None:
        """Discard all tokens."""
        self.length, self.padded = 0, False


class StateCache(Cache):
    """The sums Z and z of linear attention, whose size does not depend on the length.

    Examples:
        >>> attention = mgk.Attention(64, 4, variant="smlk", is_causal=True)
        >>> short, long = (attention.make_cache(batch_size=1, max_length=length) for length in (10, 10_000))
        >>> short.nbytes == long.nbytes
        True
    """

    state: tuple[Tensor, ...]

    def __init__(self, batch_size: int, max_length: int, state: tuple[Tensor, ...]) -> None:
        super().__init__(batch_size, max_length)
        self._empty = state
        self.reset()

    @property
    def buffers(self) -> Sequence[Tensor]:
        """The state."""
        return self.state

    def use_buffers(self, buffers: Sequence[Tensor]) -> bool:
        """Copy the state to these buffers if their shapes fit."""
        if any(new.shape != current.shape for new, current in zip(buffers, self.state, strict=True)):
            return False
        if self.state is not buffers:
            for new, current in zip(buffers, self.state, strict=True):
                new.copy_(current)
            self.state = tuple(buffers)
        return True

    def replace(self, state: tuple[Tensor, ...], new_tokens: int) -> None:
        """Replace the state by one that includes new tokens."""
        if self.device_position is None:
            self.advance(state[0].shape[0], new_tokens)
            self.state = state
        else:
            for buffer, new in zip(self.state, state, strict=True):
                buffer.copy_(new)

    def reorder(self, rows: Tensor) -> None:
        """Replace row n by row rows[n]."""
        self._check_rows(rows)
        self.state = tuple(part.index_select(0, rows.to(part.device)) for part in self.state)

    def take(self, rows: Tensor) -> None:
        """Select rows; the batch size becomes their number."""
        self._check_rows(rows, same_number=False)
        self.state, self._empty = (
            tuple(part.index_select(0, rows.to(part.device)) for part in parts) for parts in (self.state, self._empty)
        )
        self.batch_size = len(rows)

    def crop(self, length: int) -> None:
        """Discard all tokens (`length` 0) or none; the sums cannot be cropped to some of the tokens."""
        if self._check_length(length) not in (0, self.length):
            fail("length", f"must be 0 or {self.length}: a sum over tokens cannot be cropped to some of them")
        if length == 0:
            self.reset()

    def reset(self) -> None:
        """Discard all tokens."""
        self.length = 0
        # Cloned, because a forward at a device position writes to the state in place.
        self.state = tuple(part.clone() for part in self._empty)
