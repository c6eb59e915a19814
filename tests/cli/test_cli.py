"""The command line: errors of the user, help, environment variables."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mgk import __version__, cli, tasks
from mgk.cli import commands
from mgk.cli.app import apply_steps, resolve_data_dir
from mgk.training import config


@pytest.fixture
def mgk(monkeypatch, tmp_path, capsys):
    """Return a function that runs `mgk` in an empty directory: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *arguments: None)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["mgk", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        return (exit_info.value.code or 0, *capsys.readouterr())

    return call


# Invalid runs, invalid recipes, and files in place of directories.
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
    "notes.csv": b"notes of a user\n",
    "empty/demo.csv": b"notes of a user\n",
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
    (["train", "row.yaml"], "row.yaml: row must have the form variant:heads"),
    (["train", "circle.yaml"], "circle.yaml extends itself"),
    (["train", "listops", "--variant", "soft"], "--variant must be one of"),
    (["train", "listops", "--heads", "0"], "--heads must be a positive integer"),
    (["train", "listops", "--heads", "many"], "'--heads'"),
    (["train", "listops", "--data-dir", ""], "'--data-dir': must be a directory, got ''"),
    (["train", "listops", "--heads", "3", "--kv-heads", "2"], "--kv-heads = 2 must divide"),
    (["train", "listops", "--heads", "4", "--key-heads", "3"], "--key-heads = 3 must divide"),
    (["compare", "listops", "--rows", "smgk:4/3/4"], "3 key heads do not divide 4 heads"),
    (["compare", "listops", "--rows", "smgk:4/1/3"], "3 value heads do not divide 4 heads"),
    (["compare", "listops", "--rows", "smgk:4/1/2/2"], "variant:heads/key-heads[/value-heads], as in"),
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
    (
        ["flops", "demo", "--set", "model.hed_dim=3"],
        "model.hed_dim (from --set or the recipe) is not a setting: use one of attention_dropout, backend, dropout, "
        "embed_dim, feature_map, ffn_dim, head_dim, hidden_dim, num_components, num_layers, pooling, token_std; "
        "did you mean 'head_dim'?",
    ),
    (["train", "demo", "--set", "lr"], "--set must have the form key=value, got 'lr'"),
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
    (["train", "demo", "--set", "model.num_key_heads=2"], "is not a setting: use --key-heads or --rows\n"),
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
    (["train", "demo", "--results", "notes.csv"], "--results notes.csv is not a results file"),
    (["data", "nothing"], "task must be one of"),
    (["data", "listops", "--workers", "0"], "--workers must be at least 1, got 0"),
    (
        ["data", "enwiki-lm"],
        "enwiki-lm is not published; for a text of your own in WikiText's format use the task words",
    ),
    (["eval", "nowhere"], "nowhere is not a run directory"),
    (["eval", "broken"], "run.json is damaged"),
    (["eval", "binary"], "run.json is damaged"),
    (["eval", "empty"], "run.json is damaged: it has no task, training; train again, or use another directory"),
    (["eval", "broken"], "; train again, or use another directory"),
    (["eval", "."], ". is not a run directory (no run.json). `mgk train` prints the directory in its last line"),
    (["generate", "headless", "--prompt", "a"], "is damaged (kind in config.json must be classifier or"),
    (["eval", "empty", "--batch-size", "0"], "--batch-size must be a positive integer"),
    (["eval", "empty", "--precision", "fp8"], "--precision must be one of"),
    (["generate", "nowhere", "--prompt", "a"], "nowhere is not a run directory"),
    (["generate", "nowhere"], "'--prompt'"),
    (["compare", "demo", "--rows", "smgk"], "--rows must have the form"),
    (["compare", "demo", "--rows", ""], "--rows must have the form variant:heads"),
    (["compare", "demo", "--rows", "softmax4"], "--rows must have the form variant:heads or"),
    (["compare", "demo", "--rows", "softmx:4"], "did you mean 'softmax'?"),
    (["compare", "demo", "--rows", "smgk:4/3"], "3 key heads do not divide 4 heads"),
    (["compare", "demo", "--jobs", "-1"], "--jobs must be at least 1, got -1"),
    (["compare", "demo", "--seeds", "0"], "--seeds must be at least 1, got 0"),
    (["compare", "demo", "--minutes", "0"], "--minutes must be more than 0"),
    (["compare", "demo", "--preset", "best"], "--preset must be one of"),
    (["compare", "demo", "--out", "file"], "--out file: file is not a directory"),
    (["compare", "demo", "--runs", "file"], "--runs file: file is not a directory"),
    (["compare", "demo", "--redraw"], "results has no results of softmax:4, smgk:2 under recipe demo"),
    (["generate", "classifier", "--prompt", "a"], "is a run of listops, not of a language model"),
    (["compare", "bytes", "--rows", "smgk"], "--rows must have the form"),
    (["analyze"], "give one or more run directories"),
    (["analyze", "nowhere"], "nowhere is not a run directory"),
    (["analyze", "empty", "--threshold", "0"], "--threshold must be more than 0"),
    (["analyze", "empty", "--seed", "-1"], "--seed must be at least 0"),
    (["analyze", "empty", "--out", "file"], "--out file: file is not a directory"),
    (["flops", "demo", "--variants", ""], "--variants must be one of"),
    (["flops", "demo", "--lengths", str(10**30)], "--lengths must be positive integers"),
    (["flops", "demo", "--lengths", "²"], "--lengths must be positive integers"),
    (["flops", "demo", "--out", "file"], "--out file: file is not a directory"),
    (["compare", "demo", "--out", "empty"], "--out empty/demo.csv is not a results file"),
    (["bench", "--out", "empty"], "--out empty is a directory"),
    (["bench", "--out", "notes.csv"], "--out notes.csv is not a results file"),
    (["evidence", "--check"], "In a clone of the repository run: python -m experiments.paper --check"),
    (["nothing"], "No such command 'nothing' (see mgk --help)"),
    (["study"], "No such command 'study'; it was removed: run mgk compare, mgk generate and mgk analyze (see"),
    (["analyse"], "Did you mean 'analyze'? (see mgk --help)"),
    (["train", "lisops"], "did you mean 'listops'?"),
    (["data", "lisops"], "did you mean 'listops'?"),
    (["compare", "demo", "--runs", "/proc/x"], "--runs /proc/x: /proc is not writable"),
    (["compare", "demo", "--seeds", "1000000"], "--seeds must be at most 10000, got 1000000"),
    (["train", "demo", "--keep-checkpoints", "0"], "--keep-checkpoints must be at least 1, got 0"),
    (["train", "demo", "--set", "compile=maybe"], "--set: compile must be True or False, got 'maybe'"),
    (["train", "demo", "--heads", str(10**30)], "--heads must be below 2^63, got 1e+30"),
    (["train", "line\nbreak.yaml"], r"recipe file line\nbreak.yaml does not exist"),
    (["train"], "Missing argument 'recipe' (see mgk train --help)"),
    (["train", "demo", "--sed", "1"], "--sed"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_user_error_is_one_line_and_exit_code_2(mgk, tmp_path, arguments, message):
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    code, _, errors = mgk(*arguments)
    assert code == 2
    assert errors.startswith("mgk: ")
    assert message in errors
    assert errors.count("\n") == 1
    # No file is written.
    assert sorted(tmp_path.rglob("*")) == before


def test_read_only_directory_is_reported_before_the_work(mgk, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    code, _, errors = mgk("train", "demo", "--out", "a/b")
    assert (code, errors) == (2, f"mgk: --out a/b: {tmp_path} is not writable\n")


def test_help_and_version(mgk):
    assert mgk("--version")[:2] == (0, f"mgk {__version__}\n")
    assert f'\nversion = "{__version__}"\n' in (Path(__file__).parents[2] / "pyproject.toml").read_text()
    code, output, _ = mgk()
    assert code == 0
    for name in ("train", "eval", "data", "recipes", "compare", "analyze", "generate", "flops", "bench"):
        assert f" {name} " in output
        assert mgk(name, "--help")[0] == 0


def test_recipe_is_printed_unchanged(mgk, monkeypatch):
    monkeypatch.setenv("MGK_PLUGINS", "experiments.paper")
    code, output, _ = mgk("recipes", "retrieval-peerread-random")
    assert code == 0
    assert "extends: retrieval-peerread" in output
    code, _, error = mgk("recipes", "lisops")
    assert code == 2
    assert "did you mean 'listops'?" in error


def test_internal_error_is_raised(mgk, monkeypatch):
    def broken():
        raise KeyError("internal")

    monkeypatch.setattr(config, "recipe_names", broken)
    with pytest.raises(KeyError, match="internal"):
        mgk("recipes")


@pytest.mark.parametrize(("value", "has_traceback"), [("1", True), ("0", False), ("", False)])
def test_variable_shows_the_traceback(mgk, monkeypatch, value, has_traceback):
    monkeypatch.setenv("MGK_TRACEBACK", value)
    if has_traceback:
        with pytest.raises(ValueError, match="recipe must be one of"):
            mgk("train", "nothing")
    else:
        assert mgk("train", "nothing")[0] == 2


def test_python_dash_m_runs_the_command(tmp_path):
    arguments = [sys.executable, "-m", "mgk", "train", "nothing"]
    result = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stderr.startswith("mgk: recipe must be one of")
    assert result.stderr.count("\n") == 1


def test_missing_extra_is_reported_in_one_line(tmp_path):
    code = "import sys; sys.modules['typer'] = None; from mgk.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2
    assert "mgk[train]" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_steps_scale_the_warm_up_unless_it_is_set():
    assert apply_steps("listops", None, None) == []
    assert apply_steps("listops", ["lr=1"], 50) == ["lr=1", "warmup=10", "steps=50"]
    assert apply_steps("listops", ["training.warmup=3"], 50) == ["training.warmup=3", "steps=50"]
    assert config.load_recipe("listops").with_settings(apply_steps("listops", None, 50)).training.warmup == 10


def test_data_directory_is_option_variable_run_or_default(monkeypatch):
    monkeypatch.delenv("MGK_DATA", raising=False)
    run = {"data_dir": "there"}
    assert resolve_data_dir(None) == Path("data")
    assert resolve_data_dir(None, run) == Path("there")
    monkeypatch.setenv("MGK_DATA", "everywhere")
    assert resolve_data_dir(None, run) == Path("everywhere")
    assert resolve_data_dir(Path("here"), run) == Path("here")


def test_data_all_prepares_tasks_and_reports_missing_data(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "TASKS", {name: tasks.TASKS[name] for name in ("listops-short", "text")})
    result = CliRunner().invoke(commands.app, ["data", "all", "--data-dir", str(tmp_path)])
    assert "listops-short train: 20,000 examples" in result.output
    assert isinstance(result.exception, ValueError)
    assert str(result.exception) == "no data for text"


def test_bench_headers_align_with_their_columns(monkeypatch):
    monkeypatch.setattr("mgk.bench.timing.MAX_REPEATS", 2)
    monkeypatch.setattr("mgk.bench.timing.MIN_REPEATS", 1)
    # A random prior's gradient near 0 would fail the check.
    torch.manual_seed(0)
    result = CliRunner().invoke(
        commands.app, ["bench", "--only", "speed", "--shapes", "1x2x40x8", "--variants", "smgk"]
    )
    assert result.exception is None, result.output
    lines = result.output.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("part "))
    # Missing implementations print lines of their own: torch 2.6 has no flash attention for shared keys on a CPU.
    header, row = lines[start], next(line for line in lines[start:] if line.startswith("speed "))
    assert len(header) == len(row)
    for name, cell in (("part", "speed"), ("B x H x N x D", "1x2x40x8"), ("pass", "forward"), ("variant", "softmax")):
        assert header.index(name) == row.index(cell)
    assert header.index("time") + len("time") == row.index(" ms") + len(" ms")
    # A CPU has a single time.
    assert (row.count(" ms"), "plain calls" in result.output) == (1, False)


def test_recipes_and_tasks_of_the_reproduction_get_a_hint(mgk, monkeypatch):
    # Other tests import experiments.paper, which registers them.
    monkeypatch.setattr(config, "RECIPE_DIRECTORIES", config.RECIPE_DIRECTORIES[:1])
    monkeypatch.setattr(tasks, "TASKS", {"listops": tasks.TASKS["listops"]})
    hint = "is part of experiments.paper: in a clone of the repository, set the environment variable MGK_PLUGINS="
    assert mgk("train", "text-5k")[::2] == (2, f"mgk: recipe text-5k {hint}experiments.paper\n")
    assert mgk("data", "retrieval-peerread")[::2] == (2, f"mgk: task retrieval-peerread {hint}experiments.paper\n")


def test_names_of_the_reproduction_are_complete():
    folder = Path(__file__).parents[2] / "experiments" / "paper" / "recipes"
    assert {path.stem for path in folder.glob("*.yaml")} == config.PAPER_RECIPES
