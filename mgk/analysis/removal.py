"""What would be missed: the model's answer with one head silenced, against its answer with all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mgk.analysis.watching import Call, Progress, Watch, Watcher, run


@dataclass(frozen=True)
class Removal:
    """Per head, on the samples that were tried."""

    change: NDArray[np.float64]  # ‖y − y′‖ / ‖y‖ of the model's output, [H]
    flipped: NDArray[np.float64] | None  # the share of predictions that come out differently, [H]; None without logits


def remove_heads(
    model: nn.Module, inputs: Sequence[Any], heads: dict[str, int], watch: Watch, tell: Progress
) -> dict[str, Removal]:
    """For each layer, what removing one of its heads changes. heads: how many each layer has."""

    def answers(watcher: Watcher) -> list[tuple[Tensor, bool]]:
        with watch(model, watcher):
            return [_answer(run(model, sample)) for sample in inputs]

    whole = answers(lambda name, call, output: output)
    total, done, found = sum(heads.values()), 0, {}
    for layer, count in heads.items():
        change, flipped = np.zeros(count), np.zeros(count)
        for head in range(count):
            change[head], flipped[head] = _compare(whole, answers(_silence(layer, head)))
            done += 1
            tell("silencing one head at a time", done, total)
        found[layer] = Removal(change, flipped if whole[0][1] else None)
    return found


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


def _compare(whole: list[tuple[Tensor, bool]], without: list[tuple[Tensor, bool]]) -> tuple[float, float]:
    moved = norm = flips = places = 0.0
    for (before, _), (after, _) in zip(whole, without, strict=True):
        before, after = before.double(), after.double()
        moved += float((before - after).square().sum())
        norm += float(before.square().sum())
        flips += float((before.argmax(-1) != after.argmax(-1)).sum())
        places += before[..., 0].numel()
    return (moved / max(norm, torch.finfo(torch.float64).tiny)) ** 0.5, flips / max(places, 1)
