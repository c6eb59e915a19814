"""What a language model writes, kept when its weights cannot be."""

from __future__ import annotations

from pathlib import Path

import torch

from mgk.files import write_atomically
from mgk.generation import Sampling, generate
from mgk.runs import load_language_model


def sample(run: Path, out: Path, prompt: str = "The", tokens: int = 120) -> Path:
    """What the model writes on from a prompt, three times."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, vocabulary = load_language_model(run, device)
    lines = [f"# Samples of {run.name}", "", f"Temperature 1, top_p 0.9, from {prompt!r}."]
    for seed in range(3):
        ids, _ = vocabulary.encode(prompt)
        drawn = generate(model, ids.tolist(), max_tokens=tokens, sampling=Sampling(top_p=0.9, seed=seed))
        joint = " " if vocabulary.spaced else ""
        lines += ["", f"## Seed {seed}", "", prompt + joint + vocabulary.decode(drawn).replace("\n", "\n\n")]
    path = out / f"{run.parent.name}-{run.name}-samples.md"
    write_atomically(path, "\n".join(lines) + "\n")
    return path
