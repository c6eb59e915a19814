"""mgk generate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mgk._core.validation import positive_integer
from mgk.cli.app import app
from mgk.cli.help_texts import epilog


@app.command(epilog=epilog("generate"))
def generate(
    run: Annotated[Path, typer.Argument(help="Run directory of a language model.")],
    prompt: Annotated[
        str, typer.Option(help="Text to continue. Word-level models split it at spaces and map unknown words to <unk>.")
    ],
    max_tokens: Annotated[int, typer.Option(help="Number of tokens to generate.")] = 100,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 takes the most likely token.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Sample only from the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample only from the most likely tokens with this total probability.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
) -> None:
    """Continue a prompt with a language model."""
    import torch

    from mgk.models.generation import Sampling
    from mgk.models.generation import generate as generate_tokens
    from mgk.training.runs import load_language_model

    positive_integer("--max-tokens", max_tokens)
    try:
        sampling = Sampling(temperature, top_k, top_p, seed)
    except ValueError as error:
        # The message starts with the name of a field, which is the option's name with underscores.
        field, _, reason = str(error).partition(" ")
        raise ValueError(f"--{field.replace('_', '-')} {reason}") from None
    model, vocabulary = load_language_model(run, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    ids, unknown = vocabulary.encode(prompt)
    if not len(ids):
        raise ValueError("--prompt must not be empty")
    if unknown:
        print(f"{unknown} words of the prompt are not in the vocabulary and become <unk>", file=sys.stderr)
    print(prompt, end=" " if vocabulary.spaced else "", flush=True)
    for piece in vocabulary.pieces(generate_tokens(model, ids.tolist(), max_tokens=max_tokens, sampling=sampling)):
        print(piece, end="", flush=True)
    print()
