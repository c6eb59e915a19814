"""Start tests/support/tiny_training.py in one or several processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import tiny_training

SCRIPT = Path(tiny_training.__file__)

# FSDP needs this method of a stream; torch 2.6 has it only for GPUs.
needs_fsdp = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch has no FSDP on a CPU")


def torchrun(*options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", *options)


def train(
    out: Path,
    *arguments: str,
    launcher: tuple[str, ...] = (sys.executable,),
    task: str = "classes",
    timeout: float = 300,
) -> int:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2]), "TINY_TASK": task}
    command = [*launcher, str(SCRIPT), str(out), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, timeout=timeout)
    # torchrun exits with 1, whatever the exit codes of its processes.
    killed = any("--kill" in argument for argument in arguments)
    if result.returncode not in ((-9, 143, 1) if killed else (0,)):
        raise AssertionError(result.stderr.decode()[-2000:])
    return result.returncode
