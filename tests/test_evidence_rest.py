"""What the evidence lacks is run: trainings, then times, then analyses, each once, and nothing that is there."""

from types import SimpleNamespace

import pytest
from test_evidence import record
from typer.testing import CliRunner

from mgk import commands, recipes, results
from mgk.compare import COSTS
from mgk.evidence import plan, rest
from mgk.recipes import Row

BASELINE, MIXTURE = Row("softmax", 8), Row("smgk", 4)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Two models of ListOps and their analysis are planned; a command does what it says, except rows in `broken`."""
    monkeypatch.chdir(tmp_path)
    two = {BASELINE: 2, MIXTURE: 1}
    monkeypatch.setattr(plan, "EXPERIMENTS", (plan.Experiment(1, "two", "listops", two),))
    monkeypatch.setattr(plan, "ANALYSES", (plan.Looked("listops", "", (BASELINE, MIXTURE), "test"),))
    seen = SimpleNamespace(commands=[], broken=set(), results=tmp_path / "results", runs=tmp_path / "runs")
    seen.results.mkdir()

    def run(arguments):
        given = arguments[3:]
        seen.commands.append(given)
        if given[0] == "compare":
            for row in given[given.index("--rows") + 1].split(","):
                if row in seen.broken:
                    return SimpleNamespace(returncode=1)
                train(row, given)
        else:
            (seen.results / "listops-analysis").mkdir()
            (seen.results / "listops-analysis" / "ranks.csv").touch()
        return SimpleNamespace(returncode=0)

    def train(row, given):
        path, recipe = seen.results / "listops.csv", recipes.load("listops")
        if "--alone" in given:
            own = next(each for each in results.read([path]) if each["variant"] in row)
            results.append(path, [{**own, "metric": metric, "value": 1} for metric in COSTS])
            return
        known = results.read([path])
        for seed in range(int(given[given.index("--seeds") + 1])):
            if not plan.finished(known, recipe, Row.parse(row), "paper", seed):
                record(seen.results, "listops", row, seed, 0.36, left=500)
                (seen.runs / "listops" / f"{Row.parse(row).file_name}-paper-s{seed}" / "best").mkdir(parents=True)

    monkeypatch.setattr(rest.subprocess, "run", run)
    return seen


def kinds(asked):
    """Without where things lie."""
    return [each[: each.index("--out")] if each[0] == "compare" else each[:1] for each in asked.commands]


def test_trainings_come_first_then_times_then_analyses(asked):
    record(asked.results, "listops", "softmax:8", 0, 0.36, left=500)
    assert rest.run(asked.results, asked.runs, None, 3, None) == []
    assert kinds(asked) == [
        ["compare", "listops", "--rows", "smgk:4", "--seeds", "1", "--no-alone"],
        ["compare", "listops", "--rows", "softmax:8", "--seeds", "2", "--no-alone"],
        ["compare", "listops", "--rows", "softmax:8,smgk:4", "--alone"],
        ["analyze"],
    ]
    assert all(each[-2:] == ["--jobs", "3"] for each in asked.commands[:3])
    # Of softmax:8 the seed that was trained here: the other's model is elsewhere.
    assert asked.commands[3][1:3] == [
        str(asked.runs / "listops" / name) for name in ("softmax-8-paper-s1", "smgk-4-paper-s0")
    ]
    asked.commands.clear()
    assert rest.run(asked.results, asked.runs, None, 3, None) == []
    assert asked.commands == []


def test_what_fails_is_tried_once_and_told_when_the_page_is_made(asked, monkeypatch):
    asked.broken.add("smgk:4")
    made = SimpleNamespace(parts={"rules": "made"}, pictures=[], left_out=[])
    monkeypatch.setattr("mgk.evidence.page.gather", lambda folder: made)
    result = CliRunner().invoke(commands.app, ["evidence", "--run", "--page", "page.md"])
    assert "1 commands failed: mgk compare listops --rows smgk:4 --seeds 1" in str(result.exception)
    assert "made" in (asked.results.parent / "page.md").read_text()
    assert [each[3] for each in kinds(asked)] == ["smgk:4", "softmax:8", "softmax:8"]
    assert "needs trained models of softmax:8, smgk:4" in result.stderr


def test_time_that_is_over_leaves_the_rest(asked, capsys):
    rest.run(asked.results, asked.runs, asked.runs, None, 1e-9)
    assert asked.commands == []
    assert "minutes are over" in capsys.readouterr().err
    rest.run(asked.results, asked.runs, asked.runs, None, 5)
    assert asked.commands[0][-4:] == ["--data-dir", str(asked.runs), "--minutes", "5.00"]
