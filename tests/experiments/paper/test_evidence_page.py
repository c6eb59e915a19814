"""Test the texts of the pages of evidence on made-up results."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from experiments.paper import __main__, plan
from experiments.paper.claims import cost as costs
from experiments.paper.claims import heads, plateau, quality
from experiments.paper.comparisons import compare
from experiments.paper.evidence_page import gather
from experiments.paper.recipe_results import read_recipe
from experiments.paper.verdicts import FAILS, HOLDS, MISSING, OPEN
from mgk.training import config, predictions, results
from mgk.training.config import ModelSpec
from mgk.training.predictions import PredictionsKey

EXAMPLES = 400


def record(
    folder: Path, recipe: str, row: str, seed: int, share: float, plateau_step: int | None = None, **more
) -> None:
    """Record a run with a share of the examples correct: the first ones, so that runs differ on few examples."""
    settings, model = config.load_recipe(recipe).training, ModelSpec.parse(row)
    common = {
        "recipe": recipe, "variant": model.variant, "preset": "paper", "heads": model.heads,
        "kv_heads": model.kv_heads or model.heads, "seed": seed, "steps": settings.steps, "lr": settings.lr,
        "batch": settings.batch_size, "split": "test", "n_examples": EXAMPLES, "params": 1000, "flops": 10**9,
        "gpu": "a GPU", "torch": "2", "date": "today", "setup": "made-up",
    } | more  # fmt: skip
    rows = [{**common, "metric": "accuracy", "value": share}, {**common, "metric": "majority_share", "value": 0.1}]
    if plateau_step is not None:
        rows.append({**common, "metric": "plateau_left_at_step", "value": plateau_step})
    results.append(folder / f"{recipe}.csv", rows)
    key = PredictionsKey(recipe, model, "paper", seed, "test", common["setup"])
    predictions.save(folder, key, np.arange(EXAMPLES) < share * EXAMPLES)


def load(folder: Path, recipe: str) -> quality.ExperimentResults:
    rows = results.read(sorted(folder.glob("*.csv")))
    experiment = next(item for item in plan.EXPERIMENTS if item.recipe == recipe)
    return quality.ExperimentResults(experiment, read_recipe(rows, recipe, folder))


def test_seeds_and_examples_both_widen_the_interval(tmp_path):
    for seed, (mixture, baseline) in enumerate([(0.35, 0.36), (0.37, 0.38)]):
        record(tmp_path, "listops", "smgk:4", seed, mixture, plateau_step=500)
        record(tmp_path, "listops", "softmax:8", seed, baseline, plateau_step=500)
    result = compare(load(tmp_path, "listops").results, ModelSpec("smgk", 4), ModelSpec("softmax", 8))
    assert result.difference == pytest.approx(-1.0)
    assert result.over_seeds == pytest.approx(stats.t.ppf(0.975, 2) * 2**0.5)  # two groups of two, a deviation of √2
    # 8 of 400 examples differ by one half.
    differences = np.r_[np.full(8, -0.5), np.zeros(EXAMPLES - 8)]
    over_examples = 100 * differences.std(ddof=1) / 20
    assert result.over_examples == pytest.approx(stats.t.ppf(0.975, EXAMPLES - 1) * over_examples)
    # Welch and Satterthwaite's degrees of freedom of both errors.
    total = 2 + over_examples**2
    degrees = total**2 / (2**2 / 2 + over_examples**4 / (EXAMPLES - 1))
    assert result.half_width == pytest.approx(stats.t.ppf(0.975, degrees) * total**0.5)
    assert result.low == pytest.approx(-1 - result.half_width)


def test_runs_on_the_plateau_are_excluded(tmp_path):
    for seed in range(2):
        record(tmp_path, "listops", "smgk:4", seed, 0.36 + 0.01 * seed, plateau_step=500)
        record(tmp_path, "listops", "softmax:8", seed, (0.2, 0.37)[seed], plateau_step=2250 * seed)
    item = load(tmp_path, "listops")
    result = compare(item.results, ModelSpec("smgk", 4), ModelSpec("softmax", 8))
    assert result.difference == pytest.approx(-0.5)
    assert result.counts == (2, 1)
    assert result.over_seeds == pytest.approx(stats.t.ppf(0.975, 1) * 0.5**0.5 * 1.5**0.5)  # from the runs of smgk:4
    line = next(
        line for line in quality.table(item, quality.judge_half(item)).splitlines() if "smgk:4 − softmax:8" in line
    )
    assert "2 of 2 − 1 of 2" in line
    # The comparison has selected runs by their result.
    assert line.endswith("| **undecided** (softmax:8 learnt the task in 1 of 2 runs) |")


def test_all_runs_count_if_one_model_never_learns(tmp_path):
    for seed in range(2):
        record(tmp_path, "listops", "smgk:4", seed, 0.19 + 0.01 * seed, plateau_step=0)
        record(tmp_path, "listops", "softmax:8", seed, 0.36 + 0.01 * seed, plateau_step=500)
    judged = quality.judge_half(load(tmp_path, "listops"))
    assert next(item.verdict for item in judged if str(item) == "smgk:4 − softmax:8") == FAILS


@pytest.mark.parametrize("learnt", [[True, False], [True]], ids=["one of two", "one of one"])
def test_occasional_learning_is_undecided(tmp_path, learnt):
    for seed, has_learnt in enumerate(learnt):
        record(tmp_path, "listops", "softmax:8", seed, 0.37 if has_learnt else 0.19, plateau_step=4000 * has_learnt)
    for seed in range(2):
        record(tmp_path, "listops", "smgk:4", seed, 0.19, plateau_step=0)
    judged = next(item for item in quality.judge_half(load(tmp_path, "listops")) if str(item) == "smgk:4 − softmax:8")
    assert (judged.verdict, f"the other in 1 of {len(learnt)}" in judged.remark) == (OPEN, True)
    # Neither a mean over runs in both states nor a single run that learnt has a known deviation.
    assert judged.difference.over_seeds is None


@pytest.mark.parametrize(
    ("stuck", "plateau_steps"), [(1, (500, 750)), (2, (4750, 4800))], ids=["one stuck run", "late"]
)
def test_one_stuck_run_or_late_runs_are_undecided(tmp_path, stuck, plateau_steps):
    for seed in range(2):
        record(tmp_path, "listops", "softmax:8", seed, 0.36 + 0.01 * seed, plateau_step=plateau_steps[seed])
    for seed in range(stuck):
        record(tmp_path, "listops", "smgk:4", seed, 0.19 + 0.01 * seed, plateau_step=0)
    judged = next(item for item in quality.judge_half(load(tmp_path, "listops")) if str(item) == "smgk:4 − softmax:8")
    assert (judged.verdict, f"0 of {stuck} runs, the other in 2 of 2" in judged.remark) == (OPEN, True)


def test_late_run_is_undecided(tmp_path):
    for seed in range(2):
        record(tmp_path, "listops", "smgk:4", seed, 0.27 + 0.001 * seed, plateau_step=(4500, 4750)[seed])
        record(tmp_path, "listops", "softmax:8", seed, 0.37 + 0.001 * seed, plateau_step=500)
    judged = next(item for item in quality.judge_half(load(tmp_path, "listops")) if str(item) == "smgk:4 − softmax:8")
    assert (judged.verdict, judged.remark) == (OPEN, "a run left the plateau in its last steps")


def test_seed_deviation_is_pooled_within_a_family(tmp_path):
    """Runs of linear attention, one of them late, do not widen the intervals of softmax and its mixtures."""
    for seed in range(2):
        record(tmp_path, "listops", "smgk:4", seed, 0.36 + 0.01 * seed, plateau_step=500)
        record(tmp_path, "listops", "softmax:8", seed, 0.36 + 0.01 * seed, plateau_step=500)
        record(tmp_path, "listops", "linear:8", seed, 0.27 + 0.09 * seed, plateau_step=(5000, 500)[seed])
    result = compare(load(tmp_path, "listops").results, ModelSpec("smgk", 4), ModelSpec("softmax", 8))
    assert result.over_seeds == pytest.approx(stats.t.ppf(0.975, 2) * 0.5**0.5)
    # Between families each mean has the deviation of its family: Welch's interval.
    result = compare(load(tmp_path, "listops").results, ModelSpec("softmax", 8), ModelSpec("linear", 8))
    errors = 0.5 / 2, 81 / 2 / 2
    degrees = sum(errors) ** 2 / (errors[0] ** 2 / 2 + errors[1] ** 2)
    assert result.over_seeds == pytest.approx(stats.t.ppf(0.975, degrees) * sum(errors) ** 0.5)


def test_plateau_is_left_earlier(tmp_path):
    """The difference over two pairs of models has the interval and the p-value of Student's t test."""
    steps = {"smgk:4": (500, 750), "softmax:4": (1000, 1250), "smgk:2": (250, 500), "softmax:2": (750, 1000)}
    for row, plateau_steps in steps.items():
        for seed in range(2):
            record(tmp_path, "listops", row, seed, 0.36, plateau_step=plateau_steps[seed])
    item = load(tmp_path, "listops")
    result = plateau.compare([item], "smgk")
    assert (result.difference, result.counts, result.pairs) == (-500, (4, 4), 2)
    error = (250**2 / 2 * (1 / 4 + 1 / 4)) ** 0.5  # four groups of two runs 250 steps apart
    assert result.half_width == pytest.approx(stats.t.ppf(0.975, 4) * error)
    assert result.p_value == pytest.approx(2 * stats.t.sf(500 / error, 4))
    assert "smgk leaves the plateau of ListOps 500 ± 347 steps earlier" in plateau.sentences([item])
    assert plateau.compare([item], "mgk") is None
    # A run that never leaves has no step, so that its pair is omitted.
    record(tmp_path, "listops", "softmax:4", 2, 0.2, plateau_step=0)
    assert plateau.compare([load(tmp_path, "listops")], "smgk").counts == (2, 2)


@pytest.mark.parametrize(("share", "plateau_step"), [(0.3, 0), (0.11, 500)])
def test_models_that_did_not_learn_are_undecided(tmp_path, share, plateau_step):
    """On the plateau, or no better than the most frequent class."""
    for seed in range(2):
        record(tmp_path, "listops", "smgk:4", seed, share, plateau_step=plateau_step)
        record(tmp_path, "listops", "softmax:8", seed, share, plateau_step=plateau_step)
    judged = next(item for item in quality.judge_half(load(tmp_path, "listops")) if str(item) == "smgk:4 − softmax:8")
    assert (judged.verdict, judged.remark) == (OPEN, "neither has learnt the task")


def test_one_seed_is_not_enough(tmp_path):
    record(tmp_path, "text-5k", "smgk:4", 0, 0.66)
    record(tmp_path, "text-5k", "softmax:8", 0, 0.65)
    item = load(tmp_path, "text-5k")
    judged = next(verdict for verdict in quality.judge_half(item) if verdict.difference)
    assert judged.verdict == OPEN
    assert "one seed" in judged.remark
    # A second seed of one model gives the deviation.
    record(tmp_path, "text-5k", "softmax:8", 1, 0.6501)
    judged = next(verdict for verdict in quality.judge_half(load(tmp_path, "text-5k")) if verdict.difference)
    assert judged.verdict == HOLDS


def test_hard_assignment_is_compared_with_soft_and_unclaimed_rows_are_marked(tmp_path):
    """Table 4: sMGK + Hard-E loses a quarter of a point; MGK + Hard-E and both Soft-E lose three."""
    shares = {"smgk:1": 0.37, "smgk-hard:1": 0.3675, "smgk-em:1": 0.34, "mgk:1": 0.37, "mgk-hard:1": 0.34}
    for row, share in shares.items():
        for seed in range(2):
            record(tmp_path, "listops-4e-4", row, seed, share + 0.0001 * seed, plateau_step=500)
    judged = {
        str(item): (item.verdict, item.control) for item in quality.judge_learning(load(tmp_path, "listops-4e-4"))
    }
    assert judged == {
        "smgk-hard:1 − smgk:1": (HOLDS, False),
        "smgk-em:1 − smgk:1": (FAILS, True),
        "mgk-hard:1 − mgk:1": (FAILS, True),
        "mgk-em:1 − mgk:1": (MISSING, True),
    }
    made = gather(tmp_path).texts
    assert "Verdict, sMGK + Hard-E is as good as sMGK: **holds** on ListOps (lr 4e-4)." in made["ways"]
    assert "Verdict, the other rows of Table 4: **does not hold** on ListOps (lr 4e-4)." in made["ways"]
    assert "| not claimed: mgk-hard:1 − mgk:1 | −17.73 |" in made["ways"]
    assert "Not measured yet: mgk-em:1 − mgk:1." in made["ways"]
    assert "| 6. sMGK + Hard-E is as good as sMGK | **holds** (1 of 1) | – |" in made["summary"]
    assert "| 6. not claimed: Soft-E, and MGK + Hard-E | **does not hold** (2 of 3) | – |" in made["summary"]


def test_average_needs_all_three_tasks(tmp_path):
    for recipe, share in (("listops-4e-4", 0.36), ("text-5k", 0.65)):
        record(tmp_path, recipe, "smgk:4", 0, share, plateau_step=500)
        record(tmp_path, recipe, "softmax:8", 0, share, plateau_step=500)
    row = "| smgk:4 | 36.00 | 65.00 | "
    made = gather(tmp_path).texts["averages"]
    assert f"{row}– | – | 61.85 |" in made
    assert made.endswith("No model has been run on all three tasks yet, so there is no average.")
    for seed, share in enumerate((0.52, 0.05, 0.54)):  # the second has not learnt the task
        record(tmp_path, "retrieval-peerread-random", "smgk:4", seed, share)
    made = gather(tmp_path).texts["averages"]
    assert f"{row}53.00 | 51.33 | 61.85 |" in made
    assert "no average" not in made
    assert "softmax:8" not in made  # not planned on retrieval, and not run


def test_lower_perplexity_is_better(tmp_path):
    recipe = config.load_recipe("enwiki-lm-2").training
    for row, seed, perplexity in (("mgk:8", 0, 98.0), ("softmax:8", 0, 100.0), ("softmax:8", 1, 100.1)):
        record(tmp_path, "enwiki-lm-2", row, seed, 0.5)
        results.append(tmp_path / "enwiki-lm-2.csv", [
            {"recipe": "enwiki-lm-2", "variant": row.split(":")[0], "preset": "paper", "heads": 8, "kv_heads": 8,
             "seed": seed, "steps": recipe.steps, "lr": recipe.lr, "batch": recipe.batch_size, "split": "dev",
             "n_examples": 9000, "metric": "perplexity", "value": perplexity, "params": 1, "flops": 1, "setup": "lm"},
        ])  # fmt: skip
        losses = np.log(perplexity) + 0.1 * np.sin(np.arange(24 * predictions.BLOCK))
        predictions.save(
            tmp_path, PredictionsKey("enwiki-lm-2", ModelSpec.parse(row), "paper", seed, "dev", "lm"), losses
        )
    item = load(tmp_path, "enwiki-lm-2")
    judged = next(verdict for verdict in quality.judge_same(item) if str(verdict) == "mgk:8 − softmax:8")
    assert judged.difference.difference == pytest.approx(100 * np.log(100.05 / 98.0), abs=0.01)
    assert judged.verdict == HOLDS


def test_fewer_key_heads_are_compared_with_all(tmp_path):
    item = load(tmp_path, "enwiki-lm-2")
    same, half, keys = (
        [str(verdict) for verdict in judge(item)]
        for judge in (quality.judge_same, quality.judge_half, quality.judge_half_keys)
    )
    assert {"smgk:8 − softmax:8", "smgk:8/4 − softmax:8/4", "smgk:4 − softmax:4"} <= set(same)
    assert keys == ["smgk:8/4 − softmax:8", "softmax:8/4 − softmax:8"]
    assert not set(keys) & set(same + half)


def test_missing_results_have_no_verdict(tmp_path):
    (tmp_path / "empty.csv").write_text(",".join(results.COLUMNS) + "\n")
    made = gather(tmp_path).texts
    for name in ("half", "same", "linear", "heads"):
        assert HOLDS not in made[name]
        assert "Not measured yet" in made[name] or MISSING in made[name]
    assert "0 of 72" in made["queue"]
    record(tmp_path, "listops-4e-4", "smgk:4", 0, 0.36, plateau_step=500)
    made = gather(tmp_path).texts
    assert "1 of 72" in made["queue"]
    assert "smgk:4 − softmax:8 |" not in made["half"]


def test_only_solo_times_count(tmp_path):
    for row, alone in (("smgk:4", 5.0), ("softmax:8", 10.0)):
        record(tmp_path, "listops", row, 0, 0.36, plateau_step=500, step_ms=20)
        record(tmp_path, "listops", row, 0, 0.36, plateau_step=500, step_ms=alone, metric="x")
    item = load(tmp_path, "listops")
    assert "training step" not in costs.ratios(
        *costs.pairs(costs.experiment_costs(item, results.read([tmp_path / "listops.csv"])))[0]
    )
    rows = results.read([tmp_path / "listops.csv"])
    timed = [{**row, "metric": "step_ms_alone", "value": row["step_ms"]} for row in rows if row["step_ms"] != "20"]
    [pair] = costs.pairs(costs.experiment_costs(item, [*rows, *timed]))
    assert costs.ratios(*pair)["training step"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "other", [{"components": 4}, {"command": "mgk train listops --set model.num_components=4 --seed 0"}]
)
def test_runs_with_other_settings_are_excluded(tmp_path, other):
    for row in ("softmax:8", "smgk:4"):
        record(tmp_path, "listops", row, 0, 0.36, plateau_step=500)
    before = gather(tmp_path).texts
    record(tmp_path, "listops", "smgk:4", 0, 0.2, plateau_step=500, setup="other", params=7, **other)
    alone = {"metric": "step_ms_alone", "value": 3, "setup": "other", **other}
    results.append(tmp_path / "listops.csv", [{**results.read([tmp_path / "listops.csv"])[-1], **alone}])
    page = tmp_path / "page.md"
    result = CliRunner().invoke(__main__.app, ["--results", str(tmp_path), "--page", str(page)])
    assert result.exception is None, result.output
    name = f"listops smgk:4 seed 0 ({'4 components' if 'components' in other else '--set model.num_components=4'})"
    made = gather(tmp_path)
    assert made.excluded == [name]
    assert (
        made.texts.pop("runs")
        == before.pop("runs") + f"\n\nExcluded, because their settings differ from the recipe's: {name}."
    )
    assert made.texts == before
    assert name in result.stderr
    assert name in page.read_text(encoding="utf-8")


def test_settings_equal_to_those_of_the_recipe_are_accepted(tmp_path):
    for row in ("softmax:8", "smgk:4"):
        record(
            tmp_path,
            "listops",
            row,
            0,
            0.36,
            plateau_step=500,
            components=1 + (row == "smgk:4"),
            command="mgk --set warmup=1000",
        )
    made = gather(tmp_path)
    assert not made.excluded
    assert "| smgk:4 | 0 | 36.00 |" in made.texts["runs"]


def test_runs_of_other_data_are_not_mixed(tmp_path):
    record(tmp_path, "listops", "smgk:4", 0, 0.36, plateau_step=500)
    record(tmp_path, "listops", "smgk:4", 1, 0.36, plateau_step=500, setup="other")
    with pytest.raises(ValueError, match=r"listops has results of smgk:4 from 2 versions .*made-up, other"):
        load(tmp_path, "listops")


def test_times_of_another_setup_are_ignored(tmp_path):
    record(tmp_path, "listops", "smgk:4", 0, 0.36, plateau_step=500)
    [first, *_] = rows = results.read([tmp_path / "listops.csv"])
    times = [
        {**first, "metric": "step_ms_alone", "value": value, "setup": setup}
        for value, setup in ((5, "made-up"), (3, "other"))
    ]
    [cost] = costs.experiment_costs(load(tmp_path, "listops"), [*rows, *times])
    assert cost.values["training step"] == 5


def test_heads_need_two_seeds(tmp_path):
    def analysis(seeds: int) -> Path:
        folder = tmp_path / f"seeds-{seeds}"
        folder.mkdir()
        ranks, pairs = (
            ["model,layer,head,size,rank,effective_rank"],
            ["model,layer,head_a,head_b,jensen_shannon_bits,cosine,cka"],
        )
        for seed in range(seeds):
            for row, rank in (("mgk:4", 90), ("softmax:4", 60)):
                ranks.append(f"{row} made-up seed {seed},1,1,100,{rank + seed},{rank / 2 + seed}")
                pairs.append(f"{row} made-up seed {seed},1,1,2,{rank / 100 + seed / 1000},0.5,{0.9 + seed / 1000}")
        (folder / "ranks.csv").write_text("\n".join(ranks))
        (folder / "pairs.csv").write_text("\n".join(pairs))
        return folder

    assert {verdict for *_, verdict in heads.judge(heads.read(analysis(1)))} == {OPEN}
    judged = [verdict for *_, verdict in heads.judge(heads.read(analysis(2)))]
    assert judged == [HOLDS, HOLDS, HOLDS, OPEN]


def test_figure_needs_its_files(tmp_path):
    """An analysis may have ranks and no maps."""

    def figures() -> str:
        lines = plan.table([], tmp_path).splitlines()
        return "".join(line.split(" | ")[0][2:] for line in lines if line.endswith("| yes |"))

    assert figures() == ""
    for folder in (analysis.folder for analysis in plan.ANALYSES):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ranks.csv").touch()
    assert figures() == "6"
    for folder in (analysis.folder for analysis in plan.ANALYSES):
        (tmp_path / folder / "maps-1.png").touch()
    assert figures() == "2568"
