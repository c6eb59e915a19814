"""Results and comparisons: what is measured is kept, found again, and told as it is."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mgk.training import config, predictions, report, results, sweep
from mgk.training.config import ModelSpec
from mgk.training.evaluate import first_step_above


def measured(row: str, seed: int, value: float, split: str = "test", metric: str = "accuracy") -> dict:
    recipe, model = config.load_recipe("listops"), ModelSpec.parse(row)
    settings = recipe.training
    return {
        "recipe": "listops",
        "task": "listops",
        "variant": model.variant,
        "preset": "paper",
        "heads": model.heads,
        "kv_heads": model.kv_heads or model.heads,
        "seed": seed,
        "steps": settings.steps,
        "lr": settings.lr,
        "batch": settings.batch_size,
        "split": split,
        "n_examples": 2000,
        "metric": metric,
        "value": value,
        "params": 1000,
        "flops": 2_000_000_000,
        "step_ms": 5,
        "peak_mem_mb": 100,
    }


def left_plateau(row: str, seed: int, step: int) -> dict:
    return measured(row, seed, step, "dev", "plateau_left_at_step")


def test_results_come_back_and_unknown_columns_do_not_go_in(tmp_path):
    path = tmp_path / "a" / "results.csv"
    results.append(path, [measured("smgk:4", 0, 0.37)])
    results.append(path, [measured("smgk:4", 1, 0.38)])
    rows = results.read([path, tmp_path / "missing.csv"])
    assert [float(row["value"]) for row in rows] == [0.37, 0.38]
    assert list(rows[0]) == results.COLUMNS
    with pytest.raises(ValueError, match="speed"):
        results.append(path, [{"speed": 1}])
    assert len(results.read([path])) == 2


def test_many_may_write_at_once(tmp_path):
    path = tmp_path / "results.csv"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: results.append(path, [measured("smgk:4", seed, 0.1)]), range(24)))
    assert sorted(int(row["seed"]) for row in results.read([path])) == list(range(24))


def test_what_is_known_is_recognised_by_everything_that_makes_a_run(tmp_path):
    path = tmp_path / "results.csv"
    results.append(path, [measured("smgk:4", 0, 0.37)])
    rows, recipe = results.read([path]), config.load_recipe("listops")
    assert sweep.filter_rows(rows, recipe, ModelSpec("smgk", 4), "paper", 0)
    assert not sweep.filter_rows(rows, recipe, ModelSpec("smgk", 4), "paper", 1)
    assert not sweep.filter_rows(rows, recipe, ModelSpec("smgk", 4), "ref-lra", 0)
    assert not sweep.filter_rows(rows, recipe, ModelSpec("smgk", 4, 2), "paper", 0)
    assert not sweep.filter_rows(rows, recipe.with_settings(["lr=4e-4"]), ModelSpec("smgk", 4), "paper", 0)


def test_the_table_tells_each_seed_the_mean_and_the_papers_number(tmp_path):
    path = tmp_path / "listops.csv"
    results.append(path, [measured("softmax:8", 0, 0.36), measured("softmax:8", 1, 0.38), measured("smgk:4", 0, 0.37)])
    results.append(path, [left_plateau("softmax:8", seed, 750 + seed) for seed in (0, 1)])
    # The same training in two files is one training.
    again = tmp_path / "again.csv"
    results.append(again, [measured("softmax:8", 1, 0.38)])
    results.append(path, [measured("softmax:8", 0, 0.687, metric="baseline: bag of words")])
    models, files = [ModelSpec("softmax", 8), ModelSpec("smgk", 4)], [path, again]
    lines = report.write_report(config.load_recipe("listops"), models, "paper", files, tmp_path)
    table = (tmp_path / "listops.md").read_text()
    assert lines[1][:5] == ["softmax:8", "37.00 ± 1.41", "36.0 38.0", "750 751", "37.03"]
    assert "bag of words 68.7 %" in table
    # One seed: the interval of the test set, 1.96 · sqrt(0.37 · 0.63 / 2000).
    assert lines[2][1] == "37.00 ± 2.12"
    assert "| smgk:4 |" in table
    assert (tmp_path / "listops.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="no results"):
        report.write_report(config.load_recipe("listops"), [ModelSpec("mgk", 1)], "paper", [path], tmp_path)


def test_a_run_has_left_the_plateau_at_the_first_evaluation_above_it(tmp_path):
    lines = ["step,split,loss,accuracy", "250,dev,2.2,0.17", "500,train,1,0.4", "500,dev,2.1,0.26", "750,dev,2,0.31"]
    (tmp_path / "metrics.csv").write_text("\n".join(lines))
    assert first_step_above(tmp_path / "metrics.csv", 0.25) == 500
    assert first_step_above(tmp_path / "metrics.csv", 0.35) == 0


def test_what_a_model_costs_alone_stands_in_the_table_and_is_no_training(tmp_path):
    path = tmp_path / "listops.csv"
    results.append(path, [measured("smgk:4", 0, 12.5, "train", "step_ms_alone")])
    results.append(path, [measured("smgk:4", 0, 77, "train", "peak_mem_mb_alone")])
    recipe, row = config.load_recipe("listops"), ModelSpec("smgk", 4)
    assert sweep.is_timed(results.read([path]), recipe, row, "paper")
    assert not sweep.is_trained(results.read([path]), recipe, row, "paper", 0)
    results.append(path, [measured("smgk:4", 0, 0.37)])
    assert sweep.is_trained(results.read([path]), recipe, row, "paper", 0)
    lines = report.write_report(recipe, [row], "paper", [path], tmp_path)
    assert lines[1][-2:] == ["12.5", "77"]
    assert "Step time: each model timed in isolation" in (tmp_path / "listops.md").read_text()
    # Who asks for every time gets the forward's too, and what was measured last counts.
    assert not sweep.is_timed(results.read([path]), recipe, row, "paper", metrics=sweep.SOLO_METRICS)
    results.append(
        path,
        [
            measured("smgk:4", 0, value, "train", name)
            for name, value in zip(sweep.SOLO_METRICS, (9, 4, 70), strict=True)
        ],
    )
    assert sweep.is_timed(results.read([path]), recipe, row, "paper", metrics=sweep.SOLO_METRICS)
    assert report.write_report(recipe, [row], "paper", [path], tmp_path)[1][-2:] == ["9.0", "70"]


def test_times_that_were_not_taken_alone_are_not_shown(tmp_path):
    path, recipe, row = tmp_path / "listops.csv", config.load_recipe("listops"), ModelSpec("smgk", 4)
    results.append(path, [measured("smgk:4", 0, 0.37)])
    assert report.write_report(recipe, [row], "paper", [path], tmp_path)[1][-2:] == ["—", "100"]
    assert "not timed in isolation" in (tmp_path / "listops.md").read_text()
    # A training that nothing ran beside.
    results.append(path, sweep.to_solo_rows(results.read([path])))
    assert sweep.is_timed(results.read([path]), recipe, row, "paper")
    assert report.write_report(recipe, [row], "paper", [path], tmp_path)[1][-2:] == ["5.0", "100"]
    # A run that was done before it was asked for has measured nothing.
    assert sweep.to_solo_rows([{**results.read([path])[0], "step_ms": "nan"}]) == []


def test_seeds_that_stayed_on_the_plateau_are_told_apart(tmp_path):
    """softmax:8 learned with one seed of two, smgk:4 with both, linear:8 with none."""
    recipe, path = config.load_recipe("listops"), tmp_path / "listops.csv"
    shares = {"softmax:8": (0.20, 0.36), "smgk:4": (0.37, 0.37), "linear:8": (0.20, 0.21)}
    for row, accuracies in shares.items():
        for seed, accuracy in enumerate(accuracies):
            results.append(path, [measured(row, seed, accuracy), left_plateau(row, seed, 500 if accuracy > 0.3 else 0)])
            right = np.arange(2000) < 2000 * accuracy
            predictions.save(
                tmp_path, predictions.PredictionsKey("listops", ModelSpec.parse(row), "paper", seed, "test"), right
            )
    first, second, third = report.write_report(
        recipe, [ModelSpec.parse(row) for row in shares], "paper", [path], tmp_path
    )[1:]
    assert first[1:3] == ["36.00 ± 2.10 (1 of 2 seeds)", "20.0 36.0"]
    assert second[3].startswith("+1.00 ± ")
    assert third[1:4] == ["20.50 ± 0.71", "20.0 21.0", "n/a: linear:8 stayed on the plateau"]
    # The other way round: against a model that learned nothing there is no difference either.
    turned = report.write_report(recipe, [ModelSpec("linear", 8), ModelSpec("smgk", 4)], "paper", [path], tmp_path)
    assert turned[2][3] == "n/a: linear:8 stayed on the plateau"


@pytest.mark.parametrize(
    "rows", [["softmax:8"], ["softmax:8", "smgk:4"], [str(row) for row in config.load_recipe("listops").rows]]
)
def test_nothing_in_the_picture_crosses_a_frame_or_another_label(tmp_path, rows):
    path, recipe = tmp_path / "listops.csv", config.load_recipe("listops")
    for n, row in enumerate(rows):
        results.append(path, [measured(row, seed, 0.2 + 0.006 * n + seed / 100) for seed in (0, 1)])
        results.append(path, [measured(row, 0, 12345.678, "train", "step_ms_alone")])
    found = report.summarise(results.read([path]), recipe, [ModelSpec.parse(row) for row in rows], "paper")
    figure = report.make_figure(found, recipe, chance=17.6)
    figure.draw_without_rendering()
    first, *others = figure.axes
    titles = [text.get_window_extent() for text in (*figure.texts, *(axes.title for axes in others), first.xaxis.label)]
    names = [text.get_window_extent() for text in first.get_yticklabels()]
    assert len(names) == len(rows)
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in (*titles, *names))
    assert not any(a.overlaps(b) for a, b in itertools.combinations([*titles, *names], 2))
    for axes in others:
        numbers = [text.get_window_extent() for text in axes.texts]
        assert len(numbers) == len(rows)
        assert all(box.x1 <= axes.bbox.x1 for box in numbers)
        assert not any(a.overlaps(b) for a, b in itertools.combinations(numbers, 2))


def test_models_are_compared_on_the_same_examples(tmp_path):
    """Two models with the same accuracy that err together, and one that errs elsewhere: pairs tell them apart."""
    recipe, path = config.load_recipe("listops"), tmp_path / "listops.csv"
    draw = np.random.default_rng(0)
    hard = draw.random(2000) < 0.6
    said = {"softmax:8": ~hard, "smgk:4": ~hard, "mgk:4": draw.random(2000) < 0.4}
    said["smgk:4"][:20] = True
    for row, right in said.items():
        results.append(path, [measured(row, 0, right.mean())])
        predictions.save(
            tmp_path, predictions.PredictionsKey("listops", ModelSpec.parse(row), "paper", 0, "test"), right
        )
    lines = report.write_report(recipe, [ModelSpec.parse(row) for row in said], "paper", [path], tmp_path)
    column = lines[0].index("minus softmax:8, test")
    gained = (said["smgk:4"] & hard).sum()
    assert lines[1][column] == ""
    assert lines[2][column] == f"+{gained / 20:.2f} ± {196 * (gained / 2000) ** 0.5 / 2000**0.5:.2f}"
    assert float(lines[3][column].split("± ")[1]) > 2.5
    assert "on the same examples" in (tmp_path / "listops.md").read_text()


def test_redrawing_needs_one_setup_of_each_model(tmp_path):
    path, recipe, rows = (
        tmp_path / "listops.csv",
        config.load_recipe("listops"),
        [ModelSpec("smgk", 4), ModelSpec("mgk", 4)],
    )
    results.append(path, [{**measured("smgk:4", 0, 0.37), "setup": "these"}])
    assert sweep.setups_of(results.read([path]), recipe, rows, "paper") == {rows[0]: "these"}
    results.append(path, [{**measured("smgk:4", 1, 0.37), "setup": "those"}])
    with pytest.raises(ValueError, match="smgk:4 has results of 2 different settings"):
        sweep.setups_of(results.read([path]), recipe, rows, "paper")


@pytest.mark.parametrize(
    ("name", "metric", "seeds", "means", "words"),
    [
        ("listops", "accuracy", (1, 1), "± is half the 95 % interval of the test set.", False),
        ("listops", "accuracy", (2, 2), "± is the standard deviation over seeds.", False),
        ("listops", "accuracy", (2, 1), "over seeds, or with one seed half the 95 % interval of the test set.", False),
        ("bytes", "perplexity_stride_64", (1, 1), None, False),
        ("bytes", "perplexity_stride_64", (2, 1), "± is the standard deviation over seeds.", False),
        ("wikitext-103", "perplexity", (1, 1), None, True),
    ],
)
def test_only_what_stands_in_the_table_has_a_footnote(tmp_path, name, metric, seeds, means, words):
    recipe, path = config.load_recipe(name), tmp_path / "results.csv"
    for row, count in zip(recipe.rows, seeds, strict=False):
        for seed in range(count):
            each = measured(str(row), seed, 0.3 + seed / 10, metric=metric)
            settings = recipe.training
            each |= {"steps": settings.steps, "lr": settings.lr, "batch": settings.batch_size, "recipe": name}
            results.append(path, [each])
    report.write_report(recipe, list(recipe.rows), "paper", [path], tmp_path)
    note = (tmp_path / f"{name}.md").read_text().splitlines()[-1]
    assert "± is" not in note if means is None else means in note
    assert ("frequent words" in note) == words


def test_of_splits_of_the_same_size_the_test_set_is_compared_on(tmp_path):
    recipe, path = config.load_recipe("listops"), tmp_path / "listops.csv"
    right = np.arange(2000) % 3 == 0
    for row in ("softmax:8", "smgk:4"):
        for split in ("dev", "test"):
            results.append(path, [measured(row, 0, right.mean(), split)])
            predictions.save(
                tmp_path, predictions.PredictionsKey("listops", ModelSpec.parse(row), "paper", 0, split), right
            )
    lines = report.write_report(recipe, [ModelSpec("softmax", 8), ModelSpec("smgk", 4)], "paper", [path], tmp_path)
    assert "minus softmax:8, test" in lines[0]


def test_what_was_timed_last_counts_wherever_it_lies(tmp_path):
    """By its day, and of several seeds the median: each training by itself has timed its model."""

    def timed(value, date, commit, seed=0):
        return measured("smgk:4", seed, value, "train", "step_ms_alone") | {"date": date, "commit": commit}

    results.append(tmp_path / "a.csv", [timed(seed + 5, "2026-11-16", "new", seed) for seed in range(3)])
    results.append(tmp_path / "b.csv", [timed(99, "2026-01-01", "old")])
    rows = results.read(sorted(tmp_path.glob("*.csv")))
    assert results.latest_value(rows, "step_ms_alone") == 6
    assert results.latest_value(rows, "peak_mem_mb_alone") is None


def test_a_difference_that_is_not_in_the_metric_s_unit_says_so(tmp_path):
    recipe, path = config.load_recipe("bytes"), tmp_path / "bytes.csv"
    settings = recipe.training
    for row in ("softmax:2", "smgk:2"):
        found = measured(row, 0, 100.0, "test", sweep.metric_format(recipe).metric)
        found |= {"recipe": "bytes", "steps": settings.steps, "lr": settings.lr, "batch": settings.batch_size}
        results.append(path, [found])
        predictions.save(
            tmp_path, predictions.PredictionsKey("bytes", ModelSpec.parse(row), "paper", 0, "test"), np.full(2000, 4.6)
        )
    lines = report.write_report(recipe, [ModelSpec("softmax", 2), ModelSpec("smgk", 2)], "paper", [path], tmp_path)
    assert "minus softmax:2, test, nats a token" in lines[0]


def test_answers_come_back_and_losses_as_means_of_blocks(tmp_path):
    right = np.random.default_rng(1).random(1003) < 0.5
    place = predictions.PredictionsKey("a", ModelSpec("softmax", 8, 4), "paper", 2, "fresh")
    assert predictions.read(tmp_path, place) is None
    predictions.save(tmp_path, place, right)
    assert (predictions.read(tmp_path, place) == right).all()
    losses = np.random.default_rng(2).random(2 * predictions.BLOCK + 5).astype(np.float32)
    predictions.save(tmp_path, place, losses)
    expected = [losses[: predictions.BLOCK].mean(), losses[predictions.BLOCK : 2 * predictions.BLOCK].mean()]
    np.testing.assert_allclose(predictions.read(tmp_path, place), expected, rtol=1e-6)
    assert predictions.paired_difference([right.astype(float)], [losses]) is None


def test_other_settings_or_other_data_are_another_experiment(tmp_path):
    path, recipe, row = tmp_path / "listops.csv", config.load_recipe("listops"), ModelSpec("smgk", 4)
    results.append(path, [{**measured("smgk:4", 0, 0.37), "setup": "these"}])
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
