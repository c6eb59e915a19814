"""Run a sweep on a real SLURM of this machine, interrupt its runs, and compare with a sweep without SLURM."""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from mgk.models.run_directory import RunDirectory
from mgk.training import results
from tests.slurm.local_cluster import ClusterError, LocalCluster, free_ports, wait_until
from tests.support.page_commands import command_of, write_tiny_recipe

RUNS = 3
# A run pauses at this step while the file of $PAUSE_FILE exists, and writes its process id to its log. The step is
# between two checkpoints: a run that is killed there repeats steps.
PAUSE_STEP = 120
PLUGIN = f"""
import os
import sys
import time
from mgk.training import cluster
from mgk.training.callbacks import CheckpointCallback
cluster.POLL_SECONDS, cluster.ABSENT_SECONDS = 0.5, 1.0
file = os.environ.get("PAUSE_FILE", "")
on_train_batch_end = CheckpointCallback.on_train_batch_end

def pause(self, trainer, *arguments):
    on_train_batch_end(self, trainer, *arguments)
    if trainer.global_step == {PAUSE_STEP} and os.path.exists(file):
        print("paused", os.getpid(), file=sys.stderr, flush=True)
        while os.path.exists(file) and self._stop_request.number(self.device) is None:
            time.sleep(0.05)

CheckpointCallback.on_train_batch_end = pause
"""
# The runs of the sweep in one process, without SLURM: an import of torch and Lightning takes seconds.
REFERENCE = """
from mgk.cli import commands, load_plugins
load_plugins()
for variant, heads in (("softmax", 2), ("smgk", 1), ("mgk-em", 1)):
    out = f"runs/tiny/{variant}-{heads}-paper-s0"
    command = f"train ../tiny.yaml --variant {variant} --heads {heads} --out {out} --results results/tiny.csv"
    commands.app(f"{command} --logger none --data-dir data".split(), standalone_mode=False)
"""
# Columns that depend on the time, the machine and the paths of a run.
UNEQUAL_COLUMNS = {"step_ms", "peak_mem_mb", "date", "command"}


def paused_processes(runs: Path) -> dict[Path, int]:
    """Return the process ids of the paused runs by run directory."""
    lines = {log.parent: log.read_text(errors="replace").strip().rpartition("\n")[2] for log in runs.glob("*/log.txt")}
    pids = {run: int(line.split()[1]) for run, line in lines.items() if line.startswith("paused ")}
    return {run: pid for run, pid in pids.items() if Path("/proc", str(pid)).exists()}


def read_results(folder: Path) -> Counter:
    """Count the rows of a results file, without the columns of times."""
    rows = results.read([folder / "tiny.csv"])
    return Counter(tuple((name, row[name]) for name in sorted(row) if name not in UNEQUAL_COLUMNS) for row in rows)


def read_run(directory: Path) -> dict[str, object]:
    """Return metrics without times, and all tensors of the last checkpoint and the best model, of a run."""
    files = RunDirectory(directory)
    checkpoint = torch.load(files.checkpoint, weights_only=True)
    states = checkpoint["optimizer_states"][0]["state"]
    optimizer = {(n, name): x for n, state in states.items() for name, x in state.items()}
    return {
        "metrics": [line.rpartition(",")[0] for line in files.metrics.read_text().splitlines()],
        "best model": (files.best_model / "model.safetensors").read_bytes(),
        "weights": {name: x.numpy().tobytes() for name, x in checkpoint["state_dict"].items()},
        "optimizer": {key: torch.as_tensor(x).numpy().tobytes() for key, x in optimizer.items()},
    }


def count_starts(directory: Path) -> int:
    return len(json.loads(RunDirectory(directory).environment.read_text()))


class Sweep:
    """The command of a sweep in a process, with its output in a file."""

    def __init__(self, directory: Path, environment: dict[str, str], command: str) -> None:
        directory.mkdir(exist_ok=True)
        self.directory, self.output = directory, directory / "output.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                shlex.split(command),
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def wait_until_printed(self, text: str) -> None:
        wait_until(lambda: text in self.output.read_text() or self.process.poll() is not None, f"no line {text!r}", 120)

    def finish(self) -> str:
        """Wait for the end and return the output."""
        self.process.wait(300)
        output = self.output.read_text()
        assert self.process.returncode == 0, output
        return output


def interrupt_runs(sweep: Sweep, cluster: LocalCluster, pause_file: Path) -> None:
    """Kill the training of one run, send SIGTERM to the job of another, then kill the node with the third."""
    runs = sweep.directory / "runs" / "tiny"
    interrupted: list[Path] = []

    def pause_of_next_run() -> Path:
        def others() -> list[Path]:
            return [run for run in paused_processes(runs) if run not in interrupted]

        wait_until(lambda: bool(others()) or sweep.process.poll() is not None, "no run pauses", 120)
        interrupted.append(others()[0])
        return interrupted[-1]

    run = pause_of_next_run()
    os.kill(paused_processes(runs)[run], signal.SIGKILL)
    print(f"killed the training of {run.name}", flush=True)
    sweep.wait_until_printed("submitted again as job")

    run = pause_of_next_run()
    job = json.loads((run / "slurm" / "job.json").read_text())["id"]
    cluster.run("scancel", "--signal=TERM", job)
    wait_until(lambda: "Restarts=1" in cluster.run("scontrol", "show", "job", job), f"job {job} is not requeued", 60)
    print(f"sent SIGTERM to job {job} of {run.name}, which has requeued itself", flush=True)

    run = pause_of_next_run()
    batch_log = sweep.directory.with_name("batch") / "log.txt"
    wait_until(lambda: batch_log.exists() and "paused" in batch_log.read_text(), "the batch script does not pause", 120)
    count = cluster.kill_node()
    print(f"killed slurmd and {count} processes of jobs, among them those of {run.name}", flush=True)
    pause_file.unlink()
    cluster.start("slurmd")


def submit_batch_script(cluster: LocalCluster, directory: Path, environment: dict[str, str]) -> None:
    """Submit the batch script of the page: two processes on one node."""
    [port] = free_ports(1)
    replacements = {
        "--nodes=2": "--nodes=1",
        "--gpus-per-node=8 --cpus-per-task=64": "--cpus-per-task=1",
        "--nproc-per-node 8": "--nproc-per-node 2",
        "wikitext-103": "../tiny.yaml --logger none",
        # Without --local-addr, ranks connect to the name of the machine, which some containers cannot resolve.
        '"$head:29500"': f"127.0.0.1:{port} --local-addr 127.0.0.1",
        "/shared": str(directory),
    }
    directory.mkdir()
    (directory / "train.sh").write_text(command_of("SLURM", replacements))
    cluster.run("sbatch", "--output=log.txt", "train.sh", cwd=directory, env=environment)


def main(directory: Path) -> None:
    environment = write_tiny_recipe(directory, steps=200, eval_every=50, plugin=PLUGIN)
    pause_file = directory / "pause"
    pause_file.touch()
    small = {"compare listops --seeds 5": "compare ../tiny.yaml --no-alone --logger none --data-dir data"}
    on_cluster = command_of("Sweeps on SLURM", {**small, "--partition gpu --gpus-per-node 1": "--partition main"})
    reference = None
    try:
        with LocalCluster(directory / "cluster") as cluster:
            environment_of_jobs = {**cluster.environment, **environment, "PAUSE_FILE": str(pause_file)}
            sweep = Sweep(directory / "slurm", environment_of_jobs, on_cluster)
            submit_batch_script(cluster, directory / "batch", environment_of_jobs)
            (directory / "local" / "results").mkdir(parents=True)
            program = shlex.join([sys.executable, "-c", REFERENCE])
            reference = Sweep(directory / "local", {**os.environ, **environment}, program)
            try:
                interrupt_runs(sweep, cluster, pause_file)
                output = sweep.finish()
                repeated_output = Sweep(directory / "slurm", environment_of_jobs, on_cluster).finish()
                batch_result = RunDirectory(directory / "batch" / "runs" / "smgk").result
                wait_until(batch_result.exists, "the batch script does not end", 120)
                check_batch_script(directory / "batch")
                reference.finish()
            except BaseException:
                sweep.process.kill()
                for log in [
                    sweep.output,
                    *directory.glob("slurm/runs/tiny/*/log.txt"),
                    directory / "batch" / "log.txt",
                ]:
                    print(f"--- {log}", log.read_text() if log.exists() else "does not exist", sep="\n")
                print(cluster.logs(), flush=True)
                raise
        print(output, flush=True)
        check(directory, output, repeated_output)
    finally:
        if reference is not None and reference.process.poll() is None:
            reference.process.kill()


def check_batch_script(directory: Path) -> None:
    """Check that the batch script was requeued after the failure of the node, and has finished its run."""
    run = directory / "runs" / "smgk"
    assert RunDirectory(run).result.exists(), "the batch script has not finished"
    assert count_starts(run) == 2


def check(directory: Path, output: str, repeated_output: str) -> None:
    """Check that no result is lost, written twice, or different from that of a sweep without SLURM."""
    assert output.count("was killed; submitted again as job") >= 1
    # The same command has all results and submits nothing.
    assert f"{RUNS} of {RUNS} runs are already in results" in repeated_output, repeated_output
    assert "submitted" not in repeated_output
    rows, expected = read_results(directory / "slurm" / "results"), read_results(directory / "local" / "results")
    assert set(rows.values()) == {1}, rows
    assert rows == expected, (rows - expected, expected - rows)
    names = sorted(run.name for run in (directory / "slurm" / "runs" / "tiny").iterdir())
    assert len(names) == RUNS
    for name in names:
        assert count_starts(directory / "slurm" / "runs" / "tiny" / name) > 1, f"{name} was not started again"
        run, uninterrupted = (read_run(directory / kind / "runs" / "tiny" / name) for kind in ("slurm", "local"))
        unequal = [part for part in run if run[part] != uninterrupted[part]]
        assert not unequal, f"{name}: {', '.join(unequal)} differ from those of the run that was not killed"
    print(f"{len(rows)} results and all weights equal those of a sweep without SLURM")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.slurm")
    parser.add_argument(
        "--skip-without-slurm", action="store_true", help="exit with status 0 if SLURM does not start on this machine"
    )
    arguments = parser.parse_args()
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="mgk-slurm-"))
    try:
        main(folder)
    except ClusterError as error:
        outcome = "skipped" if arguments.skip_without_slurm else "FAILED"
        print(f"{error}\ntest-slurm: {outcome}, SLURM does not start on this machine (its daemons' logs are above)")
        sys.exit(0 if arguments.skip_without_slurm else 1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"test-slurm: passed in {time.monotonic() - start:.0f} s")
