"""The runner of the study of cost and quality: order, timings, stages, missing data and interrupted commands."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.cost_quality import run, timing
from experiments.cost_quality.__main__ import app as study_app
from experiments.cost_quality.plan import PRESET, Arm, Plan, Stage
from mgk import tasks
from mgk.models.run_directory import RunDirectory
from mgk.training import results
from mgk.training.config import ModelSpec, load_recipe
from mgk.training.equal_time import STEPS
from mgk.training.job_queue import JobQueue
from mgk.training.sweep import SOLO_TRAINING_METRICS, is_timed
from tests.experiments.cost_quality.test_study import result_row

ROOT = Path(__file__).parents[3]


def test_arm_without_step_times_ends_the_run(tmp_path, monkeypatch):
    """An arm whose step times could not be measured is reported, and the command ends."""
    monkeypatch.setattr(type(tasks.TASKS["listops"]), "prepare", lambda *_: None)
    queues = []

    def execute_jobs(jobs, *_):
        queues.append(JobQueue([]))
        assert len(queues) < 10
        return queues[-1]

    monkeypatch.setattr(run, "execute_jobs", execute_jobs)
    monkeypatch.setattr(run, "setup_of", lambda *_: "made-up")
    monkeypatch.setattr(run.commands, "run_module", lambda *_: 0)
    plan = Plan((Stage("one", {Arm.parse("listops", "softmax:8@time=smgk:4"): 1}),), (), "test")
    failed = run.run(plan, tmp_path, tmp_path / "runs", tmp_path, None, None, lambda *_: None)
    assert failed == ["softmax:8@time=smgk:4 of listops (the step time of smgk:4 is missing)"]


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """Replace preparation, timing and training; return a function that runs a plan, and the order of the events."""
    events = []
    monkeypatch.setattr(type(tasks.TASKS["listops"]), "prepare", lambda *_: None)
    monkeypatch.setattr(run, "setup_of", lambda *_: "made-up")

    def run_module(module, arguments, cluster):
        assert (module, arguments[0]) == (run.TIMING, "listops")
        for number, text in enumerate(arguments[2].split(",")):
            events.append(f"time {text}")
            for metric in SOLO_TRAINING_METRICS:
                model, value = ModelSpec.parse(text), 4 + number
                row = result_row(load_recipe("listops"), model, 0, metric, value, split="train", setup="made-up")
                results.append(tmp_path / "listops.csv", [row])
        return 0

    def execute_jobs(jobs, *_):
        events.extend(f"{job.row} {job.seed}" + " at equal time" * ("equal-time" in str(job.directory)) for job in jobs)
        return JobQueue(jobs if runner.is_interrupted else [])

    def runner(planned, minutes=None, **options):
        plan = Plan(tuple(planned), (), "test")
        failed = run.run(plan, tmp_path, tmp_path / "runs", tmp_path, None, minutes, lambda *_: None, **options)
        return failed, events

    runner.is_interrupted = False
    monkeypatch.setattr(run.commands, "run_module", run_module)
    monkeypatch.setattr(run, "execute_jobs", execute_jobs)
    return runner


def listops_stage(name, **seeds):
    return Stage(name, {Arm.parse("listops", text): count for text, count in seeds.items()})


def test_stages_are_timed_first_and_run_seed_by_seed(runner):
    first = listops_stage("first", **{"softmax:8": 2, "smgk:4": 2, "softmax:8@time=smgk:4": 2})
    second = listops_stage("second", **{"mgk:4": 1, "softmax:8": 1})
    assert runner([first, second]) == (
        [],
        [
            "time softmax:8", "time smgk:4",
            "softmax:8 0", "smgk:4 0", "softmax:8@time=smgk:4 0 at equal time",
            "softmax:8 1", "smgk:4 1", "softmax:8@time=smgk:4 1 at equal time",
            "time mgk:4", "mgk:4 0", "softmax:8 0",
        ],
    )  # fmt: skip


def test_more_models_than_runs_are_timed_at_a_time(runner, tmp_path, monkeypatch):
    """Models to time mostly compile: --jobs 2 limits the training runs only."""
    commands = []
    monkeypatch.setattr(run, "resolve_max_running", lambda option: option or 4)
    monkeypatch.setattr(run.commands, "run_module", lambda module, arguments, _: commands.append(arguments) or 0)
    plan = Plan((listops_stage("first", **{"softmax:8": 1}),), (), "test")
    for jobs in (2, 6):
        run.run(plan, tmp_path, tmp_path / "runs", tmp_path, jobs, None, lambda *_: None)
    assert [arguments[arguments.index("--jobs") + 1] for arguments in commands] == ["4", "6"]


def test_arms_are_timed_although_the_time_limit_interrupts_their_training(runner):
    runner.is_interrupted = True
    stages = [listops_stage("first", **{"softmax:8": 1}), listops_stage("second", **{"mgk:4": 1})]
    assert runner(stages, minutes=5) == ([], ["time softmax:8", "softmax:8 0"])


def test_step_times_of_other_settings_give_no_number_of_steps(runner, tmp_path):
    stage = listops_stage("first", **{"softmax:8": 0, "smgk:4": 0, "softmax:8@time=smgk:4": 1})
    recipe = load_recipe("listops")
    for name, value in (("softmax:8", 1), ("smgk:4", 3)):
        row = result_row(recipe, ModelSpec.parse(name), 0, "step_ms_alone", value, split="train", setup="other")
        results.append(tmp_path / "listops.csv", [{**row, "date": "2026-02-01"}])
    runner([stage])
    recorded = [row["value"] for row in results.read([tmp_path / "listops.csv"]) if row["metric"] == STEPS]
    assert recorded == [str(round(recipe.training.steps * 5 / 4))]


def test_selected_stages_run_in_the_order_of_the_plan(runner):
    stages = [listops_stage(name, **{f"{name}:4": 1}) for name in ("softmax", "smgk", "mgk")]
    assert runner(stages, stages=["mgk", "softmax"])[1] == ["time softmax:4", "softmax:4 0", "time mgk:4", "mgk:4 0"]
    with pytest.raises(ValueError, match="--stage must be one of 'softmax', 'smgk', 'mgk', got 'sgmk'"):
        runner(stages, stages=["sgmk"])
    assert "--stage has no effect without --run" in str(CliRunner().invoke(study_app, ["--stage", "rivals"]).exception)


def test_arms_without_data_are_skipped_with_one_line(runner, tmp_path, capsys):
    image = Stage("image", {Arm.parse("image", "softmax:8"): 1})
    again = Stage("again", {Arm.parse("image", "smgk:8"): 1})
    expected = ["time softmax:4", "softmax:4 0"]
    assert runner([image, again, listops_stage("text", **{"softmax:4": 1})]) == ([], expected)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("The arms of the task image are skipped: ")
    # Without any data the command fails.
    [failure] = runner([image])[0]
    assert failure.startswith("the data of image are missing: ")


def test_command_without_finished_runs_says_how_to_continue(tmp_path, monkeypatch):
    failures = []
    monkeypatch.setattr(run, "run", lambda *_: failures)
    command = ["--run", "--results", str(tmp_path), "--page", str(tmp_path / "page.md"), "--runs", str(tmp_path)]
    result = CliRunner().invoke(study_app, command)
    assert (result.exit_code, (tmp_path / "page.md").exists()) == (0, False)
    assert "No run is finished yet" in result.output
    assert "--run" not in result.output
    failures.append("softmax:8")
    assert str(CliRunner().invoke(study_app, command).exception) == "1 failed: softmax:8"


def test_rule_adds_seeds_until_it_needs_none(runner, monkeypatch):
    fixed, arm = listops_stage("fixed", **{"softmax:4": 1}), Arm.parse("listops", "softmax:4")
    more = Stage("more", {arm: 8}, until_half_width=0.5)
    rules = iter([{arm: 2}, {arm: 3}, {}])
    monkeypatch.setattr(run, "next_seeds", lambda *_: next(rules))
    expected = [
        "time softmax:4",
        "softmax:4 0",
        "softmax:4 0",
        "softmax:4 1",
        "softmax:4 0",
        "softmax:4 1",
        "softmax:4 2",
    ]
    assert runner([fixed, more]) == ([], expected)
    # A pass without new results is the last one.
    monkeypatch.setattr(run, "next_seeds", lambda *_: {arm: 2})
    assert runner([more])[1] == [*expected, "softmax:4 0", "softmax:4 1"]


def test_data_of_finished_arms_are_not_prepared(runner, tmp_path, monkeypatch):
    prepared, recipe = [], load_recipe("listops")
    monkeypatch.setattr(type(tasks.TASKS["listops"]), "prepare", lambda *_: prepared.append(1))
    results.append(tmp_path / "listops.csv", [result_row(recipe, ModelSpec("softmax", 4), 0, "accuracy", 0.5, "test")])
    assert runner([listops_stage("text", **{"softmax:4": 1})]) == ([], [])
    assert prepared == []
    # Prepared data are verified: the runs may be of another version.
    (tmp_path / ".mgk" / "listops" / "0123").mkdir(parents=True)
    assert runner([listops_stage("text", **{"softmax:4": 1})])[1] == ["time softmax:4", "softmax:4 0"]
    assert prepared == [1]


PLAN = """
judged_split: test
stages:
  - name: changed settings
    recipe: tiny.yaml
    sets: [[lr=1e-2]]
    arms: {"softmax:1": 1}
  - name: equal time
    recipe: tiny.yaml
    arms: {"softmax:1": 1, "smgk:1": 1, "softmax:1@time=smgk:1": 1}
questions:
  - {title: "equal time", recipe: tiny.yaml, first: "smgk:1", second: "softmax:1@time=smgk:1"}
"""
TIME_MATCHED = "runs/equal-time-smgk-1/tiny/softmax-1-paper-s0"
RECIPE = """
extends: bytes
title: tiny
model: {num_layers: 1, embed_dim: 8}
training: {steps: 60, warmup: 1, batch_size: 2, eval_every: 30, eval_batch_size: 8, stride: 256}
"""


def kill_in_time_matched_run(command, folder, environment):
    """Start the command and kill it in the run with a training time; return its number of steps.

    Returns None if the run had ended before, or if equal step times give it the steps of the other models.
    """
    process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not RunDirectory(folder / TIME_MATCHED).metrics.exists():
        time.sleep(0.05)
    process.kill()
    assert process.communicate()[1].count("FAILED") == 0
    rows = results.read([folder / "out/tiny.csv"])
    [steps] = [row["value"] for row in rows if row["metric"] == STEPS]
    return None if any(row["steps"] == steps and row["split"] == "test" for row in rows) else steps


@pytest.mark.slow
def test_command_runs_the_plan_and_continues_a_killed_run(tmp_path):
    """Kill the command in the run that waits for the step times of the others, then start it twice."""
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        (folder / "plan.yaml").write_text(PLAN)
        (folder / "tiny.yaml").write_text(RECIPE)
        (folder / "text.txt").write_text("the cat sat on the mat and the dog sat on the log ; " * 200)
        command = [sys.executable, "-m", "experiments.cost_quality", "--plan", "plan.yaml", "--run", "--jobs", "2"]
        command += ["--data-dir", str(folder), "--results", "out", "--page", "page.md", "--runs", "runs"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        steps = kill_in_time_matched_run(command, folder, environment)
        if steps is not None:
            break
    assert steps is not None, "the run was not interrupted in three attempts"
    for _ in range(2):  # the second start has nothing to do
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        rows = results.read([folder / "out/tiny.csv"])
        keys = [(row["variant"], row["lr"], row["steps"], row["split"], row["metric"]) for row in rows]
        assert sorted(set(keys)) == sorted(keys)
        tested = {key[:3] for key in keys if key[3] == "test"}
        assert len(tested) == 4
        assert ("softmax", "0.001", steps) in tested
    assert re.search(r"step [1-9]\d*/\d+  starting", RunDirectory(folder / TIME_MATCHED).log.read_text())
    text = (folder / "page.md").read_text()
    assert "`softmax:1` (lr=1e-2)" in text
    assert "| `softmax:1@time=smgk:1` | 1 |" in text


def test_command_times_models_that_were_not_trained(tmp_path):
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog sat on the log ; " * 200)
    tasks.get_task("bytes").prepare(tmp_path)
    recipe, out = str(tmp_path / "tiny.yaml"), tmp_path / "out"
    options = ["--rows", "softmax:1,smgk:1", "--results", str(out), "--data-dir", str(tmp_path)]
    result = CliRunner().invoke(timing.app, [recipe, *options])
    assert result.exception is None, result.output
    rows = results.read([out / "tiny.csv"])
    for name in ("softmax:1", "smgk:1"):
        arm = Arm.parse(recipe, name)
        assert is_timed(rows, load_recipe(recipe), arm.model, PRESET, run.setup_of(arm, load_recipe(recipe), tmp_path))
    late = CliRunner().invoke(timing.app, [recipe, *options, "--minutes", "0"])
    assert "time limit reached before timing softmax:1, smgk:1" in late.output
    assert results.read([out / "tiny.csv"]) == rows
