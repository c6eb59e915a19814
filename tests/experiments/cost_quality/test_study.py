"""Plan, statistics, page and runner of the study of cost and quality."""

import dataclasses
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from experiments import statistics
from experiments.cost_quality import page, run, summary, timing
from experiments.cost_quality.plan import PRESET, Arm, Plan, Stage, load_plan
from mgk import tasks
from mgk.models.run_directory import RunDirectory
from mgk.training import predictions, results
from mgk.training.config import ModelSpec, load_recipe
from mgk.training.equal_time import STEPS
from mgk.training.job_queue import JobQueue
from mgk.training.sweep import SOLO_TRAINING_METRICS, is_timed

ROOT = Path(__file__).parents[3]


def result_row(recipe, model, seed, metric, value, split="wikitext-103-valid", setup="abc", **changes):
    settings = recipe.training
    columns = {"recipe": recipe.name, "variant": model.variant, "preset": PRESET, "heads": str(model.heads)}
    columns |= {"kv_heads": str(model.kv_heads or model.heads), "seed": str(seed), "steps": str(settings.steps)}
    columns |= {"lr": str(settings.lr), "batch": str(settings.batch_size), "split": split, "metric": metric}
    columns |= {"value": str(value), "params": "1000000", "setup": setup, "date": "2026-01-01", "commit": "c"}
    return {**dict.fromkeys(results.COLUMNS, ""), **columns, **changes}


def test_plan_names_known_recipes_and_every_question_has_its_arms():
    plan = load_plan()
    recipes = {arm.recipe for arm in plan.arms}
    assert recipes == {"study", "study-8", "study-m4", "image", "image-patches"}
    assert plan.arms[Arm.parse("study", "softmax:8")] == 5
    assert plan.arms[Arm.parse("study", "smgk:8", ("steps=600", "lr=2e-3"))] == 1
    for question in plan.questions:
        assert question.first in plan.arms
        assert question.second in plan.arms


def test_small_plan_has_a_title_and_a_scope():
    plan = load_plan(ROOT / "experiments/cost_quality/plan-small.yaml")
    assert {arm.recipe for arm in plan.arms} == {"study-small"}
    text = page.write_page(plan, [], ROOT)
    assert text.startswith("# Mixture keys in a small decoder\n\nA decoder with 4 layers")
    assert "0 of 10 planned runs have results" in text


@pytest.mark.parametrize("text", ["softmax:8@steps=4", "softmax", "softmax:8@time=x:8"])
def test_wrong_arms(text):
    with pytest.raises(ValueError, match="arm"):
        Arm.parse("study", text)


def test_a_question_without_runs_is_refused(tmp_path):
    text = (
        (ROOT / "experiments/cost_quality/plan.yaml")
        .read_text()
        .replace('"gaussian:8": 3, "gaussian:8/4"', '"gaussian:8/4"')
    )
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"no stage of .* trains gaussian:8 of study"):
        load_plan(tmp_path / "plan.yaml")


def test_a_time_without_a_timed_model_is_refused(tmp_path):
    text = (ROOT / "experiments/cost_quality/plan.yaml").read_text().replace('"softmax:10": 3, ', "")
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ValueError, match="softmax:10@time=smgk:8 of study needs the step time of softmax:10"):
        load_plan(tmp_path / "plan.yaml")


def test_a_plan_without_stages_is_refused(tmp_path):
    (tmp_path / "plan.yaml").write_text("title: none\n")
    with pytest.raises(ValueError, match=r"plan .*plan.yaml must have the keys stages, questions, judged_split"):
        load_plan(tmp_path / "plan.yaml")


def test_arm_without_step_times_ends_the_run(tmp_path, monkeypatch):
    """An arm whose step times could not be measured is reported, and the command ends."""
    monkeypatch.setattr(type(tasks.TASKS["listops"]), "prepare", lambda *_: None)
    queues = []

    def execute_jobs(jobs, *_):
        queues.append(JobQueue([]))
        assert len(queues) < 10
        return queues[-1]

    monkeypatch.setattr(run, "execute_jobs", execute_jobs)
    monkeypatch.setattr(run, "setup_of", lambda *_: "made-up")
    monkeypatch.setattr(run.commands, "run_module", lambda *_: 0)
    plan = Plan((Stage("one", {Arm.parse("listops", "softmax:8@time=smgk:4"): 1}),), (), "test")
    failed = run.run(plan, tmp_path, tmp_path / "runs", tmp_path, None, None, lambda *_: None)
    assert failed == ["softmax:8@time=smgk:4 of listops (the step time of smgk:4 is missing)"]


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """Replace preparation, timing and training; return a function that runs a plan, and the order of the events."""
    events = []
    monkeypatch.setattr(type(tasks.TASKS["listops"]), "prepare", lambda *_: None)
    monkeypatch.setattr(run, "setup_of", lambda *_: "made-up")

    def run_module(module, arguments, cluster):
        assert (module, arguments[0]) == (run.TIMING, "listops")
        for number, text in enumerate(arguments[2].split(",")):
            events.append(f"time {text}")
            for metric in SOLO_TRAINING_METRICS:
                model, value = ModelSpec.parse(text), 4 + number
                row = result_row(load_recipe("listops"), model, 0, metric, value, split="train", setup="made-up")
                results.append(tmp_path / "listops.csv", [row])
        return 0

    def execute_jobs(jobs, *_):
        events.extend(f"{job.row} {job.seed}" + " at equal time" * ("equal-time" in str(job.directory)) for job in jobs)
        return JobQueue(jobs if runner.is_interrupted else [])

    def runner(stages, minutes=None, **options):
        plan = Plan(tuple(stages), (), "test")
        failed = run.run(plan, tmp_path, tmp_path / "runs", tmp_path, None, minutes, lambda *_: None, **options)
        return failed, events

    runner.is_interrupted = False
    monkeypatch.setattr(run.commands, "run_module", run_module)
    monkeypatch.setattr(run, "execute_jobs", execute_jobs)
    return runner


def listops_stage(name, **seeds):
    return Stage(name, {Arm.parse("listops", text): count for text, count in seeds.items()})


def test_stages_are_timed_first_and_run_seed_by_seed(runner):
    first = listops_stage("first", **{"softmax:8": 2, "smgk:4": 2, "softmax:8@time=smgk:4": 2})
    second = listops_stage("second", **{"mgk:4": 1, "softmax:8": 1})
    assert runner([first, second]) == (
        [],
        [
            "time softmax:8", "time smgk:4",
            "softmax:8 0", "smgk:4 0", "softmax:8 0 at equal time",
            "softmax:8 1", "smgk:4 1", "softmax:8 1 at equal time",
            "time mgk:4", "mgk:4 0", "softmax:8 0",
        ],
    )  # fmt: skip


def test_arms_are_timed_although_the_time_limit_interrupts_their_training(runner):
    runner.is_interrupted = True
    stages = [listops_stage("first", **{"softmax:8": 1}), listops_stage("second", **{"mgk:4": 1})]
    assert runner(stages, minutes=5) == ([], ["time softmax:8", "softmax:8 0"])


def test_step_times_of_other_settings_give_no_number_of_steps(runner, tmp_path):
    stage = listops_stage("first", **{"softmax:8": 0, "smgk:4": 0, "softmax:8@time=smgk:4": 1})
    recipe = load_recipe("listops")
    for name, value in (("softmax:8", 1), ("smgk:4", 3)):
        row = result_row(recipe, ModelSpec.parse(name), 0, "step_ms_alone", value, split="train", setup="other")
        results.append(tmp_path / "listops.csv", [{**row, "date": "2026-02-01"}])
    runner([stage])
    recorded = [row["value"] for row in results.read([tmp_path / "listops.csv"]) if row["metric"] == STEPS]
    assert recorded == [str(round(recipe.training.steps * 5 / 4))]


def test_runs_that_select_settings_are_judged_on_their_own_split(tmp_path):
    plan, recipe = load_plan(), load_recipe("study")
    arm = Arm.parse("study", "softmax:8", ("steps=600", "lr=5e-4"))
    assert plan.selection_split(arm) == "dev"
    assert plan.selection_split(Arm.parse("study", "softmax:8")) is None
    changed = recipe.with_settings(list(arm.overrides))
    rows = [
        result_row(changed, arm.model, 0, "best_perplexity", 40.0, split="dev"),
        result_row(changed, arm.model, 0, "loss_stride_512", 1.0),
    ]
    [(_, found)] = summary.summarize(plan, rows).items()
    assert found.quality == pytest.approx(40)
    text = page.write_page(plan, rows, tmp_path)
    assert "| study | steps=600, lr=5e-4 | `softmax:8` | `dev` | 1 | 40.00 |  |" in text
    assert "2.72" not in text  # exp(1), on the judged split
    assert "| `softmax:8` (steps=600" not in text
    chosen = dataclasses.replace(arm, overrides=("steps=600", "lr=1e-3"))
    rows = [
        result_row(recipe.with_settings(list(chosen.overrides)), arm.model, 0, "best_perplexity", 40.0, split="dev")
    ]
    assert "| 40.00 | yes |" in page.evidence_section(plan, rows, tmp_path, "")


def test_an_arm_that_selects_settings_is_not_judged(tmp_path):
    text = (ROOT / "experiments/cost_quality/plan.yaml").read_text().replace("[steps=600, lr=1e-3]", "[]")
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"of study selects settings in one stage of .* and is judged in another"):
        load_plan(tmp_path / "plan.yaml")


def test_time_matched_steps():
    recipe, softmax, smgk = load_recipe("study"), ModelSpec("softmax", 8), ModelSpec("smgk", 8)
    arm = Arm.parse("study", "softmax:8@time=smgk:8")
    rows = [result_row(recipe, softmax, 0, "step_ms_alone", 50.0, split="train")]
    assert arm.resolve(rows) is None
    rows.append(result_row(recipe, smgk, 0, "step_ms_alone", 60.0, split="train"))
    resolved = arm.resolve(rows)
    assert resolved.training.steps == round(recipe.training.steps * 1.2) == 2280
    assert arm.command_overrides(resolved) == ("steps=2280",)
    assert arm.runs_folder(Path("runs")) == Path("runs/equal-time-smgk-8")
    assert Arm.parse("study", "smgk:8", ("lr=2e-3",)).runs_folder(Path("runs")) == Path("runs/lr-2e-3")


def test_pooled_spread_of_two_arms_is_that_of_the_t_test():
    first, second = [1.0, 1.4, 0.9], [2.0, 2.3, 2.2, 1.7]
    spread = statistics.pooled_spread([first, second, [5.0]])
    assert spread.degrees == 5
    # Without an error over text the interval is that of Student's t test with pooled variance.
    blocks = np.zeros(10)
    interval = statistics.compare(first, second, spread, (blocks, blocks))
    expected = stats.ttest_ind(first, second).confidence_interval()
    assert interval.difference - interval.half_width == pytest.approx(expected.low)
    assert interval.difference + interval.half_width == pytest.approx(expected.high)
    assert statistics.pooled_spread([[1.0], [2.0]]) is None


def test_interval_without_seed_variance_is_that_of_the_paired_t_test():
    generator = np.random.default_rng(0)
    first, second = generator.normal(0.1, 1, 30), generator.normal(0, 1, 30)
    spread = statistics.Spread(0.0, 4)
    interval = statistics.compare([first.mean()], [second.mean()], spread, (first, second))
    expected = stats.ttest_rel(first, second).confidence_interval()
    assert interval.difference - interval.half_width == pytest.approx(expected.low)


def test_intervals_cover_the_true_difference():
    generator, covered, trials = np.random.default_rng(1), 0, 2000
    for _ in range(trials):
        text = generator.normal(0, 0.5, (2, 40))
        runs = [generator.normal(0, 0.1, n) for n in (3, 5, 3)]
        first, second = runs[0] + text[0].mean(), runs[1] + text[1].mean()
        interval = statistics.compare(first, second, statistics.pooled_spread(runs), (text[0], text[1]))
        covered += not interval.excludes_zero
    # Three standard errors of a share of 0.95 in 2,000 trials are 0.015.
    assert covered / trials == pytest.approx(0.95, abs=0.015)


def test_unknown_errors_give_no_interval():
    blocks = np.arange(4.0)
    assert math.isnan(statistics.compare([1.0], [2.0], None, (blocks, blocks)).half_width)
    spread = statistics.Spread(1.0, 2)
    assert math.isnan(statistics.compare([1.0], [2.0], spread, (blocks, None)).half_width)
    assert math.isnan(statistics.compare([1.0], [2.0], spread, (blocks, blocks[:3])).half_width)


def test_cache_bytes():
    recipe = load_recipe("study")
    expected = {"softmax:8": 2 * 8, "smgk:8": 2 * 8, "mgk:8": 3 * 8, "softmax:8/4": 8, "smgk:8/1/8": 9}
    expected |= {"diff:8/4": 8, "mla:8/4": 8, "smgk-query-shifts:8/2/8": 10}
    for name, heads in expected.items():
        assert summary.cache_bytes_per_token(recipe, ModelSpec.parse(name)) == 8 * heads * 64 * 2, name


@pytest.fixture
def study(tmp_path):
    """Results of two arms whose losses differ by 0.02 nats, and of a third with one seed."""
    recipe, generator = load_recipe("study"), np.random.default_rng(0)
    text = generator.normal(3.0, 0.3, 8 * 20)
    rows = []
    arms = {"softmax:8": (0.0, 5), "smgk:8": (-0.02, 5), "gaussian:8": (0.0, 1)}
    for name, (offset, seeds) in arms.items():
        model = ModelSpec.parse(name)
        for seed in range(seeds):
            losses = text + offset + generator.normal(0, 0.002) + generator.normal(0, 0.001, len(text))
            rows.append(result_row(recipe, model, seed, "loss_stride_512", losses.mean()))
            key = predictions.PredictionsKey("study", model, PRESET, seed, "wikitext-103-valid", "abc")
            predictions.save(tmp_path, key, np.repeat(losses, predictions.BLOCK))
        rows.append(result_row(recipe, model, 0, "step_ms_alone", 50 if name == "softmax:8" else 55, split="train"))
    results.append(tmp_path / "study.csv", rows)
    return tmp_path


def test_page_answers_the_questions(study):
    plan, rows = load_plan(), run.read_results(study)
    text = page.write_page(plan, rows, study)
    assert text.startswith("# Cost and quality of mixture keys\n\n")
    assert f"11 of {sum(plan.arms.values())} planned runs have results" in text
    answers = {line.split(" | ")[0].strip("| "): line for line in text.split("\n") if line.startswith("|")}
    equal = answers["sMGK against softmax, equal heads (`smgk:8`, `softmax:8`)"]
    assert equal.endswith("| better |")
    assert "−1.9" in equal or "−2.0" in equal
    one = answers["One Gaussian against softmax (`gaussian:8`, `softmax:8`)"]
    assert one.endswith("| undecided |")
    assert answers["sMGK against softmax, half of all heads (`smgk:4`, `softmax:4`)"].endswith("| no runs yet |")
    row = answers["`smgk:8`"].split(" | ")
    assert row[1] == "5"
    assert row[3:7] == ["55.0", f"{1900 * 55 / 60000:.1f}", "1.0", "16,384 |"]


def test_section_of_the_page_of_evidence(study):
    plan = load_plan()
    empty = page.evidence_section(plan, [], study, "figures/study.png")
    assert empty.startswith(f"**The study has no results yet**: 0 of {sum(plan.arms.values())} planned runs")
    assert "![" not in empty
    rows = run.read_results(study)
    text = page.evidence_section(plan, rows, study, "figures/study.png")
    assert text.startswith(f"11 of {sum(plan.arms.values())} planned runs have results.")
    assert "](figures/study.png)" in text
    assert "| `smgk:8` | 5 |" in text
    assert page.words_of(plan, rows, study, "smgk:8", "softmax:8") == "better"
    assert page.words_of(plan, rows, study, "smgk:8", "softmax:8@time=smgk:8") == ""
    assert [line[0] for line in page.picture_data(summary.summarize(plan, rows), "study")] == [
        "softmax:8", "smgk:8", "gaussian:8",
    ]  # fmt: skip


def test_runs_of_two_setups_are_refused(study):
    recipe = load_recipe("study")
    results.append(study / "study.csv", [result_row(recipe, ModelSpec("smgk", 8), 9, "loss_stride_512", 3, setup="x")])
    with pytest.raises(ValueError, match="smgk:8 of study has results of 2 different settings"):
        page.write_page(load_plan(), run.read_results(study), study)


def test_pareto_front():
    points = [(3.0, 1.0), (1.0, 5.0), (2.0, 2.0), (2.5, 3.0), (4.0, 1.0)]
    assert page.pareto_front(points) == [(1.0, 5.0), (2.0, 2.0), (3.0, 1.0)]


def test_picture_shows_every_arm(study):
    summaries = summary.summarize(load_plan(), run.read_results(study))
    figure = page.draw(summaries, "study")
    for axis in figure.axes:
        assert {text.get_text() for text in axis.texts} == {"softmax:8", "smgk:8", "gaussian:8"}
    assert page.plotted_recipe(summaries) == "study"
    # Two arms are too few: neither page has the picture.
    two = [row for row in run.read_results(study) if row["variant"] != "gaussian"]
    assert page.plotted_recipe(summary.summarize(load_plan(), two)) is None
    assert "](figures/study.png)" not in page.evidence_section(load_plan(), two, study, "figures/study.png")


PLAN = """
judged_split: test
stages:
  - name: changed settings
    recipe: tiny.yaml
    sets: [[lr=1e-2]]
    arms: {"softmax:1": 1}
  - name: equal time
    recipe: tiny.yaml
    arms: {"softmax:1": 1, "smgk:1": 1, "softmax:1@time=smgk:1": 1}
questions:
  - {title: "equal time", recipe: tiny.yaml, first: "smgk:1", second: "softmax:1@time=smgk:1"}
"""
RECIPE = """
extends: bytes
title: tiny
model: {num_layers: 1, embed_dim: 8}
training: {steps: 60, warmup: 1, batch_size: 2, eval_every: 30, eval_batch_size: 8, stride: 256}
"""


@pytest.mark.slow
def test_command_runs_the_plan_and_continues_a_killed_run(tmp_path):
    """Kill the command in the run that waits for the step times of the others, then start it twice."""
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog sat on the log ; " * 200)
    command = [sys.executable, "-m", "experiments.cost_quality", "--plan", "plan.yaml", "--run", "--jobs", "2"]
    command += ["--data-dir", str(tmp_path), "--results", "out", "--page", "page.md", "--runs", "runs"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    run_directory = tmp_path / "runs/equal-time-smgk-1/tiny/softmax-1-paper-s0"
    while process.poll() is None and not RunDirectory(run_directory).metrics.exists():
        time.sleep(0.05)
    process.kill()
    assert process.communicate()[1].count("FAILED") == 0
    rows = results.read([tmp_path / "out/tiny.csv"])
    [steps] = [row["value"] for row in rows if row["metric"] == STEPS]
    assert not any(row["steps"] == steps and row["split"] == "test" for row in rows)
    for _ in range(2):  # the second start has nothing to do
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        rows = results.read([tmp_path / "out/tiny.csv"])
        keys = [(row["variant"], row["lr"], row["steps"], row["split"], row["metric"]) for row in rows]
        assert sorted(set(keys)) == sorted(keys)
        tested = {key[:3] for key in keys if key[3] == "test"}
        assert len(tested) == 4
        assert ("softmax", "0.001", steps) in tested
    assert re.search(r"step [1-9]\d*/\d+  starting", RunDirectory(run_directory).log.read_text())
    text = (tmp_path / "page.md").read_text()
    assert "`softmax:1` (lr=1e-2)" in text
    assert "| `softmax:1@time=smgk:1` | 1 |" in text


def test_arms_are_hashable_records():
    arm = Arm.parse("study", "smgk:8/4")
    assert dataclasses.replace(arm) == arm
    assert str(arm) == "smgk:8/4"


def test_committed_page_of_the_small_study_follows_from_results():
    plan = load_plan(ROOT / "experiments/cost_quality/plan-small.yaml")
    text = page.write_page(plan, run.read_results(ROOT / "results"), ROOT / "results")
    assert (ROOT / "docs/small-decoder.md").read_text(encoding="utf-8").startswith(text)


def test_command_times_models_that_were_not_trained(tmp_path):
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog sat on the log ; " * 200)
    tasks.get_task("bytes").prepare(tmp_path)
    recipe, out = str(tmp_path / "tiny.yaml"), tmp_path / "out"
    options = ["--rows", "softmax:1,smgk:1", "--results", str(out), "--data-dir", str(tmp_path)]
    result = CliRunner().invoke(timing.app, [recipe, *options])
    assert result.exception is None, result.output
    rows = results.read([out / "tiny.csv"])
    for name in ("softmax:1", "smgk:1"):
        arm = Arm.parse(recipe, name)
        assert is_timed(rows, load_recipe(recipe), arm.model, PRESET, run.setup_of(arm, load_recipe(recipe), tmp_path))
    late = CliRunner().invoke(timing.app, [recipe, *options, "--minutes", "0"])
    assert "no time left to time softmax:1, smgk:1" in late.output
    assert results.read([out / "tiny.csv"]) == rows
