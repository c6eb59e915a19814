"""Experiment trackers: CSV and TensorBoard files, mlflow's file store, wandb's arguments; resume and ranks."""

import csv
import importlib.util
import json
import struct
import sys
import types
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch
import yaml
from pytorch_lightning.loggers import Logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mgk.models.run_directory import RunDirectory
from mgk.training import trackers, trainer
from mgk.training.callbacks import CheckpointCallback
from tests.support import mlflow_stub, tiny_training


@pytest.fixture(autouse=True)
def _frequent_points(monkeypatch, tmp_path):
    monkeypatch.setattr("mgk.training.callbacks.LOG_EVERY", 4)
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


def fit(out, *loggers, resume=False, **settings):
    run = tiny_training.run(str(out), **settings)
    trainer.fit(run, tiny_training.TinyTask(), resume=resume, accelerator="cpu", loggers=loggers)
    return run


def interrupt_and_resume(out, monkeypatch, *loggers, after_interrupt=lambda: None):
    """Train with an error at step 11, and resume from the checkpoint of step 6."""
    on_train_batch_end = CheckpointCallback.on_train_batch_end

    def fail_at_step_11(self, lightning, *arguments):
        on_train_batch_end(self, lightning, *arguments)
        if lightning.global_step == 11:
            for logger in lightning.loggers:
                logger.save()
            raise RuntimeError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointCallback, "on_train_batch_end", fail_at_step_11)
        with pytest.raises(RuntimeError, match="interrupted"):
            fit(out, *loggers)
    after_interrupt()
    return fit(out, *loggers, resume=True)


def read_csv(out):
    with RunDirectory(out).csv.joinpath("metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_csv_of_a_resumed_run_equals_that_of_an_uninterrupted_one(tmp_path, monkeypatch):
    run = fit(tmp_path / "a", "csv")
    rows = read_csv(tmp_path / "a")
    assert [int(row["step"]) for row in rows if row["loss"]] == [4, 8, 12, 16, 20, 24]
    assert sum(bool(row["dev_loss"]) for row in rows) == 4
    interrupt_and_resume(tmp_path / "b", monkeypatch, "csv")
    assert read_csv(tmp_path / "b") == rows
    logged = yaml.safe_load((tmp_path / "a" / "csv" / "hparams.yaml").read_text())
    assert logged == json.loads(json.dumps(run.describe(tiny_training.TinyTask())))


def test_last_evaluation_outside_the_interval_is_logged(tmp_path):
    fit(tmp_path, "csv", steps=7)
    assert [row["step"] for row in read_csv(tmp_path) if row["dev_loss"]][-1] == "7"


def test_several_trackers_have_the_same_curve(tmp_path):
    fit(tmp_path, "csv", "tensorboard")
    curve = {int(row["step"]): float(row["loss"]) for row in read_csv(tmp_path) if row["loss"]}
    events = EventAccumulator(str(RunDirectory(tmp_path).tensorboard)).Reload()
    points = {event.step: event.value for event in events.Scalars("loss")}
    assert points == pytest.approx(curve)
    assert "hp_metric" not in events.Tags()["scalars"]


def test_settings_weights_and_files_do_not_depend_on_the_tracker(tmp_path):
    task = tiny_training.TinyTask()
    setups, weights = set(), []
    for name, loggers in {"none": (), "csv": ("csv",)}.items():
        run = fit(tmp_path / name, *loggers)
        setups.add(run.setup(task))
        weights.append(torch.load(run.files.checkpoint, weights_only=True)["state_dict"])
    assert len(setups) == 1
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    descriptions = [(tmp_path / name / "run.json").read_text() for name in ("none", "csv")]
    assert descriptions[0] == descriptions[1]
    assert not (tmp_path / "none" / "tensorboard").exists()
    assert not (tmp_path / "none" / "csv").exists()
    # A run resumes with another tracker.
    fit(tmp_path / "none", "csv", resume=True)


def test_mlflow_file_store_has_one_run_after_a_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # restored at the end
    if importlib.util.find_spec("mlflow") is None:
        mlflow_stub.install(monkeypatch)
    from mlflow.tracking import MlflowClient

    run = interrupt_and_resume(tmp_path / "run", monkeypatch, "mlflow")
    client = MlflowClient((tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("mgk")
    (entry,) = client.search_runs([experiment.experiment_id])
    assert entry.data.tags["mlflow.runName"] == "tiny/smgk-2-paper-s3"
    assert entry.data.params["training/lr"] == "0.001"
    assert entry.data.params["seed"] == "3"
    losses = client.get_metric_history(entry.info.run_id, "loss")
    # Steps after the checkpoint are logged again, with the same values.
    assert sorted({point.step for point in losses}) == [4, 8, 12, 16, 20, 24]
    assert len({(point.step, point.value) for point in losses}) == 6
    assert len(client.get_metric_history(entry.info.run_id, "dev_loss")) == 4

    run.files.trackers.write_text(json.dumps({"mlflow": {"uri": (tmp_path / "mlruns").as_uri(), "run": "0" * 32}}))
    with pytest.raises(ValueError, match=r"--logger mlflow: .* not found.*remove .*trackers\.json"):
        fit(tmp_path / "run", "mlflow", resume=True)


def test_wandb_continues_the_run_of_the_directory(tmp_path, monkeypatch):
    starts = []

    def init(**options):
        starts.append(options)
        return SimpleNamespace(config=SimpleNamespace(update=lambda *a, **k: None), log=lambda *a, **k: None)

    content = {
        "wandb": {"init": init, "run": None},
        "wandb.sdk": {},
        "wandb.sdk.lib": {"RunDisabled": int},
        "wandb.wandb_run": {"Run": int},
    }
    for name, names in content.items():
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("pytorch_lightning.loggers.wandb._WANDB_AVAILABLE", True)
    assert trackers.parse_loggers("wandb") == ("wandb",)
    interrupt_and_resume(tmp_path / "a", monkeypatch, "wandb")
    fit(tmp_path / "b", "wandb")
    first, second, other = starts
    assert first == second
    assert first["resume"] == "allow"
    assert first["project"] == "mgk"
    assert first["id"] != other["id"]


def read_records(path):
    """Yield the records of a file of wandb: a header of 7 bytes, then a LevelDB log in blocks of 32 KiB."""
    data, position, parts = path.read_bytes(), 7, []
    while position + 7 <= len(data):
        block_left = 32768 - position % 32768
        if block_left < 7:
            position += block_left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield b"".join(parts)
            parts = []


def read_offline_run(path):
    """Return id, seed and points (step, training loss) of a file of wandb."""
    from wandb.proto.wandb_internal_pb2 import Record

    records = [Record.FromString(data) for data in read_records(path)]
    [run] = [record.run for record in records if record.HasField("run")]
    settings = {item.key: item.value_json for record in records for item in record.config.update}
    settings |= {item.key: item.value_json for item in run.config.update}
    rows = [{item.key or item.nested_key[0]: item.value_json for item in record.history.item} for record in records]
    points = [(int(row["trainer/global_step"]), float(row["loss"])) for row in rows if "loss" in row]
    return run.run_id, json.loads(settings["seed"]), points


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="make test-trackers installs wandb")
def test_wandb_stores_offline_runs(tmp_path, monkeypatch):
    """Run wandb itself without a network connection; an interrupted run has two files of one id."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    fit(tmp_path / "csv", "csv")
    curve = {int(row["step"]): float(row["loss"]) for row in read_csv(tmp_path / "csv") if row["loss"]}
    # A run is resumed in another process, which has no active run.
    interrupt_and_resume(tmp_path / "run", monkeypatch, "wandb", after_interrupt=wandb.finish)
    wandb.finish()
    first, second = map(read_offline_run, sorted(tmp_path.glob("run/wandb/offline-run-*/run-*.wandb")))
    run_id = json.loads(RunDirectory(tmp_path / "run").trackers.read_text())["wandb"]
    assert first[:2] == second[:2] == (run_id, 3)
    assert [step for step, _ in first[2]] == [4, 8]
    assert [step for step, _ in second[2]] == [8, 12, 16, 20, 24]
    for step, loss in first[2] + second[2]:
        assert loss == pytest.approx(curve[step])


def test_registered_tracker_is_selected_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "TRACKERS", dict(trackers.TRACKERS))
    points = []

    class ListLogger(Logger):
        name, version = "list", "0"

        def log_metrics(self, metrics, step=None):
            points.append(step)

        def log_hyperparams(self, params):
            points.append(params["seed"])

    trackers.register_tracker("list", trackers.Tracker(lambda files, name: ListLogger(), "json"))
    assert trackers.parse_loggers("list, csv,list") == ("list", "csv")
    fit(tmp_path, "list")
    assert points[0] == 3
    assert 24 in points


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensorbord", "--logger must be one of 'tensorboard', 'csv', 'wandb', 'mlflow', 'none', got 'tensorbord'"),
        ("csv,none", "--logger none cannot be combined with other names"),
        ("", "--logger must be one of"),
        ("wandb", "--logger wandb needs the package wandb: pip install wandb"),
    ],
)
def test_wrong_name_or_missing_package_is_reported(text, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=message) as caught:
        trackers.parse_loggers(text)
    assert "\n" not in str(caught.value)


def test_damaged_ids_are_reported(tmp_path):
    files = RunDirectory(tmp_path)
    files.trackers.write_text("[1")
    with pytest.raises(ValueError, match=r"trackers\.json is damaged"):
        trackers.make_loggers(["wandb"], files, "run")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_other_ranks_start_no_run_in_the_tracker(name, tmp_path, monkeypatch):
    mlflow_stub.install(monkeypatch)
    monkeypatch.setattr("pytorch_lightning.loggers.wandb._WANDB_AVAILABLE", True)
    monkeypatch.setenv("RANK", "1")
    trackers.make_loggers([name], RunDirectory(tmp_path), "run")
    assert list(tmp_path.iterdir()) == []
