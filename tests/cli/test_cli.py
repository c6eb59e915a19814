"""The command: every option reaches what uses it, and wrong input is one line and exit code 2."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from mgk import __version__, cli, tasks
from mgk.cli import commands
from mgk.cli.app import apply_steps, resolve_data_dir
from mgk.models import Classifier
from mgk.training import config, results
from mgk.training.config import ModelSpec


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What `train` asks for, without training."""
    seen = {}

    def fit(run, task, **options):
        seen.update(run=run, task=task, **options)
        return SimpleNamespace(global_rank=1), SimpleNamespace(stopped_by=None)

    monkeypatch.setattr("mgk.training.trainer.fit", fit)
    monkeypatch.setattr(type(tasks.TASKS["listops"]), "prepare", lambda *arguments: seen.update(data=arguments[1]))
    return seen


def mapped(asked):
    """What the feature map of the model that was asked for is called."""
    feature_map = Classifier(asked["run"].model_config(asked["task"])).layers[0].attention.feature_map
    return getattr(feature_map, "__name__", type(feature_map).__name__)


OPTIONS = [
    ("variant", ["--variant", "mgk-em"], lambda a: a["run"].row.variant, "mgk-em"),
    ("heads", ["--heads", "3"], lambda a: a["run"].row.heads, 3),
    ("kv_heads", ["--heads", "4", "--kv-heads", "2"], lambda a: a["run"].row, ModelSpec("softmax", 4, 2)),
    ("preset", ["--preset", "ref-lra"], lambda a: a["run"].model_config(a["task"]).pooling, "mean-padded"),
    ("seed", ["--seed", "7"], lambda a: a["run"].seed, 7),
    ("steps", ["--steps", "2000"], lambda a: a["run"].recipe.training.steps, 2000),
    ("settings", ["--set", "lr=1e-2"], lambda a: a["run"].recipe.training.lr, 1e-2),
    ("settings", ["--set", "model.num_layers=3"], lambda a: a["run"].model_config(a["task"]).num_layers, 3),
    *(
        ("settings", ["--variant", "mlk", "--set", f"model.feature_map={name}"], mapped, shown)
        for name, shown in {"elu": "elu_plus_one", "relu": "relu", "favor": "FAVOR", "dpfp": "DPFP"}.items()
    ),
    ("data_dir", ["--data-dir", "somewhere"], lambda a: a["data"], Path("somewhere")),
    ("out", ["--out", "there"], lambda a: a["run"].directory, Path("there")),
    ("resume", ["--resume", "auto"], lambda a: a["resume"], True),
    ("accelerator", ["--accelerator", "cpu"], lambda a: a["accelerator"], "cpu"),
    ("strategy", ["--strategy", "ddp"], lambda a: a["strategy"], "ddp"),
    ("graphs", ["--no-graphs"], lambda a: a["graphs"], False),
    ("recipe", [], lambda a: a["run"].recipe.name, "listops"),
]


@pytest.mark.parametrize(("option", "arguments", "reach", "wanted"), OPTIONS, ids=[" ".join(o[1]) for o in OPTIONS])
def test_an_option_of_train_arrives(asked, option, arguments, reach, wanted):
    result = CliRunner().invoke(commands.app, ["train", "listops", *arguments])
    assert result.exception is None, result.output
    assert reach(asked) == wanted


@pytest.fixture
def finished(asked, monkeypatch, tmp_path):
    """The directory of a run that has nothing left to do, and the results in it."""
    objective = SimpleNamespace(
        metric="accuracy", read_predictions=lambda where: [], test_metric=lambda settings: "accuracy"
    )
    objective.format_metric = str
    done = SimpleNamespace(global_rank=0, objective=objective), SimpleNamespace(stopped_by=None, steps=0)
    monkeypatch.setattr("mgk.training.trainer.fit", lambda *arguments, **options: done)
    common = {"recipe": "listops", "dataset": "listops", "metric": "accuracy", "n_examples": 10, "kv_heads": None}
    rows = [{**common, "split": split, "value": value} for split, value in (("dev", 1 / 3), ("test", 0.1 + 0.2))]
    run = tmp_path / "run"
    run.mkdir()
    (run / "result.json").write_text(json.dumps(rows))
    (run / "metrics.csv").write_text("step,split,loss\n1,dev,2.5\n")
    return run, rows


def test_a_finished_run_that_is_repeated_adds_its_results_once(finished, tmp_path):
    (run, rows), file = finished, tmp_path / "found.csv"
    command = ["train", "listops", "--resume", "auto", "--out", str(run), "--results", str(file)]
    told = [CliRunner().invoke(commands.app, command) for _ in range(2)]
    assert [each.exception for each in told] == [None, None]
    assert ["already has the results of this run" in each.stderr for each in told] == [False, True]
    assert len(results.read([file])) == 2
    (run / "result.json").write_text(json.dumps([*rows, {**rows[0], "metric": "best_step"}]))
    CliRunner().invoke(commands.app, command)
    assert [row["metric"] for row in results.read([file])] == ["accuracy", "accuracy", "best_step"]


def test_the_curve_of_a_run_is_kept_beside_its_results(finished, tmp_path):
    run, kept = finished[0], tmp_path / "kept"
    command = ["train", "listops", "--heads", "4", "--out", str(run), "--results", str(kept / "found.csv")]
    for more in ([], ["--seed", "1"], ["--seed", "1", "--steps", "100"]):
        assert CliRunner().invoke(commands.app, command + more).exception is None
    found = results.curve_files(kept, "listops", ModelSpec("softmax", 4), "paper")
    assert list(found) == [0, 1]
    assert {path.read_text() for path in found.values()} == {(run / "metrics.csv").read_text()}
    # With other settings it is another model's.
    assert len(list((kept / "curves").iterdir())) == 3


def test_every_option_of_train_is_in_the_table():
    # --results is what the finished run is written to: the training itself does not see it.
    assert {name for name, *_ in OPTIONS} | {"results_file"} == set(inspect.signature(commands.train.train).parameters)


@pytest.mark.parametrize(
    ("arguments", "gpu", "told"),
    [
        (["listops"], False, True),
        (["listops"], True, False),
        (["listops", "--accelerator", "cpu"], True, True),
        (["demo"], False, False),
        (["demo", "--set", "model.embed_dim=8192"], False, True),
    ],
)
def test_what_is_meant_for_a_gpu_says_so_on_a_cpu(asked, monkeypatch, arguments, gpu, told):
    monkeypatch.setattr("pytorch_lightning.accelerators.CUDAAccelerator.is_available", lambda: gpu)
    monkeypatch.setattr("pytorch_lightning.accelerators.MPSAccelerator.is_available", lambda: False)
    result = CliRunner().invoke(commands.app, ["train", *arguments])
    assert result.exception is None, result.output
    assert ("is meant for a GPU; on a CPU try `mgk compare demo`\n" in result.stderr) == told


def test_each_layer_is_the_variant_that_was_asked_for(asked):
    CliRunner().invoke(commands.app, ["train", "listops", "--variant", "smgk-hard", "--heads", "2"])
    model = Classifier(asked["run"].model_config(asked["task"]))
    for layer in model.layers:
        variant = layer.attention.variant
        assert (variant.keys, variant.assignment, variant.prior) == ("shifted", "hard", "uniform")
        assert (layer.attention.num_heads, layer.attention.head_dim) == (2, 32)


@pytest.fixture
def mgk(monkeypatch, tmp_path, capsys):
    """The command, in this process and an empty folder: exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *arguments: None)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["mgk", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return (left.value.code or 0, *capsys.readouterr())

    return call


# A run that is none, recipes that are none, and files where folders should be.
FILES = {
    "broken.yaml": b"title: [",
    "binary.yaml": b"\xff\xfe",
    "list.yaml": b"- a",
    "training.yaml": b"title: a\ntask: listops\ntraining: 3",
    "lr.yaml": b"title: a\ntask: listops\ntraining: {lr: fast}",
    "paper.yaml": b"title: a\ntask: listops\npaper: {smgk:4: much}",
    "plateau.yaml": b"title: a\ntask: listops\nplateau: high",
    "row.yaml": b"title: a\ntask: listops\nrows: [smgk]",
    "heads.yaml": b"title: a\ntask: listops\nmodel: {num_heads: 2}",
    "circle.yaml": b"extends: circle.yaml",
    "broken/run.json": b"{",
    "binary/run.json": b"\xff",
    "empty/run.json": b"{}",
    "classifier/run.json": b'{"task": "listops"}',
    "headless/run.json": b'{"task": "bytes"}',
    "headless/best/config.json": b'{"a": 1}',
    "file": b"",
}
WRONG = [
    (["train", "nothing"], "recipe must be one of"),
    (["train", "nothing.yaml"], "recipe file nothing.yaml does not exist"),
    (["train", "broken.yaml"], "broken.yaml is not valid YAML, line 1: "),
    (["train", "binary.yaml"], "binary.yaml is not UTF-8 text"),
    (["train", "list.yaml"], "list.yaml must be a mapping"),
    (["train", "training.yaml"], "training.yaml: training must be a mapping"),
    (["train", "lr.yaml"], "recipe lr.yaml: lr must be a number"),
    (["train", "paper.yaml"], "paper.yaml: paper smgk:4 must be a number"),
    (["train", "plateau.yaml"], "plateau.yaml: plateau must be a number"),
    (["train", "row.yaml"], "row.yaml: row must read variant:heads"),
    (["train", "circle.yaml"], "circle.yaml extends itself"),
    (["train", "listops", "--variant", "soft"], "--variant must be one of"),
    (["train", "listops", "--heads", "0"], "--heads must be a positive integer"),
    (["train", "listops", "--heads", "many"], "'--heads'"),
    (["train", "listops", "--heads", "3", "--kv-heads", "2"], "--kv-heads = 2 must divide"),
    (["train", "listops", "--preset", "best"], "--preset must be one of"),
    (["train", "listops", "--seed", "-1"], "--seed must be at least 0"),
    (["train", "listops", "--steps", "0"], "--steps must be a positive integer"),
    (["train", "listops", "--set", "steps=0"], "--set: steps must be a positive integer"),
    (["train", "listops", "--set", "speed=1"], "--set must set one of"),
    (["train", "listops", "--set", "lrr=1"], "got 'lrr'; did you mean 'lr'?"),
    (["train", "listops", "--set", "batchsize=1"], "got 'batchsize'; did you mean 'batch_size'?"),
    (["train", "listops", "--set", "lr=abc"], "--set: lr must be a number, got 'abc'"),
    (["train", "bytes", "--set", "steps=50"], "below steps = 50, got 100; use --steps, which also scales the warm-up"),
    (["train", "bytes", "--set", "warmup=2000"], "--set: warmup must be below steps = 1000, got 2000\n"),
    (["flops", "demo", "--set", "model.hed_dim=3"], "model.* (from --set or the recipe) must be one of"),
    (["flops", "demo", "--set", "model.hed_dim=3"], "got 'hed_dim'; did you mean 'head_dim'?"),
    (["flops", "demo", "--set", "model.embed_dim=big"], "model.embed_dim must be a positive integer, got 'big' (from"),
    (["flops", "demo", "--set", "model.feature_map=performer"], "must be one of 'elu', 'relu', 'favor', 'dpfp', got"),
    (["train", "bytes", "--data-dir", "nodir"], "(the directory nodir does not exist)"),
    (["train", "listops", "--set", "lr=["], "--set lr: '[' is not valid YAML"),
    (
        ["train", "demo", "--set", "model.variant=smgk"],
        "model.variant (from --set or the recipe) is not a setting",
    ),
    (["train", "demo", "--set", "model.variant=[softmax,smgk]"], "models with a variant per layer are built in Python"),
    (["train", "demo", "--set", "model.num_heads=2"], "is not a setting: use --heads or --rows\n"),
    (["train", "demo", "--set", "model.num_kv_heads=2"], "is not a setting: use --kv-heads or --rows\n"),
    (["train", "demo", "--set", "model.preset=ref-lra"], "is not a setting: use --preset\n"),
    (["train", "heads.yaml"], "model.num_heads (from --set or the recipe) is not a setting"),
    (["compare", "demo", "--set", "model.variant=smgk"], "model.variant (from --set or the recipe) is not a setting"),
    (["compare", "bytes", "--set", "model.num_heads=2"], "model.num_heads (from --set or the recipe) is not a setting"),
    (["flops", "demo", "--set", "model.preset=ref-lra"], "model.preset (from --set or the recipe) is not a setting"),
    (["train", "listops", "--resume", "yes"], "--resume must be auto"),
    (["train", "listops", "--accelerator", "tpu"], "--accelerator must be one of"),
    (["train", "listops", "--strategy", "none"], "--strategy must be one of"),
    (["train", "listops", "--out", "file"], "--out file: file is not a directory"),
    (["train", "listops", "--out", "file/run"], "is not a directory"),
    (["train", "listops", "--results", "empty"], "--results empty is a directory"),
    (["data", "nothing"], "task must be one of"),
    (["data", "listops", "--workers", "0"], "'--workers'"),
    (["eval", "nowhere"], "nowhere is not a run directory"),
    (["eval", "broken"], "run.json is damaged"),
    (["eval", "binary"], "run.json is damaged"),
    (["eval", "empty"], "run.json is damaged: it has no task, training; train again, or take another folder"),
    (["eval", "broken"], "; train again, or take another folder"),
    (["eval", "."], ". is not a run directory (no run.json). `mgk train` prints the directory in its last line"),
    (["generate", "headless", "--prompt", "a"], "is damaged (config.json must have the kind classifier or"),
    (["eval", "empty", "--batch-size", "0"], "--batch-size must be a positive integer"),
    (["eval", "empty", "--precision", "fp8"], "--precision must be one of"),
    (["generate", "nowhere", "--prompt", "a"], "nowhere is not a run directory"),
    (["generate", "nowhere"], "'--prompt'"),
    (["compare", "demo", "--rows", "smgk"], "--rows must read"),
    (["compare", "demo", "--rows", ""], "--rows must read variant:heads"),
    (["compare", "demo", "--rows", "softmax4"], "--rows must read variant:heads or"),
    (["compare", "demo", "--rows", "softmx:4"], "did you mean 'softmax'?"),
    (["compare", "demo", "--rows", "smgk:4/3"], "3 key heads do not divide 4 heads"),
    (["compare", "demo", "--jobs", "-1"], "'--jobs'"),
    (["compare", "demo", "--minutes", "0"], "--minutes must be more than 0"),
    (["compare", "demo", "--preset", "best"], "--preset must be one of"),
    (["compare", "demo", "--out", "file"], "--out file: file is not a directory"),
    (["compare", "demo", "--runs", "file"], "--runs file: file is not a directory"),
    (["compare", "demo", "--redraw"], "results has no results of softmax:4, smgk:2 under recipe demo"),
    (["generate", "classifier", "--prompt", "a"], "is a run of listops, not of a language model"),
    (["compare", "bytes", "--rows", "smgk"], "--rows must read"),
    (["analyze"], "give one or more run directories"),
    (["analyze", "nowhere"], "nowhere is not a run directory"),
    (["analyze", "empty", "--threshold", "0"], "--threshold must be more than 0"),
    (["analyze", "empty", "--seed", "-1"], "--seed must be at least 0"),
    (["analyze", "empty", "--out", "file"], "--out file: file is not a directory"),
    (["flops", "demo", "--variants", ""], "--variants must be one of"),
    (["flops", "demo", "--out", "file"], "--out file: file is not a directory"),
    (["bench", "--out", "empty"], "--out empty is a directory"),
    (["evidence", "--check"], "In a clone of the repository run: python -m experiments.paper --check"),
    (["nothing"], "No such command 'nothing' (see mgk --help)"),
    (["train"], "Missing argument 'recipe' (see mgk train --help)"),
    (["train", "demo", "--sed", "1"], "--sed"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_wrong_input_is_one_line_and_exit_code_2(mgk, tmp_path, arguments, says):
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    code, _, errors = mgk(*arguments)
    assert code == 2
    assert errors.startswith("mgk: ")
    assert says in errors
    assert errors.count("\n") == 1
    # Nothing is left half done.
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_may_not_be_written_to_is_found_before_the_work(mgk, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    code, _, errors = mgk("train", "demo", "--out", "a/b")
    assert (code, errors) == (2, f"mgk: --out a/b: {tmp_path} is not writable\n")


def test_help_and_version(mgk):
    assert mgk("--version")[:2] == (0, f"mgk {__version__}\n")
    assert f'\nversion = "{__version__}"\n' in (Path(__file__).parents[2] / "pyproject.toml").read_text()
    code, said, _ = mgk()
    assert code == 0
    for name in ("train", "eval", "data", "recipes", "compare", "analyze", "generate", "flops", "bench"):
        assert f" {name} " in said
        assert mgk(name, "--help")[0] == 0


def test_a_recipe_is_printed_as_it_is_written(mgk, monkeypatch):
    monkeypatch.setenv("MGK_PLUGINS", "experiments.paper")
    code, said, _ = mgk("recipes", "retrieval-peerread-random")
    assert code == 0
    assert "extends: retrieval-peerread" in said
    code, _, error = mgk("recipes", "lisops")
    assert code == 2
    assert "did you mean 'listops'?" in error


def test_an_error_of_ours_is_not_hidden(mgk, monkeypatch):
    def broken():
        raise KeyError("ours")

    monkeypatch.setattr(config, "recipe_names", broken)
    with pytest.raises(KeyError, match="ours"):
        mgk("recipes")


@pytest.mark.parametrize(("value", "whole"), [("1", True), ("0", False), ("", False)])
def test_the_traceback_of_a_line_is_there_for_who_wants_it(mgk, monkeypatch, value, whole):
    monkeypatch.setenv("MGK_TRACEBACK", value)
    if whole:
        with pytest.raises(ValueError, match="recipe must be one of"):
            mgk("train", "nothing")
    else:
        assert mgk("train", "nothing")[0] == 2


def test_the_module_is_the_command(tmp_path):
    arguments = [sys.executable, "-m", "mgk", "train", "nothing"]
    result = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stderr.startswith("mgk: recipe must be one of")
    assert result.stderr.count("\n") == 1


def test_without_the_extra_the_command_says_so(tmp_path):
    code = "import sys; sys.modules['typer'] = None; from mgk.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2
    assert "mgk[train]" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_fewer_steps_keep_the_share_of_the_warm_up_unless_it_is_set():
    assert apply_steps("listops", None, None) == []
    assert apply_steps("listops", ["lr=1"], 50) == ["lr=1", "warmup=10", "steps=50"]
    assert apply_steps("listops", ["training.warmup=3"], 50) == ["training.warmup=3", "steps=50"]
    assert config.load_recipe("listops").with_settings(apply_steps("listops", None, 50)).training.warmup == 10


def test_data_lies_where_it_is_said_to_or_where_the_run_found_it(monkeypatch):
    monkeypatch.delenv("MGK_DATA", raising=False)
    run = {"data_dir": "there"}
    assert resolve_data_dir(None) == Path("data")
    assert resolve_data_dir(None, run) == Path("there")
    monkeypatch.setenv("MGK_DATA", "everywhere")
    assert resolve_data_dir(None, run) == Path("everywhere")
    assert resolve_data_dir(Path("here"), run) == Path("here")


def test_all_data_is_prepared_and_what_is_missing_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "TASKS", {name: tasks.TASKS[name] for name in ("listops-short", "text")})
    result = CliRunner().invoke(commands.app, ["data", "all", "--data-dir", str(tmp_path)])
    assert "listops-short train: 20,000 examples" in result.output
    assert isinstance(result.exception, ValueError)
    assert str(result.exception) == "no data for text"


def test_the_columns_of_bench_have_names_that_stand_above_them(monkeypatch):
    monkeypatch.setattr("mgk.bench.timing.MAX_REPEATS", 2)
    monkeypatch.setattr("mgk.bench.timing.MIN_REPEATS", 1)
    # A prior's gradient that is near 0 by chance would be refused.
    torch.manual_seed(0)
    result = CliRunner().invoke(
        commands.app, ["bench", "--only", "speed", "--shapes", "1x2x40x8", "--variants", "smgk"]
    )
    assert result.exception is None, result.output
    lines = result.output.splitlines()
    place = next(n for n, line in enumerate(lines) if line.startswith("part "))
    # A torch without one of the others says so in a line of its own: 2.6 has no flash attention for shared keys here.
    header, row = lines[place], next(line for line in lines[place:] if line.startswith("speed "))
    assert len(header) == len(row)
    for name, cell in (("part", "speed"), ("B x H x N x D", "1x2x40x8"), ("pass", "forward"), ("variant", "softmax")):
        assert header.index(name) == row.index(cell)
    assert header.index("time") + len("time") == row.index(" ms") + len(" ms")
    # On a CPU there is but one time.
    assert (row.count(" ms"), "plain calls" in result.output) == (1, False)
