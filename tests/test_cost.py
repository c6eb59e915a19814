"""The cost of a row by itself: measured on the task's own batches, at the settings of the run."""

from pathlib import Path

import pytest
import tiny_training
import torch

from mgk import cost
from mgk.compare import COSTS


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_a_forward_and_the_memory_are_measured(tmp_path, monkeypatch, accumulate):
    run = tiny_training.run(str(tmp_path), accumulate=accumulate)
    seen = []
    take = cost.Order.take
    monkeypatch.setattr(
        cost.Order, "take", lambda self, start, count: seen.append((start, count)) or take(self, start, count)
    )
    rows = cost.measure(run, tiny_training.TinyTask(), torch.device("cpu"))
    assert [row["metric"] for row in rows] == list(COSTS)
    assert all(float(row["value"]) > 0 for row in rows)
    size = run.recipe.training.batch_size // accumulate
    assert {count for _, count in seen} == {size}
    # Every step sees other examples than the one before.
    assert [start for start, _ in seen[: 3 * accumulate]] == [size * n for n in range(3 * accumulate)]
    assert not Path(tmp_path / "run.json").exists()
