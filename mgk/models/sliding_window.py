"""How well a language model predicts a text, by a window that slides over it.

The paper's evaluation: all positions of the first window, then the last position of each window one token further. So
every prediction but the first few sees a full window, at the price of a forward for every token. Windows go through in
batches, the last layer works for the last position alone, and the softmax runs once, for all positions together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgk._core.validation import fail, positive_integer
from mgk.models import LanguageModel


@torch.no_grad()
def sliding_losses(
    model: LanguageModel, tokens: Tensor, *, window: int | None = None, stride: int = 1, batch_size: int = 512
) -> Tensor:
    """−log p of tokens 1, 2, … given those before them in the window: [T] to [T − 1], in fp32.

    window: how many tokens a prediction sees, by default the model's max_length. stride: 1 is the paper's evaluation; n
    scores the last n positions of each window, in an n-th of the time, with less to see for most of them. batch_size:
    windows at a time; the result does not depend on it. The caller sets autocast.
    """
    window = model.config.max_length if window is None else positive_integer("window", window)
    positive_integer("batch_size", batch_size)
    if not 1 <= positive_integer("stride", stride) <= window:
        fail("stride", f"must be at most the window, {window}, got {stride}")
    if tokens.dim() != 1 or len(tokens) < 2:
        fail("tokens", f"must be a running text [T] of at least 2 tokens, got {list(tokens.shape)}")
    if model.training:
        fail("model", "must be in eval mode: call model.eval()")
    tokens = tokens.long()
    inputs, targets = tokens[:-1], tokens[1:]
    first = model.hidden(inputs[None, :window])[0]
    hidden = first.new_empty(len(inputs), first.shape[-1])
    hidden[:window] = first
    # The window that ends at position e begins at e − window + 1.
    steps = list(range(window + stride - 1, len(inputs), stride))
    if len(inputs) > window and (len(inputs) - window) % stride:
        steps.append(len(inputs) - 1)
    ends = torch.tensor(steps, dtype=torch.long, device=tokens.device)
    size = min(batch_size, len(ends))
    for begin in range(0, len(ends), max(1, size)):
        # The last batch is as large as the others, some windows a second time: one shape, compiled once.
        chosen = ends[min(begin, len(ends) - size) :][:size]
        places = chosen[:, None] + torch.arange(1 - window, 1, device=tokens.device)
        if stride == 1:
            hidden[chosen] = model.last_hidden(inputs[places])
        else:
            hidden[places[:, -stride:]] = model.hidden(inputs[places])[:, -stride:]
    return model.table.losses(hidden, targets)
