"""The GPU kernels without a GPU: their tests under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mgk.backends.triton import NO_TRITON


@pytest.mark.slow
@pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests themselves run on the GPU")
def test_the_kernels_under_the_interpreter():
    """Triton decides when it is imported whether to interpret, so they need a process of their own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(Path(__file__).parent / "kernels"),
        "-q",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
    ]
    environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
