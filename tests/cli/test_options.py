"""Every option of compare, generate and eval takes effect; for those of train see test_train.py."""

import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mgk import tasks
from mgk.cli import commands
from mgk.models.vocabulary import ByteVocabulary
from mgk.training.config import ModelSpec
from mgk.training.job_queue import JobQueue


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Replace the work of the commands by a record of its arguments, in a directory with a run of each kind."""
    monkeypatch.chdir(tmp_path)
    calls = {"timed": []}

    def run_jobs(jobs, max_running, minutes):
        calls.update(jobs=jobs, command=jobs[0].command if jobs else [], max_running=max_running, minutes=minutes)
        return JobQueue([])

    def run_on_slurm(jobs, options, minutes):
        calls.update(jobs=jobs, cluster=options, minutes=minutes)
        return JobQueue([])

    def profile_many(runs, task, device):
        calls["timed"] += [str(run.row) for run in runs]
        return []

    def write_report(recipe, models, preset, out, setups, recipes):
        calls.update(recipe=recipe, models=models, preset=preset, out=out)

    def generate(model, prompt, *, max_tokens, sampling):
        calls.update(prompt=bytes(prompt).decode(), max_tokens=max_tokens, sampling=sampling)
        return []

    def load(run, device):
        calls["run"] = run
        return None, ByteVocabulary()

    def load_objective(directory, settings, task, data_dir, device, split):
        calls.update(directory=directory, settings=settings, data=data_dir, split=split)
        return SimpleNamespace(splits={})

    monkeypatch.setattr("mgk.training.cluster.run_jobs", run_jobs)
    monkeypatch.setattr("mgk.training.cluster.run_on_slurm", run_on_slurm)
    monkeypatch.setattr("mgk.training.cluster.check_cluster", lambda name, options: None)
    monkeypatch.setattr("mgk.training.profiling.profile_many", profile_many)
    monkeypatch.setattr("mgk.training.comparison.write_report", write_report)
    monkeypatch.setattr("mgk.models.generation.generate", generate)
    monkeypatch.setattr("mgk.training.runs.load_language_model", load)
    monkeypatch.setattr("mgk.training.evaluate.load_objective", load_objective)
    monkeypatch.setattr(type(tasks.TASKS["listops"]), "prepare", lambda *arguments: calls.update(data=arguments[1]))
    monkeypatch.setattr(type(tasks.TASKS["listops"]), "checksum", lambda *arguments: "some data")
    for name, task in (("classes", "listops"), ("text", "bytes")):
        Path(name, "best").mkdir(parents=True)
        Path(name, "run.json").write_text(json.dumps({"task": task, "training": {"stride": 4, "precision": "bf16"}}))
    return calls


def value_of(command, option):
    return command[command.index(option) + 1]


def directories(calls):
    return [job.directory for job in calls["jobs"]]


COMPARE = [
    ("recipe", [], lambda a: a["recipe"].name, "listops"),
    (
        "rows",
        ["--rows", "smgk:4,softmax:8/4"],
        lambda a: a["models"],
        [ModelSpec("smgk", 4), ModelSpec("softmax", 8, 4)],
    ),
    ("seeds", ["--rows", "smgk:4", "--seeds", "2"], lambda a: [job.seed for job in a["jobs"]], [0, 1]),
    ("keep_checkpoints", ["--keep-checkpoints", "3"], lambda a: value_of(a["command"], "--keep-checkpoints"), "3"),
    ("preset", ["--preset", "ref-lra"], lambda a: "--preset ref-lra" in " ".join(a["command"]), True),
    ("steps", ["--steps", "2000"], lambda a: "--set steps=2000" in " ".join(a["command"]), True),
    ("settings", ["--set", "lr=1e-2"], lambda a: "--set lr=1e-2" in " ".join(a["command"]), True),
    ("data_dir", ["--data-dir", "there"], lambda a: a["data"], Path("there")),
    ("data_dir", ["--data-dir", "there"], lambda a: "--data-dir there" in " ".join(a["command"]), True),
    ("jobs", ["--jobs", "3"], lambda a: a["max_running"], 3),
    ("jobs", [], lambda a: a["max_running"], 1),
    ("alone", ["--rows", "smgk:4"], lambda a: a["timed"], ["smgk:4"]),
    ("alone", ["--rows", "smgk:4", "--jobs", "2"], lambda a: a["timed"], ["smgk:4"]),
    ("alone", ["--rows", "smgk:4", "--no-alone"], lambda a: a["timed"], []),
    ("alone", ["--rows", "smgk:4", "--jobs", "2", "--no-alone"], lambda a: a["timed"], []),
    ("minutes", ["--minutes", "2.5"], lambda a: a["minutes"], 2.5),
    ("minutes", [], lambda a: a["minutes"], None),
    ("redraw", ["--redraw"], lambda a: "jobs" in a, False),
    ("out", ["--out", "here"], lambda a: a["out"], Path("here")),
    ("out", ["--out", "here"], lambda a: value_of(a["command"], "--results"), "here/listops.csv"),
    ("logger", ["--logger", "csv,tensorboard"], lambda a: value_of(a["command"], "--logger"), "csv,tensorboard"),
    ("logger", [], lambda a: "--logger" in a["command"], False),
    ("cluster", ["--cluster", "slurm"], lambda a: (a["cluster"].time, a["timed"]), ("04:00:00", [])),
    ("cluster", [], lambda a: "cluster" in a, False),
    ("partition", ["--cluster", "slurm", "--partition", "big"], lambda a: a["cluster"].partition, "big"),
    ("gpus_per_node", ["--cluster", "slurm", "--gpus-per-node", "2"], lambda a: a["cluster"].gpus_per_node, 2),
    ("time_limit", ["--cluster", "slurm", "--time", "30"], lambda a: a["cluster"].time, "30"),
    ("max_parallel", ["--cluster", "slurm", "--max-parallel", "3"], lambda a: a["cluster"].max_parallel, 3),
    ("runs", ["--rows", "smgk:4", "--runs", "here"], directories, [Path("here/listops/smgk-4-paper-s0")]),
]  # fmt: skip
GENERATE = [
    ("run", [], lambda a: a["run"], Path("text")),
    ("prompt", [], lambda a: a["prompt"], "the cat"),
    ("max_tokens", ["--max-tokens", "7"], lambda a: a["max_tokens"], 7),
    ("temperature", ["--temperature", "0.5"], lambda a: a["sampling"].temperature, 0.5),
    ("top_k", ["--top-k", "3"], lambda a: a["sampling"].top_k, 3),
    ("top_p", ["--top-p", "0.25"], lambda a: a["sampling"].top_p, 0.25),
    ("seed", ["--seed", "9"], lambda a: a["sampling"].seed, 9),
]
EVAL = [
    ("run", [], lambda a: a["directory"], Path("text/best")),
    ("split", ["--split", "dev"], lambda a: a["split"], "dev"),
    ("split", [], lambda a: a["split"], None),
    ("data_dir", ["--data-dir", "there"], lambda a: a["data"], Path("there")),
    ("batch_size", ["--batch-size", "5"], lambda a: a["settings"].eval_batch_size, 5),
    ("stride", ["--stride", "9"], lambda a: a["settings"].stride, 9),
    ("stride", [], lambda a: a["settings"].stride, 4),
    ("precision", ["--precision", "fp32"], lambda a: a["settings"].precision, "fp32"),
    ("precision", [], lambda a: a["settings"].precision, "bf16"),
]
TABLES = {
    "compare": (["compare", "listops"], COMPARE, commands.compare.compare),
    "generate": (["generate", "text", "--prompt", "the cat"], GENERATE, commands.generate.generate),
    "eval": (["eval", "text"], EVAL, commands.evaluate.evaluate),
}
ROWS = [
    pytest.param([*command, *arguments], read, expected, id=" ".join([command[0], option, *arguments]))
    for command, rows, _ in TABLES.values()
    for option, arguments, read, expected in rows
]


@pytest.mark.parametrize(("arguments", "read", "expected"), ROWS)
def test_option_takes_effect(calls, monkeypatch, arguments, read, expected):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(commands.app, arguments)
    assert result.exception is None, result.output
    assert read(calls) == expected


@pytest.mark.parametrize("name", TABLES)
def test_every_option_is_tested(name):
    _, rows, command = TABLES[name]
    assert {option for option, *_ in rows} == set(inspect.signature(command).parameters)


def test_runs_that_finished_before_an_interruption_are_timed(calls, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("mgk.training.sweep.is_trained", lambda rows, recipe, model, *_: model.variant == "softmax")
    result = CliRunner().invoke(commands.app, ["compare", "listops", "--rows", "softmax:4,smgk:2"])
    assert result.exception is None, result.output
    assert directories(calls) == [Path("runs/listops/smgk-2-paper-s0")]
    assert calls["timed"] == ["softmax:4", "smgk:2"]
