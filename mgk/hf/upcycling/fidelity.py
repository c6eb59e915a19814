"""Fidelity of a merged model: agreement of its outputs with those of the original."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from mgk._core.eval_mode import eval_mode
from mgk._core.validation import fail


@dataclass(frozen=True)
class Outputs:
    """Outputs of a model for a batch.

    Attributes:
        hidden: Hidden states of the embedding and of all layers, [B, L, width] each.
        logits: Logits per token [B, L, V], or None.
        mask: Whether a token is not padding [B, L].
    """

    hidden: tuple[Tensor, ...]
    logits: Tensor | None
    mask: Tensor

    def embedding(self) -> Tensor:
        """Return the mean of the last hidden states over the tokens, with norm 1, [B, width]."""
        hidden = self.hidden[-1]
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        keep = self.mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * keep).sum(1) / keep.sum(1).clamp(min=1), dim=-1)


def run_model(model: PreTrainedModel, batch: Mapping[str, Any]) -> Outputs:
    """Return the hidden states and logits of a model."""
    output = model(**batch, output_hidden_states=True)
    hidden = getattr(output, "hidden_states", None) or getattr(output, "decoder_hidden_states", None)
    if hidden is None:
        fail("model", f"is a {type(model).__name__}, which returns no hidden states: upcycle its parts one by one")
    logits = getattr(output, "logits", None)
    mask = batch.get("attention_mask")
    if mask is None or mask.shape != hidden[-1].shape[:2]:
        mask = torch.ones(hidden[-1].shape[:2], device=hidden[-1].device)
    has_token_logits = logits is not None and logits.dim() == 3 and logits.shape[:2] == mask.shape
    return Outputs(tuple(hidden), logits if has_token_logits else None, mask.bool())


def max_positions(model: PreTrainedModel) -> int | None:
    """Return the number of positions of a model, None if it has no limit."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return None
    # The positions of RoBERTa and its relatives start after that of the padding token.
    offsets = [
        module.padding_idx + 1
        for module in model.modules()
        if isinstance(getattr(module, "padding_idx", None), int) and hasattr(module, "position_embeddings")
    ]
    return int(positions) - max(offsets, default=0)


def is_language_model(model: PreTrainedModel) -> bool:
    """Return whether a model predicts the next token of its input."""
    return bool(model.can_generate()) and not model.config.is_encoder_decoder


def measure_fidelity(
    teacher: PreTrainedModel, student: PreTrainedModel, batches: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Compare a model with the original on held-out text.

    Returns:
        cosine: Mean cosine between the embeddings (mean of the last hidden states) of both models.
        hidden_error: Squared error of the last hidden states, relative to those of the original.
        For models with logits per token also agreement, the share of tokens with the same most probable token, and kl,
        the Kullback-Leibler divergence per token in nats; for causal models also perplexity and original_perplexity.
    """
    sums: dict[str, float] = defaultdict(float)
    with eval_mode(teacher), eval_mode(student):
        for batch in batches:
            expected, actual = run_model(teacher, batch), run_model(student, batch)
            sums["cosine"] += float((expected.embedding() * actual.embedding()).sum())
            sums["samples"] += len(expected.mask)
            before, after = (item.hidden[-1][item.mask].float() for item in (expected, actual))
            sums["error"] += float((after - before).square().sum())
            sums["energy"] += float(before.square().sum())
            if expected.logits is None or actual.logits is None:
                continue
            old, new = (item.logits[item.mask].float().log_softmax(-1) for item in (expected, actual))  # type: ignore[index]
            sums["kl"] += float((old.exp() * (old - new)).sum())
            sums["agreement"] += float((old.argmax(-1) == new.argmax(-1)).sum())
            sums["tokens"] += len(old)
            if is_language_model(teacher) and "input_ids" in batch:
                original_loss, count = _next_token_loss(expected, batch["input_ids"])
                sums["original_loss"] += original_loss
                sums["loss"] += _next_token_loss(actual, batch["input_ids"])[0]
                sums["predictions"] += count
    result = {"cosine": sums["cosine"] / sums["samples"], "hidden_error": sums["error"] / max(sums["energy"], 1e-300)}
    if sums["tokens"]:
        result |= {"kl": sums["kl"] / sums["tokens"], "agreement": sums["agreement"] / sums["tokens"]}
    if sums["predictions"]:
        result["perplexity"] = math.exp(sums["loss"] / sums["predictions"])
        result["original_perplexity"] = math.exp(sums["original_loss"] / sums["predictions"])
    return result


def _next_token_loss(outputs: Outputs, ids: Tensor) -> tuple[float, int]:
    """Return the summed cross entropy of the next tokens, and their number."""
    assert outputs.logits is not None
    if outputs.logits.shape[:2] != ids.shape:
        return 0.0, 0
    keep = outputs.mask[:, 1:] & outputs.mask[:, :-1]
    logits = outputs.logits[:, :-1][keep].float()
    return float(F.cross_entropy(logits, ids[:, 1:][keep], reduction="sum")), int(keep.sum())
