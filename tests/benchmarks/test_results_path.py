"""The scripts in benchmarks/ check their results file before they measure."""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


SCRIPTS = ("analysis", "language_model", "training_step", "cpu", "host_time", "experimental_kernels", "compile_time")


@pytest.mark.parametrize("script", SCRIPTS)
def test_foreign_file_is_refused_first(script, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location(f"benchmark_{script}", FOLDER / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    notes = tmp_path / "notes.csv"
    notes.write_text("notes of a user\n")
    monkeypatch.setattr(sys, "argv", [script, "--out", str(notes)])
    # A measurement would take minutes, or need a GPU.
    monkeypatch.setattr("torch.nn.Module.__init__", None)
    monkeypatch.setattr("time.perf_counter", None)
    with pytest.raises((ValueError, SystemExit), match=r"--out .*notes\.csv"):
        module.main()
    assert notes.read_text() == "notes of a user\n"
