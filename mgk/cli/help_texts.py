"""Epilogs of the commands: two examples each, and the keys of --set."""

from __future__ import annotations

import inspect
import re
import textwrap

EXAMPLES = {
    "train": (
        "mgk train demo --variant smgk --heads 2 --data-dir runs/data",
        "mgk train bytes --variant smgk --heads 4 --set lr=1e-3 --resume auto",
    ),
    "compare": (
        "mgk compare demo --out mine",
        "mgk compare bytes --rows softmax:4,smgk:4/2 --seeds 3 --data-dir DIR",
    ),
    "eval": ("mgk eval runs/demo/smgk-2-paper-s0", "mgk eval runs/wikitext-2/smgk-2-paper-s0 --split test --stride 1"),
    "generate": (
        'mgk generate runs/bytes/smgk-2-paper-s0 --prompt "The cat"',
        'mgk generate runs/bytes/smgk-2-paper-s0 --prompt "The cat" --top-p 0.9',
    ),
    "data": ("mgk data listops --data-dir DIR", "mgk data all --data-dir DIR"),
    "recipes": ("mgk recipes", "mgk recipes bytes > mine.yaml"),
    "analyze": ("mgk analyze runs/demo/softmax-4-paper-s0", "mgk analyze --hf gpt2 --text essay.txt --out report"),
    "bench": ("mgk bench", "mgk bench --only speed --shapes 8x16x2048x64xcausal --variants smgk"),
    "upcycle": (
        "mgk upcycle gpt2 --text essay.txt --key-heads 6 --out smaller",
        "mgk upcycle MODEL --text essay.txt --cache 0.5 --out smaller",
    ),
    "flops": ("mgk flops listops --heads 2,4,8", "mgk flops retrieval-aan --lengths 1024,4096 --variants softmax,smgk"),
}


# Width of lines in epilogs: Typer indents the lines of a terminal of 80 columns by one.
WIDTH = 78


def epilog(command: str, *, settings: bool = False) -> str:
    """Return the end of a command's help: its examples and, with `settings`, the keys of --set."""
    return "\n\n".join([examples_epilog(*EXAMPLES[command]), *(setting_lists() if settings else ())])


def examples_epilog(*commands: str) -> str:
    """Return an epilog that lists examples of a command."""
    return _paragraph("Examples:" if len(commands) > 1 else "Example:", [f"  {command}" for command in commands])


def setting_lists() -> list[str]:
    """List the keys of --set with their meanings: training settings, and those of all kinds of models."""
    from mgk.models import DecoderConfig, EncoderConfig, VisionConfig
    from mgk.training.config import TrainConfig, settable_names

    models: dict[str, str] = {}
    for config in (VisionConfig, DecoderConfig, EncoderConfig):
        meanings = attribute_meanings(config)
        models |= {name: meanings.get(name, "") for name in settable_names(config)}
    return [
        _paragraph("Keys of --set:", _columns(attribute_meanings(TrainConfig))),
        _paragraph("Model settings, with the prefix `model.`:", _columns(dict(sorted(models.items())))),
    ]


def attribute_meanings(config: type) -> dict[str, str]:
    """Return the first sentence of each attribute in the docstring of a class, without its period."""
    # python -OO removes docstrings.
    section = (inspect.getdoc(config) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", section, re.MULTILINE)
    return {name: re.split(r"\.(?:\s|$)", " ".join(text.split()), maxsplit=1)[0] for name, text in entries}


def _columns(meanings: dict[str, str]) -> list[str]:
    indent = max((len(name) for name in meanings), default=0) + 4
    return [
        line
        for name, meaning in meanings.items()
        for line in textwrap.wrap(
            meaning, WIDTH, initial_indent=f"  {name}".ljust(indent), subsequent_indent=" " * indent
        )
    ]


def _paragraph(title: str, lines: list[str]) -> str:
    # A \b line keeps the line breaks of a paragraph.
    return "\n".join(["\b", title, *lines])
