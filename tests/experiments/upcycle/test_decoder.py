"""Merged decoders of the study, with a tiny one that the tests train on a CPU."""

import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")

from experiments.cost_quality import decoding
from experiments.cost_quality.plan import PRESET
from experiments.upcycle import decoder, decoder_arms, decoder_page
from experiments.upcycle.decoder_arms import MEAN, ORIGINAL, SVD, WITHOUT_REFIT, DecoderArm
from mgk import tasks
from mgk.models import save_model
from mgk.models.run_directory import RunDirectory
from mgk.training import config, predictions, results, trainer
from mgk.training.config import ModelSpec, load_recipe
from mgk.training.evaluate import evaluate_run
from mgk.training.runs import run_path

ROOT = Path(__file__).parents[3]
MODEL = ModelSpec("softmax", 8)
METRIC = "loss_stride_128"
RECIPE = """
title: a tiny decoder
task: bytes
model:
  {embed_dim: 16, ffn_dim: 16, num_layers: 1, head_dim: 4, norm: rms, norm_place: pre, positions: rotary, mlp: swiglu,
   head_bias: false, dropout: 0.0}
training:
  {steps: 40, batch_size: 2, lr: 1.0e-2, warmup: 4, schedule: cosine, final_lr: 0.1, eval_every: 20, eval_batch_size: 8,
   stride: 128, precision: fp32, compile: false}
"""
PLAN = """
judged_split: test
stages: [{name: tiny, recipe: tiny, arms: {"softmax:8": 2}}]
questions: []
"""


def train(folder, model, seed):
    """Train a model of the tiny recipe, and return its result rows."""
    run = trainer.Run(
        load_recipe("tiny"), model, PRESET, seed, folder, run_path(folder / "runs", "tiny", model, PRESET, seed)
    )
    task = tasks.get_task("bytes")
    module, callback = trainer.fit(run, task, resume=False, accelerator="cpu", loggers=[])
    # The attention of a model after 40 steps is nearly uniform: large weights make merges visible.
    network = run.files.load_language_model()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.layers.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    save_model(network, run.files.best_model)
    rows = evaluate_run(run, task, module, callback)
    for split, losses in module.objective.read_predictions(run.directory):
        key = predictions.PredictionsKey("tiny", model, PRESET, seed, split, run.setup(task))
        predictions.save(folder / "out", key, losses)
    return rows


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train two seeds of softmax:8 and of softmax:8/4."""
    folder = tmp_path_factory.mktemp("decoder")
    (folder / "tiny.yaml").write_text(RECIPE)
    (folder / "plan.yaml").write_text(PLAN)
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(40)]
    (folder / "text.txt").write_text(" ".join(draw.choices(words, k=8_000)))
    config.RECIPE_DIRECTORIES.append(folder)
    try:
        tasks.get_task("bytes").prepare(folder)
        for model in (MODEL, ModelSpec("softmax", 8, 4)):
            for seed in (0, 1):
                results.append(folder / "out" / "tiny.csv", train(folder, model, seed))
        yield folder
    finally:
        config.RECIPE_DIRECTORIES.remove(folder)


@pytest.fixture
def folder(trained, tmp_path):
    """Return a copy of the trained runs and their results that a test may change."""
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    return copy


def make_study(folder):
    return decoder_arms.DecoderStudy(load_recipe("tiny"), MODEL, folder / "runs", folder, "test", torch.device("cpu"))


def run_command(folder, *options):
    page = folder / "page.md"
    if not page.exists():
        page.write_text("A page.\n\n<!-- made: other -->\nkept\n<!-- end -->\n\n<!-- made: decoder -->\n<!-- end -->\n")
    arguments = ["--runs", folder / "runs", "--data-dir", folder, "--results", folder / "out", "--recipe", "tiny"]
    arguments += ["--plan", folder / "plan.yaml", "--page", page, "--device", "cpu", *options]
    return CliRunner().invoke(decoder.app, list(map(str, arguments)))


def test_plan():
    recipe = load_recipe("study")
    assert [str(model) for model in decoder_arms.merged_models(MODEL)] == [
        "softmax:8/4/8",
        "softmax:8/1/8",
        "softmax:8/4",
    ]
    after = decoder_arms.training_after(recipe).training
    assert (after.steps, after.warmup, after.lr) == (95, 9, pytest.approx(6e-4))
    assert replace(after, steps=1900, warmup=150, lr=2e-3) == recipe.training
    arms = decoder_arms.plan_arms(recipe, MODEL)
    assert len(arms) == len(set(arms)) == 2 + 3 * 3 + 3 * 2
    assert {(arm.method, arm.steps) for arm in arms} == {
        (ORIGINAL, 0), (ORIGINAL, 95), (SVD, 0), (SVD, 95), (MEAN, 0), (MEAN, 95), (WITHOUT_REFIT, 0),
    }  # fmt: skip
    for text in ("smgk:8", "softmax:8/4", "softmax:1"):
        with pytest.raises(ValueError, match="--model must be softmax:HEADS"):
            decoder_arms.merged_models(ModelSpec.parse(text))


@pytest.mark.parametrize("method", [ORIGINAL, SVD, MEAN])
def test_unmerged_model_has_the_perplexity_of_its_run(trained, method, tmp_path):
    stored = {
        row["metric"]: row["value"]
        for row in RunDirectory(run_path(trained / "runs", "tiny", MODEL, PRESET, 1)).read_result()
        if row["split"] == "test"
    }
    measured = make_study(trained).measure(DecoderArm(method, MODEL), 1, tmp_path)
    assert {row["metric"]: row["value"] for row in measured} == stored
    assert {row["setup"] for row in measured} == {stored_setup(trained, MODEL)}


def test_evaluation_does_not_compile(trained, monkeypatch):
    study, seen = make_study(trained), []
    study.recipe = replace(study.recipe, training=replace(study.recipe.training, compile=True))
    to_device = decoder_arms.LanguageModelling.to_device

    def record(self, *arguments, **options):
        seen.append(self.settings.compile)
        return to_device(self, *arguments, **options)

    monkeypatch.setattr(decoder_arms.LanguageModelling, "to_device", record)
    study.evaluate(study.make(DecoderArm(ORIGINAL, MODEL), 0))
    assert seen == [False]


def stored_setup(folder, model):
    (setup,) = {
        row["setup"]
        for row in results.read([folder / "out" / "tiny.csv"])
        if (row["kv_heads"], row["key_heads"]) == (str(model.kv_heads or model.heads), str(model.key_heads or ""))
    }
    return setup


def test_copies_of_heads_are_merged_without_loss(folder):
    """Give neighbouring heads equal keys and values; their queries and output projections differ."""
    directory = RunDirectory(run_path(folder / "runs", "tiny", MODEL, PRESET, 0))
    model = directory.load_language_model()
    with torch.no_grad():
        for layer in model.layers:
            for projection in (layer.attention.keys.projection, layer.attention.value):
                for tensor in (projection.weight, projection.bias):
                    heads = tensor.view(4, 2, 4, -1)
                    heads[:, 1] = heads[:, 0]
    save_model(model, directory.best_model)
    study = make_study(folder)

    def loss(method, name):
        rows = study.measure(DecoderArm(method, ModelSpec.parse(name)), 0, folder / "out")
        return {row["metric"]: row["value"] for row in rows}[METRIC]

    original = loss(ORIGINAL, "softmax:8")
    for name in ("softmax:8/4/8", "softmax:8/4"):
        for method in (SVD, WITHOUT_REFIT, MEAN):
            assert loss(method, name) == pytest.approx(original, rel=1e-5), (name, method)
    assert abs(loss(MEAN, "softmax:8/1/8") - original) > 1e-4


def test_training_changes_all_arms_by_the_same_data(trained, tmp_path, monkeypatch):
    study, batches = make_study(trained), []
    measure = decoder_arms.LanguageModelling.measure

    def record(self, indices, split):
        batches.append(indices.tolist())
        return measure(self, indices, split)

    monkeypatch.setattr(decoder_arms.LanguageModelling, "measure", record)
    orders, rates = [], []
    for method, name in ((SVD, "softmax:8/4"), (MEAN, "softmax:8/1/8"), (ORIGINAL, "softmax:8")):
        batches.clear()
        arm = DecoderArm(method, ModelSpec.parse(name), 2)
        model = study.make(arm, 0)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        study.train(model, 0)
        orders.append(list(batches))
        assert all(not torch.equal(value, before[name]) for name, value in model.named_parameters() if value.numel())
        rows = study.measure(arm, 0, tmp_path)
        rates.append({(row["steps"], str(row["lr"]), row["tokens"]) for row in rows})
    assert [len(order) for order in orders] == [2, 2, 2]
    assert orders[0] == orders[1] == orders[2]
    assert rates[0] == rates[1] == rates[2] == {("2", str(0.3 * 1e-2), 2 * 2 * 256)}


@pytest.fixture(scope="module")
def finished(trained, tmp_path_factory):
    """Run the command for all arms of both seeds."""
    copy = tmp_path_factory.mktemp("finished") / "copy"
    shutil.copytree(trained, copy)
    result = run_command(copy, "--lengths", "8")
    assert result.exception is None, result.output
    return copy


def test_command_measures_and_continues(finished, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    file = folder / "out" / "upcycle-decoder.csv"
    rows = results.read([file])
    losses = [row for row in rows if row["metric"] == METRIC]
    assert len(losses) == 2 * len(make_study(folder).arms) == 2 * 17
    assert {row["seed"] for row in losses} == {"0", "1"}
    assert {row["recipe"] for row in rows} == {"upcycle-decoder"}
    caches = {(row["key_heads"], row["kv_heads"]): row["value"] for row in rows if row["metric"] == decoding.CACHE}
    # Keys and values of width 4, 8 tokens, fp32.
    expected = {("", "8"): 16, ("4", "8"): 12, ("1", "8"): 9, ("", "4"): 8}
    assert caches == {key: str(heads * 4 * 8 * 4) for key, heads in expected.items()}
    # Nothing is measured again.
    again = run_command(folder, "--lengths", "8")
    assert again.exception is None, again.output
    assert results.read([file]) == rows
    # An interrupted command continues with the rest: here one arm of seed 1, and another length.
    remaining_rows = [row for row in rows if not (is_trained_svd(row) and row["seed"] == "1")]
    file.unlink()
    results.append(file, remaining_rows, decoder_arms.EXTRA_COLUMNS)
    assert run_command(folder, "--lengths", "8", "--seeds", "0").exception is None
    assert len(results.read([file])) == len(remaining_rows)
    assert run_command(folder, "--lengths", "8,16").exception is None
    added = results.read([file])[len(remaining_rows) :]
    assert {(row["method"], row["steps"], row["seed"]) for row in added if row["method"]} == {(SVD, "2", "1")}
    assert {row["length"] for row in added if not row["method"]} == {"16"}
    removed = [row for row in rows if is_trained_svd(row) and row["seed"] == "1"]
    assert [row["value"] for row in added if row["method"]] == [row["value"] for row in removed]


def is_trained_svd(row):
    return row["method"] == SVD and row["steps"] == "2"


def test_page(finished, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "INDEPENDENT_BLOCK", 512)  # the test set of the tiny text has 1,800 tokens
    assert decoder_page.section(trained / "out") == "No merge has been measured yet."
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    assert run_command(folder, "--no-measure").exception is None
    text = (folder / "page.md").read_text()
    assert text.startswith(
        "A page.\n\n<!-- made: other -->\nkept\n<!-- end -->\n\n<!-- made: decoder -->\n### `tiny`: "
    )
    lines = [
        [part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `soft")
    ]
    assert [line[:3] for line in lines] == [
        [f"`softmax:{heads}`", cache, share]
        for heads, cache in (("8/4/8", "0.75"), ("8/1/8", "0.56"), ("8/4", "0.50"))
        for share in ("0 %", "5 %")
    ]
    rows = results.read([folder / "out" / "upcycle-decoder.csv"])

    def losses(method, steps, **numbers):
        expected = {"method": method, "steps": str(steps), "metric": METRIC, **numbers}
        return [float(row["value"]) for row in rows if all(row[name] == value for name, value in expected.items())]

    svd, mean = (losses(method, 2, kv_heads="4") for method in (SVD, MEAN))
    line = lines[-1]
    assert line[3] == decoder_page.cell([math.exp(value) for value in svd], 2)
    assert line[3].endswith("(2)")
    assert line[4] == "–"  # not trained without refit
    difference = sum(first - second for first, second in zip(svd, mean, strict=True)) / 2
    assert line[6].replace("−", "-").startswith(f"{100 * math.expm1(difference):+.2f} ± ")
    # Only softmax:8/4 was trained from the start; its rows are those of the study, and never those of merged models.
    start = [float(row["value"]) for row in start_rows(folder, "4", "")]
    assert line[7] == lines[-2][7] == decoder_page.cell([math.exp(value) for value in start], 2)
    difference = sum(svd) / 2 - sum(start) / 2
    assert line[8].replace("−", "-").startswith(f"{100 * math.expm1(difference):+.2f} ± ")
    assert [line[7:] for line in lines[:4]] == [["–", "–"]] * 4
    assert "| tiny | `softmax:8/1/8` | 8 |" in text
    original = losses(ORIGINAL, 0)
    assert f"The original, `softmax:8`, has {decoder_page.cell([math.exp(x) for x in original], 2)}" in text
    assert sorted(original) == sorted(float(row["value"]) for row in start_rows(folder, "8", ""))


def start_rows(folder, kv_heads, key_heads):
    return [
        row
        for row in results.read([folder / "out" / "tiny.csv"])
        if (row["split"], row["metric"]) == ("test", METRIC)
        and (row["kv_heads"], row["key_heads"]) == (kv_heads, key_heads)
    ]


def test_differences_without_errors_have_no_interval(folder):
    study = make_study(folder)
    spec = ModelSpec.parse("softmax:8/1/8")
    file = folder / "out" / "upcycle-decoder.csv"
    for method in (SVD, MEAN):
        results.append(file, study.measure(DecoderArm(method, spec), 0, folder / "out"), decoder_arms.EXTRA_COLUMNS)
    rows = results.read([file])
    svd, mean = (
        decoder_page.read_losses(rows, folder / "out", "tiny", DecoderArm(method, spec)) for method in (SVD, MEAN)
    )
    assert "±" not in decoder_page.compare_merges(svd, mean)
    assert decoder_page.compare_merges(svd, decoder_page.Losses({}, {})) == "–"


def test_wrong_arguments(trained, tmp_path):
    for options, message in (
        (["--runs", tmp_path], "--runs .* has no finished run of softmax:8 of tiny: run python -m experiments"),
        (["--seeds", "0,5"], "--seeds seed 5 has no finished run; the seeds that have one are 0, 1"),
        (["--seeds", "x"], "--seeds must be integers"),
        (["--model", "smgk:8"], "--model must be softmax:HEADS"),
        (["--recipe", "listops"], "--recipe listops trains no language model"),
        (["--lengths", "8,x"], "--lengths must be positive integers"),
        (["--minutes", "0"], "--minutes must be"),
    ):
        result = run_command(trained, *options)
        with pytest.raises(ValueError, match=message):
            raise result.exception
    assert not (trained / "out" / "upcycle-decoder.csv").exists()


def test_runs_with_other_settings_are_refused(folder):
    text = (folder / "tiny.yaml").read_text()
    changed = replace(load_recipe("tiny"), training=replace(load_recipe("tiny").training, lr=2e-2))
    assert "lr: 1.0e-2" in text
    with pytest.raises(ValueError, match=r"holds a run with different settings \(lr\)"):
        decoder_arms.DecoderStudy(changed, MODEL, folder / "runs", folder, "test", torch.device("cpu"))


def test_section_of_the_page_is_made_from_the_results():
    text = (ROOT / "docs" / "upcycling.md").read_text(encoding="utf-8")
    assert f"<!-- made: decoder -->\n{decoder_page.section(ROOT / 'results')}\n<!-- end -->" in text
