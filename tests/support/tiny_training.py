"""A tiny training for tests; as a script it runs in its own process. TINY_TASK selects one of TASKS."""

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mgk.cli import hard_exit
from mgk.distributed.checkpoint import gather_weights
from mgk.models import save_model
from mgk.models.decoder import FORMS
from mgk.models.vocabulary import ByteVocabulary
from mgk.tasks.base import Split
from mgk.tasks.corpus import TokenStream
from mgk.training import callbacks, trainer
from mgk.training.config import ModelSpec, Recipe, TrainConfig
from mgk.training.module import TrainingModule
from mgk.training.process_group import shutdown_distributed


@dataclass
class TinyTask:
    dataset: str = "tiny"
    vocab_size: int = 16
    num_classes: int = 4
    max_length: int = 24
    documents: int = 1
    objective: str = "classification"

    def checksum(self, data_dir: Path) -> str:
        return "tiny"

    def split(self, data_dir: Path, name: str) -> Split:
        draw = np.random.default_rng(len(name))
        examples = 29 if name == "train" else 10
        lengths = draw.integers(5, 24, examples * self.documents)
        tokens = draw.integers(1, 16, lengths.sum()).astype(np.uint8)
        labels = draw.integers(0, 4, examples)
        return Split(tokens, np.concatenate([[0], lengths.cumsum()]), labels, self.documents)


@dataclass
class TinyImages(TinyTask):
    """Images of 4 × 4 pixels."""

    max_length: int = 16
    objective: str = "image-classification"

    def split(self, data_dir: Path, name: str) -> Split:
        draw = np.random.default_rng(len(name))
        examples = 29 if name == "train" else 10
        pixels = draw.integers(0, 256, examples * self.max_length).astype(np.uint8)
        offsets = self.max_length * np.arange(examples + 1)
        return Split(pixels, offsets, draw.integers(0, 4, examples), 1)


@dataclass
class TinyText:
    max_length: int = 12
    objective: str = "language-model"
    unit: str = "byte"
    splits: tuple[str, ...] = ("train", "dev", "test")

    def checksum(self, data_dir: Path) -> str:
        return "tiny"

    def vocabulary(self, data_dir: Path) -> ByteVocabulary:
        return ByteVocabulary()

    def split(self, data_dir: Path, name: str) -> TokenStream:
        draw = np.random.default_rng(len(name))
        # 24 steps of 8 segments are more than one epoch, and one step spans two epochs.
        return TokenStream(draw.integers(0, 60, 29 * 12 + 5 if name == "train" else 50).astype(np.uint8), 12)


# One task for each family of recipes: ListOps, Text and images as pixels; Retrieval; images as patches; WikiText-103,
# also without cutoffs; WikiText-2, bytes and bpe.
TASKS = {
    "classes": TinyTask,
    "pairs": lambda: TinyTask(documents=2),
    "images": TinyImages,
    "text": TinyText,
    "text-full-softmax": TinyText,
    "bytes": TinyText,
}
SIZES = {"embed_dim": 8, "ffn_dim": 8, "head_dim": 4, "num_layers": 2}
MODELS = {
    "classes": SIZES,
    "pairs": SIZES,
    "images": {**SIZES, "image_size": 4, "patch_size": 2},
    "text": {**SIZES, "cutoffs": [20, 50]},
    "text-full-softmax": SIZES,
    "bytes": {**SIZES, **FORMS["modern"]},
}
TASK = os.environ.get("TINY_TASK", "classes")


def run(out: str, family: str | None = None, **settings) -> trainer.Run:
    defaults = {"steps": 24, "batch_size": 8, "lr": 1e-3, "warmup": 4, "eval_every": 6, "precision": "fp32"}
    recipe = Recipe(
        "tiny",
        "tiny",
        "tiny",
        model={**MODELS[family or TASK], "dropout": settings.pop("dropout", 0.1)},
        training=TrainConfig(**{**defaults, "compile": False, "padding": "longest", **settings}),
    )
    return trainer.Run(recipe, ModelSpec("smgk", 2), "paper", 3, Path("."), Path(out))


def train(family: str, out: Path, options: argparse.Namespace) -> int:
    """Train one task, save its model, and return the exit code."""
    settings = {"schedule": "cosine", "clip": 0.25} if family == "text" else {}
    settings |= {name: int(value) for name, value in (setting.split("=") for setting in options.set)}
    tiny_run = replace(run(str(out), family, dropout=options.dropout, **settings), row=ModelSpec.parse(options.row))
    module, callback = trainer.fit(
        tiny_run,
        TASKS[family](),
        resume=options.resume,
        accelerator="cpu",
        strategy=options.strategy,
        loggers=[options.logger],
    )
    weights = gather_weights(module.model)
    if callback.stopped_by is None and module.global_rank == 0:
        save_model(module.model, out / "final", weights)
    return 0 if callback.stopped_by is None else 128 + callback.stopped_by


def send_signal_after(step: int, number: int) -> None:
    """Make the training send a signal to this process after a step, and fail if it is evaluated afterwards."""
    on_train_batch_end = callbacks.CheckpointCallback.on_train_batch_end

    def fail_validation(*arguments):
        raise AssertionError("evaluated after the stop signal")

    def send_signal(self, lightning, *arguments):
        on_train_batch_end(self, lightning, *arguments)
        if lightning.global_step == step:
            # The signal is handled in the next step, which may end with an evaluation.
            if (step + 1) % lightning.val_check_interval:
                TrainingModule.validation_step = fail_validation
            os.kill(os.getpid(), number)

    callbacks.CheckpointCallback.on_train_batch_end = send_signal


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--kill-with", type=int, default=9)
    parser.add_argument("--kill-rank", help="rank that receives the signal; default: all")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--every-task", action="store_true", help="train all TASKS, each in a folder of its name")
    parser.add_argument("--row", default="smgk:2")
    parser.add_argument("--logger", default="tensorboard")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=INTEGER")
    options = parser.parse_args()
    if options.kill_at and options.kill_rank in (None, os.environ.get("RANK")):
        send_signal_after(options.kill_at, options.kill_with)
    status = 0
    for family in TASKS if options.every_task else [TASK]:
        status = status or train(family, Path(options.out) / (family if options.every_task else ""), options)
    shutdown_distributed()
    if "WORLD_SIZE" in os.environ:
        hard_exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
