"""Language models in use: the sliding window, generation, and the commands."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import experiments.paper  # noqa: F401  (adds its recipes)
from mgk import tasks
from mgk.cli import commands
from mgk.models import Classifier, DecoderConfig, EncoderConfig, LanguageModel, save_model
from mgk.models.generation import Sampling, generate
from mgk.models.sliding_window import sliding_losses
from mgk.training import config as recipes
from mgk.training import report, sweep
from mgk.training.config import ModelSpec
from tests.models.test_decoder import tiny

TEXT = "the cat sat on the mat and the dog sat on the log ; " * 30


@torch.no_grad()
def one_at_a_time(model, tokens, window):
    """All positions of the first window, then the last position of each."""
    first = model(tokens[None, :window]).log_softmax(-1)[0]
    losses = [-first[n, tokens[n + 1]] for n in range(min(window, len(tokens) - 1))]
    for start in range(1, len(tokens) - window):
        last = model(tokens[None, start : start + window]).log_softmax(-1)[0, -1]
        losses.append(-last[tokens[start + window]])
    return torch.stack(losses)


@pytest.mark.parametrize("variant", ["softmax", "smgk", "mgk", "mlk", ("softmax", "linear", "smgk-hard")])
@pytest.mark.parametrize("form", ["paper", "modern"])
def test_the_sliding_window_is_one_window_at_a_time(variant, form):
    model, tokens = tiny(form, variant=variant), torch.randint(50, (41,))
    wanted = one_at_a_time(model, tokens, 11)
    for batch_size in (1, 7, 100):
        found = sliding_losses(model, tokens, window=11, batch_size=batch_size)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    # Predictions differ from window to window, or the test would see nothing.
    assert (sliding_losses(model, tokens, window=12)[12:] - wanted[12:]).abs().max() > 1e-3


@pytest.mark.parametrize("length", [2, 8, 11, 12, 13])
def test_texts_about_as_long_as_the_window(length):
    model, tokens = tiny(), torch.randint(50, (length,))
    torch.testing.assert_close(sliding_losses(model, tokens, window=11), one_at_a_time(model, tokens, 11))


@pytest.mark.parametrize("length", [40, 41, 42])
def test_a_stride_scores_the_last_positions_of_each_window(length):
    model, tokens = tiny(), torch.randint(50, (length,))
    found = sliding_losses(model, tokens, window=11, stride=4, batch_size=3)
    wanted = one_at_a_time(model, tokens, 11)
    assert len(found) == length - 1
    # Positions 11 to 14 come from the window that ends at 14, whose last is exact.
    assert torch.allclose(found[[10, 14, 18, -1]], wanted[[10, 14, 18, -1]], atol=1e-5)
    with torch.no_grad():
        window = model(tokens[None, 4:15]).log_softmax(-1)[0, -4:]
    torch.testing.assert_close(found[11:15], -window.gather(-1, tokens[12:16, None])[:, 0])


def test_wrong_windows():
    model, tokens = tiny(), torch.randint(50, (20,))
    for settings, says in (
        ({"stride": 0}, "stride"),
        ({"window": 5, "stride": 6}, "stride"),
        ({"window": 0}, "window"),
    ):
        with pytest.raises(ValueError, match=says):
            sliding_losses(model, tokens, **settings)
    with pytest.raises(ValueError, match="tokens"):
        sliding_losses(model, tokens[:1])
    with pytest.raises(ValueError, match="eval mode"):
        sliding_losses(model.train(), tokens)


@pytest.mark.parametrize("variant", ["softmax", "smgk", "mlk"])
@torch.no_grad()
def test_the_likeliest_token_again_and_again_past_the_context(variant):
    model = tiny(variant=variant)
    prompt = [3, 1, 4]
    drawn = list(generate(model, prompt, max_tokens=30, sampling=Sampling(temperature=0)))
    seen, held = list(prompt), list(prompt)
    for token in drawn:
        assert token == int(model(torch.tensor([held]))[0, -1].argmax())
        seen.append(token)
        # A full context of 24 goes on from its last half.
        held = seen[-12:] if len(held) == 24 else [*held, token]


def test_seeds_repeat_and_differ():
    model = tiny()
    texts = [list(generate(model, [1], max_tokens=20, sampling=Sampling(seed=seed))) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(temperature=0), {2}),
        (Sampling(top_k=1), {2}),
        (Sampling(top_k=2), {2, 0}),
        (Sampling(top_p=0.4), {2}),
        (Sampling(top_p=0.6), {2, 0}),
        (Sampling(top_p=0.6, top_k=1), {2}),
        (Sampling(), {0, 1, 2, 3}),
        (Sampling(temperature=0.05), {2}),
    ],
)
def test_what_may_be_drawn(sampling, possible):
    scores = torch.tensor([0.3, 0.15, 0.5, 0.05]).log()
    generator = torch.Generator().manual_seed(0)
    assert {sampling.draw(scores, generator) for _ in range(200)} == possible


def test_probabilities_are_those_of_the_scores():
    scores = torch.tensor([0.2, 0.8]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = [Sampling(temperature=2.0).draw(scores, generator) for _ in range(2000)]
    assert sum(drawn) / 2000 == pytest.approx(0.8**0.5 / (0.8**0.5 + 0.2**0.5), abs=0.03)


@pytest.mark.parametrize(
    "settings", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}], ids=lambda s: next(iter(s))
)
def test_wrong_sampling(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Sampling(**settings)


SMALL = ["stride=1", "steps=4", "warmup=1", "eval_every=2", "batch_size=4", "model.embed_dim=8", "model.ffn_dim=8"]


@pytest.fixture(scope="module")
def own_text(tmp_path_factory):
    """A folder with a user's text, and the directory of a run trained on it."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "story.txt").write_text(TEXT * 5)
    run = folder / "run"
    settings = [part for setting in SMALL for part in ("--set", setting)]
    arguments = ["train", "bytes", "--data-dir", str(folder), "--out", str(run), "--accelerator", "cpu", *settings]
    result = CliRunner().invoke(commands.app, arguments)
    assert result.exception is None, result.output
    return folder


@pytest.mark.slow
def test_a_run_is_trained_judged_by_the_window_and_judged_again(own_text):
    rows = json.loads((own_text / "run" / "result.json").read_text())
    found = {(row["split"], row["metric"]): row["value"] for row in rows}
    assert found["dev", "perplexity"] == pytest.approx(2 ** found["dev", "bits_per_byte"])
    assert {row["length"] for row in rows} == {256}
    result = CliRunner().invoke(commands.app, ["eval", str(own_text / "run"), "--data-dir", str(own_text)])
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["split"] for line in lines] == ["dev", "test"]
    assert lines[1]["perplexity"] == pytest.approx(found["test", "perplexity"])
    arguments = ["eval", str(own_text / "run"), "--data-dir", str(own_text), "--stride", "64", "--split", "dev"]
    (cheaper,) = (json.loads(line) for line in CliRunner().invoke(commands.app, arguments).stdout.splitlines())
    assert "perplexity" not in cheaper
    assert "perplexity_stride_64" in cheaper


def test_eval_says_when_the_data_is_not_what_the_run_was_trained_on(tmp_path):
    texts = {"here": "the cat sat on the mat. " * 250, "there": "the dog lay on the rug. " * 250}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(text)
    run, config = tmp_path / "run", DecoderConfig(256, embed_dim=8, ffn_dim=8, num_layers=1, num_heads=1)
    save_model(LanguageModel(config), run / "best")
    settings = {"stride": 256, "precision": "fp32"}

    def judged(where, **described):
        (run / "run.json").write_text(json.dumps({"task": "bytes", "training": settings, **described}))
        arguments = ["eval", str(run), "--data-dir", str(tmp_path / where), "--split", "test"]
        result = CliRunner().invoke(commands.app, arguments)
        return json.loads(result.stdout).get("same_data"), result.stderr

    key = tasks.get_task("bytes").checksum(tmp_path / "here")
    assert judged("here", data=key) == (True, "")
    assert judged("there", data=key) == (False, f"{tmp_path / 'there'} is not the data that {run} was trained on\n")
    # Of a run that does not know, nothing is said.
    assert judged("there") == (None, "")


@pytest.mark.slow
def test_generate_streams_from_a_run_alone(own_text):
    arguments = ["generate", str(own_text / "run"), "--prompt", "the cat", "--max-tokens", "5", "--top-k", "3"]
    outputs = [CliRunner().invoke(commands.app, arguments).stdout for _ in range(2)]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("the cat")


@pytest.mark.slow
def test_wrong_input_of_the_commands_is_one_line_and_exit_code_2(own_text, tmp_path):
    classifier = tmp_path / "classifier"
    save_model(Classifier(EncoderConfig(5, 2, 8)), classifier / "best")
    (classifier / "run.json").write_text('{"task": "listops", "training": {}}')
    run = str(own_text / "run")
    cases = [
        (["generate", run, "--prompt", ""], "--prompt must contain some text"),
        (["generate", run, "--prompt", "a", "--temperature", "-1"], "temperature"),
        (["generate", str(classifier), "--prompt", "a"], "not of a language model"),
        (["generate", str(tmp_path), "--prompt", "a"], "is not a run directory"),
        (["eval", run, "--data-dir", str(own_text), "--split", "other"], "split must be one of"),
        (["train", "wikitext-2", "--data-dir", str(tmp_path)], "wiki.train.tokens is missing"),
        (["analyze", run, "--data-dir", str(own_text), "--split", "other"], "--split must be one of"),
        (["eval", str(classifier), "--stride", "2"], "--stride is for language models"),
        (["eval", run, "--data-dir", str(own_text), "--stride", "0"], "stride must be a positive integer"),
    ]
    for arguments, says in cases:
        result = CliRunner().invoke(commands.app, arguments)
        assert isinstance(result.exception, ValueError), (arguments, result.output)
        assert says in str(result.exception)
    command = [sys.executable, "-m", "mgk", *cases[0][0]]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1


def test_comparisons_of_language_models_show_perplexity(tmp_path):
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
    lines = report.make_table(report.summarise(rows, recipe, [ModelSpec("softmax", 8)], "paper"), recipe)
    assert lines[0][:4] == ["model", "dev perplexity", "wikitext-103-valid perplexity", "each seed"]
    assert lines[1][:4] == ["softmax:8", "80.25", "90.50", "80.2"]


def test_a_recipe_with_a_stride_says_so_beside_its_numbers():
    how = sweep.metric_format(recipes.load_recipe("bytes"))
    assert (how.metric, how.title) == ("perplexity_stride_64", "perplexity at stride 64")
    assert sweep.metric_format(recipes.load_recipe("enwiki-lm")).metric == "perplexity"


def test_the_paper_s_table_3_is_all_there():
    recipe = recipes.load_recipe("wikitext-103")
    assert set(recipe.paper) == {"softmax:8", "mgk:4", "smgk:8", "mgk:8", "linear:8", "mlk:4", "mlk:8"}
    assert {str(row) for row in recipe.rows} - set(recipe.paper) == {"smgk:4", "smlk:8", "softmax:8/4"}
    assert (recipe.training.schedule, recipe.training.clip, recipe.training.warmup) == ("cosine", 0.25, 2000)


@pytest.mark.slow
def test_compare_generate_and_analyze_write_all_but_the_weights_to_out(own_text, tmp_path):
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


@pytest.mark.parametrize("command", [["generate", "--prompt", "the"], ["eval"], ["analyze"]], ids=lambda each: each[0])
def test_a_run_that_was_stopped_early_says_how_to_go_on(command, tmp_path):
    (tmp_path / "run.json").write_text(
        json.dumps({"task": "bytes", "recipe": "bytes", "row": "smgk:2", "seed": 0, "training": {}})
    )
    (tmp_path / "last.ckpt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has no model yet: .* --resume auto"):
        commands.app([command[0], str(tmp_path), *command[1:]], standalone_mode=False)
