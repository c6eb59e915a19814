"""Evidence: verdicts follow their rules on made-up results, and the committed page is what the command makes."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from experiments.paper import claims, costs, heads, plan, verdicts
from experiments.paper.figures import DRAWN_FROM
from experiments.paper.page import MADE, fill, gather
from experiments.paper.recipe_results import find
from experiments.paper.statistics import Difference, compare, pooled
from experiments.paper.verdicts import FAILS, HOLDS, MISSING, OPEN, SO_FAR
from mgk.cli import commands
from mgk.training import config, predictions, results
from mgk.training.config import ModelSpec
from mgk.training.predictions import PredictionsKey

ROOT = Path(__file__).parents[3]
EXAMPLES = 400


def compared(difference: float, half_width: float | None, remark: str = "") -> Difference:
    return Difference("test", difference, half_width, 0.0, (2, 2), remark)


def record(folder: Path, recipe: str, row: str, seed: int, share: float, left: int | None = None, **more) -> None:
    """A run that gets a share of the examples right: the first ones, so that runs differ on as few as can be."""
    settings, model = config.load_recipe(recipe).training, ModelSpec.parse(row)
    common = {
        "recipe": recipe, "variant": model.variant, "preset": "paper", "heads": model.heads,
        "kv_heads": model.kv_heads or model.heads, "seed": seed, "steps": settings.steps, "lr": settings.lr,
        "batch": settings.batch_size, "split": "test", "n_examples": EXAMPLES, "params": 1000, "flops": 10**9,
        "gpu": "a GPU", "torch": "2", "date": "today", "setup": "made-up",
    } | more  # fmt: skip
    found = [{**common, "metric": "accuracy", "value": share}, {**common, "metric": "majority_share", "value": 0.1}]
    found += [] if left is None else [{**common, "metric": "plateau_left_at_step", "value": left}]
    results.append(folder / f"{recipe}.csv", found)
    place = PredictionsKey(recipe, model, "paper", seed, "test", common["setup"])
    predictions.save(folder, place, np.arange(EXAMPLES) < share * EXAMPLES)


def part(folder: Path, recipe: str) -> claims.ExperimentResults:
    rows = results.read(sorted(folder.glob("*.csv")))
    experiment = next(each for each in plan.EXPERIMENTS if each.recipe == recipe)
    return claims.ExperimentResults(experiment, find(rows, recipe, folder))


@pytest.mark.parametrize(
    ("found", "suffices", "better"),
    [
        (compared(+0.5, 0.4), HOLDS, HOLDS),
        (compared(-0.5, 0.4), HOLDS, FAILS),
        (compared(-0.5, 0.6), OPEN, OPEN),
        (compared(-2.0, 0.9), FAILS, FAILS),
        (compared(+3.0, None), OPEN, OPEN),
        (compared(+3.0, 0.1, "neither has learnt"), OPEN, OPEN),
        (None, MISSING, MISSING),
    ],
)
def test_a_verdict_follows_from_the_interval(found, suffices, better):
    assert (verdicts.suffices(found, 1.0), verdicts.better(found)) == (suffices, better)


@pytest.mark.parametrize(
    ("found", "gap", "verdict"),
    [
        (compared(1, 0.5), compared(5, 1), HOLDS),
        (compared(-1, 0.5), compared(5, 1), FAILS),
        (compared(1, 0.5), compared(5, 6), OPEN),  # no gap to narrow
        (compared(1, 0.5), None, MISSING),
    ],
)
def test_a_gap_must_be_there_to_be_narrowed(found, gap, verdict):
    assert verdicts.narrows(found, gap)[0] == verdict


def test_costs_are_judged_exactly_and_times_within_their_noise():
    assert [verdicts.cheaper(ratio) for ratio in (0.99, 1.0, 1.01, None)] == [HOLDS, OPEN, FAILS, MISSING]
    for name, noise in (("training step", verdicts.STEPS), ("memory of the step", verdicts.MEMORY)):
        ratios = (0.99 - noise, 1.01 - noise, 0.99 + noise, 1.01 + noise)
        assert [costs.judge(name, 10 * ratio, 10.0) for ratio in ratios] == [HOLDS, OPEN, OPEN, FAILS]
    assert costs.judge("parameters", 1.001, 1.0) == FAILS
    # Short ones wait for the host.
    assert [costs.judge("inference", ours, 1.7) for ours in (1.2, 1.4, 1.61, 1.9)] == [HOLDS, OPEN, OPEN, FAILS]


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([HOLDS, HOLDS], HOLDS),
        ([HOLDS, MISSING], SO_FAR),
        ([HOLDS, OPEN], OPEN),
        ([HOLDS, FAILS], FAILS),
        ([MISSING], MISSING),
        ([], MISSING),
    ],
)
def test_a_claim_holds_if_it_holds_for_every_pair_measured(found, verdict):
    assert verdicts.overall(found) == verdict


@pytest.mark.parametrize(
    ("found", "cell"),
    [
        ([], "–"),
        ([HOLDS, HOLDS], f"**{HOLDS}** (2 of 2)"),
        ([HOLDS, OPEN, MISSING], f"**{OPEN}** (2 of 3; 1 holds)"),
        ([HOLDS, FAILS, HOLDS, OPEN], f"**{FAILS}** (4 of 4; 2 hold, 1 does not)"),
    ],
)
def test_a_cell_says_of_how_many_pairs_its_verdict_is(found, cell):
    assert claims.cell(found) == cell


def test_the_spread_over_seeds_is_pooled():
    spread = pooled([[1, 3], [2, 4], [7]])
    assert (spread.deviation, spread.freedom) == (pytest.approx(2**0.5), 2)
    assert spread.half_width(2, 1) == pytest.approx(4.303 * 2**0.5 * 1.5**0.5)
    assert pooled([[1], [2]]) is None


def test_seeds_and_examples_both_widen_the_interval(tmp_path):
    for seed, (ours, theirs) in enumerate([(0.35, 0.36), (0.37, 0.38)]):
        record(tmp_path, "listops", "smgk:4", seed, ours, left=500)
        record(tmp_path, "listops", "softmax:8", seed, theirs, left=500)
    found = compare(part(tmp_path, "listops").found, ModelSpec("smgk", 4), ModelSpec("softmax", 8))
    assert found.difference == pytest.approx(-1.0)
    assert found.over_seeds == pytest.approx(4.303 * 2**0.5)  # two groups of two, a deviation of √2
    # Each of two steps of half a point in 400 examples: 4 + 4 of them differ by one half.
    differences = np.r_[np.full(8, -0.5), np.zeros(EXAMPLES - 8)]
    assert found.over_examples == pytest.approx(196 * differences.std(ddof=1) / 20)
    assert found.half_width == pytest.approx((found.over_seeds**2 + found.over_examples**2) ** 0.5)
    assert found.low == pytest.approx(-1 - found.half_width)


def test_runs_that_never_left_the_plateau_do_not_blur_those_that_did(tmp_path):
    for seed in range(2):
        record(tmp_path, "listops", "smgk:4", seed, 0.36 + 0.01 * seed, left=500)
        record(tmp_path, "listops", "softmax:8", seed, (0.2, 0.37)[seed], left=2250 * seed)
    own = part(tmp_path, "listops")
    found = compare(own.found, ModelSpec("smgk", 4), ModelSpec("softmax", 8))
    assert found.difference == pytest.approx(-0.5)
    assert found.counts == (2, 1)
    assert found.over_seeds == pytest.approx(12.706 * 0.5**0.5 * 1.5**0.5)  # of smgk:4's two runs alone
    line = next(each for each in claims.table(own, claims.half(own)).splitlines() if "smgk:4 − softmax:8" in each)
    assert "2 of 2 − 1 of 2" in line


def test_where_one_model_never_learns_all_runs_count(tmp_path):
    for seed in range(2):
        record(tmp_path, "listops", "smgk:4", seed, 0.19 + 0.01 * seed, left=0)
        record(tmp_path, "listops", "softmax:8", seed, 0.36 + 0.01 * seed, left=500)
    judged = claims.half(part(tmp_path, "listops"))
    assert next(each.verdict for each in judged if str(each) == "smgk:4 − softmax:8") == FAILS


@pytest.mark.parametrize("learnt", [[True, False], [True]], ids=["one of two", "one of one"])
def test_what_learns_by_chance_decides_nothing_against_what_never_does(tmp_path, learnt):
    for seed, left in enumerate(learnt):
        record(tmp_path, "listops", "softmax:8", seed, 0.37 if left else 0.19, left=4000 * left)
    for seed in range(2):
        record(tmp_path, "listops", "smgk:4", seed, 0.19, left=0)
    judged = next(each for each in claims.half(part(tmp_path, "listops")) if str(each) == "smgk:4 − softmax:8")
    assert (judged.verdict, f"1 of {len(learnt)} runs" in judged.remark) == (OPEN, True)
    # The mean over a run that learnt and one that did not has no known interval.
    assert (judged.compared.over_seeds is None) == (len(learnt) > 1)


@pytest.mark.parametrize(("stuck", "left"), [(1, (500, 750)), (2, (4750, 4800))], ids=["one stuck run", "late"])
def test_one_stuck_run_or_late_ones_decide_nothing(tmp_path, stuck, left):
    for seed in range(2):
        record(tmp_path, "listops", "softmax:8", seed, 0.36 + 0.01 * seed, left=left[seed])
    for seed in range(stuck):
        record(tmp_path, "listops", "smgk:4", seed, 0.19 + 0.01 * seed, left=0)
    judged = next(each for each in claims.half(part(tmp_path, "listops")) if str(each) == "smgk:4 − softmax:8")
    assert (judged.verdict, f"in {stuck}, the other in 2 of 2 runs" in judged.remark) == (OPEN, True)


def test_a_run_that_has_only_just_left_the_plateau_decides_nothing(tmp_path):
    for seed in range(2):
        record(tmp_path, "listops", "smgk:4", seed, 0.27 + 0.001 * seed, left=(4500, 4750)[seed])
        record(tmp_path, "listops", "softmax:8", seed, 0.37 + 0.001 * seed, left=500)
    judged = next(each for each in claims.half(part(tmp_path, "listops")) if str(each) == "smgk:4 − softmax:8")
    assert (judged.verdict, judged.remark) == (OPEN, "a run had only just left the plateau")


def test_a_run_that_has_only_just_left_the_plateau_does_not_blur_others(tmp_path):
    for seed in range(2):
        record(tmp_path, "listops", "smgk:4", seed, 0.36 + 0.01 * seed, left=500)
        record(tmp_path, "listops", "softmax:8", seed, 0.36 + 0.01 * seed, left=500)
        record(tmp_path, "listops", "softmax:4", seed, 0.27 + 0.09 * seed, left=(5000, 500)[seed])
    found = compare(part(tmp_path, "listops").found, ModelSpec("smgk", 4), ModelSpec("softmax", 8))
    assert found.over_seeds == pytest.approx(4.303 * 0.5**0.5)  # of the two groups without it


@pytest.mark.parametrize(("share", "left"), [(0.3, 0), (0.11, 500)])
def test_models_that_have_not_learnt_decide_nothing(tmp_path, share, left):
    """On the plateau, or no better than the most frequent class."""
    for seed in range(2):
        record(tmp_path, "listops", "smgk:4", seed, share, left=left)
        record(tmp_path, "listops", "softmax:8", seed, share, left=left)
    judged = next(each for each in claims.half(part(tmp_path, "listops")) if str(each) == "smgk:4 − softmax:8")
    assert (judged.verdict, judged.remark) == (OPEN, "neither has learnt the task")


def test_one_seed_is_not_enough(tmp_path):
    record(tmp_path, "text-5k", "smgk:4", 0, 0.66)
    record(tmp_path, "text-5k", "softmax:8", 0, 0.65)
    own = part(tmp_path, "text-5k")
    judged = next(each for each in claims.half(own) if each.compared)
    assert judged.verdict == OPEN
    assert "one seed" in judged.remark
    # A second seed of either tells how far seeds differ.
    record(tmp_path, "text-5k", "softmax:8", 1, 0.6501)
    assert next(each for each in claims.half(part(tmp_path, "text-5k")) if each.compared).verdict == HOLDS


def test_a_hard_assignment_is_held_against_the_soft_one_and_what_is_not_claimed_is_told_apart(tmp_path):
    """Table 4: sMGK + Hard-E loses a quarter of a point; MGK + Hard-E and both Soft-E lose three."""
    shares = {"smgk:1": 0.37, "smgk-hard:1": 0.3675, "smgk-em:1": 0.34, "mgk:1": 0.37, "mgk-hard:1": 0.34}
    for row, share in shares.items():
        for seed in range(2):
            record(tmp_path, "listops-4e-4", row, seed, share + 0.0001 * seed, left=500)
    judged = {str(each): (each.verdict, each.control) for each in claims.ways(part(tmp_path, "listops-4e-4"))}
    assert judged == {
        "smgk-hard:1 − smgk:1": (HOLDS, False),
        "smgk-em:1 − smgk:1": (FAILS, True),
        "mgk-hard:1 − mgk:1": (FAILS, True),
        "mgk-em:1 − mgk:1": (MISSING, True),
    }
    made = gather(tmp_path).parts
    assert "Verdict, sMGK + Hard-E is as good as sMGK: **holds** on ListOps (lr 4e-4)." in made["ways"]
    assert "Verdict, the other ways of Table 4: **does not hold** on ListOps (lr 4e-4)." in made["ways"]
    assert "| not claimed: mgk-hard:1 − mgk:1 | −17.73 |" in made["ways"]
    assert "Not measured yet: mgk-em:1 − mgk:1." in made["ways"]
    assert "| 6. sMGK + Hard-E is as good as sMGK | **holds** (1 of 1) | – |" in made["summary"]
    assert "| 6. not claimed: Soft-E, and MGK + Hard-E | **does not hold** (2 of 3) | – |" in made["summary"]


def test_an_average_is_over_all_three_tasks_or_is_none(tmp_path):
    for recipe, share in (("listops-4e-4", 0.36), ("text-5k", 0.65)):
        record(tmp_path, recipe, "smgk:4", 0, share, left=500)
        record(tmp_path, recipe, "softmax:8", 0, share, left=500)
    row = "| smgk:4 | 36.00 | 65.00 | "
    made = gather(tmp_path).parts["averages"]
    assert f"{row}– | – | 61.85 |" in made
    assert made.endswith("No model has been run on all three tasks yet, so that there is no average.")
    for seed, share in enumerate((0.52, 0.05, 0.54)):  # the second has not learnt the task
        record(tmp_path, "retrieval-peerread-random", "smgk:4", seed, share)
    made = gather(tmp_path).parts["averages"]
    assert f"{row}53.00 | 51.33 | 61.85 |" in made
    assert "no average" not in made
    assert "softmax:8" not in made  # not planned on retrieval, and not run


def test_less_perplexity_is_better(tmp_path):
    recipe = config.load_recipe("enwiki-lm-2").training
    for row, seed, perplexity in (("mgk:8", 0, 98.0), ("softmax:8", 0, 100.0), ("softmax:8", 1, 100.1)):
        record(tmp_path, "enwiki-lm-2", row, seed, 0.5)
        results.append(tmp_path / "enwiki-lm-2.csv", [
            {"recipe": "enwiki-lm-2", "variant": row.split(":")[0], "preset": "paper", "heads": 8, "kv_heads": 8,
             "seed": seed, "steps": recipe.steps, "lr": recipe.lr, "batch": recipe.batch_size, "split": "dev",
             "n_examples": 9000, "metric": "perplexity", "value": perplexity, "params": 1, "flops": 1, "setup": "lm"},
        ])  # fmt: skip
        losses = np.log(perplexity) + 0.1 * np.sin(np.arange(20 * predictions.BLOCK))
        predictions.save(
            tmp_path, PredictionsKey("enwiki-lm-2", ModelSpec.parse(row), "paper", seed, "dev", "lm"), losses
        )
    own = part(tmp_path, "enwiki-lm-2")
    judged = next(each for each in claims.same(own) if str(each) == "mgk:8 − softmax:8")
    assert judged.compared.difference == pytest.approx(100 * np.log(100.05 / 98.0), abs=0.01)
    assert judged.verdict == HOLDS


def test_fewer_key_heads_are_held_against_as_many(tmp_path):
    own = part(tmp_path, "enwiki-lm-2")
    same, half, keys = (
        [str(each) for each in judge(own)] for judge in (claims.same, claims.half, claims.half_the_keys)
    )
    assert {"smgk:8 − softmax:8", "smgk:8/4 − softmax:8/4", "smgk:4 − softmax:4"} <= set(same)
    assert keys == ["smgk:8/4 − softmax:8", "softmax:8/4 − softmax:8"]
    assert not set(keys) & set(same + half)


def test_what_has_not_run_is_not_guessed(tmp_path):
    (tmp_path / "empty.csv").write_text(",".join(results.COLUMNS) + "\n")
    made = gather(tmp_path).parts
    for name in ("half", "same", "linear", "heads"):
        assert HOLDS not in made[name]
        assert "Not measured yet" in made[name] or MISSING in made[name]
    assert "0 of 72" in made["queue"]
    record(tmp_path, "listops-4e-4", "smgk:4", 0, 0.36, left=500)
    made = gather(tmp_path).parts
    assert "1 of 72" in made["queue"]
    assert "smgk:4 − softmax:8 |" not in made["half"]


def test_only_what_was_timed_alone_counts(tmp_path):
    for row, alone in (("smgk:4", 5.0), ("softmax:8", 10.0)):
        record(tmp_path, "listops", row, 0, 0.36, left=500, step_ms=20)
        record(tmp_path, "listops", row, 0, 0.36, left=500, step_ms=alone, metric="x")
    own = part(tmp_path, "listops")
    assert "training step" not in costs.ratios(
        *costs.pairs(costs.of_part(own, results.read([tmp_path / "listops.csv"])))[0]
    )
    rows = results.read([tmp_path / "listops.csv"])
    timed = [{**row, "metric": "step_ms_alone", "value": row["step_ms"]} for row in rows if row["step_ms"] != "20"]
    [pair] = costs.pairs(costs.of_part(own, [*rows, *timed]))
    assert costs.ratios(*pair)["training step"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "other", [{"components": 4}, {"command": "mgk train listops --set model.num_components=4 --seed 0"}]
)
def test_runs_with_other_settings_than_the_recipe_s_are_left_out_and_named(tmp_path, other):
    for row in ("softmax:8", "smgk:4"):
        record(tmp_path, "listops", row, 0, 0.36, left=500)
    own = gather(tmp_path).parts
    record(tmp_path, "listops", "smgk:4", 0, 0.2, left=500, setup="other", params=7, **other)
    alone = {"metric": "step_ms_alone", "value": 3, "setup": "other", **other}
    results.append(tmp_path / "listops.csv", [{**results.read([tmp_path / "listops.csv"])[-1], **alone}])
    page = tmp_path / "page.md"
    result = CliRunner().invoke(commands.app, ["evidence", "--results", str(tmp_path), "--page", str(page)])
    assert result.exception is None, result.output
    said = f"listops smgk:4 seed 0 ({'4 components' if 'components' in other else '--set model.num_components=4'})"
    made = gather(tmp_path)
    assert made.left_out == [said]
    assert (
        made.parts.pop("runs") == own.pop("runs") + f"\n\nLeft out, since their settings are not the recipe's: {said}."
    )
    assert made.parts == own
    assert said in result.stderr
    assert said in page.read_text(encoding="utf-8")


def test_settings_that_are_the_recipe_s_own_change_nothing(tmp_path):
    for row in ("softmax:8", "smgk:4"):
        record(
            tmp_path,
            "listops",
            row,
            0,
            0.36,
            left=500,
            components=1 + (row == "smgk:4"),
            command="mgk --set warmup=1000",
        )
    made = gather(tmp_path)
    assert not made.left_out
    assert "| smgk:4 | 0 | 36.00 |" in made.parts["runs"]


def test_runs_of_other_data_are_not_mixed(tmp_path):
    record(tmp_path, "listops", "smgk:4", 0, 0.36, left=500)
    record(tmp_path, "listops", "smgk:4", 1, 0.36, left=500, setup="other")
    with pytest.raises(ValueError, match=r"listops has results of smgk:4 from 2 versions .*made-up, other"):
        part(tmp_path, "listops")


def test_times_of_another_setup_are_not_taken(tmp_path):
    record(tmp_path, "listops", "smgk:4", 0, 0.36, left=500)
    [own, *_] = rows = results.read([tmp_path / "listops.csv"])
    times = [
        {**own, "metric": "step_ms_alone", "value": value, "setup": setup}
        for value, setup in ((5, "made-up"), (3, "other"))
    ]
    [found] = costs.of_part(part(tmp_path, "listops"), [*rows, *times])
    assert found.of["training step"] == 5


def test_heads_of_one_seed_decide_nothing_and_of_two_they_do(tmp_path):
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

    assert {verdict for *_, verdict in heads.judged(heads.read(analysis(1)))} == {OPEN}
    found = {measure: verdict for _, _, measure, _, verdict in heads.judged(heads.read(analysis(2)))}
    assert list(found.values()) == [HOLDS, HOLDS, HOLDS, OPEN]


def test_a_figure_is_there_when_its_own_files_are(tmp_path):
    """An analysis may have ranks and no maps."""

    def there() -> str:
        lines = plan.table([], tmp_path).splitlines()
        return "".join(line.split(" | ")[0][2:] for line in lines if line.endswith("| yes |"))

    assert there() == ""
    for folder in (each.folder for each in plan.ANALYSES):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ranks.csv").touch()
    assert there() == "6"
    for folder in (each.folder for each in plan.ANALYSES):
        (tmp_path / folder / "maps-1.png").touch()
    assert there() == "2568"


def test_prose_stays_and_unknown_parts_are_refused():
    page = "# By hand\n<!-- made: rules -->\nold\n<!-- end -->\nand so on\n"
    assert fill(page, {"rules": "new"}) == page.replace("old", "new")
    with pytest.raises(ValueError, match="'rules'"):
        fill(page, {"summary": "new"})
    with pytest.raises(ValueError, match="no part"):
        fill("# By hand\n", {"rules": "new"})


@pytest.fixture(scope="module")
def made():
    return gather(ROOT / "results")


def test_the_committed_pages_are_what_the_command_makes(made):
    """Every page with marked parts: the README may have one too."""
    pages = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
    for path, page in pages.items():
        if MADE.search(page):
            assert fill(page, made.parts) == page, f"results/ has changed: run mgk evidence --page {path.name}"
    assert all(f"<!-- made: {name} -->" in pages[ROOT / "docs" / "evidence.md"] for name in made.parts)


def test_the_committed_pictures_show_these_results(made):
    for picture in made.pictures:
        with Image.open(ROOT / "docs" / "figures" / f"{picture.name}.png") as image:
            assert image.text[DRAWN_FROM] == picture.digest, f"{picture.name} is out of date: run mgk evidence"


def test_the_command_writes_page_and_pictures(tmp_path):
    for seed in range(2):
        for row in ("smgk:4", "softmax:8"):
            record(tmp_path / "results", "listops", row, seed, 0.36 + 0.001 * seed, left=500)
    page = tmp_path / "new" / "evidence.md"
    arguments = ["evidence", "--results", str(tmp_path / "results"), "--page", str(page)]
    result = CliRunner().invoke(commands.app, arguments)
    assert result.exception is None, result.output
    assert "| smgk:4 − softmax:8 |" in page.read_text(encoding="utf-8")
    assert len(list((tmp_path / "new" / "figures").glob("evidence-*.png"))) == 3
    wrong = CliRunner().invoke(commands.app, [*arguments[:2], str(tmp_path / "nowhere")])
    assert "has no CSV files" in str(wrong.exception)
