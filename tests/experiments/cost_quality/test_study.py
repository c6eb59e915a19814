"""Plan, statistics, page and runner of the study of cost and quality."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments import statistics
from experiments.cost_quality import page, picture, run, summary
from experiments.cost_quality.plan import PRESET, Arm, load_plan
from mgk.training import predictions, results
from mgk.training.config import ModelSpec, load_recipe

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


def test_a_damaged_plan_is_refused(tmp_path):
    (tmp_path / "plan.yaml").write_text("stages: [")
    with pytest.raises(ValueError, match=r"plan: .*plan.yaml is not valid YAML"):
        load_plan(tmp_path / "plan.yaml")


def test_a_plan_without_stages_is_refused(tmp_path):
    (tmp_path / "plan.yaml").write_text("title: none\n")
    with pytest.raises(ValueError, match=r"plan .*plan.yaml must have the keys stages, questions, judged_split"):
        load_plan(tmp_path / "plan.yaml")


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
    chosen = dataclasses.replace(arm, overrides=("steps=600", "lr=2e-3"))
    rows = [
        result_row(recipe.with_settings(list(chosen.overrides)), arm.model, 0, "best_perplexity", 40.0, split="dev")
    ]
    assert "| 40.00 | yes |" in page.write_page(plan, rows, tmp_path)


def test_an_arm_that_selects_settings_is_not_judged(tmp_path):
    text = (ROOT / "experiments/cost_quality/plan.yaml").read_text().replace("[steps=600, lr=1e-3]", "[]")
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"of study selects settings in one stage of .* and is judged in another"):
        load_plan(tmp_path / "plan.yaml")


def test_evaluations_of_the_study_divide_its_training():
    """Each evaluation writes a checkpoint of 400 MB; the last step is one of them."""
    settings = load_recipe("study").training
    assert (settings.eval_every, settings.steps % settings.eval_every) == (475, 0)


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


@pytest.mark.parametrize(
    ("difference", "half_width", "unit", "words"),
    [
        (0.2, 0.25, "%", "equal within 0.5 %"),
        (-0.3, 0.1, "points", "equal within 0.5 points"),  # although the interval is without 0
        (0.3, 0.25, "%", "worse"),
        (0.3, 0.35, "%", "undecided"),
        (-0.6, 0.1, "%", "better"),
        (-0.6, 0.1, "points", "worse"),
    ],
)
def test_words_of_an_answer(difference, half_width, unit, words):
    question = load_plan().questions[0]
    assert summary.Answer(question, statistics.Interval(difference, half_width), unit).words == words


def test_primary_questions_are_about_the_headline_arms():
    plan = load_plan()
    [headline] = [stage for stage in plan.stages if stage.name == "headline"]
    [more] = [stage for stage in plan.stages if stage.until_half_width is not None]
    assert {arm for question in plan.primary_questions for arm in (question.first, question.second)} == set(more.arms)
    assert (list(more.arms), set(more.arms.values()), more.until_half_width) == (list(headline.arms), {8}, 0.5)
    # Seeds that the rule may add are not planned.
    assert plan.arms[Arm.parse("study", "softmax:8")] == 5


def test_a_rule_for_seeds_needs_a_primary_question_and_first_seeds(tmp_path):
    text = (ROOT / "experiments/cost_quality/plan.yaml").read_text()
    (tmp_path / "plan.yaml").write_text(text.replace("primary: true, ", ""))
    with pytest.raises(ValueError, match="until_half_width, but no question with primary: true"):
        load_plan(tmp_path / "plan.yaml")
    (tmp_path / "plan.yaml").write_text(text.replace('{"softmax:8": 8, ', '{"softmax:9": 8, '))
    with pytest.raises(ValueError, match="softmax:9 of study gets more seeds, but no stage of"):
        load_plan(tmp_path / "plan.yaml")


def test_family_pools_the_deviations_of_its_recipes():
    plan, rows = load_plan(), []
    for name, losses in {"study": (1.0, 1.2), "study-m4": (1.0, 1.6), "study-8": (0.0, 9.0)}.items():
        rows += [
            result_row(load_recipe(name), ModelSpec("smgk", 8), seed, "loss_stride_512", loss)
            for seed, loss in enumerate(losses)
        ]
    summaries = summary.summarize(plan, rows)
    for name in ("study", "study-m4"):
        spread = summary.family_spread(plan, summaries, name)
        assert (spread.degrees, spread.deviation) == (2, pytest.approx(math.sqrt((0.02 + 0.18) / 2)))
    assert summary.family_spread(plan, summaries, "study-8").degrees == 1


def record_headline(folder, seeds, deviation):
    """Store runs of the headline arms; return the rows and the stage that adds seeds."""
    plan, recipe, generator = load_plan(), load_recipe("study"), np.random.default_rng(0)
    [stage] = [stage for stage in plan.stages if stage.until_half_width is not None]
    times = [
        result_row(recipe, ModelSpec(name, 8), 0, "step_ms_alone", ms) for name, ms in (("softmax", 50), ("smgk", 60))
    ]
    rows, text = [dict(row, split="train") for row in times], generator.normal(3.0, 0.3, 8 * 20)
    for arm in stage.arms:
        resolved = arm.resolve(rows)
        setup = f"equal{resolved.training.steps}"
        for seed in range(seeds):
            losses = text + deviation * (seed % 2)
            rows.append(result_row(resolved, arm.model, seed, "loss_stride_512", losses.mean(), setup=setup))
            key = predictions.PredictionsKey("study", arm.model, PRESET, seed, plan.judged_split, setup)
            predictions.save(folder, key, np.repeat(losses, predictions.BLOCK))
    return plan, stage, rows


def test_seeds_are_added_until_the_intervals_are_narrow(tmp_path):
    plan, stage, rows = record_headline(tmp_path, 5, 0.02)
    assert summary.next_seeds(plan, stage, rows, tmp_path) == dict.fromkeys(stage.arms, 6)
    assert f"25 of {sum(plan.arms.values())} planned runs have results." in page.write_page(plan, rows, tmp_path)
    # Incomplete arms come first, and seeds do not help if losses are missing.
    assert summary.next_seeds(plan, stage, rows[:-1], tmp_path) == {}
    next(tmp_path.rglob("smgk-8-*-s4-*.npz")).unlink()
    assert summary.next_seeds(plan, stage, rows, tmp_path) == {}
    plan, stage, rows = record_headline(tmp_path, 5, 0.002)
    assert summary.next_seeds(plan, stage, rows, tmp_path) == {}
    plan, stage, rows = record_headline(tmp_path, 8, 0.2)
    assert summary.next_seeds(plan, stage, rows, tmp_path) == {}
    text = page.write_page(plan, rows, tmp_path)
    assert f"25 of {sum(plan.arms.values())} planned runs have results, and 15 added seeds." in text
    assert "`softmax:8/4`, `smgk:8/4` get one more seed at a time,\nuntil the half-width" in text


def test_missing_losses_are_named(study):
    plan, rows = load_plan(), run.read_results(study)
    assert page.words_of(plan, rows, study, "gaussian:8", "softmax:8") == "equal within 0.5 %"
    for seed in (1, 3):
        [path] = study.glob(f"answers/study/smgk-8-paper-s{seed}-*.npz")
        path.unlink()
    lost = "results/answers lacks the losses per block of text of `smgk:8` (seed 1, 3)"
    assert page.words_of(plan, rows, study, "smgk:8", "softmax:8") == f"undecided ({lost})"
    single = [row for row in rows if row["seed"] == "0"]
    words = page.words_of(plan, single, study, "smgk:8", "softmax:8")
    assert words == "undecided (the error over seeds is unknown with one seed per arm)"


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
            rows.append(result_row(recipe, model, seed, "perplexity_segments", math.exp(3 + 0.1 * (seed - 2))))
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
    assert one.endswith("| equal within 0.5 % |")
    assert answers["Half the key heads with mixture (`smgk:8/4`, `softmax:8`)"].endswith("| – | no runs yet |")
    assert f"{len(plan.questions) - 6} other questions have no runs yet." in text
    assert "\n- sMGK against softmax, half of all heads (`smgk:4`, `softmax:4`)\n" in text
    row = answers["`smgk:8`"].split(" | ")
    assert row[1] == "5"
    assert row[3] == "20.09"  # the geometric mean
    assert row[4:8] == ["55.0", f"{1900 * 55 / 60000:.1f}", "1.0", "16,384 |"]


def test_questions_about_two_recipes_name_them(tmp_path):
    text = page.write_page(load_plan(), [], tmp_path)
    assert "\n- Four Gaussians against two (`smgk:8` of study-m4, `smgk:8` of study)\n" in text
    assert "\n- Two Gaussians against one (`smgk:8`, `gaussian:8`)\n" in text


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
    assert [line[0] for line in picture.picture_data(summary.summarize(plan, rows), "study")] == [
        "softmax:8", "smgk:8", "gaussian:8",
    ]  # fmt: skip


def test_runs_of_two_setups_are_refused(study):
    recipe = load_recipe("study")
    results.append(study / "study.csv", [result_row(recipe, ModelSpec("smgk", 8), 9, "loss_stride_512", 3, setup="x")])
    with pytest.raises(ValueError, match="smgk:8 of study has results of 2 different settings"):
        page.write_page(load_plan(), run.read_results(study), study)


def test_arms_are_hashable_records():
    arm = Arm.parse("study", "smgk:8/4")
    assert dataclasses.replace(arm) == arm
    assert str(arm) == "smgk:8/4"


def test_committed_page_of_the_small_study_follows_from_results():
    plan = load_plan(ROOT / "experiments/cost_quality/plan-small.yaml")
    text = page.write_page(plan, run.read_results(ROOT / "results"), ROOT / "results")
    assert (ROOT / "docs/small-decoder.md").read_text(encoding="utf-8").startswith(text)


def test_every_judged_arm_is_part_of_a_question():
    plan = load_plan()
    compared = {arm for question in plan.questions for arm in (question.first, question.second)}
    others = [(arm.recipe, str(arm)) for arm in plan.arms if arm not in compared and not arm.overrides]
    # softmax:10 gives the step time of softmax:10@time=smgk:8.
    assert others == [("study", "softmax:10"), ("image", "gaussian:4"), ("image-patches", "gaussian:4")]
    assert len({(question.first, question.second) for question in plan.questions}) == len(plan.questions)


def test_an_arm_of_equal_time_has_no_settings_of_its_own(tmp_path):
    text = (ROOT / "experiments/cost_quality/plan.yaml").read_text()
    text = text.replace('arms: {"softmax:8": 1, "smgk:8": 1}', 'arms: {"softmax:8": 1, "smgk:8@time=softmax:8": 1}')
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ValueError, match="smgk:8@time=softmax:8 of study has the training time of another arm"):
        load_plan(tmp_path / "plan.yaml")


@pytest.mark.parametrize(
    ("difference", "half_width", "words"),
    [(2.0, 2.01, "undecided"), (5.0, 4.95, "worse"), (0.3, 0.19, "equal within 0.5 %"), (0.3, 0.21, "worse")],
)
def test_answers_do_not_depend_on_the_order_of_the_arms(difference, half_width, words):
    """Per cent are not symmetric: +5 % of the first is -4.8 % of the second."""
    opposite = {"worse": "better"}
    for sign, expected in ((1, words), (-1, opposite.get(words, words))):
        nats = statistics.Interval(sign * difference, half_width)
        factor = math.exp(nats.difference / 100)
        percent = statistics.Interval(100 * math.expm1(nats.difference / 100), factor * half_width)
        assert summary.Answer(None, percent, "%", "", nats).words == expected
