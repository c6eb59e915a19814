"""Jobs on SLURM, whose commands are replaced by tests/support/fake_slurm.py. `make test-slurm` uses a real SLURM."""

import re
import shutil
import sys
import time

import pytest
from typer.testing import CliRunner

from mgk.cli import commands
from mgk.training import cluster, trainer
from mgk.training.cluster import ClusterOptions, Submission, run_on_slurm
from mgk.training.config import ModelSpec
from mgk.training.job_queue import Job
from tests.support import tiny_training
from tests.support.fake_slurm import FakeSlurm

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="SLURM's commands are scripts of bash")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(cluster, "ABSENT_SECONDS", 0.1)
    return FakeSlurm(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def make_job(tmp_path):
    def make(seed, code):
        directory = tmp_path / "runs" / f"run {seed}"
        return Job("tiny", ModelSpec("softmax", 2), seed, directory, ["bash", "-c", code])

    return make


def fail_first(path, action):
    """Return the code of a job whose first start ends with an action and whose second start succeeds."""
    return f"[ -e '{path}' ] && exit 0; touch '{path}'; {action}"


def test_jobs_succeed_and_fail_with_logs(slurm, make_job, tmp_path, capsys):
    jobs = [make_job(0, "echo trained"), make_job(1, "echo wrong setting; exit 3")]
    queue = run_on_slurm(jobs, ClusterOptions("big", 1, "1-00:00:00"))
    assert (queue.failed, queue.unfinished) == ([jobs[1]], [])
    assert jobs[0].log.read_text() == "trained\n"
    output = capsys.readouterr().err
    assert "tiny softmax:2 seed 0: submitted as job 1, log" in output
    assert "seed 1: FAILED (exit status 3): wrong setting (see" in output
    flags = set(re.findall(r"^#SBATCH --(.*)$", slurm.scripts[0], re.MULTILINE))
    assert {"partition=big", "gpus-per-node=1", "time=1-00:00:00", "signal=TERM@120", "requeue", "open-mode=append",
            "dependency=singleton", "nodes=1"} <= flags  # fmt: skip
    assert not list(tmp_path.rglob("*.pkl"))


@pytest.mark.parametrize(
    ("action", "submissions"),
    [("kill -KILL $PPID", 2), ("exit 137", 2), ("exit 143", 1)],
    ids=["script-killed", "training-killed", "requeued"],
)
def test_killed_job_is_submitted_or_requeued(slurm, make_job, tmp_path, capsys, action, submissions):
    queue = run_on_slurm([make_job(0, fail_first(tmp_path / "started", action))], ClusterOptions())
    assert (queue.failed, queue.unfinished) == ([], [])
    assert len(slurm.scripts) == submissions
    assert ("was killed; submitted again as job 2" in capsys.readouterr().err) == (submissions == 2)


def test_job_that_is_always_killed_fails(slurm, make_job):
    job = make_job(0, "exit 137")
    assert run_on_slurm([job], ClusterOptions()).failed == [job]
    assert len(slurm.scripts) == cluster.MAX_SUBMISSIONS


def test_interrupted_sweep_leaves_its_jobs_and_follows_them_later(slurm, make_job, tmp_path, monkeypatch, capsys):
    job = make_job(0, f"until [ -e '{tmp_path}/go' ]; do sleep 0.05; done")

    sleep = time.sleep

    def interrupt(seconds):
        if seconds == cluster.POLL_SECONDS:
            raise KeyboardInterrupt
        sleep(seconds)  # of subprocess, which waits for squeue

    with monkeypatch.context() as patch:
        patch.setattr(cluster.time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_on_slurm([job], ClusterOptions())
    assert "1 jobs stay in the queue; the same command follows them. To cancel: scancel 1" in capsys.readouterr().err
    assert slurm.cancelled == []
    (tmp_path / "go").touch()
    # The job may end before it is seen again; then it is submitted again, and has nothing to do.
    assert not run_on_slurm([job], ClusterOptions()).failed


def test_job_in_the_queue_is_not_submitted_twice(slurm, make_job, tmp_path, capsys):
    job = make_job(0, f"until [ -e '{tmp_path}/go' ]; do sleep 0.05; done")
    for _ in range(2):
        queue = cluster.ClusterQueue(ClusterOptions(), [Submission(job, "name")])
        queue.start(print)
    (tmp_path / "go").touch()
    assert len(slurm.scripts) == 1
    assert "is already in the queue as job 1" in capsys.readouterr().out


@pytest.mark.parametrize(("answer", "cancelled"), [("n", ["7", "8"]), ("", []), ("y", [])])
def test_interrupt_on_a_terminal_asks(slurm, make_job, monkeypatch, answer, cancelled):
    class Terminal:
        is_terminal = True

        def input(self, question):
            assert question == "Leave 2 jobs in the queue? [Y/n] "
            return answer

        def print(self, text):
            pass

    for job_id in ("7", "8"):
        (slurm.directory / "jobs" / job_id).mkdir()
    monkeypatch.setattr(cluster.sys.stdin, "isatty", lambda: True, raising=False)
    cluster._leave_or_cancel(["7", "8"], Terminal())
    assert slurm.cancelled == cancelled


def test_time_limit_of_the_sweep_cancels_jobs(slurm, make_job):
    job = make_job(0, "sleep 30")
    queue = run_on_slurm([job], ClusterOptions(), minutes=0.002)
    assert (queue.unfinished, slurm.cancelled) == ([job], ["1"])


def test_controller_that_does_not_reply_loses_no_job(slurm, make_job, monkeypatch):
    queue = cluster.ClusterQueue(ClusterOptions(), [Submission(make_job(0, "exit 0"), "name", "1")])
    (slurm.directory / "down").touch()
    assert queue.poll() == []
    assert len(queue.active) == 1
    with pytest.raises(ValueError, match="squeue does not reply"):
        queue.start(print)


def test_jobs_of_one_slot_share_a_name(slurm, make_job):
    run_on_slurm([make_job(seed, "true") for seed in range(3)], ClusterOptions(max_parallel=2))
    names = [re.search(r"--job-name=(\S+)", script)[1] for script in slurm.scripts]
    assert names[0] == names[2] != names[1]


def test_several_gpus_start_torchrun(make_job):
    job = make_job(0, "")
    job.command[:] = ["python", "-m", "mgk", "train", "listops"]
    command, _ = cluster.job_script(Submission(job, "name"), ClusterOptions(gpus_per_node=2))
    expected = "python -m torch.distributed.run --standalone --nproc-per-node 2 -m mgk train listops"
    assert command == f"srun --unbuffered --ntasks=1 {expected}"


def test_rejected_submission_is_one_line(slurm, make_job):
    (slurm.directory / "refuse").touch()
    with pytest.raises(ValueError, match=r"sbatch failed for tiny.*invalid partition") as caught:
        run_on_slurm([make_job(0, "")], ClusterOptions("no-such"))
    assert "\n" not in str(caught.value)


def test_training_on_a_machine_with_srun_does_not_warn(slurm, tmp_path):
    """Lightning warns, which is an error in tests, if srun exists and is not used."""
    trainer.fit(tiny_training.run(str(tmp_path / "run")), tiny_training.TinyTask(), resume=False, accelerator="cpu")
    assert (tmp_path / "run" / "last.ckpt").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--partition", "gpu"], "--partition has no effect without --cluster"),
        (["--max-parallel", "2"], "--max-parallel has no effect without --cluster"),
        (["--cluster", "pbs"], "--cluster must be slurm, got 'pbs'"),
        (["--cluster", "slurm", "--time", "4h"], "--time must be minutes, HH:MM:SS or D-HH:MM:SS, got '4h'"),
    ],
)
def test_wrong_options_of_compare(slurm, arguments, message):
    result = CliRunner().invoke(commands.app, ["compare", "demo", *arguments])
    assert message in str(result.exception)


def test_missing_commands_and_package_are_named(slurm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "submitit", None)
        with pytest.raises(ValueError, match=r"needs the package submitit: pip install 'mgk\[cluster\]'"):
            cluster.check_cluster("slurm", ClusterOptions())
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "sbatch" else which(name))
    with pytest.raises(ValueError, match="--cluster slurm needs sbatch on PATH"):
        cluster.check_cluster("slurm", ClusterOptions())
