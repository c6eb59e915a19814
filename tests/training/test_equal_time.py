"""Test rows of a sweep that have the training time of another model."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mgk import tasks
from mgk.cli.commands import app
from mgk.training import report, results
from mgk.training.config import ModelSpec, load_recipe
from mgk.training.equal_time import STEP_TIME, EqualTimeSpec, record_steps, steps_of, with_steps
from mgk.training.trainer import Run

RECIPE = load_recipe("demo")
ROW = EqualTimeSpec.parse("softmax:4/2@time=smgk:2")


def result_row(model: ModelSpec, metric: str, value: float, steps: int = RECIPE.training.steps, setup: str = "a"):
    settings = RECIPE.training
    columns = {"recipe": RECIPE.name, "variant": model.variant, "preset": "paper", "heads": model.heads}
    columns |= {"kv_heads": model.kv_heads or model.heads, "seed": 0, "steps": steps, "lr": settings.lr}
    columns |= {"batch": settings.batch_size, "metric": metric, "value": value, "setup": setup, "split": "test"}
    columns |= {"date": "today", "params": 1, "flops": 1, "n_examples": 10, "peak_mem_mb": 1}
    return {**dict.fromkeys(results.COLUMNS, ""), **{name: str(text) for name, text in columns.items()}}


def timed(softmax: float, smgk: float) -> list[dict[str, str]]:
    return [
        result_row(ModelSpec("softmax", 4, 2), STEP_TIME, softmax),
        result_row(ModelSpec("smgk", 2), STEP_TIME, smgk),
    ]


def test_rows_with_and_without_a_reference():
    assert EqualTimeSpec.parse("smgk:4") == ModelSpec("smgk", 4)
    assert type(EqualTimeSpec.parse("smgk:4")) is ModelSpec
    assert (str(ROW), ROW.model, ROW.time_of) == (
        "softmax:4/2@time=smgk:2",
        ModelSpec("softmax", 4, 2),
        ModelSpec("smgk", 2),
    )
    # The files of a run have the name of the model; its directory is apart from that with the recipe's steps.
    assert ROW.file_name == ROW.model.file_name
    assert ROW.model != ROW
    assert ROW.runs_folder(Path("runs")) == Path("runs/equal-time-smgk-2")


@pytest.mark.parametrize("text", ["softmax:4@steps=3", "softmax:4@time=", "softmax:4@time=x:8", "softmax:4@"])
def test_wrong_rows(text):
    with pytest.raises(ValueError, match=r"^--rows"):
        EqualTimeSpec.parse(text, "--rows")


def test_steps_follow_from_the_step_times_and_stay_once_recorded(tmp_path):
    file, steps = tmp_path / "demo.csv", RECIPE.training.steps
    assert steps_of(timed(2, 3)[:1], RECIPE, ROW, "paper", {}) is None
    results.append(file, timed(2, 3))
    rows = results.read([file])
    assert steps_of(rows, RECIPE, ROW, "paper", {}) == round(1.5 * steps)
    assert steps_of(rows, RECIPE, ROW, "paper", {ROW.model: "other"}) is None
    record_steps(file, rows, RECIPE, ROW, "paper", "other", 1)
    assert results.read([file]) == rows  # no results of this setup
    record_steps(file, rows, RECIPE, ROW, "paper", "a", round(1.5 * steps))
    # A later timing changes nothing, and the number is recorded once.
    results.append(file, timed(2, 5))
    rows = results.read([file])
    assert steps_of(rows, RECIPE, ROW, "paper", {}) == round(1.5 * steps)
    record_steps(file, rows, RECIPE, ROW, "paper", "a", 1)
    assert results.read([file]) == rows
    # Another reference has another number.
    other = EqualTimeSpec.parse("softmax:4/2@time=mgk:2")
    assert steps_of(rows, RECIPE, other, "paper", {}) is None


def test_steps_follow_from_times_of_one_commit_on_one_device():
    def measured(softmax, smgk, **origin):
        return [{**row, **origin} for row in timed(softmax, smgk)]

    def ratio(rows):
        steps = steps_of(rows, RECIPE, ROW, "paper", {})
        return None if steps is None else steps / RECIPE.training.steps

    first = measured(2, 3, gpu="H200", commit="a", date="2026-01-01")
    later = measured(4, 8, gpu="A100", commit="b", date="2026-01-02")
    assert ratio([*first, *later]) == 2
    same_day = measured(2, 5, gpu="H200", commit="c", date="2026-01-01")
    assert ratio([*first, *same_day]) == 2.5
    # smgk alone was timed once more.
    assert ratio([*first, later[1]]) == 1.5
    assert ratio([first[0], later[1]]) is None


def test_table_has_the_steps_of_each_row(tmp_path):
    longer = with_steps(RECIPE, 2 * RECIPE.training.steps)
    rows = [
        result_row(ROW.model, "accuracy", 0.3),
        result_row(ROW.model, "accuracy", 0.4, longer.training.steps, "b"),
        *timed(2, 4),
    ]
    results.append(tmp_path / "demo.csv", rows)
    setups = {ROW.model: "a", ROW: "b"}
    models = [ROW.model, ROW]
    table = report.write_report(RECIPE, models, "paper", [tmp_path / "demo.csv"], tmp_path, setups, {ROW: longer})
    cells = {line[0]: dict(zip(table[0], line, strict=True)) for line in table[1:]}
    assert cells["softmax:4/2"]["steps"] == f"{RECIPE.training.steps:,}"
    assert cells[str(ROW)]["steps"] == f"{longer.training.steps:,}"
    assert {line["step, ms"] for line in cells.values()} == {"2.0"}
    assert (tmp_path / "demo.md").read_text().count("@time") == 2
    # Without times the row is not in the table.
    assert len(report.write_report(RECIPE, models, "paper", [tmp_path / "demo.csv"], tmp_path, setups)) == 2


def test_compare_trains_the_row_with_the_steps_of_the_first_timing(tmp_path, monkeypatch):
    """Give mgk compare the results of two timed models; it starts only the row with the time of one of them."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog sat on the log ; " * 200)
    recipe, jobs = load_recipe("bytes"), []
    tasks.get_task("bytes").prepare(tmp_path, 1, lambda *_: None)
    file = tmp_path / "out" / "bytes.csv"
    models = ModelSpec("softmax", 2), ModelSpec("smgk", 1)
    settings = {"recipe": "bytes", "steps": recipe.training.steps, "lr": recipe.training.lr, "split": "test"}
    settings |= {"batch": recipe.training.batch_size}

    def write(*times: float) -> None:
        for model, time in zip(models, times, strict=True):
            setup = Run(recipe, model, "paper", 0, tmp_path, tmp_path).setup(tasks.get_task("bytes"))
            values = {"step_ms_alone": time, "peak_mem_mb_alone": 1, "predict_ms_alone": 1, "perplexity_stride_64": 3}
            rows = [result_row(model, metric, value, setup=setup) | settings for metric, value in values.items()]
            results.append(file, rows)

    def run_jobs(pending, *_):
        jobs.append(pending)
        return SimpleNamespace(failed=[], unfinished=pending)

    monkeypatch.setattr("mgk.training.cluster.run_jobs", run_jobs)
    options = ["--data-dir", str(tmp_path), "--out", str(file.parent), "--runs", str(tmp_path / "runs")]
    command = ["compare", "bytes", "--rows", "softmax:2,smgk:1,softmax:2@time=smgk:1", *options]
    for times in ((2, 3), (2, 5)):  # the second timing changes nothing
        write(*times)
        result = CliRunner().invoke(app, command)
        assert result.exception is None, result.output
        first, [job] = jobs[-2:]
        assert not first
        assert f"steps={round(1.5 * recipe.training.steps)}" in job.command
        assert job.directory.parts[-3:] == ("equal-time-smgk-1", "bytes", "softmax-2-paper-s0")
    refused = CliRunner().invoke(app, [*command[:3], "smgk:2@time=smgk:1", *options, "--no-alone"])
    assert "--no-alone leaves out the step times that smgk:2@time=smgk:1 needs" in str(refused.exception)
    refused = CliRunner().invoke(app, [*command, "--cluster", "slurm"])
    assert "which --cluster does not measure" in str(refused.exception)
