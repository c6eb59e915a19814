"""Training: resume, several processes, run directory and checks."""

import json
import os
import platform
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from mgk._core.io import replacing
from mgk.features import FAVOR
from mgk.models import Classifier, EncoderConfig, load_model
from mgk.models.run_directory import RunDirectory
from mgk.training import trainer
from mgk.training.callbacks import CheckpointCallback
from mgk.training.config import ModelSpec, TrainConfig
from mgk.training.module import TrainingModule
from mgk.training.objectives import Classification
from tests.support import tiny_training
from tests.support.launch_training import SCRIPT, needs_fsdp, torchrun, train


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "final" / "model.safetensors")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Train each task without interruption once, on first use; returns its directory."""
    directories = {}

    def train_once(task):
        if task not in directories:
            directories[task] = tmp_path_factory.mktemp(task)
            assert train(directories[task], task=task) == 0
        return directories[task]

    return train_once


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "kill_at", "signal_number"),
    [
        pytest.param("classes", 10, 9, id="middle"),
        pytest.param("classes", 12, 9, id="boundary"),
        pytest.param("classes", 15, 15, id="sigterm"),
        pytest.param("classes", 11, 15, id="sigterm-in-an-evaluated-step"),
        pytest.param("classes", 23, 15, id="sigterm-in-the-last-step"),
        pytest.param("text", 10, 9, id="language-model"),
    ],
)
def test_killed_run_resumes_bit_for_bit(tmp_path, uninterrupted, task, kill_at, signal_number):
    exit_code = train(tmp_path, f"--kill-at={kill_at}", f"--kill-with={signal_number}", task=task)
    assert exit_code == (-9 if signal_number == 9 else 143)
    assert not (tmp_path / "final").exists()
    assert train(tmp_path, "--resume", task=task) == 0
    expected, resumed = weights(uninterrupted(task)), weights(tmp_path)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    # metrics.csv is the same too, except for its last column, the time.
    columns = [
        [line.rsplit(",", 1)[0] for line in RunDirectory(out).metrics.read_text().splitlines()]
        for out in (uninterrupted(task), tmp_path)
    ]
    assert columns[0] == columns[1]


def largest_difference(one: Path, other: Path) -> float:
    a, b = weights(one), weights(other)
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Train in one process with the whole batch, without dropout: its random numbers depend on the rank."""
    out = tmp_path_factory.mktemp("one_process")
    train(out, "--dropout=0")
    return out


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=needs_fsdp)])
def test_two_processes_equal_one_with_the_whole_batch(tmp_path, one_process, strategy):
    launcher = torchrun("--standalone", "--nproc-per-node=2")
    train(tmp_path, "--dropout=0", f"--strategy={strategy}", launcher=launcher)
    assert largest_difference(one_process, tmp_path) < 1e-5
    # Only rank 0 writes the run directory.
    assert (RunDirectory(tmp_path).best_model / "model.safetensors").exists()
    assert len(RunDirectory(tmp_path).metrics.read_text().splitlines()) == 9
    assert len(json.loads(RunDirectory(tmp_path).environment.read_text())) == 1


@needs_fsdp
@pytest.mark.slow
def test_fsdp_resumes_after_a_signal_to_one_process(tmp_path, one_process):
    launcher, stop = torchrun("--standalone", "--nproc-per-node=2"), ("--kill-at=15", "--kill-with=15", "--kill-rank=1")
    assert train(tmp_path, "--dropout=0", "--strategy=fsdp", *stop, launcher=launcher) != 0
    assert torch.load(RunDirectory(tmp_path).checkpoint, weights_only=True)["global_step"] == 16
    assert not (tmp_path / "final").exists()
    # One process can resume from a checkpoint of FSDP.
    assert train(tmp_path, "--dropout=0", "--resume") == 0
    assert largest_difference(one_process, tmp_path) < 1e-5


@pytest.mark.slow
def test_two_nodes_equal_one_process(tmp_path, one_process):
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        port = unused.getsockname()[1]
    node = torchrun("--nnodes=2", "--nproc-per-node=1", "--master-addr=localhost", f"--master-port={port}")
    with ThreadPoolExecutor() as pool:
        nodes = [
            pool.submit(train, tmp_path, "--dropout=0", launcher=(*node, f"--node-rank={rank}")) for rank in (0, 1)
        ]
    assert [node.result() for node in nodes] == [0, 0]
    assert largest_difference(one_process, tmp_path) < 1e-5


@pytest.mark.slow
def test_last_step_is_evaluated_between_two_evaluations(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import tiny_training as t; from mgk.training import trainer;"
        "trainer.fit(t.run(sys.argv[2], steps=7, eval_every=5), t.TinyTask(), resume=False, accelerator='cpu')"
    )
    command = [sys.executable, "-c", code, str(SCRIPT.parent), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    steps = [line.split(",")[0] for line in RunDirectory(tmp_path).metrics.read_text().splitlines()[1:]]
    assert steps == ["5", "5", "7", "7"]
    assert (RunDirectory(tmp_path).best_model / "model.safetensors").exists()


def test_gradients_are_clipped_for_a_fused_optimizer():
    model = Classifier(EncoderConfig(16, 4, 24, embed_dim=8))
    module = TrainingModule(Classification(model, TrainConfig(clip=0.25), tiny_training.TinyTask(), {}), seed=0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    module.configure_gradient_clipping(torch.optim.AdamW(model.parameters(), fused=True), 0.25)
    norms = torch.stack([parameter.grad.norm() for parameter in model.parameters()])
    assert norms.norm() == pytest.approx(0.25, rel=1e-4)


def test_setup_hash_depends_on_settings_and_data_but_not_on_the_seed(monkeypatch):
    task, run = tiny_training.TinyTask(), tiny_training.run("a")
    setup = run.setup(task)
    assert replace(run, seed=7).setup(task) == setup
    assert replace(run, directory=Path("b")).setup(task) == setup
    assert tiny_training.run("a", weight_decay=0.5).setup(task) != setup
    assert tiny_training.run("a", dropout=0.3).setup(task) != setup
    # The default of a setting that was added later does not change the hash of earlier runs.
    for std, same in ((0.02, True), (1.0, False)):
        recipe = replace(run.recipe, model={**run.recipe.model, "token_std": std})
        assert (replace(run, recipe=recipe).setup(task) == setup) == same
    monkeypatch.setattr(tiny_training.TinyTask, "checksum", lambda self, data_dir: "other data")
    assert run.setup(task) != setup


def fit_tiny(out: Path, resume: bool = False, **settings):
    run = tiny_training.run(str(out), **{"steps": 3, "eval_every": 3, "warmup": 1, **settings})
    return trainer.fit(run, tiny_training.TinyTask(), resume=resume, accelerator="cpu")


def test_settings_that_only_one_run_has_differ():
    run = {"data": "abc", "model": {"dropout": 0.1}, "training": {"steps": 3}}
    moved = {**run, "data_dir": "elsewhere"}
    older = {**run, "training": {"steps": 3, "beta2": 0.999}}
    trainer.check_same_settings(Path("run"), moved, run)
    trainer.check_same_settings(Path("run"), run, older)
    newer = {**run, "model": {"dropout": 0.1, "gate": True}, "backend": "fast"}
    with pytest.raises(ValueError, match=r"different settings \(backend, gate\)"):
        trainer.check_same_settings(Path("run"), newer, run)


@pytest.mark.slow
def test_resume_needs_the_same_settings_and_data(tmp_path, monkeypatch):
    fit_tiny(tmp_path)
    with pytest.raises(ValueError, match=r"different settings \(lr, dropout\)|different settings \(dropout, lr\)"):
        fit_tiny(tmp_path, resume=True, lr=0.5, dropout=0.0)
    with monkeypatch.context() as patched:
        patched.setattr(tiny_training.TinyTask, "checksum", lambda self, data_dir: "other data")
        with pytest.raises(ValueError, match=r"different settings \(data\)"):
            fit_tiny(tmp_path, resume=True)
    # A run that stopped during its final evaluation has no steps left, but a device for the evaluation.
    module, callback = fit_tiny(tmp_path, resume=True)
    assert (callback.steps, callback.device) == (0, module.trainer.strategy.root_device)
    RunDirectory(tmp_path).checkpoint.write_bytes(b"half a file")
    with pytest.raises(ValueError, match="damaged"):
        fit_tiny(tmp_path, resume=True)


def test_random_feature_directions_are_saved_with_a_run(tmp_path, monkeypatch):
    """FAVOR draws its directions once; a resumed run and the best model keep them."""
    run = tiny_training.run(str(tmp_path), steps=2, eval_every=2, warmup=1)
    recipe = replace(run.recipe, model={**run.recipe.model, "feature_map": "favor"})
    run = replace(run, recipe=recipe, row=ModelSpec("mlk", 2))

    def directions(model):
        return torch.stack([layer.attention.feature_map.directions for layer in model.layers])

    def fit(resume):
        return trainer.fit(run, tiny_training.TinyTask(), resume=resume, accelerator="cpu")[0].model

    drawn = directions(fit(False))
    assert drawn.std() > 0.5
    monkeypatch.setattr(FAVOR, "redraw", lambda self: self.directions.zero_())
    assert torch.equal(directions(fit(True)), drawn)
    assert torch.equal(directions(load_model(RunDirectory(tmp_path).best_model)), drawn)


def test_environment_lists_every_start_of_a_run(tmp_path, monkeypatch):
    """A start is written before training, so that interrupted ones are listed too."""
    monkeypatch.setenv("MGK_COMMIT", "abc1234")
    monkeypatch.setattr(sys, "argv", ["/bin/mgk", "train", "a recipe"])

    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointCallback, "on_train_batch_end", stop)
        with pytest.raises(SystemExit):
            fit_tiny(tmp_path)
    assert not RunDirectory(tmp_path).checkpoint.exists()
    monkeypatch.setattr(trainer, "PACKAGES", ("pytorch-lightning", "no-such-package"))
    monkeypatch.setenv("MGK_COMMIT", "def5678")
    fit_tiny(tmp_path)
    first, second = json.loads(RunDirectory(tmp_path).environment.read_text())
    assert (first["commit"], second["commit"]) == ("abc1234", "def5678")
    assert first["command"] == "mgk train 'a recipe'"
    assert (first["torch"], first["device"], first["gpu"]) == (torch.__version__, "cpu", f"cpu {platform.machine()}")
    assert first["python"] == platform.python_version()
    assert {"triton", "pytorch-lightning", "mgk"} <= first.keys()
    assert second["no-such-package"] is None
    assert first["date"] <= second["date"]
    assert datetime.fromisoformat(first["date"]).tzinfo is not None
    RunDirectory(tmp_path).environment.write_text("[")
    with pytest.raises(ValueError, match=r"environment.json is damaged: .*; remove it"):
        fit_tiny(tmp_path, resume=True)


@pytest.mark.parametrize("content", ["", "{", "[]", "3"])
def test_damaged_description_is_named_on_resume(tmp_path, content):
    files = RunDirectory(tmp_path)
    torch.save({}, files.checkpoint)
    files.description.write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"{files.description} is damaged: ")):
        fit_tiny(tmp_path, resume=True)
    assert files.description.read_text() == content


def test_run_leaves_no_temporary_files_of_a_killed_start(tmp_path, monkeypatch):
    """A killed start leaves them in the run directory only: nothing is written to $TMPDIR."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    files = RunDirectory(tmp_path)
    files.best_model.mkdir()
    files.unfinished_checkpoint.touch()
    for path in (files.metrics, files.best_model / "model.safetensors"):
        with replacing(path) as temporary:
            temporary.touch()
            temporary.with_name(temporary.name.replace(f"-{os.getpid()}.", f"-{ended.pid}.")).touch()
    monkeypatch.setattr("tempfile.mkstemp", None)
    files.metrics.unlink()
    fit_tiny(tmp_path)
    assert files.checkpoint.exists()
    assert not list(tmp_path.rglob("*.tmp"))


def test_callback_has_the_device_before_training_starts(tmp_path):
    """A run that resumes after its last step calls no other hook."""
    callback, device = CheckpointCallback(tmp_path, TrainConfig()), torch.device("meta")
    callback.setup(SimpleNamespace(strategy=SimpleNamespace(root_device=device)), None, "fit")
    assert callback.device == device


@pytest.mark.slow
def test_diverged_training_raises(tmp_path):
    with pytest.raises(ValueError, match="not finite at step 3"):
        fit_tiny(tmp_path, lr=1e30)
