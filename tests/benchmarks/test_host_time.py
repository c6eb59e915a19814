"""The launches of plain calls, without a GPU: launches by address pass the same parameters as those of Triton."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="Triton's launcher needs a C compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stub CUDA driver needs a machine without a GPU"),
]


def run(code):
    """Run Python code in another process, in which the stub driver is loaded."""
    program = f"import sys; sys.path.insert(0, 'benchmarks'); import host_time\n{code}\nhost_time.main()"
    command = [sys.executable, "-c", program, "--repeats", "10", "--calls", "smgk, large call"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_launches_by_address_pass_the_parameters_of_ordinary_launches():
    result = run("")
    assert result.returncode == 0, result.stderr
    assert "forward and backward" in result.stdout


def test_other_parameters_are_found():
    result = run(
        "from mgk.kernels.mixture import call_plan\n"
        "from mgk.kernels.tma import Layout\n"
        "call_plan.matrix_layout = lambda shape, block: Layout((shape[0] - 1, shape[1]), (shape[1], 1), block)"
    )
    assert result.returncode != 0
    assert "differ from those of Triton" in result.stderr
