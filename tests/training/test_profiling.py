"""The cost of a row by itself: measured on the task's own batches, at the settings of the run."""

import multiprocessing
import runpy
from pathlib import Path

import pytest
import torch

from mgk.training import profiling
from mgk.training.sweep import COSTS
from tests.support import tiny_training


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_a_forward_and_the_memory_are_measured(tmp_path, monkeypatch, accumulate):
    run = tiny_training.run(str(tmp_path), accumulate=accumulate)
    seen = []
    take = profiling.EpochPermutation.take
    monkeypatch.setattr(
        profiling.EpochPermutation,
        "take",
        lambda self, start, count: seen.append((start, count)) or take(self, start, count),
    )
    rows = profiling.measure(run, tiny_training.TinyTask(), torch.device("cpu"))
    assert [row["metric"] for row in rows] == list(COSTS)
    assert all(float(row["value"]) > 0 for row in rows)
    size = run.recipe.training.batch_size // accumulate
    assert {count for _, count in seen} == {size}
    # Every step sees other examples than the one before.
    assert [start for start, _ in seen[: 3 * accumulate]] == [size * n for n in range(3 * accumulate)]
    # None is made while forwards are timed.
    assert len(seen) == accumulate * profiling.COUNT + profiling.WARM_UP + profiling.STEPS
    assert not Path(tmp_path / "run.json").exists()


@pytest.mark.slow
def test_several_warm_up_beside_one_another_and_are_timed_in_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "measure", lambda *_: pytest.fail("a process of its own has not done it"))
    runs = [tiny_training.run(str(tmp_path), lr=lr) for lr in (1e-3, 2e-3)]
    found = list(profiling.measure_in_turn(runs, tiny_training.TinyTask(), torch.device("cpu")))
    assert [[row["metric"] for row in rows] for rows in found] == [list(COSTS)] * 2
    assert [rows[0]["lr"] for rows in found] == [1e-3, 2e-3]
    assert all(float(row["value"]) > 0 for rows in found for row in rows)


@pytest.mark.slow
def test_what_fails_beside_the_others_is_measured_again_by_itself(tmp_path, monkeypatch, capfd):
    """The first asks for a dropout that there is none of; the second is timed all the same, and gone by then."""
    again = []
    monkeypatch.setattr(
        profiling, "measure", lambda run, *_: again.append((run, multiprocessing.active_children())) or []
    )
    runs = [tiny_training.run(str(tmp_path), dropout=dropout) for dropout in (7.0, 0.1)]
    second, first = profiling.measure_in_turn(runs, tiny_training.TinyTask(), torch.device("cpu"))
    assert len(second) == len(COSTS)
    assert first == []
    assert again == [(runs[0], [])]
    assert "dropout" in capfd.readouterr().err


@pytest.mark.slow
def test_who_is_killed_while_it_waits_is_measured_again(tmp_path, monkeypatch):
    again = []
    monkeypatch.setattr(profiling, "measure", lambda run, *_: again.append(run) or [])
    runs = [tiny_training.run(str(tmp_path), lr=lr) for lr in (1e-3, 2e-3)]
    found = profiling.measure_in_turn(runs, tiny_training.TinyTask(), torch.device("cpu"))
    assert next(found)[0]["lr"] == 1e-3
    for waiting in multiprocessing.active_children():
        waiting.kill()
        waiting.join()
    assert list(found) == [[]]
    assert again == runs[1:]


@pytest.mark.parametrize(("name", "runs"), [("__main__", 1), ("__mp_main__", 0)])
def test_processes_of_the_command_are_not_the_command_again(monkeypatch, name, runs):
    """Python imports what it was started with into each process that is to time a model."""
    calls = []
    monkeypatch.setattr("mgk.cli.main", lambda: calls.append(name))
    runpy.run_module("mgk.__main__", run_name=name)
    assert len(calls) == runs
