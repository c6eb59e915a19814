"""Training in several processes: every family of recipes, with DDP and FSDP."""

from types import SimpleNamespace

import pytest
import torch

from mgk.models import Classifier, EncoderConfig
from mgk.models.run_directory import RunDirectory
from mgk.tasks import get_task
from mgk.training.config import load_recipe, recipe_names
from mgk.training.module import TrainingModule
from mgk.training.objectives import OBJECTIVES, Classification
from mgk.variants import PRESETS, VARIANTS
from tests.support import tiny_training
from tests.support.launch_training import needs_fsdp, torchrun, train

FAMILIES = list(tiny_training.TASKS)
STRATEGIES = ["ddp", pytest.param("fsdp", marks=needs_fsdp)]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_trainable_parameter_has_a_gradient(family, variant, preset):
    """DDP waits for the gradient of each parameter that requires one."""
    task = tiny_training.TASKS[family]()
    objective = OBJECTIVES[task.objective]
    sizes = dict(tiny_training.MODELS[family])
    if task.objective != "image-classification":
        sizes |= {"vocab_size": 64, "max_length": task.max_length}
    if task.objective != "language-model":
        sizes["num_classes"] = 4
    if task.objective == "classification":
        sizes["documents"] = task.documents
    model = objective.model_class(objective.config_class(**sizes, variant=variant, preset=preset, num_heads=2))
    if task.objective == "image-classification":
        loss = model(torch.rand(3, 1, 4, 4)).logsumexp(-1).sum()
    elif task.objective == "classification":
        tokens = torch.randint(1, 16, (3, 24) if task.documents == 1 else (3, 2, 24))
        loss = model(tokens).logsumexp(-1).sum()
    else:
        loss = model.losses(torch.randint(0, 64, (3, 12)), torch.randint(0, 64, (3, 12))).sum()
    loss.backward()
    unused = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
    assert unused == []


def test_every_objective_of_a_recipe_has_a_family():
    objectives = {get_task(load_recipe(name).task).objective for name in recipe_names()}
    assert {task().objective for task in tiny_training.TASKS.values()} == objectives == set(OBJECTIVES)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_family_trains_in_two_processes(tmp_path, strategy):
    """One start of the processes trains all families: most of the time of a start is imports."""
    settings = ("--set=steps=4", "--set=eval_every=2", "--set=warmup=1", f"--strategy={strategy}", "--every-task")
    train(tmp_path, *settings, launcher=torchrun("--standalone", "--nproc-per-node=2"))
    for family in FAMILIES:
        lines = RunDirectory(tmp_path / family).metrics.read_text().splitlines()[1:]
        assert [line.split(",")[0] for line in lines] == ["2", "2", "4", "4"]
        assert (tmp_path / family / "final" / "model.safetensors").exists()


@pytest.fixture(scope="module")
def metrics_of_one_process(tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    train(out, "--dropout=0", *(f"--set={setting}" for setting in UNEVEN))
    return dev_metrics(out)


# 10 examples in batches of 3: rank 0 has 4 examples in two batches, the others 3 in one. The last step is
# not a multiple of eval_every.
UNEVEN = ("steps=5", "eval_every=2", "warmup=1", "batch_size=12", "eval_batch_size=3")


def dev_metrics(out):
    rows = [line.split(",") for line in RunDirectory(out).metrics.read_text().splitlines()]
    best = torch.load(RunDirectory(out).checkpoint, weights_only=True)["best"]
    return [float(value) for row in rows if row[1] == "dev" for value in row[2:4]] + list(best.values())


def test_last_evaluation_of_a_rank_covers_its_examples(tmp_path):
    task, settings = tiny_training.TinyTask(), tiny_training.run(str(tmp_path), eval_batch_size=2).recipe.training
    model = Classifier(EncoderConfig(16, 4, 24, embed_dim=8))
    module = TrainingModule(Classification(model, settings, task, {"dev": task.split(tmp_path, "dev")}), seed=0)
    module.objective.to_device(torch.device("cpu"))
    indices = []
    measure = module.objective.measure
    module.objective.measure = lambda batch, split: indices.extend(batch.tolist()) or measure(batch, split)
    module.trainer = SimpleNamespace(global_rank=1, world_size=3, strategy=None)
    means = module.evaluate()
    assert indices == [1, 4, 7]
    assert not model.training
    with torch.no_grad():
        expected = measure(torch.tensor(indices), "dev")
    assert means == pytest.approx({name: float(value) for name, value in expected.items()})


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_development_metrics_of_three_processes_equal_those_of_one(tmp_path, metrics_of_one_process, strategy):
    launcher, settings = torchrun("--standalone", "--nproc-per-node=3"), [f"--set={setting}" for setting in UNEVEN]
    train(tmp_path, "--dropout=0", *settings, f"--strategy={strategy}", launcher=launcher, timeout=120)
    assert dev_metrics(tmp_path) == pytest.approx(metrics_of_one_process, rel=2e-6)
