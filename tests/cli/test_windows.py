"""Commands without the modules, functions and signals that Windows lacks."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mgk.training import job_queue
from tests.support import windows

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "tests" / "fixtures" / "aa005c7" / "text"
SIZES = "batch_size=2 warmup=1 model.embed_dim=8 model.ffn_dim=8 model.head_dim=4 model.num_layers=1".split()
SETTINGS = [part for setting in SIZES for part in ("--set", setting)]
RUN = "runs/bytes/smgk-2-paper-s0"
COMMANDS = [
    ["compare", "bytes", "--rows", "smgk:2", "--steps", "3", *SETTINGS, "--data-dir", "text", "--no-alone"],
    ["train", "bytes", "--variant", "smgk", "--heads", "2", "--steps", "3", *SETTINGS, "--data-dir", "text"],
    ["eval", RUN],
    ["generate", RUN, "--prompt", "a", "--max-tokens", "2"],
    ["analyze", RUN, "--out", "analysis", "--matrices", "2", "--removal", "2"],
    ["flops", "--lengths", "64"],
]
# The training has the output directory of the comparison.
COMMANDS[1] += ["--resume", "auto"]
SCRIPT = f"""
import sys
import mgk.cli
for arguments in {COMMANDS!r}:
    sys.argv = ["mgk", *arguments]
    try:
        mgk.cli.run_app(mgk.cli._load_app, "mgk", arguments)
    except SystemExit as error:
        print("exit", arguments[0], error.code or 0, flush=True)
"""


@pytest.mark.slow
def test_every_command_runs_without_posix(tmp_path):
    shutil.copytree(TEXT, tmp_path / "text")
    # Every process of the commands imports this at its start.
    (tmp_path / "sitecustomize.py").write_text("from tests.support import windows\nwindows.install()\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "MGK_COMMIT": "abc1234"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True)
    statuses = [line for line in done.stdout.splitlines() if line.startswith("exit ")]
    assert statuses == [f"exit {command[0]} 0" for command in COMMANDS], done.stdout + done.stderr
    assert (tmp_path / RUN / ".run.lock.held").exists()  # the lock of filelock
    assert (tmp_path / "analysis" / "report.html").exists()


CHILD = """
import signal, sys, time
from tests.support import windows
windows.install()
from mgk.training.signals import stop_with_parent
signal.signal(signal.SIGTERM, lambda *arguments: sys.exit(5))
stop_with_parent()
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def test_job_is_stopped_by_the_end_of_its_input(monkeypatch):
    """On Windows, `terminate` would end it without saving."""
    monkeypatch.setattr(job_queue, "os", windows.Windows(os, {"name": "nt"}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), job_queue.STOP_AT_END_OF_INPUT: "1"}
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout.readline() == b"ready\n"
        job_queue._request_stop(child)
        assert child.wait(timeout=60) == 5


def sources():
    return sorted(path for folder in ("mgk", "experiments") for path in (ROOT / folder).rglob("*.py"))


def test_names_that_windows_lacks_are_read_with_a_default():
    """Every use of such a name is guarded by getattr, or by a test of os.name in the same file."""
    names = [(module, name) for module, text in windows.MISSING.items() for name in text.split()]
    pattern = re.compile("|".join(rf"\b{module}\.{name}\b" for module, name in names))
    uses = [f"{path}: {match[0]}" for path in sources() for match in pattern.finditer(path.read_text("utf-8"))]
    assert uses == []


def test_modules_that_windows_lacks_are_imported_in_a_try_block():
    pattern = re.compile(rf"^(.*\n)( *)(?:import|from) (?:{'|'.join(windows.MISSING_MODULES)})\b", re.MULTILINE)
    matches = [(path, match) for path in sources() for match in pattern.finditer(path.read_text("utf-8"))]
    assert {path.name for path, match in matches} == {"io.py", "evaluate.py"}
    assert [path for path, match in matches if match[1].strip() != "try:"] == []
