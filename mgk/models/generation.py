"""Token generation: sampling from a language model, and single-token decoding with a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mgk._core.validation import fail, number, positive_integer
from mgk.cache import Cache, DevicePosition
from mgk.models.cuda_graphs import CaptureError, capture_graph, uncached_autocast
from mgk.models.decoder import LanguageModel


@dataclass(frozen=True)
class Sampling:
    """Options for sampling a token.

    Attributes:
        temperature: Divisor of the logits; 0 selects the token of highest probability.
        top_k: Number of tokens of highest probability to sample from.
        top_p: Sample from the smallest set of most probable tokens whose probabilities sum to at least this value.
        seed: Seed of the random number generator.

    Examples:
        >>> from mgk.models.generation import Sampling
        >>> Sampling(temperature=0.8, top_p=0.9)
        Sampling(temperature=0.8, top_k=None, top_p=0.9, seed=0)
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        number("temperature", self.temperature, 0)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
            fail("seed", f"must be an integer from -2^63 to 2^63 - 1, got {self.seed!r}")
        if self.top_k is not None:
            positive_integer("top_k", self.top_k)
        if self.top_p is not None and not 0 < number("top_p", self.top_p) <= 1:
            fail("top_p", f"must be more than 0 and at most 1, got {self.top_p!r}")

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """Sample a token from logits [V]."""
        # The maximum is NaN if a logit is.
        if not logits.max().isfinite():
            raise ValueError("the logits are not finite: the model has diverged, or its weights are damaged")
        if self.temperature == 0:
            return int(logits.argmax())
        # On the CPU, so that a seed gives the same tokens on every device.
        scaled = logits.float().cpu() / self.temperature
        # The quotients overflow at temperatures close to 0.
        if not scaled.max().isfinite():
            return int(logits.argmax())
        ordered, tokens = scaled.sort(descending=True, stable=True)
        ordered, tokens = ordered[: self.top_k], tokens[: self.top_k]
        probabilities = ordered.softmax(-1)
        if self.top_p is not None:
            # The token that crosses the threshold is included.
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= self.top_p, 0)
        return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


@torch.no_grad()
def generate(
    model: LanguageModel, prompt: Sequence[int], *, max_tokens: int, sampling: Sampling | None = None
) -> Iterator[int]:
    """Generate the tokens that follow a prompt.

    The context has at most `max_length` tokens, as in training. When it is full, generation continues from its last
    half, which is processed again.

    Args:
        model: A language model in eval mode.
        prompt: Token ids, at least one.
        max_tokens: Number of tokens to generate.
        sampling: Sampling options. Default: `Sampling()`.

    Yields:
        One token id at a time.

    Examples:
        >>> from mgk.models.generation import Sampling, generate
        >>> config = mgk.models.DecoderConfig(100, embed_dim=32, ffn_dim=64, num_layers=1, num_heads=2)
        >>> model = mgk.models.LanguageModel(config).eval()
        >>> tokens = list(generate(model, [1, 2, 3], max_tokens=5, sampling=Sampling(temperature=0.8, top_k=10)))
        >>> len(tokens), all(token < 100 for token in tokens)
        (5, True)
    """
    sampling = Sampling() if sampling is None else sampling
    positive_integer("max_tokens", max_tokens)
    if len(prompt) == 0:
        fail("prompt", "must have at least one token")
    if model.training:
        fail("model", "must be in eval mode, because dropout would change the tokens: call model.eval()")
    context, device = model.config.max_length, model.table.weight.device
    generator = torch.Generator().manual_seed(sampling.seed)
    caches = model.make_caches(1, context)
    # Only for CUDA: on other devices a step of fixed shape saves nothing, and attends over the cache's whole buffer.
    step = DecodingStep(model, caches) if device.type == "cuda" else None
    history = [int(token) for token in prompt]
    new_tokens = history[-context:]
    for _ in range(max_tokens):
        tokens = torch.tensor([new_tokens], device=device)
        if step is not None and len(new_tokens) == 1:
            logits = step(tokens)
        else:
            logits = model.table.logits(model.hidden(tokens, caches=caches)[:, -1])
        token = sampling.draw(logits[0], generator)
        yield token
        history.append(token)
        new_tokens = [token]
        if caches[0].length == context:
            for cache in caches:
                cache.reset()
            new_tokens = history[-max(1, context // 2) :]


class DecodingStep:
    """Decode one token per sequence in a step of fixed shape, captured as a CUDA graph on a GPU.

    Calling it with tokens [B, 1] appends them to the caches and returns the logits [B, V] of the next token. The next
    call overwrites the logits: clone them to keep them. Everything that depends on the length (where keys are written,
    how many are attended to, the position) is read on the device. Small models are limited by Python and kernel
    launches; replaying the graph is one launch.

    Args:
        model: A language model in eval mode, whose parameters stay in place in memory.
        caches: `model.make_caches(batch_size, max_length)`, filled with a prompt by `model(prompt, caches=caches)`.
            Between calls they may be filled, cropped and reset.

    Examples:
        >>> from mgk.models.generation import DecodingStep
        >>> config = mgk.models.DecoderConfig(100, embed_dim=32, ffn_dim=64, num_layers=1, num_heads=2)
        >>> model = mgk.models.LanguageModel(config).eval()  # on a GPU, the step is captured as a CUDA graph
        >>> caches = model.make_caches(batch_size=1, max_length=20)
        >>> with torch.no_grad():
        ...     token = model(torch.randint(100, (1, 12)), caches=caches)[:, -1].argmax(-1, keepdim=True)
        >>> step = DecodingStep(model, caches)
        >>> for _ in range(3):
        ...     token = step(token).argmax(-1, keepdim=True)
        >>> caches[0].length
        15
    """

    def __init__(self, model: LanguageModel, caches: Sequence[Cache]) -> None:
        if not isinstance(model, LanguageModel):
            fail("model", f"must be a LanguageModel, got {type(model).__name__}")
        are_caches = isinstance(caches, (list, tuple)) and all(isinstance(cache, Cache) for cache in caches)
        if not are_caches or len(caches) != len(model.layers):
            fail("caches", f"must be a list of {len(model.layers)}, one for each layer, from model.make_caches")
        self.model, self.caches = model, caches
        device = model.table.weight.device
        self.device_position = DevicePosition(
            torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int32, device=device)
        )
        self.use_graph = device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._buffers: list[Sequence[Tensor]] = []
        # Input and output of the graph.
        self._tokens = self._logits = torch.empty(0, device=device)

    @property
    def is_captured(self) -> bool:
        """Whether the next call replays a graph, provided that the buffers of the caches stay in place."""
        return self._graph is not None

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        if self.model.training:
            fail("model", "must be in eval mode: call model.eval()")
        length, batch = self.caches[0].length, self.caches[0].batch_size
        if any((cache.length, cache.batch_size) != (length, batch) for cache in self.caches):
            lengths = [cache.length for cache in self.caches]
            fail("caches", f"must hold the same tokens of the same sequences, got lengths {lengths}")
        is_integer = isinstance(tokens, Tensor) and tokens.dtype in (torch.int32, torch.int64)
        if not is_integer or tokens.shape != (batch, 1):
            got = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            fail("tokens", f"must be an integer tensor [B, 1] = [{batch}, 1], one for each sequence, got {got}")
        try:
            for cache in self.caches:
                cache.check_padding_mask(False)
                cache.advance(batch, 1)
            self.device_position.index.fill_(length)
            return self._decode(tokens)
        except Exception:
            # Roll the caches back if the call fails.
            for cache in self.caches:
                cache.length = length
            raise

    def _decode(self, tokens: Tensor) -> Tensor:
        if self._graph is not None and self._restore_buffers():
            self._tokens.copy_(tokens)
            self._graph.replay()
            return self._logits
        self._tokens = tokens.clone()
        return self._capture() if self.use_graph else self._step()

    def _restore_buffers(self) -> bool:
        """Move the caches back to the buffers of the graph; return False if they do not fit."""
        return all(cache.use_buffers(buffers) for cache, buffers in zip(self.caches, self._buffers, strict=True))

    def _step(self) -> Tensor:
        """Run the model at `device_position`; this reads and writes only tensors, so that it can be captured."""
        self.device_position.length.copy_(self.device_position.index).add_(1)
        for cache in self.caches:
            cache.device_position = self.device_position
        try:
            with uncached_autocast(self._tokens.device.type):
                hidden = self.model.hidden(self._tokens, position_ids=self.device_position.index, caches=self.caches)
                return self.model.table.logits(hidden[:, -1])
        finally:
            for cache in self.caches:
                cache.device_position = None

    def _capture(self) -> Tensor:
        """Run a step eagerly, and capture it for the next call."""
        self._graph = None
        try:
            graph, logits, self._logits = capture_graph(self._step, torch.cuda.Stream())
        except CaptureError as error:
            self.use_graph = False
            message = "a decoding step could not be captured as a CUDA graph; it runs eagerly, which is slower"
            warnings.warn(f"{message}: {error}", stacklevel=3)
            output: Tensor = error.output
            return output
        self._graph = graph
        self._buffers = [tuple(cache.buffers) for cache in self.caches]
        return logits
