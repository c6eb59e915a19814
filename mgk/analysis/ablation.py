"""Ablation of heads: change of the model's output when the output of one head is set to zero."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mgk._core.progress import Progress
from mgk.analysis.capture import Call, Capture, LayerHandler, call_model


class MainOutput(NamedTuple):
    """Output of a model that is compared."""

    values: Tensor
    are_logits: bool


@dataclass(frozen=True)
class Removal:
    """Effect of removing each head of a layer."""

    change: NDArray[np.float64]  # ‖y − y′‖ / ‖y‖ of the model's output, [H]
    flipped: NDArray[np.float64] | None  # share of predictions that change, [H]; None without logits


def measure_removals(
    model: nn.Module,
    inputs: Sequence[Any],
    heads: dict[str, int],
    capture: Capture,
    progress: Progress,
    *,
    memory: int,
    together: int = 1,
) -> dict[str, Removal]:
    """Measure the effect of removing each head, one at a time.

    Args:
        model: The model, in eval mode.
        inputs: Samples, in the format of `analyse`.
        heads: Number of heads of each layer, by name.
        capture: Context manager that passes the attention calls of a model to a handler.
        progress: Called with (stage, done, total).
        memory: Bytes for the outputs of the model; limits the number of samples.
        together: Samples per call, if they can be concatenated along their first axis.

    Returns:
        The effect of each head of each layer, by layer name.
    """
    with capture(model, _keep_output):
        first = _main_output(call_model(model, inputs[0]))
        # The outputs with all heads are stored; ablated outputs are compared one call at a time.
        count = min(len(inputs), max(1, memory // max(1, 3 * first.values.nbytes)))
        batches = concatenate(inputs[:count], min(together, count))
        baseline = [_main_output(call_model(model, batch)) for batch in batches]
    total, done, removals = sum(heads.values()), 0, {}
    for layer, number in heads.items():
        change, flipped = np.zeros(number), np.zeros(number)
        for head in range(number):
            with capture(model, _zero_head(layer, head)):
                ablated = (_main_output(call_model(model, batch)) for batch in batches)
                change[head], flipped[head] = _compare(baseline, ablated)
            done += 1
            samples = "1 sample" if count == 1 else f"{count} samples"
            progress(f"removing one head at a time, {samples}", done, total)
        removals[layer] = Removal(change, flipped if first.are_logits else None)
    return removals


def concatenate(inputs: Sequence[Any], together: int) -> list[Any]:
    """Concatenate samples that are tensors of the same shape, up to `together` at a time."""
    groups: dict[Any, list[Tensor]] = {}
    single = []
    for sample in inputs:
        if isinstance(sample, Tensor) and sample.dim():
            groups.setdefault((sample.shape, sample.dtype, sample.device), []).append(sample)
        else:
            single.append(sample)
    batches = [group[start : start + together] for group in groups.values() for start in range(0, len(group), together)]
    return [*(torch.cat(batch) for batch in batches), *single]


def _keep_output(name: str, call: Call, output: Tensor) -> Tensor:
    return output


def _zero_head(layer: str, head: int) -> LayerHandler:
    def zero_head(name: str, call: Call, output: Tensor) -> Tensor:
        if name != layer:
            return output
        output = output.clone()
        output[:, head] = 0
        return output

    return zero_head


def _main_output(output: Any) -> MainOutput:
    """Return the logits among the outputs of a model, else the first tensor."""
    if isinstance(output, Tensor):
        return MainOutput(output, are_logits=True)
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return MainOutput(logits, are_logits=True)
    parts = output.values() if isinstance(output, dict) else output
    first = next((part for part in parts if isinstance(part, Tensor)), None)
    if first is None:
        raise ValueError(f"model must return a tensor or a container of tensors, got {type(output).__name__}")
    return MainOutput(first, are_logits=False)


def _compare(baseline: list[MainOutput], ablated: Iterable[MainOutput]) -> tuple[float, float]:
    """Return the relative change of the outputs and the share of changed predictions."""
    difference = norm = flips = predictions = 0.0
    for (before, _), (after, _) in zip(baseline, ablated, strict=True):
        difference += float(torch.linalg.vector_norm(before - after, dtype=torch.float64)) ** 2
        norm += float(torch.linalg.vector_norm(before, dtype=torch.float64)) ** 2
        flips += float((before.argmax(-1) != after.argmax(-1)).sum())
        predictions += before[..., 0].numel()
    return (difference / max(norm, torch.finfo(torch.float64).tiny)) ** 0.5, flips / max(predictions, 1)
