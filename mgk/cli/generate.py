"""mgk generate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mgk._core.validation import positive_integer
from mgk.cli.app import app


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="The directory of a language model's run.")],
    prompt: Annotated[str, typer.Option(help="The text to go on from. Word-level models know words between spaces.")],
    max_tokens: Annotated[int, typer.Option(help="How many tokens.")] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Only the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="The likeliest tokens of this probability in all.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
) -> None:
    """Write on from a prompt, token by token."""
    import torch

    from mgk.models.generation import Sampling
    from mgk.models.generation import generate as tokens_of
    from mgk.training.run_dir import load_language_model

    positive_integer("--max-tokens", max_tokens)
    try:
        sampling = Sampling(temperature, top_k, top_p, seed)
    except ValueError as error:
        # The options are called as the fields are, but for their dashes.
        name, _, rest = str(error).partition(" ")
        raise ValueError(f"--{name.replace('_', '-')} {rest}") from None
    model, vocabulary = load_language_model(run, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    ids, unknown = vocabulary.encode(prompt)
    if not len(ids):
        raise ValueError("--prompt must hold some text to go on from")
    if unknown:
        print(f"{unknown} of the prompt's words are not in the vocabulary: read as <unk>", file=sys.stderr)
    print(prompt, end=" " if vocabulary.spaced else "", flush=True)
    for piece in vocabulary.pieces(tokens_of(model, ids.tolist(), max_tokens=max_tokens, sampling=sampling)):
        print(piece, end="", flush=True)
    print()
