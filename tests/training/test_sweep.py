"""Which results belong to a model of a sweep."""

from pathlib import Path

import numpy as np
import pytest

from mgk.training import config, predictions, report, results, sweep
from mgk.training.config import ModelSpec
from tests.support.result_rows import result_row


def test_filter_rows_matches_all_settings_of_a_run(tmp_path):
    path = tmp_path / "results.csv"
    results.append(path, [result_row("smgk:4", 0, 0.37)])
    rows, recipe = results.read([path]), config.load_recipe("listops")
    assert sweep.filter_rows(rows, recipe, ModelSpec("smgk", 4), "paper", 0)
    assert not sweep.filter_rows(rows, recipe, ModelSpec("smgk", 4), "paper", 1)
    assert not sweep.filter_rows(rows, recipe, ModelSpec("smgk", 4), "ref-lra", 0)
    assert not sweep.filter_rows(rows, recipe, ModelSpec("smgk", 4, 2), "paper", 0)
    assert not sweep.filter_rows(rows, recipe, ModelSpec("smgk", 4, None, 1), "paper", 0)
    shared = [{**row, "key_heads": "1"} for row in rows]
    assert sweep.filter_rows(shared, recipe, ModelSpec("smgk", 4, None, 1), "paper", 0)
    assert not sweep.filter_rows(shared, recipe, ModelSpec("smgk", 4), "paper", 0)
    assert not sweep.filter_rows(rows, recipe.with_settings(["lr=4e-4"]), ModelSpec("smgk", 4), "paper", 0)


def test_redraw_needs_one_setup_per_model(tmp_path):
    path, recipe, rows = (
        tmp_path / "listops.csv",
        config.load_recipe("listops"),
        [ModelSpec("smgk", 4), ModelSpec("mgk", 4)],
    )
    results.append(path, [{**result_row("smgk:4", 0, 0.37), "setup": "these"}])
    assert sweep.setups_of(results.read([path]), recipe, rows, "paper") == {rows[0]: "these"}
    results.append(path, [{**result_row("smgk:4", 1, 0.37), "setup": "those"}])
    with pytest.raises(ValueError, match="smgk:4 has results of 2 different settings"):
        sweep.setups_of(results.read([path]), recipe, rows, "paper")


def test_setup_separates_settings_and_data(tmp_path):
    path, recipe, row = tmp_path / "listops.csv", config.load_recipe("listops"), ModelSpec("smgk", 4)
    results.append(path, [{**result_row("smgk:4", 0, 0.37), "setup": "these"}])
    rows = results.read([path])
    assert sweep.is_trained(rows, recipe, row, "paper", 0, "these")
    assert not sweep.is_trained(rows, recipe, row, "paper", 0, "those")
    assert report.write_report(recipe, [row], "paper", [path], tmp_path, {row: "these"})[1][1].startswith("37.00")
    with pytest.raises(ValueError, match="no results"):
        report.write_report(recipe, [row], "paper", [path], tmp_path, {row: "those"})
    predictions.save(
        tmp_path, predictions.PredictionsKey("listops", row, "paper", 0, "test", "these"), np.ones(5, bool)
    )
    assert predictions.read(tmp_path, predictions.PredictionsKey("listops", row, "paper", 0, "test", "those")) is None


def test_number_of_checkpoints_is_passed_to_the_runs():
    def command(**options):
        directories = {"data_dir": Path("data"), "out": Path("out"), "runs": Path("runs")}
        return sweep.train_job(
            config.load_recipe("demo"), ModelSpec("smgk", 2), 0, preset="paper", **directories, **options
        )

    assert "--keep-checkpoints" not in command().command
    arguments = command(keep_checkpoints=3).command
    assert arguments[arguments.index("--keep-checkpoints") + 1] == "3"
