"""Text from a language model, one token at a time, on its caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mgk._core.validation import fail, number, positive_integer
from mgk.models import LanguageModel
from mgk.models.decoding import DecodingStep


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. temperature 0 takes the likeliest; top_k and top_p leave the likeliest tokens alone."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        number("temperature", self.temperature, 0)
        if self.top_k is not None:
            positive_integer("top_k", self.top_k)
        if self.top_p is not None and not 0 < number("top_p", self.top_p) <= 1:
            fail("top_p", f"must be more than 0 and at most 1, got {self.top_p!r}")

    def draw(self, scores: Tensor, generator: torch.Generator) -> int:
        """A token from its scores [V]."""
        if self.temperature == 0:
            return int(scores.argmax())
        # On the CPU, so that a seed means the same everywhere.
        ordered, tokens = (scores.float().cpu() / self.temperature).sort(descending=True, stable=True)
        ordered, tokens = ordered[: self.top_k], tokens[: self.top_k]
        probabilities = ordered.softmax(-1)
        if self.top_p is not None:
            # The token that crosses the threshold stays.
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= self.top_p, 0)
        return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


@torch.no_grad()
def generate(
    model: LanguageModel, prompt: Sequence[int], *, max_tokens: int, sampling: Sampling | None = None
) -> Iterator[int]:
    """Tokens that follow the prompt, as they are drawn.

    The model sees at most max_length tokens, as in training. Where these are used up it goes on from the last half of
    them, read anew.
    """
    sampling = Sampling() if sampling is None else sampling
    positive_integer("max_tokens", max_tokens)
    if len(prompt) == 0:
        fail("prompt", "must have at least one token")
    context, device = model.config.max_length, model.table.weight.device
    generator = torch.Generator().manual_seed(sampling.seed)
    caches = model.make_caches(1, context)
    # Elsewhere a step that reads its length on the device saves nothing, and looks at all the room there is for keys.
    step = DecodingStep(model, caches) if device.type == "cuda" else None
    seen = [int(token) for token in prompt]
    new = seen[-context:]
    for _ in range(max_tokens):
        tokens = torch.tensor([new], device=device)
        if step is not None and len(new) == 1:
            scores = step(tokens)
        else:
            scores = model.table.logits(model.hidden(tokens, caches=caches)[:, -1])
        token = sampling.draw(scores[0], generator)
        yield token
        seen.append(token)
        new = [token]
        if caches[0].length == context:
            for cache in caches:
                cache.reset()
            new = seen[-max(1, context // 2) :]
