"""Seeds, means and the best model of the training module, without a trainer."""

import math
from types import SimpleNamespace

import pytest
import torch

from mgk.models import load_model
from mgk.training import callbacks, module
from mgk.training.objectives import OBJECTIVES
from tests.support import tiny_training


@pytest.fixture
def trained(tmp_path):
    task, run = tiny_training.TinyTask(), tiny_training.run(str(tmp_path), eval_batch_size=4)
    objective = OBJECTIVES[task.objective]
    splits = {name: task.split(tmp_path, name) for name in ("train", "dev")}
    model = objective.model_class(run.model_config(task))
    return module.TrainingModule(objective(model, run.recipe.training, task, splits), run.seed)


def random_numbers(trained, step):
    trained.on_train_batch_start(torch.arange(2), step)
    return torch.rand(4)


def test_random_numbers_of_a_step_depend_on_seed_and_step_alone(trained):
    """A resumed run therefore draws the dropout masks of an uninterrupted one."""
    first = random_numbers(trained, 5)
    torch.rand(100)
    assert torch.equal(random_numbers(trained, 5), first)
    assert not torch.equal(random_numbers(trained, 6), first)
    trained.seed += 1
    assert not torch.equal(random_numbers(trained, 5), first)


def test_development_means_are_weighted_by_the_number_of_examples(trained, monkeypatch):
    monkeypatch.setattr(trained, "log_dict", lambda *args, **kwargs: None)
    trained.on_validation_epoch_start()
    # The last batch repeats an example to fill it, and counts none.
    values = [(8, 0.5, 1.0), (2, 0.0, 3.0), (0, math.nan, math.nan)]
    monkeypatch.setattr(
        trained.objective, "measure", lambda n, split: {"accuracy": values[n][1], "loss": torch.tensor(values[n][2])}
    )
    for n, (count, accuracy, _) in enumerate(values):
        values[n] = (count, torch.tensor(accuracy), values[n][2])
        trained.validation_step((n, count), n)
    trained.on_validation_epoch_end()
    assert trained.dev_means == pytest.approx({"accuracy": 0.4, "loss": 1.4})


def test_means_over_a_split_are_weighted_by_the_number_of_examples(trained, monkeypatch):
    """Of 10 examples in batches of 4, the last 2 are a fifth."""
    objective = trained.objective
    monkeypatch.setattr(objective, "device", torch.device("cpu"), raising=False)
    monkeypatch.setattr(objective, "measure", lambda indices, split: {"loss": torch.tensor(float(len(indices)))})
    assert objective.evaluate_means("dev")["loss"] == pytest.approx((4 * 4 + 4 * 4 + 2 * 2) / 10)


def record(trained, directory, step, accuracy):
    """Record an evaluation as the callback does, without training."""
    trained.train_means = {}
    callback = callbacks.CheckpointCallback(directory, trained.settings)
    trainer = SimpleNamespace(
        global_step=step,
        is_global_zero=True,
        optimizers=[SimpleNamespace(param_groups=[{"lr": 0.1}])],
        save_checkpoint=lambda path, **kwargs: path.write_text(""),
    )
    callback._record_evaluation(trainer, trained, {"accuracy": accuracy, "loss": 1.0})


def test_best_model_before_a_resume_is_kept(trained, tmp_path):
    best = torch.nn.utils.parameters_to_vector(trained.model.parameters()).detach().clone()
    record(trained, tmp_path, 6, 0.6)
    checkpoint = {}
    trained.on_save_checkpoint(checkpoint)
    trained.best = {"accuracy": -math.inf, "step": -1}
    trained.on_load_checkpoint(checkpoint)
    assert trained.best == {"accuracy": 0.6, "step": 6}
    for parameter in trained.model.parameters():
        parameter.data.add_(1.0)
    record(trained, tmp_path, 12, 0.5)
    stored = load_model(tmp_path / "best")
    assert torch.equal(torch.nn.utils.parameters_to_vector(stored.parameters()), best)
    record(trained, tmp_path, 18, 0.7)
    stored = load_model(tmp_path / "best")
    assert torch.equal(torch.nn.utils.parameters_to_vector(stored.parameters()), best + 1.0)
    assert trained.best == {"accuracy": 0.7, "step": 18}


@pytest.mark.parametrize("name, better, worse", [("classification", 0.6, 0.5), ("language-model", 20.0, 21.0)])
def test_metrics_have_a_direction_and_ties_keep_the_earlier_model(name, better, worse):
    objective = OBJECTIVES[name]
    assert objective.is_better(better, worse)
    assert not objective.is_better(worse, better)
    assert not objective.is_better(better, better)
    assert objective.is_better(worse, objective.worst_value())
