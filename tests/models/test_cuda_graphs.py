"""CUDA graphs of training steps give the gradients of eager steps."""

import pytest
import torch
from torch import nn

from mgk.models.cuda_graphs import GraphedBackward, GraphedForward
from mgk.training import trainer
from mgk.training.config import ModelSpec, Recipe, TrainConfig
from mgk.training.objectives import Objective
from tests.support import tiny_training


class FakeGraph:
    """Stand-in for a captured graph on the CPU: it writes to the gradient buffers that existed at the capture."""

    def __init__(self, graphs, sizes):
        self.graphs, self.sizes, self.buffers = graphs, sizes, list(graphs.gradients)

    def replay(self, inputs):
        means = self.graphs.measure(*inputs, *self.sizes)
        for buffer, gradient in zip(
            self.buffers, torch.autograd.grad(means["loss"], self.graphs.parameters), strict=True
        ):
            buffer.copy_(gradient)
        return means


@pytest.fixture
def graphs_on_cpu(monkeypatch):
    def capture(self, key, inputs, sizes):
        self.captured[key] = FakeGraph(self, sizes)

    def graphed_step(self):
        graphs = GraphedBackward(list(self.model.parameters()), self.measure_batch)
        return lambda indices: graphs(*self.batch(indices, "train"))

    monkeypatch.setattr(GraphedBackward, "_capture", capture)
    monkeypatch.setattr(Objective, "graphed_step", graphed_step)


def train_few_steps(task, tmp_path, graphs):
    """Return weights and metrics after 6 steps; Lightning drops all gradients at each evaluation."""
    settings = TrainConfig(steps=6, warmup=1, eval_every=2, precision="fp32", clip=0.5, padding="longest")
    recipe = Recipe("tiny", "", "tiny", model=tiny_training.MODELS[task], training=settings)
    run = trainer.Run(recipe, ModelSpec("smgk", 2), "paper", 0, tmp_path, tmp_path / str(graphs))
    module, _ = trainer.fit(run, tiny_training.TASKS[task](), resume=False, accelerator="cpu", graphs=graphs)
    assert (module.graphed_step is not None) == graphs
    rows = (tmp_path / str(graphs) / "metrics.csv").read_text().splitlines()
    return module.model.state_dict(), [row.rsplit(",", 1)[0] for row in rows]


@pytest.mark.parametrize("task", ["classes", "text"])
def test_run_with_graphs_equals_eager_run(task, tmp_path, graphs_on_cpu):
    (plain, rows), (captured, graph_rows) = (train_few_steps(task, tmp_path, graphs) for graphs in (False, True))
    assert all(torch.equal(plain[name], captured[name]) for name in plain)
    assert rows == graph_rows
    assert len(rows) == 7  # the header, and at steps 2, 4 and 6 the last step's loss and the development set


@pytest.mark.parametrize("transpositions", [(True,), (False, True), (False, False)])
def test_gradients_of_any_strides(transpositions):
    """The gradient of a transposed matrix has transposed strides."""
    parameters = [nn.Parameter(torch.arange(12.0).view(3, 4)) for _ in transpositions]
    factors = [torch.randn(4, 3) if transposed else torch.randn(3, 4) for transposed in transpositions]

    def measure(x):
        pairs = zip(parameters, factors, transpositions, strict=True)
        return {"loss": sum((x * (p.t() if transposed else p) * f).sum() for p, f, transposed in pairs)}

    GraphedBackward(parameters, measure, use_graphs=False)((torch.ones(()),))
    for parameter, factor, transposed in zip(parameters, factors, transpositions, strict=True):
        assert torch.equal(parameter.grad, factor.t() if transposed else factor)


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
def test_graphed_gradients_follow_weights_and_batch():
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
        # A live pass on another stream would keep the parameters on that stream.
        del loss
        with torch.no_grad():
            for p in parameters:
                p -= 0.5 * p.grad
    assert len(graphs.captured) == 2


@pytest.mark.gpu
def test_graphed_forward_follows_weights_and_batch():
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
def test_capture_draws_no_random_numbers():
    """A step that is captured gives the same result as a replay with the same seed."""
    network, measure = network_and_loss(0.5)
    graphs = GraphedBackward(list(network.parameters()), measure)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(float(graphs(batch(9, 0))["loss"]))
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.gpu
def test_capture_keeps_buffers():
    """A step that is captured updates buffers once."""
    network, measure = network_and_loss(0.0)
    total = torch.zeros(1, device="cuda")

    def counting(x, labels):
        total.add_(len(x))
        return measure(x, labels)

    graphs = GraphedBackward(list(network.parameters()), counting, buffers=lambda: [total])
    for step, size in enumerate((5, 7, 5)):
        graphs(batch(size, step))
    assert float(total) == 17
    assert len(graphs.captured) == 2


@pytest.mark.gpu
def test_failed_capture_warns_and_runs_eagerly():
    network, measure = network_and_loss(0.0)

    def synchronizing(x, labels):
        float(x.sum())  # synchronizes, which a capture does not allow
        return measure(x, labels)

    graphs = GraphedBackward(list(network.parameters()), synchronizing)
    x = batch(4, 0)
    with pytest.warns(UserWarning, match="could not be captured"):
        means = [graphs(x), graphs(x), graphs(x)]
    assert not graphs.captured
    assert torch.equal(means[0]["loss"], means[2]["loss"])
    assert torch.rand(3, device="cuda").unique().numel() == 3  # the generator still works


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.filterwarnings("error:a training step could not be captured")
@pytest.mark.parametrize("task", ["classes", "text"])
@pytest.mark.parametrize("row", ["softmax:2", "smgk:2", "mgk:2", "mlk:2", "smgk-em:2"])
def test_gpu_run_with_graphs_equals_eager_run(tmp_path, row, task):
    """Compare the losses over several evaluations, for which Lightning drops all gradients."""
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
