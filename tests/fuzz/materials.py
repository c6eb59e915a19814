"""Runs, data and models that the cases copy and damage: the artefacts in tests/fixtures and small texts."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from pathlib import Path

from tests.fuzz.harness import call_main

FIXTURES = Path(__file__).parents[1] / "fixtures" / "aa005c7"
# The settings of FIXTURES/run-lm, see the README there.
LM_SETTINGS = "eval_every=100 batch_size=4 lr=3e-2 model.embed_dim=8 model.ffn_dim=8 model.head_dim=4".split()
LM_TRAIN = (
    *("train", "bytes", "--variant", "smgk", "--heads", "2", "--seed", "0", "--steps", "200", "--accelerator", "cpu"),
    *(part for setting in LM_SETTINGS for part in ("--set", setting)),
)
DEMO_SETTINGS = (
    "eval_every=150 batch_size=32 lr=1e-2 model.embed_dim=8 model.ffn_dim=8 model.hidden_dim=8 model.head_dim=4".split()
)
DEMO_TRAIN = (
    *("train", "demo", "--variant", "smgk", "--heads", "2", "--seed", "3", "--steps", "300", "--accelerator", "cpu"),
    *(part for setting in DEMO_SETTINGS for part in ("--set", setting)),
)
# A recipe whose training takes a second.
RECIPE = """\
title: a tiny model of bytes
task: bytes
model: {embed_dim: 8, ffn_dim: 8, num_layers: 1, head_dim: 4, norm: rms, norm_place: pre, positions: rotary,
  mlp: swiglu, head_bias: false, dropout: 0.1}
training: {steps: 2, batch_size: 2, lr: 1.0e-3, warmup: 1, schedule: cosine, eval_every: 2, eval_batch_size: 32,
  stride: 256, precision: fp32, compile: false}
rows: ["softmax:2", "smgk:1"]
"""


@functools.cache
def folder() -> Path:
    """Return a temporary folder of this process for files that all cases share."""
    return Path(tempfile.mkdtemp(prefix="mgk-fuzz-"))


def remove() -> None:
    """Remove the shared files."""
    shutil.rmtree(folder(), ignore_errors=True)


@functools.cache
def text() -> Path:
    """Return a data directory with the text of FIXTURES/run-lm."""
    return shutil.copytree(FIXTURES / "text", folder() / "text")


@functools.cache
def demo_data() -> Path:
    """Return a data directory with the prepared data of FIXTURES/run."""
    directory = folder() / "data"
    run_mgk("data", "listops-short", "--data-dir", str(directory))
    return directory


def copy(name: str, target: Path) -> Path:
    """Copy a fixture."""
    return shutil.copytree(FIXTURES / name, target)


@functools.cache
def shared_run() -> Path:
    """Return a run directory that no case changes."""
    return copy("run-lm", folder() / "shared-run")


@functools.cache
def _prepared_text() -> Path:
    directory = shutil.copytree(FIXTURES / "text", folder() / "prepared")
    run_mgk("data", "bytes", "--data-dir", str(directory))
    return directory


def copy_prepared_text(target: Path) -> Path:
    """Copy a data directory with the prepared text of FIXTURES/run-lm."""
    return shutil.copytree(_prepared_text(), target)


def run_mgk(*arguments: str) -> None:
    """Run a command that must succeed, in a fork of this process, which has imported the package."""
    log = folder() / "log.txt"
    process = os.fork()
    if process == 0:
        os.chdir(folder())
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), number)
        os._exit(call_main(arguments))
    if os.waitpid(process, 0)[1]:
        raise RuntimeError(f"mgk {' '.join(arguments)}: {log.read_text()}")


@functools.cache
def _word_run() -> Path:
    data = folder() / "words"
    data.mkdir()
    for name in ("train", "valid", "test"):
        (data / f"wiki.{name}.tokens").write_text("the cat sat on the mat and it slept <unk>\n" * 40)
    recipe = RECIPE.replace("task: bytes", "task: words")
    (folder() / "words.yaml").write_text(recipe)
    run = folder() / "word-run"
    run_mgk("train", "words.yaml", "--data-dir", str(data), "--out", str(run), "--accelerator", "cpu")
    return run


def copy_word_run(target: Path) -> Path:
    """Copy a run directory of a model of words, which holds vocabulary.txt."""
    return shutil.copytree(_word_run(), target)


WORDS = [f"w{number}" for number in range(46)]
CALIBRATION = "".join(" ".join(WORDS[(7 * row + n * n) % 46] for n in range(9)) + "\n" for row in range(20))


@functools.cache
def encoder() -> Path:
    """Return the directory of a BERT with one layer, and its tokenizer."""
    import tokenizers
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16}
    path = folder() / "encoder"
    transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).save_pretrained(path)
    words = {word: number for number, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(path)
    return path
