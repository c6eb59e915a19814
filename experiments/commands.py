"""Start commands of `mgk` in other processes, with the tasks and recipes of a study."""

from __future__ import annotations

import os
import subprocess
import sys

from mgk.training.cluster import ClusterOptions, srun_command


def add_plugin(package: str) -> None:
    """Add a package to MGK_PLUGINS, from which this command and its child processes load tasks and recipes."""
    plugins = [name for name in os.environ.get("MGK_PLUGINS", "").split(",") if name not in ("", package)]
    os.environ["MGK_PLUGINS"] = ",".join([*plugins, package])


def run_mgk(arguments: list[str], cluster: ClusterOptions | None) -> int:
    """Run `mgk` with these arguments, on a node of a cluster if there is one, and return its exit code."""
    return run_module("mgk", arguments, cluster)


def run_module(module: str, arguments: list[str], cluster: ClusterOptions | None) -> int:
    """Run a module with these arguments, on a node of a cluster if there is one, and return its exit code."""
    command = [sys.executable, "-m", module, *arguments]
    return run_command(command if cluster is None else srun_command(command, cluster))


def run_command(command: list[str]) -> int:
    """Run a command and return its exit code; terminate it if this process is interrupted."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
