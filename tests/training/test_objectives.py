"""A new objective is one class and one row of OBJECTIVES: it trains, is evaluated and has a table format."""

import json
from dataclasses import dataclass

import pytest
import torch

from mgk import tasks
from mgk.models import Classifier, EncoderConfig
from mgk.models.run_directory import RunDirectory
from mgk.training import sweep, trainer
from mgk.training.data import DeviceDataset
from mgk.training.evaluate import evaluate_run
from mgk.training.objectives import OBJECTIVES, Metric, MetricFormat, Objective
from tests.support import tiny_training


class Regression(Objective):
    """Predict the share of a sequence that is not padding; mean absolute error."""

    metric, higher_is_better, predictions_file = "error", False, "errors"
    format = MetricFormat("error", "absolute error", 1.0, "error on the same examples", "", 3, "", "FLOPs")
    config_class, model_class = EncoderConfig, Classifier

    @classmethod
    def make_config(cls, recipe, row, preset, task, data_dir):
        sizes = {"vocab_size": task.vocab_size, "num_classes": 2, "max_length": task.max_length}
        return cls.resolve_config(recipe, row, preset, sizes)

    def load_split(self, split):
        return DeviceDataset(split, self.model.config.max_length, self.device)

    def compile_network(self):
        return torch.compile(self.model)

    def batch(self, indices, split):
        return self.examples[split].batch(indices, self.model.config.max_length)[:2], ()

    def errors(self, tokens, lengths):
        return (self.network(tokens, lengths)[:, 0] - lengths / tokens.shape[-1]).abs()

    def measure_batch(self, *batch):
        return {"loss": self.errors(*batch).mean()}

    def measure(self, indices, split):
        return self.measure_batch(*self.batch(indices, split)[0])

    def metric_value(self, means):
        return means["loss"]

    @staticmethod
    def format_metric(value):
        return f"error {value:.3f}"

    @staticmethod
    def test_splits(task):
        return ["test"]

    @torch.no_grad()
    def evaluate(self, split, directory):
        errors = self.errors(*self.batch(torch.arange(len(self.splits[split])), split)[0])
        self.save_predictions(directory, split, errors.numpy())
        yield Metric(len(errors), "error", float(errors.mean()))

    @staticmethod
    def run_example(model, length):
        model(torch.empty((1, length), dtype=torch.long), torch.empty(1, dtype=torch.long))


@dataclass
class LengthTask(tiny_training.TinyTask):
    objective: str = "regression"

    def baselines(self, data_dir):
        return {"mean length": {"test": 0.25}}


def test_new_objective_is_one_class_and_one_row(tmp_path, monkeypatch, capsys):
    task = LengthTask()
    monkeypatch.setitem(OBJECTIVES, "regression", Regression)
    monkeypatch.setitem(tasks.TASKS, "tiny", task)
    run = tiny_training.run(str(tmp_path), steps=20, eval_every=5, dropout=0.0, lr=1e-2)
    module, callback = trainer.fit(run, task, resume=False, accelerator="cpu")
    assert "dev error " in capsys.readouterr().err
    files = RunDirectory(tmp_path)
    lines = [line.split(",") for line in files.metrics.read_text().splitlines()]
    assert lines[0][:4] == ["step", "split", "loss", "error"]
    errors = [float(line[3]) for line in lines if line[1] == "dev"]
    assert len(errors) == 4
    # The lowest error is the best: training improves on the first evaluation.
    assert module.best["error"] == pytest.approx(min(errors), rel=1e-5)
    assert min(errors) < errors[0]
    # A finished run resumes without training.
    assert trainer.fit(run, task, resume=True, accelerator="cpu")[1].steps == 0
    rows = evaluate_run(run, task, module, callback)
    metrics = {row["metric"]: row["value"] for row in rows}
    assert (metrics["best_error"], metrics["baseline: mean length"]) == (module.best["error"], 0.25)
    ((split, values),) = module.objective.read_predictions(tmp_path)
    assert (split, values.mean()) == ("test", pytest.approx(metrics["error"]))
    # A sweep takes the columns of its table from the objective, and recognizes the finished run by its metric.
    assert sweep.metric_format(run.recipe) == Regression.format
    written = [{key: str(value) for key, value in row.items()} for row in json.loads(files.result.read_text())]
    assert sweep.is_trained(written, run.recipe, run.row, run.preset, run.seed)
