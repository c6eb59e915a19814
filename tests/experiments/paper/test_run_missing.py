"""Test that missing experiments run once: training runs, then analyses, then times."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from experiments import commands
from experiments.paper import __main__, plan, run_missing
from mgk import tasks
from mgk.training import results
from mgk.training.config import ModelSpec
from mgk.training.job_queue import JobQueue
from mgk.training.sweep import SOLO_METRICS
from tests.experiments.paper.test_evidence_page import record

BASELINE, MIXTURE = ModelSpec("softmax", 8), ModelSpec("smgk", 4)


def finish(directory):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "result.json").touch()


@pytest.fixture
def harness(tmp_path, monkeypatch):
    """Plan two models of ListOps and their analysis with fake runs and commands; rows in `broken` fail."""
    monkeypatch.chdir(tmp_path)
    two = {BASELINE: 2, MIXTURE: 1}
    monkeypatch.setattr(plan, "EXPERIMENTS", (plan.Experiment(1, "two", "listops", two),))
    monkeypatch.setattr(plan, "ANALYSES", (plan.HeadAnalysis("listops", "", (BASELINE, MIXTURE), "test"),))
    monkeypatch.setattr(type(tasks.TASKS["listops"]), "prepare", lambda *_: None)
    calls = SimpleNamespace(trained=[], commands=[], broken=set(), results=tmp_path / "results", runs=tmp_path / "runs")
    calls.results.mkdir()

    def run_jobs(jobs, max_running, minutes):
        calls.max_running, calls.minutes = max_running, minutes
        queue = JobQueue(list(jobs) if minutes is not None and minutes < 1e-3 else [])
        for job in () if queue.unfinished else jobs:
            calls.trained.append((str(job.row), job.seed))
            if str(job.row) in calls.broken:
                queue.failed.append(job)
                continue
            record(calls.results, "listops", str(job.row), job.seed, 0.36, plateau_step=500)
            finish(job.directory)
        return queue

    def run_command(arguments):
        command = arguments[3:]
        calls.commands.append(command)
        if "--alone" in command:
            path = calls.results / "listops.csv"
            for row in command[command.index("--rows") + 1].split(","):
                line = next(line for line in results.read([path]) if line["variant"] in row)
                results.append(path, [{**line, "metric": metric, "value": 1} for metric in SOLO_METRICS])
        elif command[0] == "analyze":
            (calls.results / "listops-analysis").mkdir()
            (calls.results / "listops-analysis" / "ranks.csv").touch()
        return 0

    monkeypatch.setattr("mgk.training.cluster.run_jobs", run_jobs)
    monkeypatch.setattr(commands, "run_command", run_command)
    monkeypatch.setattr(run_missing.Run, "setup", lambda run, task: "made-up")
    return calls


def run(harness, jobs=None, minutes=None):
    return run_missing.run(harness.results, harness.runs, Path("data"), jobs, minutes, lambda *_: None)


def test_training_comes_first_then_analyses_then_times(harness):
    record(harness.results, "listops", "softmax:8", 0, 0.36, plateau_step=500)
    assert run(harness, 3) == []
    assert harness.trained == [("softmax:8", 1), ("smgk:4", 0)]
    assert harness.max_running == 3
    analysis, timing = harness.commands
    assert timing[:5] == ["compare", "listops", "--rows", "softmax:8,smgk:4", "--alone"]
    assert timing[-4:] == ["--data-dir", "data", "--jobs", "3"]
    # Only seed 1 of softmax:8 was trained here.
    names = ("softmax-8-paper-s1", "smgk-4-paper-s0")
    assert analysis[:3] == ["analyze", *(str(harness.runs / "listops" / name) for name in names)]
    harness.trained.clear()
    harness.commands.clear()
    assert run(harness) == []
    assert harness.trained == harness.commands == []


def test_new_seed_of_a_timed_model_redraws_the_table(harness, monkeypatch):
    run(harness)
    harness.commands.clear()
    three = {BASELINE: 3, MIXTURE: 1}
    monkeypatch.setattr(plan, "EXPERIMENTS", (plan.Experiment(1, "three", "listops", three),))
    run(harness)
    assert harness.trained[-1] == ("softmax:8", 2)
    [table] = harness.commands
    assert table[:5] == ["compare", "listops", "--rows", "softmax:8,smgk:4", "--redraw"]


def test_analysed_models_without_weights_are_trained_with_another_seed(harness):
    for seed in (0, 1, 2):
        record(harness.results, "listops", "softmax:8", seed, 0.36, plateau_step=500)
    record(harness.results, "listops", "smgk:4", 0, 0.36, plateau_step=500)
    finish(harness.runs / "listops" / "smgk-4-paper-s0")
    # An interrupted run has a best model and no result.json: it resumes.
    (harness.runs / "listops" / "softmax-8-paper-s3" / "best").mkdir(parents=True)
    run(harness)
    assert harness.trained == [("softmax:8", 3)]
    assert [Path(path).name for path in harness.commands[0][1:3]] == ["softmax-8-paper-s3", "smgk-4-paper-s0"]
    harness.trained.clear()
    run(harness)
    assert harness.trained == []


def test_large_models_are_trained_first(harness, monkeypatch):
    both = {BASELINE: 1, MIXTURE: 1}
    plans = (plan.Experiment(1, "small", "listops", both), plan.Experiment(2, "large", "listops-4e-4", both))
    monkeypatch.setattr(plan, "EXPERIMENTS", plans)
    monkeypatch.setattr(run_missing.Run, "model_config", lambda run, task: run.recipe.name)
    monkeypatch.setattr(run_missing, "count_parameters", {"listops": 5, "listops-4e-4": 9}.get)
    seeds = run_missing.seeds_to_train([], harness.results, harness.runs)
    jobs = run_missing.train_jobs(seeds, harness.results, harness.runs, Path("data"))
    assert [(job.recipe, str(job.row)) for job in jobs] == [
        (recipe, row) for recipe in ("listops-4e-4", "listops") for row in ("softmax:8", "smgk:4")
    ]


def test_failures_are_reported_after_the_page_is_written(harness, monkeypatch):
    harness.broken.add("smgk:4")
    generated = SimpleNamespace(texts={"rules": "generated"}, pictures=[], excluded=[])
    monkeypatch.setattr("experiments.paper.evidence_page.gather", lambda folder: generated)
    result = CliRunner().invoke(__main__.app, ["--run", "--page", "page.md"])
    assert "1 failed: listops smgk:4 seed 0 (see runs/listops/smgk-4-paper-s0/log.txt)" in str(result.exception)
    assert "generated" in (harness.results.parent / "page.md").read_text()
    assert [command[3] for command in harness.commands] == ["softmax:8"]
    assert "needs trained models of softmax:8, smgk:4" in result.stderr


def test_missing_data_is_reported(harness, monkeypatch):
    def prepare(self, folder, *_):
        raise ValueError(f"{folder} has no ListOps")

    monkeypatch.setattr(type(tasks.TASKS["listops"]), "prepare", prepare)
    record(harness.results, "listops", "softmax:8", 0, 0.36, plateau_step=500)
    assert run(harness) == ["listops: data has no ListOps"]
    assert harness.commands == harness.trained == []


def test_nothing_is_added_to_results_of_other_data(harness):
    record(harness.results, "listops", "softmax:8", 0, 0.36, plateau_step=500, setup="of other data")
    [reason] = run(harness)
    assert (
        reason == "listops: the results of softmax:8 were computed with data or settings other than data and the recipe"
    )
    assert harness.commands == harness.trained == []


def test_interrupt_terminates_the_running_command(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    script = f"""
import pathlib, signal, sys, time
def leave(*_):
    pathlib.Path({str(gone)!r}).touch()
    sys.exit()
signal.signal(signal.SIGTERM, leave)
pathlib.Path({str(tmp_path / "there")!r}).touch()
time.sleep(60)
"""

    def wait(process):
        while not (tmp_path / "there").exists():
            time.sleep(0.01)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(commands.subprocess.Popen, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        commands.run_command([sys.executable, "-c", script])
    assert gone.exists()


def test_time_limit_stops_the_run(harness, capsys):
    run(harness, minutes=1e-9)
    assert harness.commands == harness.trained == []
    assert "Stopped after" in capsys.readouterr().err
    run(harness, minutes=5)
    assert harness.commands[-1][-2:] == ["--minutes", "5.00"]
