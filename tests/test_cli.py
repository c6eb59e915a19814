"""The command: every option reaches what uses it, and wrong input is one line and exit code 2."""

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mgk import commands, recipes, tasks
from mgk.commands.common import data_directory, with_steps
from mgk.recipes import Row


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What `train` asks for, without training."""
    seen = {}

    def fit(run, task, **options):
        seen.update(run=run, task=task, **options)
        return SimpleNamespace(global_rank=1), SimpleNamespace(stopped_by=None)

    monkeypatch.setattr("mgk.training.fit", fit)
    monkeypatch.setattr(type(tasks.TASKS["listops"]), "prepare", lambda *arguments: seen.update(data=arguments[1]))
    return seen


OPTIONS = [
    ("variant", ["--variant", "mgk-em"], lambda a: a["run"].row.variant, "mgk-em"),
    ("heads", ["--heads", "3"], lambda a: a["run"].row.heads, 3),
    ("kv_heads", ["--heads", "4", "--kv-heads", "2"], lambda a: a["run"].row, Row("softmax", 4, 2)),
    ("preset", ["--preset", "ref-lra"], lambda a: a["run"].model_config(a["task"]).pooling, "mean-padded"),
    ("seed", ["--seed", "7"], lambda a: a["run"].seed, 7),
    ("steps", ["--steps", "2000"], lambda a: a["run"].recipe.training.steps, 2000),
    ("settings", ["--set", "lr=1e-2"], lambda a: a["run"].recipe.training.lr, 1e-2),
    ("settings", ["--set", "model.num_layers=3"], lambda a: a["run"].model_config(a["task"]).num_layers, 3),
    ("data_dir", ["--data-dir", "somewhere"], lambda a: a["data"], Path("somewhere")),
    ("out", ["--out", "there"], lambda a: a["run"].directory, Path("there")),
    ("resume", ["--resume", "auto"], lambda a: a["resume"], True),
    ("accelerator", ["--accelerator", "cpu"], lambda a: a["accelerator"], "cpu"),
    ("strategy", ["--strategy", "ddp"], lambda a: a["strategy"], "ddp"),
    ("recipe", [], lambda a: a["run"].recipe.name, "listops"),
]


@pytest.mark.parametrize(("option", "arguments", "reach", "wanted"), OPTIONS, ids=[" ".join(o[1]) for o in OPTIONS])
def test_an_option_of_train_arrives(asked, option, arguments, reach, wanted):
    result = CliRunner().invoke(commands.app, ["train", "listops", *arguments])
    assert result.exception is None, result.output
    assert reach(asked) == wanted


def test_every_option_of_train_is_in_the_table():
    # --results is what the finished run is written to: the training itself does not see it.
    assert {name for name, *_ in OPTIONS} | {"results_file"} == set(inspect.signature(commands.train.train).parameters)


def test_each_layer_is_the_variant_that_was_asked_for(asked):
    from mgk.models import Classifier

    CliRunner().invoke(commands.app, ["train", "listops", "--variant", "smgk-hard", "--heads", "2"])
    model = Classifier(asked["run"].model_config(asked["task"]))
    for layer in model.layers:
        variant = layer.attention.variant
        assert (variant.keys, variant.assignment, variant.prior) == ("shifted", "hard", "uniform")
        assert (layer.attention.num_heads, layer.attention.head_dim) == (2, 32)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "nothing"], "recipe must be one of"),
        (["train", "listops", "--variant", "soft"], "--variant must be one of"),
        (["train", "listops", "--heads", "0"], "--heads must be a positive integer"),
        (["train", "listops", "--steps", "0"], "steps must be a positive integer"),
        (["train", "listops", "--set", "speed=1"], "--set knows"),
        (["train", "listops", "--resume", "yes"], "--resume must be auto"),
        (["data", "nothing"], "task must be one of"),
        (["eval", "nowhere"], "is no run"),
        (["compare", "demo", "--rows", "smgk"], "row must read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_input_is_one_line_and_exit_code_2(tmp_path, arguments, says):
    result = subprocess.run(
        [sys.executable, "-m", "mgk", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_without_the_extra_the_command_says_so(tmp_path):
    code = "import sys; sys.modules['typer'] = None; from mgk.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2
    assert "mgk[train]" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_fewer_steps_keep_the_share_of_the_warm_up_unless_it_is_set():
    assert with_steps("listops", None, None) == []
    assert with_steps("listops", ["lr=1"], 50) == ["lr=1", "warmup=10", "steps=50"]
    assert with_steps("listops", ["training.warmup=3"], 50) == ["training.warmup=3", "steps=50"]
    assert recipes.load("listops").with_settings(with_steps("listops", None, 50)).training.warmup == 10


def test_data_lies_where_it_is_said_to_or_where_the_run_found_it(monkeypatch):
    monkeypatch.delenv("MGK_DATA", raising=False)
    run = {"data_dir": "there"}
    assert data_directory(None) == Path("data")
    assert data_directory(None, run) == Path("there")
    monkeypatch.setenv("MGK_DATA", "everywhere")
    assert data_directory(None, run) == Path("everywhere")
    assert data_directory(Path("here"), run) == Path("here")


def test_all_data_is_prepared_and_what_is_missing_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "TASKS", {name: tasks.TASKS[name] for name in ("listops-short", "text")})
    result = CliRunner().invoke(commands.app, ["data", "all", "--data-dir", str(tmp_path)])
    assert "listops-short train: 20,000 examples" in result.output
    assert isinstance(result.exception, ValueError)
    assert str(result.exception) == "no data for text"


def test_the_columns_of_bench_have_names_that_stand_above_them(monkeypatch):
    monkeypatch.setattr("mgk.benchmark.timing.MOST", 2)
    monkeypatch.setattr("mgk.benchmark.timing.FEWEST", 1)
    result = CliRunner().invoke(
        commands.app, ["bench", "--only", "speed", "--shapes", "1x2x40x8", "--variants", "smgk"]
    )
    assert result.exception is None, result.output
    lines = result.output.splitlines()
    place = next(n for n, line in enumerate(lines) if line.startswith("part "))
    header, row = lines[place], lines[place + 1]
    assert len(header) == len(row)
    for name, cell in (("part", "speed"), ("B x H x N x D", "1x2x40x8"), ("pass", "forward"), ("variant", "softmax")):
        assert header.index(name) == row.index(cell)
    assert header.index("device") + len("device") == row.index(" ms") + len(" ms")
