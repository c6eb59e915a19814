"""Ctrl-C, a full disk, missing memory and a closed pipe: one line and an exit code, no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mgk import cli

ROOT = Path(__file__).parents[2]


@pytest.fixture
def mgk(monkeypatch, tmp_path, capsys):
    """Return a function that runs an app that raises an error: exit code and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *arguments: None)

    def call(error):
        def app(*arguments, **options):
            raise error

        with pytest.raises(SystemExit) as exit_info:
            cli.run_app(lambda: app, "mgk", [])
        return exit_info.value.code, capsys.readouterr().err

    return call


@pytest.mark.parametrize("is_module", [True, False], ids=["python -m mgk", "mgk"])
def test_interrupted_import_is_one_line(tmp_path, is_module):
    """Replace torch by a module that is interrupted, as by Ctrl-C in the first seconds."""
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "torch.py").write_text("raise KeyboardInterrupt")
    script = tmp_path / "mgk"
    script.write_text("from mgk.cli import main\nmain()\n")
    command = [sys.executable, *(("-m", "mgk") if is_module else (str(script),)), "recipes"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "stub"), str(ROOT)])}
    result = subprocess.run(
        command, cwd=tmp_path / "stub", env=environment, capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stderr) == (130, "mgk: interrupted\n")


def test_interrupted_import_of_the_library_is_raised(tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", "import mgk"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert "KeyboardInterrupt" in result.stderr


def test_interrupted_command_is_one_line(mgk):
    assert mgk(KeyboardInterrupt()) == (130, "mgk: interrupted\n")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "out of memory: use smaller sizes, such as a smaller batch or model (MemoryError)"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nmore"),
            "can't allocate memory: you tried)",
        ),
        (RuntimeError("Storage size calculation overflowed with sizes=[9]"), "out of memory: "),
        (OSError(28, "No space left on device", "runs/a/last.ckpt"), "runs/a/last.ckpt: No space left on device"),
        (OSError(28, "No space left on device"), "mgk: No space left on device"),
        (UnicodeEncodeError("utf-8", "a\udcffb", 1, 2, "surrogates not allowed"), r"'a\udcffb' is not valid UTF-8"),
        (ValueError("two\nlines"), r"mgk: two\nlines"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_system_error_is_one_line(mgk, error, message):
    code, text = mgk(error)
    assert (code, text.count("\n")) == (2, 1)
    assert message in text


def test_long_message_is_shortened(mgk):
    code, text = mgk(ValueError(f"--out {'x' * 100_000} is too long"))
    assert code == 2
    assert len(text) < 2000
    assert text.startswith("mgk: --out xxx")
    assert text.endswith("xxx is too long\n")


def test_error_in_the_package_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *arguments: None)

    def app(*arguments, **options):
        raise KeyError("a fault of mgk")

    with pytest.raises(KeyError, match="a fault of mgk"):
        cli.run_app(lambda: app, "mgk", [])


def test_closed_pipe_is_silent(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"{sys.executable} -m mgk recipes | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (1, "")
