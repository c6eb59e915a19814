"""The studies on SLURM, whose commands are replaced by tests/support/fake_slurm.py."""

import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.cost_quality import __main__ as cost_quality
from experiments.cost_quality import run as cost_quality_run
from experiments.cost_quality.plan import Arm, Plan, Stage
from experiments.paper import __main__ as paper
from experiments.paper import plan as paper_plan
from experiments.paper import run_missing
from mgk import tasks
from mgk.training import cluster, results
from mgk.training.cluster import ClusterOptions
from mgk.training.config import ModelSpec, load_recipe
from mgk.training.job_queue import Job
from mgk.training.sweep import SOLO_METRICS
from tests.experiments.cost_quality.test_study import result_row
from tests.support.fake_slurm import FakeSlurm

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="SLURM's commands are scripts of bash")

MODELS = (ModelSpec("softmax", 8), ModelSpec("smgk", 4))
OPTIONS = ClusterOptions("big", 2, "01:00:00", max_parallel=1)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Replace training by jobs that append the row of a result; the first start of every job is killed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(cluster, "ABSENT_SECONDS", 0.1)
    monkeypatch.setattr(type(tasks.TASKS["listops"]), "prepare", lambda *_: None)
    # The training needs one GPU in these tests: torchrun takes seconds to start.
    monkeypatch.setattr(cluster, "job_script", lambda entry, options, make=cluster.job_script: make(entry, ONE_GPU))

    def train_job(recipe, model, seed, *, out, runs, **_):
        directory = runs / recipe.name / f"{model.variant}-{model.heads}-paper-s{seed}"
        row = result_row(recipe, model, seed, "accuracy", 0.5, split="test", setup="made-up")
        line = ",".join(row[column] for column in results.COLUMNS)
        file = shlex.quote(str(out.absolute() / f"{recipe.name}.csv"))
        code = f"if [ ! -e started ]; then touch started; kill -KILL $$; fi; echo '{line}' >> {file}; touch result.json"
        code = f"mkdir -p '{directory}'; cd '{directory}' && {code}"
        return Job(recipe.name, model, seed, directory, ["bash", "-c", code])

    for module in (run_missing, cost_quality_run):
        monkeypatch.setattr(module, "train_job", train_job)
        monkeypatch.setattr(module.Run, "setup", lambda run, task: "made-up")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "listops.csv").write_text(",".join(results.COLUMNS) + "\n")
    return FakeSlurm(tmp_path / "slurm", monkeypatch)


ONE_GPU = ClusterOptions(gpus_per_node=1)


def time_models(commands):
    """Return a function that runs a command by adding the times of isolated models to the results."""

    def run(command):
        commands.append(command)
        if "--redraw" not in command:
            for text in command[command.index("--rows") + 1].split(","):
                row = result_row(
                    load_recipe("listops"), ModelSpec.parse(text), 0, "", "", split="train", setup="made-up"
                )
                results.append(Path("results/listops.csv"), [{**row, "metric": m, "value": "4"} for m in SOLO_METRICS])
        return 0

    return run


def check_runs(slurm, submissions):
    """Check that each model has one result, although each job was killed once, and one job at a time may run."""
    assert len(slurm.scripts) == submissions
    rows = results.read([Path("results/listops.csv")])
    trained = [(row["variant"], row["heads"], row["seed"], row["steps"]) for row in rows if row["metric"] == "accuracy"]
    assert len(trained) == len(set(trained)) == submissions // 2
    assert all("--partition=big" in script and "--gpus-per-node=2" in script for script in slurm.scripts)


def test_missing_experiments_of_the_paper_run_on_slurm(slurm, monkeypatch):
    experiment = paper_plan.Experiment(1, "two", "listops", dict.fromkeys(MODELS, 1))
    monkeypatch.setattr(paper_plan, "EXPERIMENTS", (experiment,))
    monkeypatch.setattr(paper_plan, "ANALYSES", ())
    commands = []
    monkeypatch.setattr("experiments.commands.run_command", time_models(commands))
    arguments = [Path("results"), Path("runs"), Path("data"), None, None, lambda *_: None, OPTIONS]
    assert run_missing.run(*arguments) == []
    check_runs(slurm, submissions=4)
    # The models are timed on a node, with one GPU.
    [timing] = commands
    assert timing[:6] == [
        "srun",
        "--ntasks=1",
        "--partition=big",
        "--gpus-per-node=1",
        "--time=01:00:00",
        sys.executable,
    ]
    assert timing[8:13] == ["compare", "listops", "--rows", "softmax:8,smgk:4", "--alone"]
    # The same command submits nothing.
    assert run_missing.run(*arguments) == []
    check_runs(slurm, submissions=4)
    # Another seed: the table is drawn on this machine.
    more = paper_plan.Experiment(1, "more", "listops", {MODELS[0]: 2, MODELS[1]: 1})
    monkeypatch.setattr(paper_plan, "EXPERIMENTS", (more,))
    assert run_missing.run(*arguments) == []
    check_runs(slurm, submissions=6)
    assert commands[1][0] == sys.executable
    assert "--redraw" in commands[1]


def test_study_of_cost_and_quality_runs_on_slurm(slurm, monkeypatch):
    equal_time = Arm("listops", MODELS[0], time_of=MODELS[1])
    plan = Plan((Stage("all", {**{Arm("listops", model): 1 for model in MODELS}, equal_time: 1}),), (), "test")
    commands = []
    monkeypatch.setattr("experiments.commands.run_command", time_models(commands))
    arguments = [plan, Path("results"), Path("runs"), Path("data"), None, None, lambda *_: None, OPTIONS]
    with monkeypatch.context() as patch:
        # Both models take 4 ms: the arm of equal time would repeat the run of softmax:8.
        patch.setattr("experiments.cost_quality.plan.steps_of", matched_steps)
        assert cost_quality_run.run(*arguments) == []
        check_runs(slurm, submissions=6)
        assert [command[0] for command in commands] == ["srun"]
        assert cost_quality_run.run(*arguments) == []
    check_runs(slurm, submissions=6)


def matched_steps(rows, *_):
    """Return a number of steps that is not the recipe's, after the models have been timed."""
    is_timed = any(row["metric"] == "step_ms_alone" for row in rows)
    return load_recipe("listops").training.steps // 2 if is_timed else None


def test_jobs_of_several_recipes_share_the_slots(slurm, tmp_path):
    jobs = [Job(name, MODELS[0], 0, tmp_path / name, ["true"]) for name in ("a", "b")]
    cluster.run_on_slurm(jobs, ClusterOptions(max_parallel=1))
    names = {line for script in slurm.scripts for line in script.splitlines() if "--job-name" in line}
    assert len(names) == 1


@pytest.mark.parametrize("app", [paper.app, cost_quality.app], ids=["paper", "cost-quality"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "slurm"], "--cluster has no effect without --run"),
        (["--run", "--partition", "gpu"], "--partition has no effect without --cluster"),
        (["--run", "--cluster", "pbs"], "--cluster must be slurm, got 'pbs'"),
        (["--run", "--cluster", "slurm", "--time", "4h"], "--time must be minutes"),
    ],
)
def test_wrong_options(slurm, app, arguments, message):
    assert message in str(CliRunner().invoke(app, arguments).exception)
    assert slurm.scripts == []
