"""Training steps as recorded graphs: the gradients of the plain step, and the same run."""

import pytest
import torch
from torch import nn

from mgk.models.cuda_graphs import GraphedBackward, GraphedForward
from mgk.training import trainer
from mgk.training.config import ModelSpec, Recipe, TrainConfig
from mgk.training.objectives import Objective
from tests.support import tiny_training


class Remembered:
    """A recorded step without a GPU: like a graph it writes to the memory that the gradients had when it was made."""

    def __init__(self, graphs, fixed):
        self.graphs, self.fixed, self.places = graphs, fixed, list(graphs.gradients)

    def replay(self, inputs):
        means = self.graphs.measure(*inputs, *self.fixed)
        for place, gradient in zip(
            self.places, torch.autograd.grad(means["loss"], self.graphs.parameters), strict=True
        ):
            place.copy_(gradient)
        return means


@pytest.fixture
def without_a_gpu(monkeypatch):
    def record(self, kind, inputs, fixed):
        self.captured[kind] = Remembered(self, fixed)

    def recorder(self):
        graphs = GraphedBackward(list(self.model.parameters()), self.measure_batch)
        return lambda indices: graphs(*self.batch(indices, "train"))

    monkeypatch.setattr(GraphedBackward, "_capture", record)
    monkeypatch.setattr(Objective, "graphed_step", recorder)


def trained(task, tmp_path, graphs):
    """The weights after a few steps, with two evaluations, for which Lightning drops all gradients."""
    settings = TrainConfig(steps=6, warmup=1, eval_every=2, precision="fp32", clip=0.5, padding="longest")
    recipe = Recipe("tiny", "", "tiny", model=tiny_training.MODELS[task], training=settings)
    run = trainer.Run(recipe, ModelSpec("smgk", 2), "paper", 0, tmp_path, tmp_path / str(graphs))
    module, _ = trainer.fit(run, tiny_training.TASKS[task](), resume=False, accelerator="cpu", graphs=graphs)
    assert (module.graphed_step is not None) == graphs
    rows = (tmp_path / str(graphs) / "metrics.csv").read_text().splitlines()
    return module.model.state_dict(), [row.rsplit(",", 1)[0] for row in rows]


@pytest.mark.parametrize("task", ["classes", "text"])
def test_a_run_of_recorded_steps_is_the_plain_run(task, tmp_path, without_a_gpu):
    (plain, told), (recorded, also_told) = (trained(task, tmp_path, graphs) for graphs in (False, True))
    assert all(torch.equal(plain[name], recorded[name]) for name in plain)
    assert told == also_told
    assert len(told) == 7  # the header, and at steps 2, 4 and 6 the last step's loss and the development set


@pytest.mark.parametrize("turned", [(True,), (False, True), (False, False)])
def test_gradients_arrive_however_they_lie(turned):
    """The gradient of a matrix that is used turned lies turned too."""
    parameters = [nn.Parameter(torch.arange(12.0).view(3, 4)) for _ in turned]
    factors = [torch.randn(4, 3) if each else torch.randn(3, 4) for each in turned]

    def measure(x):
        pairs = zip(parameters, factors, turned, strict=True)
        return {"loss": sum((x * (p.t() if each else p) * f).sum() for p, f, each in pairs)}

    GraphedBackward(parameters, measure, use_graphs=False)((torch.ones(()),))
    for parameter, factor, each in zip(parameters, factors, turned, strict=True):
        assert torch.equal(parameter.grad, factor.t() if each else factor)


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
    graphs = GraphedBackward(parameters, measure)
    for step, size in enumerate((5, 7, 5, 5, 7)):
        x = batch(size, step)
        with torch.autocast("cuda", torch.bfloat16):
            means = graphs(x)
            loss = measure(*x)["loss"]
        truth = torch.autograd.grad(loss, parameters)
        assert torch.equal(means["loss"], loss)
        assert all(torch.equal(p.grad, g) for p, g in zip(parameters, truth, strict=True))
        # As long as a pass on another stream is alive, its parameters belong to that stream.
        del loss
        with torch.no_grad():
            for p in parameters:
                p -= 0.5 * p.grad
    assert len(graphs.captured) == 2


@pytest.mark.gpu
def test_a_graph_without_gradients_follows_the_weights_and_the_batch():
    network, measure = network_and_loss(0.0)
    graphs = GraphedForward(measure)
    for step, size in enumerate((5, 7, 5, 7)):
        x = batch(size, step)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            assert torch.equal(graphs(x)["loss"], measure(*x)["loss"])
            for p in network.parameters():
                p += 0.1
    assert len(graphs.captured) == 2
    assert all(p.grad is None for p in network.parameters())


@pytest.mark.gpu
def test_recording_draws_no_random_numbers():
    """The first step of a size, which is recorded, is the step that any other would be with that seed."""
    network, measure = network_and_loss(0.5)
    graphs = GraphedBackward(list(network.parameters()), measure)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(float(graphs(batch(9, 0))["loss"]))
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.gpu
def test_recording_changes_no_buffers():
    """What a step counts is counted once, also when it is just being recorded."""
    network, measure = network_and_loss(0.0)
    seen = torch.zeros(1, device="cuda")

    def counts(x, labels):
        seen.add_(len(x))
        return measure(x, labels)

    graphs = GraphedBackward(list(network.parameters()), counts, buffers=lambda: [seen])
    for step, size in enumerate((5, 7, 5)):
        graphs(batch(size, step))
    assert float(seen) == 17
    assert len(graphs.captured) == 2


@pytest.mark.gpu
def test_what_cannot_be_recorded_runs_and_says_so():
    network, measure = network_and_loss(0.0)

    def waits(x, labels):
        float(x.sum())  # the host waits for the device, which no graph can hold
        return measure(x, labels)

    graphs = GraphedBackward(list(network.parameters()), waits)
    x = batch(4, 0)
    with pytest.warns(UserWarning, match="could not be captured"):
        means = [graphs(x), graphs(x), graphs(x)]
    assert not graphs.captured
    assert torch.equal(means[0]["loss"], means[2]["loss"])
    assert torch.rand(3, device="cuda").unique().numel() == 3  # random numbers are still to be had


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.filterwarnings("error:a training step could not be captured")
@pytest.mark.parametrize("task", ["classes", "text"])
@pytest.mark.parametrize("row", ["softmax:2", "smgk:2", "mgk:2", "mlk:2", "smgk-em:2"])
def test_a_run_on_a_gpu_is_the_same_with_recorded_steps(tmp_path, row, task):
    """Over several evaluations, for which Lightning drops all gradients: the losses of the same weights."""
    losses = []
    for graphs in (True, False):
        model = {**tiny_training.MODELS[task], "dropout": 0.0}
        recipe = Recipe("tiny", "", "tiny", model=model, training=TrainConfig(steps=24, warmup=1, eval_every=4))
        run = trainer.Run(recipe, ModelSpec.parse(row), "paper", 0, tmp_path, tmp_path / str(graphs))
        module, _ = trainer.fit(run, tiny_training.TASKS[task](), resume=False, graphs=graphs)
        assert (module.graphed_step is not None) == graphs
        rows = (tmp_path / str(graphs) / "metrics.csv").read_text().splitlines()[1:]
        losses.append([float(line.split(",")[2]) for line in rows])
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
