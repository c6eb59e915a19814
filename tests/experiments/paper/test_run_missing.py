"""What the evidence lacks is run: trainings, then analyses, then times, each once, and nothing that is there."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from experiments.paper import plan, run_missing
from mgk import tasks
from mgk.cli import commands
from mgk.training import results
from mgk.training.config import ModelSpec
from mgk.training.job_queue import JobQueue
from mgk.training.sweep import SOLO_METRICS
from tests.experiments.paper.test_page import record

BASELINE, MIXTURE = ModelSpec("softmax", 8), ModelSpec("smgk", 4)


def finish(directory):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "result.json").touch()


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Two models of ListOps and their analysis are planned; a training or command does what it says, except rows in
    `broken`."""
    monkeypatch.chdir(tmp_path)
    two = {BASELINE: 2, MIXTURE: 1}
    monkeypatch.setattr(plan, "EXPERIMENTS", (plan.Experiment(1, "two", "listops", two),))
    monkeypatch.setattr(plan, "ANALYSES", (plan.Looked("listops", "", (BASELINE, MIXTURE), "test"),))
    monkeypatch.setattr(type(tasks.TASKS["listops"]), "prepare", lambda *_: None)
    seen = SimpleNamespace(trained=[], commands=[], broken=set(), results=tmp_path / "results", runs=tmp_path / "runs")
    seen.results.mkdir()

    def run_jobs(jobs, at_once, minutes):
        seen.at_once, seen.minutes = at_once, minutes
        queue = JobQueue(list(jobs) if minutes is not None and minutes < 1e-3 else [])
        for job in () if queue.unfinished else jobs:
            seen.trained.append((str(job.row), job.seed))
            if str(job.row) in seen.broken:
                queue.failed.append(job)
                continue
            record(seen.results, "listops", str(job.row), job.seed, 0.36, left=500)
            finish(job.directory)
        return queue

    def status(arguments):
        given = arguments[3:]
        seen.commands.append(given)
        if "--alone" in given:
            path = seen.results / "listops.csv"
            for row in given[given.index("--rows") + 1].split(","):
                own = next(each for each in results.read([path]) if each["variant"] in row)
                results.append(path, [{**own, "metric": metric, "value": 1} for metric in SOLO_METRICS])
        elif given[0] == "analyze":
            (seen.results / "listops-analysis").mkdir()
            (seen.results / "listops-analysis" / "ranks.csv").touch()
        return 0

    monkeypatch.setattr(run_missing, "run_jobs", run_jobs)
    monkeypatch.setattr(run_missing, "_status", status)
    monkeypatch.setattr(run_missing.Run, "setup", lambda run, task: "made-up")
    return seen


def ran(asked, jobs=None, minutes=None):
    return run_missing.run(asked.results, asked.runs, Path("data"), jobs, minutes, lambda *_: None)


def test_trainings_come_first_then_analyses_then_times(asked):
    record(asked.results, "listops", "softmax:8", 0, 0.36, left=500)
    assert ran(asked, 3) == []
    assert asked.trained == [("softmax:8", 1), ("smgk:4", 0)]
    assert asked.at_once == 3
    looking, timing = asked.commands
    assert timing[:5] == ["compare", "listops", "--rows", "softmax:8,smgk:4", "--alone"]
    assert timing[-4:] == ["--data-dir", "data", "--jobs", "3"]
    # Of softmax:8 the seed that was trained here: the other's model is elsewhere.
    names = ("softmax-8-paper-s1", "smgk-4-paper-s0")
    assert looking[:3] == ["analyze", *(str(asked.runs / "listops" / name) for name in names)]
    for each in (asked.trained, asked.commands):
        each.clear()
    assert ran(asked) == []
    assert asked.trained == asked.commands == []


def test_a_new_seed_of_what_is_timed_already_gets_a_new_table(asked, monkeypatch):
    ran(asked)
    asked.commands.clear()
    three = {BASELINE: 3, MIXTURE: 1}
    monkeypatch.setattr(plan, "EXPERIMENTS", (plan.Experiment(1, "three", "listops", three),))
    ran(asked)
    assert asked.trained[-1] == ("softmax:8", 2)
    [table] = asked.commands
    assert table[:5] == ["compare", "listops", "--rows", "softmax:8,smgk:4", "--redraw"]


def test_models_that_are_to_be_looked_at_and_are_elsewhere_are_trained_with_a_further_seed(asked):
    for seed in (0, 1, 2):
        record(asked.results, "listops", "softmax:8", seed, 0.36, left=500)
    record(asked.results, "listops", "smgk:4", 0, 0.36, left=500)
    finish(asked.runs / "listops" / "smgk-4-paper-s0")
    # One that was interrupted has a best model and no end: it goes on.
    (asked.runs / "listops" / "softmax-8-paper-s3" / "best").mkdir(parents=True)
    ran(asked)
    assert asked.trained == [("softmax:8", 3)]
    assert [Path(each).name for each in asked.commands[0][1:3]] == ["softmax-8-paper-s3", "smgk-4-paper-s0"]
    asked.trained.clear()
    ran(asked)
    assert asked.trained == []


def test_large_models_are_trained_first(asked, monkeypatch):
    both = {BASELINE: 1, MIXTURE: 1}
    plans = (plan.Experiment(1, "small", "listops", both), plan.Experiment(2, "large", "listops-4e-4", both))
    monkeypatch.setattr(plan, "EXPERIMENTS", plans)
    monkeypatch.setattr(run_missing.Run, "model_config", lambda run, task: run.recipe.name)
    monkeypatch.setattr(run_missing, "count_parameters", {"listops": 5, "listops-4e-4": 9}.get)
    wanted = run_missing.seeds_to_train([], asked.results, asked.runs)
    jobs = run_missing.trainings(wanted, asked.results, asked.runs, Path("data"))
    assert [(job.recipe, str(job.row)) for job in jobs] == [
        (recipe, row) for recipe in ("listops-4e-4", "listops") for row in ("softmax:8", "smgk:4")
    ]


def test_what_fails_is_tried_once_and_told_when_the_page_is_made(asked, monkeypatch):
    asked.broken.add("smgk:4")
    made = SimpleNamespace(parts={"rules": "made"}, pictures=[], left_out=[])
    monkeypatch.setattr("experiments.paper.page.gather", lambda folder: made)
    result = CliRunner().invoke(commands.app, ["evidence", "--run", "--page", "page.md"])
    assert "1 failed: listops smgk:4 seed 0 (see runs/listops/smgk-4-paper-s0/log.txt)" in str(result.exception)
    assert "made" in (asked.results.parent / "page.md").read_text()
    assert [each[3] for each in asked.commands] == ["softmax:8"]
    assert "needs trained models of softmax:8, smgk:4" in result.stderr


def test_data_that_is_not_there_is_told(asked, monkeypatch):
    def prepare(self, folder, *_):
        raise ValueError(f"{folder} has no ListOps")

    monkeypatch.setattr(type(tasks.TASKS["listops"]), "prepare", prepare)
    record(asked.results, "listops", "softmax:8", 0, 0.36, left=500)
    assert ran(asked) == ["listops: data has no ListOps"]
    assert asked.commands == asked.trained == []


def test_to_results_of_other_data_nothing_is_added(asked):
    record(asked.results, "listops", "softmax:8", 0, 0.36, left=500, setup="of other data")
    [reason] = ran(asked)
    assert reason == "listops: results have softmax:8 of other data or settings than data and the recipe"
    assert asked.commands == asked.trained == []


def test_a_command_that_is_left_is_asked_to_leave_too(tmp_path, monkeypatch):
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

    monkeypatch.setattr(run_missing.subprocess.Popen, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        run_missing._status([sys.executable, "-c", script])
    assert gone.exists()


def test_time_that_is_over_leaves_the_rest(asked, capsys):
    ran(asked, minutes=1e-9)
    assert asked.commands == asked.trained == []
    assert "minutes are over" in capsys.readouterr().err
    ran(asked, minutes=5)
    assert asked.commands[-1][-2:] == ["--minutes", "5.00"]
