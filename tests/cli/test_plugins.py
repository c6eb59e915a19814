"""Modules named in MGK_PLUGINS register tasks and recipes before a command runs."""

import os
import subprocess
import sys

import pytest

from mgk.cli import load_plugins, main

PLUGIN = """
from dataclasses import replace
from pathlib import Path
from mgk.tasks import register_task
from mgk.tasks.listops import LISTOPS_SHORT
from mgk.training.config import RECIPE_DIRECTORIES
register_task(replace(LISTOPS_SHORT, name="tiny-listops", counts={"test": 3, "dev": 2, "train": 5}))
RECIPE_DIRECTORIES.append(Path(__file__).parent)
"""


@pytest.fixture
def call(tmp_path):
    """Return a function that runs `mgk` in a new process with the plugin of this file on its path."""
    (tmp_path / "my_plugin.py").write_text(PLUGIN)
    (tmp_path / "tiny.yaml").write_text("title: a tiny recipe\ntask: tiny-listops\n")

    def run(plugins, *arguments):
        environment = {**os.environ, "MGK_PLUGINS": plugins}
        command = [sys.executable, "-m", "mgk", *arguments]
        environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    return run


def test_plugin_registers_recipe_and_task(call):
    assert "tiny  " not in call("", "recipes").stdout
    assert "a tiny recipe" in call("my_plugin", "recipes").stdout
    # By the recipe's name, which leads to the plugin's task.
    result = call(" my_plugin,", "data", "tiny", "--data-dir", "data")
    assert (result.returncode, "tiny-listops train: 5 examples" in result.stdout) == (0, True), result.stderr


def test_missing_plugin_reports_one_line(call):
    result = call("my_plugin,no_such_plugin", "recipes")
    assert result.returncode == 2
    assert result.stderr.startswith("mgk: MGK_PLUGINS names 'no_such_plugin', which cannot be imported: ")
    assert result.stderr.count("\n") == 1


def test_import_error_inside_a_plugin_is_raised(tmp_path, monkeypatch):
    (tmp_path / "broken_plugin.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MGK_PLUGINS", "broken_plugin")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load_plugins()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('first\\nsecond')", "RuntimeError: first"),
        ("assert False", "AssertionError"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("import sys; sys.exit(7)", "SystemExit: 7"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
def test_plugin_that_raises_is_named_in_one_line(tmp_path, monkeypatch, capsys, code, reason):
    name = f"raising_plugin_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MGK_PLUGINS", name)
    monkeypatch.setattr("signal.signal", lambda *arguments: None)
    monkeypatch.setattr("sys.argv", ["mgk", "recipes"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    error = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert error.startswith(f"mgk: MGK_PLUGINS names '{name}', which raises {reason}")
    assert error.count("\n") == 1


def test_help_names_the_variable(call):
    assert "MGK_PLUGINS" in call("", "--help").stdout
