"""mgk train: options, results and warnings, without a training."""

import inspect
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from mgk import tasks
from mgk.cli import commands, train
from mgk.models import Classifier
from mgk.training import results
from mgk.training.config import ModelSpec, Recipe, TrainConfig
from mgk.training.objectives.classification import Classification
from mgk.training.objectives.language_modelling import LanguageModelling


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Replace the training by a record of its arguments."""
    monkeypatch.chdir(tmp_path)
    calls = {}

    def fit(run, task, **options):
        calls.update(run=run, task=task, **options)
        return SimpleNamespace(global_rank=1), SimpleNamespace(stopped_by=None)

    monkeypatch.setattr("mgk.training.trainer.fit", fit)
    monkeypatch.setattr(type(tasks.TASKS["listops"]), "prepare", lambda *arguments: calls.update(data=arguments[1]))
    return calls


def feature_map_name(calls):
    """Return the name of the feature map of the requested model."""
    feature_map = Classifier(calls["run"].model_config(calls["task"])).layers[0].attention.feature_map
    return getattr(feature_map, "__name__", type(feature_map).__name__)


OPTIONS = [
    ("variant", ["--variant", "mgk-em"], lambda a: a["run"].row.variant, "mgk-em"),
    ("heads", ["--heads", "3"], lambda a: a["run"].row.heads, 3),
    ("kv_heads", ["--heads", "4", "--kv-heads", "2"], lambda a: a["run"].row, ModelSpec("softmax", 4, 2)),
    ("key_heads", ["--heads", "4", "--key-heads", "1"], lambda a: a["run"].row, ModelSpec("softmax", 4, None, 1)),
    ("key_heads", ["--heads", "4", "--key-heads", "2"], lambda a: a["run"].model_config(a["task"]).num_key_heads, 2),
    ("preset", ["--preset", "ref-lra"], lambda a: a["run"].model_config(a["task"]).pooling, "mean-padded"),
    ("seed", ["--seed", "7"], lambda a: a["run"].seed, 7),
    ("steps", ["--steps", "2000"], lambda a: a["run"].recipe.training.steps, 2000),
    ("settings", ["--set", "lr=1e-2"], lambda a: a["run"].recipe.training.lr, 1e-2),
    ("settings", ["--set", "model.num_layers=3"], lambda a: a["run"].model_config(a["task"]).num_layers, 3),
    *(
        ("settings", ["--variant", "mlk", "--set", f"model.feature_map={name}"], feature_map_name, expected)
        for name, expected in {"elu": "elu_plus_one", "relu": "relu", "favor": "FAVOR", "dpfp": "DPFP"}.items()
    ),
    ("data_dir", ["--data-dir", "somewhere"], lambda a: a["data"], Path("somewhere")),
    ("out", ["--out", "there"], lambda a: a["run"].directory, Path("there")),
    ("resume", ["--resume", "auto"], lambda a: a["resume"], True),
    ("accelerator", ["--accelerator", "cpu"], lambda a: a["accelerator"], "cpu"),
    ("strategy", ["--strategy", "ddp"], lambda a: a["strategy"], "ddp"),
    ("keep_checkpoints", ["--keep-checkpoints", "3"], lambda a: a["keep_checkpoints"], 3),
    ("logger", ["--logger", "csv,tensorboard"], lambda a: a["loggers"], ("csv", "tensorboard")),
    ("logger", ["--logger", "none"], lambda a: a["loggers"], ()),
    ("logger", [], lambda a: a["loggers"], ("tensorboard",)),
    ("graphs", ["--no-graphs"], lambda a: a["graphs"], False),
    ("recipe", [], lambda a: a["run"].recipe.name, "listops"),
]


@pytest.mark.parametrize(("option", "arguments", "read", "expected"), OPTIONS, ids=[" ".join(o[1]) for o in OPTIONS])
def test_option_reaches_the_training(calls, option, arguments, read, expected):
    result = CliRunner().invoke(commands.app, ["train", "listops", *arguments])
    assert result.exception is None, result.output
    assert read(calls) == expected


@pytest.fixture
def finished(calls, monkeypatch, tmp_path):
    """Return the directory of a finished run, and its rows of results."""
    objective = SimpleNamespace(
        metric="accuracy", read_predictions=lambda directory: [], test_metric=lambda settings: "accuracy"
    )
    objective.format_metric, objective.describe_test = str, Classification.describe_test
    done = SimpleNamespace(global_rank=0, objective=objective), SimpleNamespace(stopped_by=None, steps=0)
    monkeypatch.setattr("mgk.training.trainer.fit", lambda *arguments, **options: done)
    common = {"recipe": "listops", "dataset": "listops", "metric": "accuracy", "n_examples": 10, "kv_heads": None}
    rows = [{**common, "split": split, "value": value} for split, value in (("dev", 1 / 3), ("test", 0.1 + 0.2))]
    run = tmp_path / "run"
    run.mkdir()
    (run / "result.json").write_text(json.dumps(rows))
    (run / "metrics.csv").write_text("step,split,loss\n1,dev,2.5\n")
    return run, rows


def test_repeated_finished_run_appends_its_results_once(finished, tmp_path):
    (run, rows), file = finished, tmp_path / "results.csv"
    command = ["train", "listops", "--resume", "auto", "--out", str(run), "--results", str(file)]
    outputs = [CliRunner().invoke(commands.app, command) for _ in range(2)]
    assert [output.exception for output in outputs] == [None, None]
    assert ["already has the results of this run" in output.stderr for output in outputs] == [False, True]
    assert len(results.read([file])) == 2
    (run / "result.json").write_text(json.dumps([*rows, {**rows[0], "metric": "best_step"}]))
    CliRunner().invoke(commands.app, command)
    assert [row["metric"] for row in results.read([file])] == ["accuracy", "accuracy", "best_step"]


def test_damaged_result_of_a_finished_run_is_named(finished):
    run, _ = finished
    (run / "result.json").write_text("")
    result = CliRunner().invoke(commands.app, ["train", "listops", "--resume", "auto", "--out", str(run)])
    assert isinstance(result.exception, ValueError)
    assert f"{run / 'result.json'} is damaged: " in str(result.exception)


def test_unknown_column_of_a_finished_run_is_named_with_its_file(finished, tmp_path):
    (run, rows), file = finished, tmp_path / "results.csv"
    (run / "result.json").write_text(json.dumps([*rows, {**rows[0], "colour": "red"}]))
    command = ["train", "listops", "--resume", "auto", "--out", str(run), "--results", str(file)]
    result = CliRunner().invoke(commands.app, command)
    assert f"{run / 'result.json'} is damaged: it has the unknown column colour" in str(result.exception)
    assert not file.exists()


def test_learning_curve_is_stored_beside_the_results(finished, tmp_path):
    run, out = finished[0], tmp_path / "out"
    command = ["train", "listops", "--heads", "4", "--out", str(run), "--results", str(out / "results.csv")]
    for options in ([], ["--seed", "1"], ["--seed", "1", "--steps", "100"]):
        assert CliRunner().invoke(commands.app, command + options).exception is None
    curves = results.curve_files(out, "listops", ModelSpec("softmax", 4), "paper")
    assert list(curves) == [0, 1]
    assert {path.read_text() for path in curves.values()} == {(run / "metrics.csv").read_text()}
    # The curve of other settings has a name of its own.
    assert len(list((out / "curves").iterdir())) == 3


def test_predictions_are_stored_before_the_rows(finished, tmp_path, monkeypatch):
    """A run with rows is not repeated, so that predictions which are missing then stay missing."""
    (run, _), out = finished, tmp_path / "out"
    module = calls_of_fit(monkeypatch)
    module.objective.read_predictions = lambda directory: [("test", np.ones(8, dtype=bool))]
    monkeypatch.setattr(results, "append", lambda *_: 1 / 0)
    command = ["train", "listops", "--out", str(run), "--results", str(out / "results.csv")]
    assert isinstance(CliRunner().invoke(commands.app, command).exception, ZeroDivisionError)
    assert len(list((out / "answers").rglob("*.npz"))) == 1
    assert len(list((out / "curves").iterdir())) == 1


def calls_of_fit(monkeypatch, stopped_by=None, step=10**6):
    """Replace the training by one that ended at a step, and return its module."""
    from mgk.training import trainer

    module, callback = trainer.fit()
    module.trainer, callback.stopped_by = SimpleNamespace(global_step=step), stopped_by
    monkeypatch.setattr("mgk.training.trainer.fit", lambda *arguments, **options: (module, callback))
    return module


def test_stop_signal_during_the_evaluation_waits_for_the_results(finished, tmp_path, monkeypatch):
    (run, rows), file = finished, tmp_path / "results.csv"
    (run / "result.json").unlink()

    def evaluate_run(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        return rows

    def end(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mgk.training.evaluate.evaluate_run", evaluate_run)
    previous = signal.signal(signal.SIGTERM, end)
    try:
        result = CliRunner().invoke(commands.app, ["train", "listops", "--out", str(run), "--results", str(file)])
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert result.exit_code == 0, result.output
    assert len(results.read([file])) == 2


@pytest.mark.parametrize(("step", "exit_code"), [(99, 128 + 15), (100, 0)])
def test_run_that_is_stopped_after_its_last_step_is_evaluated(finished, tmp_path, monkeypatch, step, exit_code):
    (run, _), file = finished, tmp_path / "results.csv"
    calls_of_fit(monkeypatch, stopped_by=15, step=step)
    command = ["train", "listops", "--steps", "100", "--out", str(run), "--results", str(file)]
    result = CliRunner().invoke(commands.app, command)
    assert result.exit_code == exit_code
    assert ("Stopped at step 99. Resume with: " in result.stderr) == (exit_code != 0)
    assert ("The training is finished: stopping after its evaluation." in result.stderr) == (exit_code == 0)
    assert file.exists() == (exit_code == 0)


def test_every_option_is_tested():
    # --results is used only after the training.
    assert {name for name, *_ in OPTIONS} | {"results_file"} == set(inspect.signature(commands.train.train).parameters)


@pytest.mark.parametrize(
    ("arguments", "has_gpu", "expected"),
    [
        (["listops"], False, True),
        (["listops"], True, False),
        (["listops", "--accelerator", "cpu"], True, True),
        (["demo"], False, False),
        (["demo", "--set", "model.embed_dim=8192"], False, True),
    ],
)
def test_large_model_on_a_cpu_gives_a_warning(calls, monkeypatch, arguments, has_gpu, expected):
    monkeypatch.setattr("pytorch_lightning.accelerators.CUDAAccelerator.is_available", lambda: has_gpu)
    monkeypatch.setattr("pytorch_lightning.accelerators.MPSAccelerator.is_available", lambda: False)
    result = CliRunner().invoke(commands.app, ["train", *arguments])
    assert result.exception is None, result.output
    assert ("is meant for a GPU; on a CPU try `mgk compare demo`\n" in result.stderr) == expected


def test_each_layer_has_the_requested_variant(calls):
    CliRunner().invoke(commands.app, ["train", "listops", "--variant", "smgk-hard", "--heads", "2"])
    model = Classifier(calls["run"].model_config(calls["task"]))
    for layer in model.layers:
        variant = layer.attention.variant
        assert (variant.keys, variant.assignment, variant.prior) == ("shifted", "hard", "uniform")
        assert (layer.attention.num_heads, layer.attention.head_dim) == (2, 32)


@pytest.mark.parametrize(
    ("objective", "value", "stride", "score"),
    [
        (LanguageModelling, 12.5, 64, "test perplexity 12.50 (stride 64, 1,814 tokens)"),
        (LanguageModelling, 12.5, 1, "test perplexity 12.50 (1,814 tokens)"),
        (Classification, 0.5, 64, "test accuracy 50.00 % (1,814 examples)"),
    ],
)
def test_printed_score_names_stride_and_size(capsys, objective, value, stride, score):
    recipe = Recipe("mine", "Mine", task="any", training=TrainConfig(stride=stride))
    run = SimpleNamespace(recipe=recipe, row="smgk:2", seed=0)
    metric = objective.test_metric(recipe.training)
    rows = [{"metric": metric, "split": "test", "value": value, "n_examples": 1814, "dataset": "text"}]
    train._print_scores(rows, run, objective)
    assert capsys.readouterr().out == f"smgk:2 seed 0 on text: {score}\n"
