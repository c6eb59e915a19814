"""Our caches as `generate` wants them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache

import mgk
from mgk._core.validation import fail
from mgk.cache import KeyValueCache


class MGKCache(Cache):
    """The caches of all layers, keys and values or constant states, as `generate` wants them. Grows as needed."""

    def __init__(self, caches: Sequence[mgk.Cache]) -> None:
        super().__init__(layers=[])
        self.caches = list(caches)

    def __len__(self) -> int:
        return len(self.caches)

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    @property
    def is_croppable(self) -> bool:
        return all(isinstance(cache, KeyValueCache) for cache in self.caches)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.caches[layer_idx].length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def make_room(self, tokens: int) -> None:
        """For so many more; twice what there was, so that growing stays cheap."""
        for cache in self.caches:
            if cache.length + tokens > cache.max_length:
                cache.enlarge(max(cache.length + tokens, 2 * cache.max_length))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for cache in self.caches:
            cache.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        for cache in self.caches:
            cache.take(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for cache in self.caches:
            cache.take(torch.arange(cache.batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets so many of the last tokens: a number below 0, as Transformers counts them. 0 does nothing."""
        if tokens_to_remove > 0:
            fail("tokens_to_remove", f"must be 0 or less, got {tokens_to_remove}")
        for cache in self.caches:
            cache.crop(cache.length + tokens_to_remove)

    def reset(self) -> None:
        for cache in self.caches:
            cache.reset()
