"""The commands of docs/how-to/train-distributed.md for one and two nodes; `make test-slurm` runs those of SLURM."""

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mgk.models.run_directory import RunDirectory
from tests.slurm.local_cluster import free_ports
from tests.support.launch_training import needs_fsdp
from tests.support.page_commands import command_of, write_tiny_recipe

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the commands are those of a shell of Linux")


def start(command: str, directory: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "-c", command],
        cwd=directory,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(*processes: subprocess.Popen[str]) -> None:
    try:
        for process in processes:
            output = process.communicate(timeout=300)[0]
            assert process.returncode == 0, output[-3000:]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def read_metrics(run: Path) -> list[float]:
    with RunDirectory(run).metrics.open() as file:
        return [float(value) for row in csv.reader(file) for value in row[2:4] if row[1] == "dev"]


@pytest.mark.slow
@needs_fsdp
def test_commands_of_one_and_two_nodes(tmp_path):
    """Run two processes on one node, then two nodes of one process each; their metrics are equal."""
    environment = write_tiny_recipe(tmp_path, steps=4, eval_every=2)
    recipe = {"wikitext-103": "tiny.yaml"}
    one_node = command_of("One node", {**recipe, "--nproc-per-node 8": "--nproc-per-node 2"})
    finish(start(one_node, tmp_path, environment))
    [expected] = (tmp_path / "runs" / "tiny").iterdir()
    assert RunDirectory(expected).result.exists()

    [port] = free_ports(1)
    # Without --local-addr, ranks connect to the name of the machine, which some containers cannot resolve.
    endpoint = f"127.0.0.1:{port} --local-addr 127.0.0.1"
    places = {"HOST:29500": endpoint, "/shared": str(tmp_path / "shared")}
    two_nodes = command_of("Two nodes", {**recipe, **places, "--nproc-per-node 8": "--nproc-per-node 1"})
    finish(*(start(two_nodes, tmp_path, environment) for _ in range(2)))
    run = tmp_path / "shared" / "runs" / "smgk"
    assert RunDirectory(run).result.exists()
    assert len(read_metrics(run)) == 4
    assert read_metrics(run) == pytest.approx(read_metrics(expected), rel=2e-6)
