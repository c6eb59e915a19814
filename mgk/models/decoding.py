"""One token more, by a step that is the same for every length and so can be recorded: on a GPU, as a CUDA graph.

A small model's decoding is bound by Python and by the launches of its kernels, not by the GPU. A recorded step is one
launch. What the length decides, where keys are written, how many are seen, which position it is, is read on the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from mgk._core.validation import fail
from mgk.cache import Cache, DevicePosition
from mgk.models import LanguageModel
from mgk.models.cuda_graphs import CaptureError, record


class DecodingStep:
    """Tokens [B, 1] to the scores [B, V] of what follows them; they are appended to the caches.

    caches: `model.make_caches(batch_size, max_length)`, filled by a prompt with model(prompt, caches=caches). They
    may be used, cropped and reset in between by other calls. The next call writes over the scores: clone them to keep
    them. The model must be in eval mode, and its parameters must stay where they are in memory.
    """

    def __init__(self, model: LanguageModel, caches: Sequence[Cache]) -> None:
        if not isinstance(model, LanguageModel):
            fail("model", f"must be a LanguageModel, got {type(model).__name__}")
        of_layers = isinstance(caches, (list, tuple)) and all(isinstance(cache, Cache) for cache in caches)
        if not of_layers or len(caches) != len(model.layers):
            fail("caches", f"must be {len(model.layers)}, one for each layer, as model.make_caches makes them")
        self.model, self.caches = model, caches
        device = model.table.weight.device
        self.device_position = DevicePosition(
            torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int32, device=device)
        )
        self.recording = device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._memory: list[Sequence[Tensor]] = []
        # What the graph reads and writes.
        self._tokens = self._scores = torch.empty(0, device=device)

    @property
    def recorded(self) -> bool:
        """Whether the next call replays a graph, the caches staying where they are."""
        return self._graph is not None

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        if self.model.training:
            fail("model", "must be in eval mode: call model.eval()")
        held, batch = self.caches[0].length, self.caches[0].batch_size
        if any((cache.length, cache.batch_size) != (held, batch) for cache in self.caches):
            lengths = [cache.length for cache in self.caches]
            fail("caches", f"must hold the same tokens of the same sequences, got lengths {lengths}")
        whole = isinstance(tokens, Tensor) and tokens.dtype in (torch.int32, torch.int64)
        if not whole or tokens.shape != (batch, 1):
            got = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            fail("tokens", f"must be an integer tensor [B, 1] = [{batch}, 1], one for each sequence, got {got}")
        try:
            for cache in self.caches:
                cache.check_padding_mask(False)
                cache.advance(batch, 1)
            self.device_position.index.fill_(held)
            return self._scored(tokens)
        except Exception:
            # What was refused is not remembered.
            for cache in self.caches:
                cache.length = held
            raise

    def _scored(self, tokens: Tensor) -> Tensor:
        if self._graph is not None and self._back_in_place():
            self._tokens.copy_(tokens)
            self._graph.replay()
            return self._scores
        self._tokens = tokens.clone()
        return self._first() if self.recording else self._step()

    def _back_in_place(self) -> bool:
        return all(cache.use_buffers(memory) for cache, memory in zip(self.caches, self._memory, strict=True))

    def _step(self) -> Tensor:
        """Reads and writes nothing but tensors: the same work every time."""
        self.device_position.length.copy_(self.device_position.index).add_(1)
        for cache in self.caches:
            cache.device_position = self.device_position
        kind = self._tokens.device.type
        try:
            # A cached cast of a weight would be recorded as it is now, and never be made again.
            with torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), False):
                hidden = self.model.hidden(self._tokens, position_ids=self.device_position.index, caches=self.caches)
                return self.model.table.logits(hidden[:, -1])
        finally:
            for cache in self.caches:
                cache.device_position = None

    def _first(self) -> Tensor:
        """The step as it is, which is recorded for the next."""
        self._graph = None
        try:
            graph, scores, self._scores = record(self._step, torch.cuda.Stream())
        except CaptureError as error:
            self.recording = False
            words = f"a decoding step could not be recorded as a CUDA graph ({error}): steps take longer"
            warnings.warn(words, stacklevel=3)
            found: Tensor = error.found
            return found
        self._graph = graph
        self._memory = [tuple(cache.buffers) for cache in self.caches]
        return scores
