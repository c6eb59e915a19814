"""Run the scripts in examples/ for a few steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
SCRIPTS = {
    "char_model": ((), ("--steps", "2"), "step 2: loss"),
    "ddp": (TORCHRUN, (), "priors of 2 processes are equal: True"),
    "decode": ((), (), "sMLK, 4 heads"),
    "lora": ((), (), "difference after loading the adapter"),
    "new_task": ((), ("--rows", "smgk:2/1", "--steps", "4", "--no-alone"), "smgk:2/1"),
}


def test_every_script_is_listed():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == SCRIPTS.keys()
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert all(f"({name}.py)" in page for name in SCRIPTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_runs(name, tmp_path):
    launcher, options, expected = SCRIPTS[name]
    if name == "lora":
        pytest.importorskip("peft")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, str(ROOT / "examples" / f"{name}.py"), *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert expected in done.stdout
