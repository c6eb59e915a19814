"""Sliding-window evaluation of language models.

As in the paper: all positions of the first window are scored, then the last position of each window shifted by one
token. Every prediction but the first ones has a full window of context, at the cost of one forward per token. Windows
run in batches, the last layer runs for the last position only, and the softmax runs once for all positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgk._core.validation import fail, positive_integer
from mgk.models.decoder import LanguageModel


@torch.no_grad()
def sliding_losses(
    model: LanguageModel, tokens: Tensor, *, window: int | None = None, stride: int = 1, batch_size: int = 512
) -> Tensor:
    """Compute -log p of each token but the first, given the tokens before it in its window.

    The caller enables autocast if needed.

    Args:
        model: A language model in eval mode.
        tokens: A text as token ids [T].
        window: Number of tokens of context. Default: the model's max_length.
        stride: Number of positions scored per window, the last ones. 1 is the paper's evaluation; n takes 1/n of the
            time, with less context for most positions.
        batch_size: Number of windows per forward; the result does not depend on it.

    Returns:
        Losses [T - 1] in fp32.
    """
    window = model.config.max_length if window is None else positive_integer("window", window)
    positive_integer("batch_size", batch_size)
    if not 1 <= positive_integer("stride", stride) <= window:
        fail("stride", f"must be at most window = {window}, got {stride}")
    if tokens.dim() != 1 or len(tokens) < 2:
        fail("tokens", f"must have shape [T] with at least 2 tokens, got {list(tokens.shape)}")
    if model.training:
        fail("model", "must be in eval mode: call model.eval()")
    tokens = tokens.long()
    inputs, targets = tokens[:-1], tokens[1:]
    window = min(window, len(inputs))
    # Last positions of the windows, and the first position that each window scores: the first window scores all.
    last_positions = list(range(window + stride - 1, len(inputs), stride))
    if (len(inputs) - window) % stride:
        last_positions.append(len(inputs) - 1)
    first_positions = [0, window, *(n + 1 for n in last_positions[:-1])][: 1 + len(last_positions)]
    ends = torch.tensor([window - 1, *last_positions], device=tokens.device)
    starts = torch.tensor(first_positions, device=tokens.device)
    hidden = torch.empty(0)
    if stride == 1:
        first = model.hidden(inputs[None, :window])[0]
        hidden = first.new_empty(len(inputs), first.shape[-1])
        hidden[:window] = first
        ends, starts = ends[1:], starts[1:]
    size = min(batch_size, len(ends))
    for begin in range(0, len(ends), max(1, size)):
        # The last batch repeats some windows, so that all batches have one shape and compile once.
        first_window = min(begin, len(ends) - size)
        batch = slice(first_window, first_window + size)
        positions = ends[batch, None] + torch.arange(1 - window, 1, device=tokens.device)
        if stride == 1:
            hidden[ends[batch]] = model.last_hidden(inputs[positions])
            continue
        states = model.hidden(inputs[positions])
        if begin == 0:
            hidden = states.new_empty(len(inputs), states.shape[-1])
        # The last window may overlap the scored positions of the one before, which have more context there.
        unscored = positions >= starts[batch, None]
        hidden[positions[unscored]] = states[unscored]
    return model.table.losses(hidden, targets)
