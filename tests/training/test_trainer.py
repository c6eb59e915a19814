"""Training: the same run however often it is interrupted, and however many processes share it."""

import json
import os
import platform
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import experiments.paper  # noqa: F401  (adds its recipes)
from mgk.features import FAVOR
from mgk.models import LanguageModel, load_model, save_model
from mgk.models.run_directory import RunDirectory
from mgk.tasks.base import Split
from mgk.training import config as recipes
from mgk.training import trainer
from mgk.training.callbacks import CheckpointCallback
from mgk.training.config import ModelSpec, Recipe, TrainConfig
from mgk.training.data import DeviceDataset, EpochPermutation, TrainSampler
from mgk.training.evaluate import evaluate_run, load_objective
from mgk.training.objectives import OBJECTIVES
from tests.support import tiny_training

SCRIPT = Path(tiny_training.__file__)


def train(out: Path, *arguments: str, launcher: tuple[str, ...] = (sys.executable,), task: str = "classes") -> int:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2]), "TINY_TASK": task}
    command = [*launcher, str(SCRIPT), str(out), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, timeout=300)
    # torchrun makes 1 of whatever its processes ended with.
    killed = any("--kill" in each for each in arguments)
    if result.returncode not in ((-9, 143, 1) if killed else (0,)):
        raise AssertionError(result.stderr.decode()[-2000:])
    return result.returncode


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "final" / "model.safetensors")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The directory of a whole run of each task, trained when first asked for."""
    done = {}

    def whole(task):
        if task not in done:
            done[task] = tmp_path_factory.mktemp(task)
            assert train(done[task], task=task) == 0
        return done[task]

    return whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "kill_at", "signal_number"),
    [
        pytest.param("classes", 10, 9, id="middle"),
        pytest.param("classes", 12, 9, id="boundary"),
        pytest.param("classes", 15, 15, id="sigterm"),
        pytest.param("classes", 11, 15, id="sigterm-heard-in-a-step-that-is-evaluated"),
        pytest.param("classes", 23, 15, id="sigterm-heard-in-the-last-step"),
        pytest.param("text", 10, 9, id="language-model"),
    ],
)
def test_a_killed_run_resumes_bit_for_bit(tmp_path, uninterrupted, task, kill_at, signal_number):
    uninterrupted = uninterrupted(task)
    killed = train(tmp_path, f"--kill-at={kill_at}", f"--kill-with={signal_number}", task=task)
    assert killed == (-9 if signal_number == 9 else 143)
    assert not (tmp_path / "final").exists()
    assert train(tmp_path, "--resume", task=task) == 0
    whole, resumed = weights(uninterrupted), weights(tmp_path)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    # Wall-clock time aside, the record of the run is the same too.
    columns = [
        [line.rsplit(",", 1)[0] for line in (out / "metrics.csv").read_text().splitlines()]
        for out in (uninterrupted, tmp_path)
    ]
    assert columns[0] == columns[1]


def torchrun(*options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", *options)


def farthest(one: Path, other: Path) -> float:
    a, b = weights(one), weights(other)
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process with the whole batch; without dropout, whose random numbers would differ."""
    out = tmp_path_factory.mktemp("alone")
    train(out, "--dropout=0")
    return out


# What FSDP asks of a stream, which torch 2.6 has for GPUs alone.
needs_fsdp = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch has no FSDP on a CPU")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=needs_fsdp)])
def test_two_processes_are_one_with_the_whole_batch(tmp_path, alone, strategy):
    both = torchrun("--standalone", "--nproc-per-node=2")
    train(tmp_path, "--dropout=0", f"--strategy={strategy}", launcher=both)
    assert farthest(alone, tmp_path) < 1e-5
    # The record of the run too: the first process's, as if there were no other.
    assert (RunDirectory(tmp_path).best_model / "model.safetensors").exists()
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 9
    assert len(json.loads((tmp_path / "environment.json").read_text())) == 1


@needs_fsdp
@pytest.mark.slow
def test_fsdp_goes_on_where_one_of_its_processes_was_told_to_stop(tmp_path, alone):
    both, stop = torchrun("--standalone", "--nproc-per-node=2"), ("--kill-at=15", "--kill-with=15", "--kill-rank=1")
    assert train(tmp_path, "--dropout=0", "--strategy=fsdp", *stop, launcher=both) != 0
    assert torch.load(RunDirectory(tmp_path).checkpoint, weights_only=True)["global_step"] == 16
    assert not (tmp_path / "final").exists()
    # What FSDP saved, one process alone can go on from.
    assert train(tmp_path, "--dropout=0", "--resume") == 0
    assert farthest(alone, tmp_path) < 1e-5


@pytest.mark.slow
def test_two_nodes_are_one_process(tmp_path, alone):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    node = torchrun("--nnodes=2", "--nproc-per-node=1", "--master-addr=localhost", f"--master-port={port}")
    with ThreadPoolExecutor() as pool:
        nodes = [
            pool.submit(train, tmp_path, "--dropout=0", launcher=(*node, f"--node-rank={rank}")) for rank in (0, 1)
        ]
    assert [each.result() for each in nodes] == [0, 0]
    assert farthest(alone, tmp_path) < 1e-5


def test_order_is_a_permutation_every_epoch_and_a_function_of_seed_and_place():
    order = EpochPermutation(10, seed=5)
    taken = order.take(0, 30)
    for epoch in range(3):
        assert sorted(taken[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert (taken[:10] != taken[10:20]).any()
    assert (EpochPermutation(10, seed=5).take(7, 16) == taken[7:23]).all()
    assert (EpochPermutation(10, seed=6).take(0, 30) != taken).any()


@pytest.mark.parametrize(("parts", "world"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_streams_of_all_processes_and_parts_make_up_the_batch(parts, world):
    whole = EpochPermutation(20, seed=1).take(0, 24)
    streams = [
        iter(TrainSampler(EpochPermutation(20, seed=1), 8, parts, rank, world, lambda: 0)) for rank in range(world)
    ]
    seen = [next(stream).tolist() for _ in range(3 * parts) for stream in streams]
    assert [index for part in seen for index in part] == whole.tolist()
    # A stream that starts later goes on where the other stands.
    later = iter(TrainSampler(EpochPermutation(20, seed=1), 8, parts, 0, world, lambda: 2 * parts))
    assert next(later).tolist() == seen[2 * parts * world]


@pytest.mark.parametrize("documents", [1, 2])
def test_batches_on_the_device_are_those_of_the_split(documents):
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 12, 6 * documents)
    tokens = draw.integers(1, 200, lengths.sum()).astype(np.uint8)
    split = Split(tokens, np.concatenate([[0], lengths.cumsum()]), draw.integers(0, 3, 6), documents)
    examples = DeviceDataset(split, 9, torch.device("cpu"))
    indices = [4, 0, 5]
    for found, wanted in zip(examples.batch(torch.tensor(indices), 9), split.batch(indices, 9), strict=True):
        assert torch.equal(found, wanted)


def test_tokens_of_all_16_bits():
    tokens = np.array([0, 32767, 32768, 65535, 5], dtype=np.uint16)
    examples = DeviceDataset(Split(tokens, np.array([0, 4, 5]), np.array([0, 1])), 4, torch.device("cpu"))
    assert examples.batch(torch.tensor([0]), 4)[0].tolist() == [[0, 32767, 32768, 65535]]
    assert examples.packed(np.array([0]))[0].tolist() == [0, 32767, 32768, 65535]


def test_recipes_load_and_every_row_is_a_model():
    for name in recipes.recipe_names():
        recipe = recipes.load_recipe(name)
        assert recipe.rows
        assert set(recipe.paper) <= {str(row) for row in recipe.rows}
    assert recipes.load_recipe("listops-4e-4").training.lr == 4e-4
    assert recipes.load_recipe("listops-4e-4").training.steps == recipes.load_recipe("listops").training.steps


def test_settings_reach_the_recipe():
    recipe = recipes.load_recipe("listops").with_settings(
        ["lr=3e-4", "training.steps=10", "warmup=2", "model.dropout=0"]
    )
    assert (recipe.training.lr, recipe.training.steps, recipe.model["dropout"]) == (3e-4, 10, 0)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("speed=3", "must set one of"),
        ("lr", "key=value"),
        ("lr=-1", "lr"),
        ("precision=fp8", "precision"),
        ("steps=1.5", "steps"),
    ],
)
def test_wrong_settings(setting, says):
    with pytest.raises(ValueError, match=says):
        recipes.load_recipe("listops").with_settings([setting])


@pytest.mark.parametrize("text", ["smgk", "smgk:", "smgk:0", "smgk:x", "smgk:4/2/1", "sgmk:4"])
def test_wrong_rows(text):
    with pytest.raises(ValueError, match="row"):
        ModelSpec.parse(text)


def test_rows_read_as_they_are_written():
    for text in ("smgk:4", "softmax:8/4"):
        assert str(ModelSpec.parse(text)) == text


def test_unknown_recipe_lists_the_known():
    with pytest.raises(ValueError, match="listops"):
        recipes.load_recipe("listop")


def test_an_unknown_name_that_is_nearly_a_known_one():
    with pytest.raises(ValueError, match=r"got 'listop'; did you mean 'listops'\?"):
        recipes.load_recipe("listop")


def test_recipe_is_checked_as_a_whole():
    with pytest.raises(ValueError, match="warmup"):
        TrainConfig(steps=10, warmup=10)
    with pytest.raises(ValueError, match="accumulate"):
        TrainConfig(batch_size=8, accumulate=3)
    assert Recipe("a", "b", "c").rows == ()


@pytest.mark.slow
def test_a_run_shorter_than_an_evaluation_still_has_a_best_model(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import tiny_training as t; from mgk.training import trainer;"
        "trainer.fit(t.run(sys.argv[2], steps=7, eval_every=5), t.TinyTask(), resume=False, accelerator='cpu')"
    )
    command = [sys.executable, "-c", code, str(SCRIPT.parent), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    steps = [line.split(",")[0] for line in (tmp_path / "metrics.csv").read_text().splitlines()[1:]]
    assert steps == ["5", "5", "7", "7"]
    assert (RunDirectory(tmp_path).best_model / "model.safetensors").exists()


def test_gradients_are_clipped_also_for_a_fused_optimizer():
    from mgk.models import Classifier, EncoderConfig
    from mgk.training.module import TrainingModule
    from mgk.training.objectives import Classification
    from tests.support.tiny_training import TinyTask

    model = Classifier(EncoderConfig(16, 4, 24, embed_dim=8))
    fit = TrainingModule(Classification(model, TrainConfig(clip=0.25), TinyTask(), {}), seed=0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    fit.configure_gradient_clipping(torch.optim.AdamW(model.parameters(), fused=True), 0.25)
    norms = torch.stack([parameter.grad.norm() for parameter in model.parameters()])
    assert norms.norm() == pytest.approx(0.25, rel=1e-4)


def test_the_setup_names_settings_and_data_and_not_the_seed(monkeypatch):
    task, given = tiny_training.TinyTask(), tiny_training.run("a")
    setup = given.setup(task)
    assert replace(given, seed=7).setup(task) == setup
    assert replace(given, directory=Path("b")).setup(task) == setup
    assert tiny_training.run("a", weight_decay=0.5).setup(task) != setup
    assert tiny_training.run("a", dropout=0.3).setup(task) != setup
    # A setting that came later changes no setup that was named before it.
    for std, same in ((0.02, True), (1.0, False)):
        recipe = replace(given.recipe, model={**given.recipe.model, "token_std": std})
        assert (replace(given, recipe=recipe).setup(task) == setup) == same
    monkeypatch.setattr(tiny_training.TinyTask, "checksum", lambda self, data_dir: "other data")
    assert given.setup(task) != setup


def fit_here(out: Path, resume: bool = False, **settings):
    given = tiny_training.run(str(out), **{"steps": 3, "eval_every": 3, "warmup": 1, **settings})
    return trainer.fit(given, tiny_training.TinyTask(), resume=resume, accelerator="cpu")


@pytest.mark.slow
def test_a_run_goes_on_only_with_its_own_settings_and_data(tmp_path, monkeypatch):
    fit_here(tmp_path)
    with pytest.raises(ValueError, match=r"other settings \(lr, dropout\)|other settings \(dropout, lr\)"):
        fit_here(tmp_path, resume=True, lr=0.5, dropout=0.0)
    with monkeypatch.context() as patched:
        patched.setattr(tiny_training.TinyTask, "checksum", lambda self, data_dir: "other data")
        with pytest.raises(ValueError, match=r"other settings \(data\)"):
            fit_here(tmp_path, resume=True)
    # One that was stopped while its model was being judged: nothing trains, and it is known where to judge.
    module, kept = fit_here(tmp_path, resume=True)
    assert (kept.steps, kept.device) == (0, module.trainer.strategy.root_device)
    (RunDirectory(tmp_path).checkpoint).write_bytes(b"half a file")
    with pytest.raises(ValueError, match="damaged"):
        fit_here(tmp_path, resume=True)


def test_the_directions_of_random_features_are_state_of_a_run(tmp_path, monkeypatch):
    """FAVOR draws them once: a run goes on, and its best model is loaded, with those that it was begun with."""
    given = tiny_training.run(str(tmp_path), steps=2, eval_every=2, warmup=1)
    recipe = replace(given.recipe, model={**given.recipe.model, "feature_map": "favor"})
    given = replace(given, recipe=recipe, row=ModelSpec("mlk", 2))

    def directions(model):
        return torch.stack([layer.attention.feature_map.directions for layer in model.layers])

    def go_on(resume):
        return trainer.fit(given, tiny_training.TinyTask(), resume=resume, accelerator="cpu")[0].model

    drawn = directions(go_on(False))
    assert drawn.std() > 0.5
    monkeypatch.setattr(FAVOR, "redraw", lambda self: self.directions.zero_())
    assert torch.equal(directions(go_on(True)), drawn)
    assert torch.equal(directions(load_model(RunDirectory(tmp_path).best_model)), drawn)


def test_a_run_tells_where_each_of_its_starts_was_before_it_trains(tmp_path, monkeypatch):
    """Also of one that never ends, and without forgetting the first start when it goes on."""
    monkeypatch.setenv("MGK_COMMIT", "abc1234")
    monkeypatch.setattr(sys, "argv", ["/bin/mgk", "train", "a recipe"])

    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointCallback, "on_train_batch_end", stop)
        with pytest.raises(SystemExit):
            fit_here(tmp_path)
    assert not (RunDirectory(tmp_path).checkpoint).exists()
    monkeypatch.setattr(trainer, "PACKAGES", ("pytorch-lightning", "no-such-package"))
    monkeypatch.setenv("MGK_COMMIT", "def5678")
    fit_here(tmp_path)
    first, second = json.loads((tmp_path / "environment.json").read_text())
    assert (first["commit"], second["commit"]) == ("abc1234", "def5678")
    assert first["command"] == "mgk train 'a recipe'"
    assert (first["torch"], first["device"], first["gpu"]) == (torch.__version__, "cpu", f"cpu {platform.machine()}")
    assert first["python"] == platform.python_version()
    assert {"triton", "pytorch-lightning", "mgk"} <= first.keys()
    assert second["no-such-package"] is None
    assert first["date"] <= second["date"]
    assert datetime.fromisoformat(first["date"]).tzinfo is not None
    (tmp_path / "environment.json").write_text("[")
    with pytest.raises(ValueError, match=r"environment.json is damaged: .*; remove it"):
        fit_here(tmp_path, resume=True)


def test_what_is_wrong_with_a_checkpoint_is_told_in_one_sentence(tmp_path):
    """Of torch's own words on what else could be tried nothing is kept."""
    torch.save({"state": Path}, RunDirectory(tmp_path).checkpoint)
    with pytest.raises(ValueError, match=r"is damaged \(\w+: Weights only load failed\): remove .* and train again$"):
        trainer._check_readable(RunDirectory(tmp_path).checkpoint)


def test_a_model_is_judged_where_it_trained(tmp_path):
    """Also by a training that is gone on with after its last step, which Lightning does not even start."""
    kept, device = CheckpointCallback(tmp_path, TrainConfig()), torch.device("meta")
    kept.setup(SimpleNamespace(strategy=SimpleNamespace(root_device=device)), None, "fit")
    assert kept.device == device


@pytest.mark.slow
def test_a_training_that_diverges_says_so(tmp_path):
    with pytest.raises(ValueError, match="not finite at step 3"):
        fit_here(tmp_path, lr=1e30)


def test_the_best_model_is_judged_not_the_last(tmp_path, monkeypatch):
    """The model in memory is what training ended with: it must take the weights of the best one."""
    monkeypatch.setattr(tiny_training.TinyText, "baselines", lambda self, data_dir: {}, raising=False)
    monkeypatch.setattr(tiny_training.TinyText, "dataset", "tiny", raising=False)
    task, config = tiny_training.TinyText(), tiny_training.MODELS["text"]
    recipe = Recipe("tiny", "", "tiny", model=config, training=TrainConfig(steps=4, warmup=1, eval_every=2, stride=6))
    described = trainer.Run(recipe, ModelSpec("smgk", 2), "paper", 0, tmp_path, tmp_path / "run")
    module, kept = trainer.fit(described, task, resume=False, accelerator="cpu")
    torch.manual_seed(1)
    save_model(LanguageModel(module.model.config), described.files.best_model)
    found = {
        row["metric"]: row["value"] for row in evaluate_run(described, task, module, kept) if row["split"] == "test"
    }
    judge = load_objective(described.files.best_model, recipe.training, task, tmp_path, torch.device("cpu"), "test")
    assert found["loss_stride_6"] == next(m.value for m in judge.evaluate("test", None) if m.metric == "loss_stride_6")


def test_a_network_compiled_for_training_also_judges(monkeypatch):
    """PyTorch's compiled modules answer a question for their truth with an error."""

    class Compiled:
        def __len__(self):
            raise TypeError("does not support len()")

    kind, network = OBJECTIVES["classification"], Compiled()
    monkeypatch.setattr(kind, "load_split", lambda self, split: split)
    judge = kind(None, recipes.load_recipe("listops").training, None, {"test": Split})
    judge.to_device(torch.device("cuda"), network)
    assert judge.network is network
