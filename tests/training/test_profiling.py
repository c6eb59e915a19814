"""Profiling of one model: on the batches of its task, with the settings of the run."""

import multiprocessing
import runpy
from pathlib import Path

import pytest
import torch

from mgk.training import profiling
from mgk.training.sweep import SOLO_METRICS
from tests.support import tiny_training


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_step_forward_and_memory_are_measured(tmp_path, monkeypatch, accumulate):
    run = tiny_training.run(str(tmp_path), accumulate=accumulate)
    calls = []
    take = profiling.EpochPermutation.take
    monkeypatch.setattr(
        profiling.EpochPermutation,
        "take",
        lambda self, start, count: calls.append((start, count)) or take(self, start, count),
    )
    rows = profiling.profile_run(run, tiny_training.TinyTask(), torch.device("cpu"))
    assert [row["metric"] for row in rows] == list(SOLO_METRICS)
    assert all(float(row["value"]) > 0 for row in rows)
    size = run.recipe.training.batch_size // accumulate
    assert {count for _, count in calls} == {size}
    # Consecutive steps use different examples.
    assert [start for start, _ in calls[: 3 * accumulate]] == [size * n for n in range(3 * accumulate)]
    # No batch is prepared while forward passes are timed.
    assert len(calls) == accumulate * profiling.TOTAL_STEPS + profiling.WARM_UP + profiling.STEPS
    assert not Path(tmp_path / "run.json").exists()


@pytest.mark.slow
def test_several_runs_are_profiled_in_their_own_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "profile_run", lambda *_: pytest.fail("profiled in this process"))
    runs = [tiny_training.run(str(tmp_path), lr=lr) for lr in (1e-3, 2e-3)]
    profiles = list(profiling.profile_many(runs, tiny_training.TinyTask(), torch.device("cpu")))
    assert [[row["metric"] for row in rows] for rows in profiles] == [list(SOLO_METRICS)] * 2
    assert [rows[0]["lr"] for rows in profiles] == [1e-3, 2e-3]
    assert all(float(row["value"]) > 0 for rows in profiles for row in rows)


@pytest.mark.slow
def test_failed_run_is_profiled_again_after_the_others(tmp_path, monkeypatch, capfd):
    """The first run has an invalid dropout; the second is timed nevertheless, and has ended by the second attempt."""
    repeated = []
    monkeypatch.setattr(
        profiling, "profile_run", lambda run, *_: repeated.append((run, multiprocessing.active_children())) or []
    )
    runs = [tiny_training.run(str(tmp_path), dropout=dropout) for dropout in (7.0, 0.1)]
    second, first = profiling.profile_many(runs, tiny_training.TinyTask(), torch.device("cpu"))
    assert len(second) == len(SOLO_METRICS)
    assert first == []
    assert repeated == [(runs[0], [])]
    assert "dropout" in capfd.readouterr().err


@pytest.mark.slow
def test_worker_killed_while_waiting_is_profiled_again(tmp_path, monkeypatch):
    repeated = []
    monkeypatch.setattr(profiling, "profile_run", lambda run, *_: repeated.append(run) or [])
    runs = [tiny_training.run(str(tmp_path), lr=lr) for lr in (1e-3, 2e-3)]
    profiles = profiling.profile_many(runs, tiny_training.TinyTask(), torch.device("cpu"))
    assert next(profiles)[0]["lr"] == 1e-3
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()
    assert list(profiles) == [[]]
    assert repeated == runs[1:]


@pytest.mark.parametrize(("name", "runs"), [("__main__", 1), ("__mp_main__", 0)])
def test_worker_process_does_not_run_the_command_again(monkeypatch, name, runs):
    """multiprocessing imports the main module into each worker, under another name."""
    calls = []
    monkeypatch.setattr("mgk.cli.main", lambda: calls.append(name))
    runpy.run_module("mgk.__main__", run_name=name)
    assert len(calls) == runs


def test_groups_have_a_process_per_run_and_end_at_the_deadline(tmp_path, monkeypatch, capsys):
    """On a CPU models are measured one after another, each in a process: its peak memory is that of its process."""
    runs = [tiny_training.run(str(tmp_path), lr=lr) for lr in (1e-3, 2e-3, 3e-3)]
    groups, clock = [], iter([0.0, 1.0, 5.0])
    monkeypatch.setattr(profiling, "profile_many", lambda group, *_: groups.append(len(group)) or [[]])
    monkeypatch.setattr(profiling.time, "monotonic", lambda: next(clock))
    assert list(profiling.profile_in_groups(runs, None, torch.device("cpu"), 2, 5.0)) == [[], []]
    assert groups == [1, 1]
    assert "time limit reached before timing" in capsys.readouterr().err
    monkeypatch.setattr(profiling.time, "monotonic", lambda: 0.0)
    assert list(profiling.profile_in_groups(runs, None, torch.device("cuda"), 2, 5.0)) == [[], []]
    assert groups == [1, 1, 2, 1]
