"""Run a sweep on a real SLURM of this machine, kill a job, and restart the node's daemon: make test-slurm."""

import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.slurm.local_cluster import LocalCluster, wait_until

ROOT = Path(__file__).parents[2]
PLUGIN = """
from dataclasses import replace
from mgk.tasks import register_task
from mgk.tasks.listops import LISTOPS_SHORT
from mgk.training import cluster
register_task(replace(LISTOPS_SHORT, name="tiny-listops", counts={"test": 40, "dev": 20, "train": 200}))
cluster.POLL_SECONDS, cluster.ABSENT_SECONDS = 0.5, 1.0
"""
RECIPE = """
title: a tiny sweep
task: tiny-listops
model: {embed_dim: 8, ffn_dim: 8, hidden_dim: 8, num_layers: 1, head_dim: 4}
training:
  {steps: STEPS, batch_size: 8, lr: 1.0e-3, warmup: 10, eval_every: 100, precision: fp32, compile: false}
rows: ["softmax:2", "smgk:1"]
"""
# Long enough for a kill in the middle.
STEPS = 800
RUNS = 4


def checkpointed_jobs(runs: Path, cluster: LocalCluster) -> list[str]:
    """Return the ids of the running jobs whose runs have a checkpoint and no result yet."""
    running = cluster.run("squeue", "-h", "-t", "running", "-o", "%i").split()
    logs = {directory: directory / "slurm" for directory in runs.glob("tiny/*") if (directory / "last.ckpt").exists()}
    ids = [folder.joinpath("job.json") for run, folder in logs.items() if not (run / "result.json").exists()]
    return [job for job in running if any(f'"{job}"' in path.read_text() for path in ids if path.exists())]


def read_keys(file: Path) -> Counter:
    """Count the results by run, split and metric."""
    with file.open() as lines:
        columns = ("variant", "heads", "seed", "split", "metric")
        return Counter(tuple(row[name] for name in columns) for row in csv.DictReader(lines))


def main(directory: Path) -> None:
    (directory / "tiny_plugin.py").write_text(PLUGIN)
    (directory / "tiny.yaml").write_text(RECIPE.replace("STEPS", str(STEPS)))
    (directory / "cluster").mkdir()
    with LocalCluster(directory / "cluster") as cluster:
        path = os.pathsep.join([str(ROOT), str(directory)])
        environment = {**cluster.environment, "PYTHONPATH": path, "MGK_PLUGINS": "tiny_plugin", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "mgk", "compare", "tiny.yaml", "--seeds", "2", "--logger", "none"]
        command += ["--data-dir", "data", "--cluster", "slurm", "--partition", "main", "--time", "10"]
        sweep = subprocess.Popen(command, cwd=directory, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            jobs: list[str] = []
            wait_until(
                lambda: (
                    bool(jobs.extend(checkpointed_jobs(directory / "runs", cluster)) or jobs)
                    or sweep.poll() is not None
                ),
                "no job writes a checkpoint",
                120,
            )
            cluster.run("scancel", "--signal=KILL", jobs[0])
            print(f"killed job {jobs[0]}", flush=True)
            cluster.restart("slurmd")
            print("restarted slurmd", flush=True)
            errors = sweep.communicate(timeout=240)[1]
        except BaseException:
            sweep.kill()
            print(sweep.communicate()[1], *(log.read_text() for log in directory.glob("runs/tiny/*/log.txt")))
            print(cluster.logs())
            raise
        print(errors, flush=True)
        assert sweep.returncode == 0, cluster.logs()
        assert f"job {jobs[0]} was killed; submitted again as job" in errors
        counts = read_keys(directory / "results" / "tiny.csv")
        assert set(counts.values()) == {1}, counts
        assert len({key[:3] for key in counts}) == RUNS, counts
        logs = [path.read_text() for path in directory.glob("runs/tiny/*/log.txt")]
        assert len(logs) == RUNS
        # The same command finds all results and submits nothing.
        repeated = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)
        assert "4 of 4 runs are already in results" in repeated.stderr, repeated.stderr
        assert "submitted" not in repeated.stderr
        assert read_keys(directory / "results" / "tiny.csv") == counts


if __name__ == "__main__":
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="mgk-slurm-"))
    try:
        main(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"passed in {time.monotonic() - start:.0f} s")
