"""What would be missed: the model's answer with one head silenced, against its answer with all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mgk.analysis.capture import Call, Progress, Watch, Watcher, call_model


@dataclass(frozen=True)
class Removal:
    """Per head, on the samples that were tried."""

    change: NDArray[np.float64]  # ‖y − y′‖ / ‖y‖ of the model's output, [H]
    flipped: NDArray[np.float64] | None  # the share of predictions that come out differently, [H]; None without logits


def remove_heads(
    model: nn.Module,
    inputs: Sequence[Any],
    heads: dict[str, int],
    watch: Watch,
    tell: Progress,
    *,
    memory: int,
    together: int = 1,
) -> dict[str, Removal]:
    """For each layer, what removing one of its heads changes. heads: how many each layer has.

    memory: bytes that the answers may take; as many samples are tried as they suffice for. together: samples of a call,
    where they can be joined along their first axis.
    """

    def answers(samples: Sequence[Any], watcher: Watcher) -> list[tuple[Tensor, bool]]:
        with watch(model, watcher):
            return [_answer(call_model(model, sample)) for sample in samples]

    def as_it_is(name: str, call: Call, output: Tensor) -> Tensor:
        return output

    first = answers(inputs[:1], as_it_is)[0][0]
    # The answers with all heads are kept, and compared with as many at a time as belong to one call.
    count = min(len(inputs), max(1, memory // max(1, 3 * first.nbytes)))
    tried = joined(inputs[:count], min(together, count))
    whole = answers(tried, as_it_is)
    total, done, found = sum(heads.values()), 0, {}
    for layer, number in heads.items():
        change, flipped = np.zeros(number), np.zeros(number)
        for head in range(number):
            with watch(model, _silence(layer, head)):
                change[head], flipped[head] = _compare(whole, (_answer(call_model(model, sample)) for sample in tried))
            done += 1
            tell(f"silencing one head at a time, {count} samples", done, total)
        found[layer] = Removal(change, flipped if whole[0][1] else None)
    return found


def joined(inputs: Sequence[Any], together: int) -> list[Any]:
    """Samples that are tensors of the same shape, up to `together` of them, as one."""
    groups: dict[Any, list[Tensor]] = {}
    others = []
    for sample in inputs:
        if isinstance(sample, Tensor) and sample.dim():
            groups.setdefault((sample.shape, sample.dtype, sample.device), []).append(sample)
        else:
            others.append(sample)
    parts = [group[start : start + together] for group in groups.values() for start in range(0, len(group), together)]
    return [*(torch.cat(part) for part in parts), *others]


def _silence(layer: str, head: int) -> Watcher:
    def silence(name: str, call: Call, output: Tensor) -> Tensor:
        if name != layer:
            return output
        output = output.clone()
        output[:, head] = 0
        return output

    return silence


def _answer(output: Any) -> tuple[Tensor, bool]:
    """The model's main output, and whether it holds a score for each class or token."""
    if isinstance(output, Tensor):
        return output, True
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits, True
    parts = output.values() if isinstance(output, dict) else output
    first = next((part for part in parts if isinstance(part, Tensor)), None)
    if first is None:
        raise ValueError("model must return a tensor, or something that holds one")
    return first, False


def _compare(whole: list[tuple[Tensor, bool]], without: Iterable[tuple[Tensor, bool]]) -> tuple[float, float]:
    moved = norm = flips = places = 0.0
    for (before, _), (after, _) in zip(whole, without, strict=True):
        moved += float(torch.linalg.vector_norm(before - after, dtype=torch.float64)) ** 2
        norm += float(torch.linalg.vector_norm(before, dtype=torch.float64)) ** 2
        flips += float((before.argmax(-1) != after.argmax(-1)).sum())
        places += before[..., 0].numel()
    return (moved / max(norm, torch.finfo(torch.float64).tiny)) ** 0.5, flips / max(places, 1)
