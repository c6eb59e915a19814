"""Run the tests of the GPU kernels under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mgk.backends.triton import NO_TRITON

FOLDER = Path(__file__).parent / "kernels"
# The interpreter computes tl.dot with NumPy. OpenBLAS's kernels for Haswell and Zen round a dot product differently
# with the shape of the matrices; a GPU does not. The logits that the backward recomputes then differ from the forward's
# by several roundings, and fp32 gradients miss the 2x rule. Its older kernels are free of this on every x86-64.
ENVIRONMENT = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem"}


@pytest.mark.slow
@pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests themselves run on the GPU")
def test_kernels_under_the_interpreter():
    """Run tests/kernels in a separate process: Triton reads TRITON_INTERPRET when it is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", str(FOLDER), "-q", "-n", "2", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
