"""Epilogs of the commands: two examples each, and the keys of --set."""

from __future__ import annotations

import dataclasses

EXAMPLES = {
    "train": (
        "mgk train demo --variant smgk --heads 2 --data-dir runs/data",
        "mgk train wikitext-103 --variant smgk --heads 8 --kv-heads 4 --set lr=5e-4 --resume auto",
    ),
    "compare": (
        "mgk compare demo --out mine",
        "mgk compare bytes --rows softmax:4,smgk:4/2 --seeds 3 --data-dir DIR_WITH_TXT_FILES --out mine",
    ),
    "eval": ("mgk eval runs/demo/smgk-2-paper-s0", "mgk eval runs/wikitext-2/smgk-2-paper-s0 --split test --stride 1"),
    "generate": (
        'mgk generate runs/bytes/smgk-2-paper-s0 --prompt "The cat"',
        'mgk generate runs/bytes/smgk-2-paper-s0 --prompt "The cat" --temperature 0.8 --top-p 0.9 --max-tokens 200',
    ),
    "data": ("mgk data listops --data-dir DIR", "mgk data all --data-dir DIR"),
    "recipes": ("mgk recipes", "mgk recipes bytes > mine.yaml"),
    "analyze": ("mgk analyze runs/demo/softmax-4-paper-s0", "mgk analyze --hf gpt2 --text essay.txt --out report"),
    "bench": ("mgk bench", "mgk bench --only speed --shapes 8x16x2048x64xcausal --variants smgk"),
    "upcycle": (
        "mgk upcycle gpt2 --text essay.txt --key-heads 6 --out smaller",
        "mgk upcycle MODEL --text a.txt --text b.txt --cache 0.5 --distil-steps 500 --out smaller",
    ),
    "flops": ("mgk flops listops --heads 2,4,8", "mgk flops retrieval-aan --lengths 1024,4096 --variants softmax,smgk"),
}


def epilog(command: str, *, settings: bool = False) -> str:
    """Return the end of a command's help: its examples and, with `settings`, the keys of --set."""
    lines = ["Examples:", *EXAMPLES[command]]
    # A \b line keeps the line breaks of a paragraph.
    text = "\b\n" + "\n".join([lines[0], *(f"  {line}" for line in lines[1:])])
    return f"{text}\n\n{setting_keys()}" if settings else text


def setting_keys() -> str:
    """List the keys of --set: fields of the training settings and of the two kinds of model."""
    from mgk.models import DecoderConfig, EncoderConfig
    from mgk.training.config import OPTIONS_OF_SETTINGS, TrainConfig

    task_fields = {"vocab_size", "num_classes", "max_length", "documents"}
    training = [field.name for field in dataclasses.fields(TrainConfig)]
    models = [field.name for config in (EncoderConfig, DecoderConfig) for field in dataclasses.fields(config)]
    model = sorted({*models} - OPTIONS_OF_SETTINGS.keys() - task_fields)
    return f"Keys of --set: {', '.join(training)}. Of the model: model. followed by {', '.join(model)}."
