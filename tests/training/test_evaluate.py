"""Evaluation of a finished run."""

import pytest
import torch
from typer.testing import CliRunner

from mgk.cli import commands
from mgk.models import Classifier, DecoderConfig, EncoderConfig, LanguageModel, save_model
from mgk.tasks.base import Split
from mgk.training import trainer
from mgk.training.config import ModelSpec, Recipe, TrainConfig
from mgk.training.evaluate import evaluate_run, first_step_above, load_objective
from mgk.training.objectives import OBJECTIVES, NotFiniteError
from tests.support import tiny_training


def test_best_model_is_evaluated_not_the_last(tmp_path, monkeypatch):
    """The module holds the last weights; the evaluation must load the best ones."""
    monkeypatch.setattr(tiny_training.TinyText, "baselines", lambda self, data_dir: {}, raising=False)
    monkeypatch.setattr(tiny_training.TinyText, "dataset", "tiny", raising=False)
    task, model = tiny_training.TinyText(), tiny_training.MODELS["text"]
    recipe = Recipe("tiny", "", "tiny", model=model, training=TrainConfig(steps=4, warmup=1, eval_every=2, stride=6))
    run = trainer.Run(recipe, ModelSpec("smgk", 2), "paper", 0, tmp_path, tmp_path / "run")
    module, callback = trainer.fit(run, task, resume=False, accelerator="cpu")
    torch.manual_seed(1)
    save_model(LanguageModel(module.model.config), run.files.best_model)
    metrics = {
        row["metric"]: row["value"] for row in evaluate_run(run, task, module, callback) if row["split"] == "test"
    }
    objective = load_objective(run.files.best_model, recipe.training, task, tmp_path, torch.device("cpu"), "test")
    assert metrics["loss_stride_6"] == next(
        m.value for m in objective.evaluate("test", None) if m.metric == "loss_stride_6"
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_classifier_with_damaged_weights_has_no_accuracy(tmp_path, value):
    """`argmax` of NaN is a class, and its accuracy a number."""
    task, settings = tiny_training.TinyTask(), tiny_training.run(str(tmp_path)).recipe.training
    model = Classifier(EncoderConfig(16, 4, 24, embed_dim=8))
    objective = OBJECTIVES["classification"](model.eval(), settings, task, {"test": task.split(tmp_path, "test")})
    objective.to_device(torch.device("cpu"))
    assert len(objective.correct("test")) == 10
    with torch.no_grad():
        next(model.parameters())[3] = value
    with pytest.raises(NotFiniteError, match="a logit on test is not finite"):
        list(objective.evaluate("test", None))


def test_eval_of_damaged_weights_prints_no_numbers(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 400)
    run, config = tmp_path / "run", DecoderConfig(256, embed_dim=8, ffn_dim=8, num_layers=1, num_heads=1)
    model = LanguageModel(config)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.inf)
    save_model(model, run / "best")
    (run / "run.json").write_text('{"task": "bytes", "training": {"stride": 256, "precision": "fp32"}}')
    result = CliRunner().invoke(commands.app, ["eval", str(run), "--data-dir", str(tmp_path), "--split", "test"])
    assert str(result.exception).startswith(f"{run}: ")
    assert "on test is not finite: the model has diverged, or its weights are damaged" in str(result.exception)
    assert result.stdout == ""


def test_compiled_network_is_reused_for_evaluation(monkeypatch):
    """Compiled modules raise in a boolean context."""

    class Compiled:
        def __len__(self):
            raise TypeError("does not support len()")

    objective_class, network = OBJECTIVES["classification"], Compiled()
    monkeypatch.setattr(objective_class, "load_split", lambda self, split: split)
    objective = objective_class(None, TrainConfig(), None, {"test": Split})
    objective.to_device(torch.device("cuda"), network)
    assert objective.network is network


def test_plateau_ends_at_the_first_evaluation_above_it(tmp_path):
    lines = ["step,split,loss,accuracy", "250,dev,2.2,0.17", "500,train,1,0.4", "500,dev,2.1,0.26", "750,dev,2,0.31"]
    (tmp_path / "metrics.csv").write_text("\n".join(lines))
    assert first_step_above(tmp_path / "metrics.csv", 0.25) == 500
    assert first_step_above(tmp_path / "metrics.csv", 0.35) == 0
