"""A training small enough for a test, in a process of its own: tiny_training.py OUT [KILL_AT SIGNAL [resume]].

TINY_TASK=text trains a language model instead of a classifier.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mgk import training
from mgk.recipes import Recipe, Row, Training
from mgk.tasks.corpus import TokenStream
from mgk.tasks.store import Split
from mgk.tasks.vocabulary import ByteVocabulary


@dataclass
class TinyTask:
    vocab_size: int = 16
    num_classes: int = 4
    max_length: int = 24
    documents: int = 1
    objective: str = "classification"

    def split(self, data_dir: Path, name: str) -> Split:
        draw = np.random.default_rng(len(name))
        examples = 29 if name == "train" else 10
        lengths = draw.integers(5, 24, examples)
        tokens = draw.integers(1, 16, lengths.sum()).astype(np.uint8)
        return Split(tokens, np.concatenate([[0], lengths.cumsum()]), draw.integers(0, 4, examples))


@dataclass
class TinyText:
    max_length: int = 12
    objective: str = "language-model"
    unit: str = "byte"
    splits: tuple[str, ...] = ("train", "dev", "test")

    def vocabulary(self, data_dir: Path) -> ByteVocabulary:
        return ByteVocabulary()

    def split(self, data_dir: Path, name: str) -> TokenStream:
        draw = np.random.default_rng(len(name))
        # 24 steps of 8 segments: more than one epoch, and a step that spans two.
        return TokenStream(draw.integers(0, 60, 29 * 12 + 5 if name == "train" else 50).astype(np.uint8), 12)


TASKS = {"classes": TinyTask, "text": TinyText}
MODELS = {
    "classes": {"embed_dim": 8, "ffn_dim": 8, "head_dim": 4},
    "text": {"embed_dim": 8, "ffn_dim": 8, "head_dim": 4, "num_layers": 2, "cutoffs": [20, 50]},
}
TASK = os.environ.get("TINY_TASK", "classes")


def run(out: str, **settings) -> training.Run:
    defaults = {"steps": 24, "batch_size": 8, "lr": 1e-3, "warmup": 4, "eval_every": 6, "precision": "fp32"}
    recipe = Recipe(
        "tiny",
        "tiny",
        "tiny",
        model={**MODELS[TASK], "dropout": settings.pop("dropout", 0.1)},
        training=Training(**{**defaults, "compile": False, "pad_full": False, **settings}),
    )
    return training.Run(recipe, Row("smgk", 2), "paper", 3, Path("."), Path(out))


def main(out: str, kill_at: str = "0", signal_number: str = "9", resume: str = "") -> None:
    if int(kill_at):
        keep_going = training.Record.on_train_batch_end

        def die(self, trainer, *arguments):
            keep_going(self, trainer, *arguments)
            if trainer.global_step == int(kill_at):
                os.kill(os.getpid(), int(signal_number))

        training.Record.on_train_batch_end = die
    settings = {"dropout": 0.0} if os.environ.get("WORLD_SIZE") or resume == "no-dropout" else {}
    if TASK == "text":
        settings |= {"schedule": "cosine", "clip": 0.25}
    module, record = training.fit(run(out, **settings), TASKS[TASK](), resume=resume == "resume", accelerator="cpu")
    if record.stopped_by is not None:
        sys.exit(128 + record.stopped_by)
    if module.global_rank == 0:
        from mgk.models import save_model

        save_model(module.model, Path(out) / "final")


if __name__ == "__main__":
    main(*sys.argv[1:])
