"""Training steps as recorded graphs: the gradients of the plain step, and the same run."""

import pytest
import tiny_training
import torch
from torch import nn

from mgk import training
from mgk.graphs import GraphedGradients
from mgk.objectives import Classification
from mgk.recipes import Recipe, Row, Training


def small(tmp_path, monkeypatch, recorded):
    """The weights after a few steps on the CPU, where "recorded" steps are plain ones that leave their gradients."""

    def recorder(self):
        def step(indices):
            means = self.measure(indices, "train")
            parameters = list(self.model.parameters())
            for parameter, gradient in zip(parameters, torch.autograd.grad(means["loss"], parameters), strict=True):
                parameter.grad = gradient
            return means

        return step if recorded else None

    monkeypatch.setattr(Classification, "recorder", recorder)
    recipe = Recipe("tiny", "", "tiny", training=Training(steps=6, warmup=1, eval_every=3, precision="fp32", clip=0.5))
    run = training.Run(recipe, Row("smgk", 2), "paper", 0, tmp_path, tmp_path / str(recorded))
    module, record = training.fit(run, tiny_training.TinyTask(), resume=False, accelerator="cpu")
    return {name: value.clone() for name, value in module.model.state_dict().items()}, record


def test_a_run_of_recorded_steps_is_the_plain_run(tmp_path, monkeypatch):
    plain, recorded = (small(tmp_path, monkeypatch, choice)[0] for choice in (False, True))
    assert all(torch.equal(plain[name], recorded[name]) for name in plain)


def test_what_is_written_does_not_depend_on_recording(tmp_path, monkeypatch):
    lines = []
    for choice in (False, True):
        small(tmp_path, monkeypatch, choice)
        rows = (tmp_path / str(choice) / "metrics.csv").read_text().splitlines()
        lines.append([row.rsplit(",", 1)[0] for row in rows])
    assert lines[0] == lines[1]
    assert len(lines[0]) == 5  # the header, and at steps 3 and 6 the last step's loss and the development set


def network_and_loss(dropout):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.GELU(), nn.Linear(16, 3)).cuda()

    def measure(x, labels):
        return {"loss": nn.functional.cross_entropy(network(x).float(), labels)}

    return network, measure


def batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x, labels = torch.randn(size, 8, generator=generator), torch.randint(3, (size,), generator=generator)
    return x.cuda(), labels.cuda()


@pytest.mark.gpu
def test_gradients_of_a_graph_follow_the_weights_and_the_batch():
    network, measure = network_and_loss(0.0)
    parameters = list(network.parameters())
    graphs = GraphedGradients(parameters, measure)
    for step, size in enumerate((5, 7, 5, 5, 7)):
        x = batch(size, step)
        with torch.autocast("cuda", torch.bfloat16):
            means = graphs(x)
            loss = measure(*x)["loss"]
        truth = torch.autograd.grad(loss, parameters)
        assert torch.equal(means["loss"], loss)
        assert all(torch.equal(p.grad, g) for p, g in zip(parameters, truth, strict=True))
        with torch.no_grad():
            for p in parameters:
                p -= 0.5 * p.grad
    assert len(graphs.recorded) == 2


@pytest.mark.gpu
def test_recording_draws_no_random_numbers():
    """The first step of a size, which is recorded, is the step that any other would be with that seed."""
    network, measure = network_and_loss(0.5)
    graphs = GraphedGradients(list(network.parameters()), measure)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(float(graphs(batch(9, 0))["loss"]))
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.gpu
def test_what_cannot_be_recorded_runs_and_says_so():
    network, measure = network_and_loss(0.0)

    def waits(x, labels):
        float(x.sum())  # the host waits for the device, which no graph can hold
        return measure(x, labels)

    graphs = GraphedGradients(list(network.parameters()), waits)
    x = batch(4, 0)
    with pytest.warns(UserWarning, match="could not be recorded"):
        means = graphs(x)
    assert torch.equal(means["loss"], graphs(x)["loss"])
    assert not graphs.recorded


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", ["softmax:2", "smgk:2", "mgk:2", "mlk:2"])
def test_a_run_on_a_gpu_learns_with_recorded_steps(tmp_path, monkeypatch, row):
    """The same run, recorded and not, without dropout: the losses are those of the same weights."""
    losses = []
    for choice in (True, False):
        if not choice:
            monkeypatch.setattr(Classification, "recorder", lambda self: None)
        recipe = Recipe("tiny", "", "tiny", model={"dropout": 0.0}, training=Training(steps=8, warmup=1, eval_every=4))
        run = training.Run(recipe, Row.parse(row), "paper", 0, tmp_path, tmp_path / str(choice))
        module, _ = training.fit(run, tiny_training.TinyTask(), resume=False)
        assert (module.recorded is not None) == choice
        losses.append(float(module.latest["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
