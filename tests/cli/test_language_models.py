"""Commands, recipes and reports of language models."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import experiments.paper  # noqa: F401  (adds its recipes)
from mgk import tasks
from mgk.cli import commands
from mgk.models import Classifier, DecoderConfig, EncoderConfig, LanguageModel, save_model
from mgk.training import config as recipes
from mgk.training import report, sweep
from mgk.training.config import ModelSpec

TEXT = "the cat sat on the mat and the dog sat on the log ; " * 30
SMALL = ["stride=1", "steps=4", "warmup=1", "eval_every=2", "batch_size=4", "model.embed_dim=8", "model.ffn_dim=8"]


@pytest.fixture(scope="module")
def own_text(tmp_path_factory):
    """Return a folder with a text and a run trained on it."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "story.txt").write_text(TEXT * 5)
    run = folder / "run"
    settings = [part for setting in SMALL for part in ("--set", setting)]
    arguments = ["train", "bytes", "--data-dir", str(folder), "--out", str(run), "--accelerator", "cpu", *settings]
    result = CliRunner().invoke(commands.app, arguments)
    assert result.exception is None, result.output
    return folder


@pytest.mark.slow
def test_train_and_eval_agree(own_text):
    rows = json.loads((own_text / "run" / "result.json").read_text())
    values = {(row["split"], row["metric"]): row["value"] for row in rows}
    assert values["dev", "perplexity"] == pytest.approx(2 ** values["dev", "bits_per_byte"])
    assert {row["length"] for row in rows} == {256}
    result = CliRunner().invoke(commands.app, ["eval", str(own_text / "run"), "--data-dir", str(own_text)])
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["split"] for line in lines] == ["dev", "test"]
    assert lines[1]["perplexity"] == pytest.approx(values["test", "perplexity"])
    arguments = ["eval", str(own_text / "run"), "--data-dir", str(own_text), "--stride", "64", "--split", "dev"]
    (strided,) = (json.loads(line) for line in CliRunner().invoke(commands.app, arguments).stdout.splitlines())
    assert "perplexity" not in strided
    assert "perplexity_stride_64" in strided


def test_eval_reports_other_data(tmp_path):
    texts = {"here": "the cat sat on the mat. " * 250, "there": "the dog lay on the rug. " * 250}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(text)
    run, config = tmp_path / "run", DecoderConfig(256, embed_dim=8, ffn_dim=8, num_layers=1, num_heads=1)
    save_model(LanguageModel(config), run / "best")
    settings = {"stride": 256, "precision": "fp32"}

    def evaluate(folder, **description):
        (run / "run.json").write_text(json.dumps({"task": "bytes", "training": settings, **description}))
        arguments = ["eval", str(run), "--data-dir", str(tmp_path / folder), "--split", "test"]
        result = CliRunner().invoke(commands.app, arguments)
        return json.loads(result.stdout).get("same_data"), result.stderr

    key = tasks.get_task("bytes").checksum(tmp_path / "here")
    assert evaluate("here", data=key) == (True, "")
    assert evaluate("there", data=key) == (False, f"{tmp_path / 'there'} is not the data that {run} was trained on\n")
    # A run without the checksum gives no message.
    assert evaluate("there") == (None, "")


@pytest.mark.slow
def test_generate_needs_no_data(own_text):
    arguments = ["generate", str(own_text / "run"), "--prompt", "the cat", "--max-tokens", "5", "--top-k", "3"]
    outputs = [CliRunner().invoke(commands.app, arguments).stdout for _ in range(2)]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("the cat")


@pytest.mark.slow
def test_invalid_input_is_one_line_and_exit_code_2(own_text, tmp_path):
    classifier = tmp_path / "classifier"
    save_model(Classifier(EncoderConfig(5, 2, 8)), classifier / "best")
    (classifier / "run.json").write_text('{"task": "listops", "training": {}}')
    run = str(own_text / "run")
    cases = [
        (["generate", run, "--prompt", ""], "--prompt must not be empty"),
        (["generate", run, "--prompt", "a", "--temperature", "-1"], "temperature"),
        (["generate", str(classifier), "--prompt", "a"], "not of a language model"),
        (["generate", str(tmp_path), "--prompt", "a"], "is not a run directory"),
        (["eval", run, "--data-dir", str(own_text), "--split", "other"], "split must be one of"),
        (["train", "wikitext-2", "--data-dir", str(tmp_path)], "wiki.train.tokens is missing"),
        (["analyze", run, "--data-dir", str(own_text), "--split", "other"], "--split must be one of"),
        (["eval", str(classifier), "--stride", "2"], "--stride applies only to language models"),
        (["eval", run, "--data-dir", str(own_text), "--stride", "0"], "stride must be a positive integer"),
    ]
    for arguments, message in cases:
        result = CliRunner().invoke(commands.app, arguments)
        assert isinstance(result.exception, ValueError), (arguments, result.output)
        assert message in str(result.exception)
    command = [sys.executable, "-m", "mgk", *cases[0][0]]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1


def test_comparison_shows_perplexity(tmp_path):
    recipe = recipes.load_recipe("enwiki-lm")
    settings = recipe.training
    rows = [
        {
            "recipe": "enwiki-lm",
            "variant": "softmax",
            "preset": "paper",
            "heads": "8",
            "kv_heads": "8",
            "steps": str(settings.steps),
            "lr": str(settings.lr),
            "batch": str(settings.batch_size),
            "seed": "0",
            "split": split,
            "n_examples": "100",
            "metric": "perplexity",
            "value": str(value),
            "params": "1",
            "flops": "1",
            "step_ms": "1",
            "peak_mem_mb": "1",
        }
        for split, value in (("dev", 80.25), ("wikitext-103-valid", 90.5))
    ]
    lines = report.make_table(report.summarize(rows, recipe, [ModelSpec("softmax", 8)], "paper"), recipe)
    assert lines[0][:4] == ["model", "dev perplexity", "wikitext-103-valid perplexity", "each seed"]
    assert lines[1][:4] == ["softmax:8", "80.25", "90.50", "80.2"]


def test_metric_names_the_stride():
    metric_format = sweep.metric_format(recipes.load_recipe("bytes"))
    assert (metric_format.metric, metric_format.title) == ("perplexity_stride_64", "perplexity at stride 64")
    assert sweep.metric_format(recipes.load_recipe("enwiki-lm")).metric == "perplexity"


def test_rows_of_the_papers_table_3():
    recipe = recipes.load_recipe("wikitext-103")
    assert set(recipe.paper) == {"softmax:8", "mgk:4", "smgk:8", "mgk:8", "linear:8", "mlk:4", "mlk:8"}
    assert {str(row) for row in recipe.rows} - set(recipe.paper) == {"smgk:4", "smlk:8", "softmax:8/4"}
    assert (recipe.training.schedule, recipe.training.clip, recipe.training.warmup) == ("cosine", 0.25, 2000)


@pytest.mark.slow
def test_compare_generate_and_analyze_write_no_weights_to_out(own_text, tmp_path):
    settings = [part for setting in SMALL for part in ("--set", setting)]
    out, run = tmp_path / "out", str(tmp_path / "runs" / "bytes" / "smgk-1-paper-s0")
    data = ["--data-dir", str(own_text)]
    for arguments in (
        ["compare", "bytes", "--rows", "smgk:1", *data, *settings, "--out", str(out), "--runs", str(tmp_path / "runs")],
        ["generate", run, "--prompt", "The", "--max-tokens", "20", "--top-p", "0.9", "--seed", "2"],
        ["analyze", run, "--split", "dev", "--matrices", "1", *data, "--out", str(out / "bytes-analysis")],
    ):
        result = CliRunner().invoke(commands.app, arguments)
        assert result.exception is None, result.output
        if arguments[0] == "generate":
            assert result.stdout.startswith("The")
            assert len(result.stdout) > len("The\n")
    files = {str(path.relative_to(out)) for path in out.rglob("*")}
    assert {"bytes.md", "bytes-analysis/report.html", "bytes-analysis/ranks.csv"} <= files
    assert any(name.startswith("curves/bytes-smgk-1-paper-s0-") for name in files)  # named after the settings too
    assert not any(name.endswith((".safetensors", ".ckpt")) for name in files)


@pytest.mark.parametrize(
    "command", [["generate", "--prompt", "the"], ["eval"], ["analyze"]], ids=lambda command: command[0]
)
def test_run_without_model_names_the_remedy(command, tmp_path):
    (tmp_path / "run.json").write_text(
        json.dumps({"task": "bytes", "recipe": "bytes", "row": "smgk:2", "seed": 0, "training": {}})
    )
    (tmp_path / "last.ckpt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has no model yet: .* --resume auto"):
        commands.app([command[0], str(tmp_path), *command[1:]], standalone_mode=False)
