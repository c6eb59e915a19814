"""Table and plot of a sweep."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from mgk.training import config, predictions, report, results, sweep
from mgk.training.config import ModelSpec
from mgk.training.report_figure import cost_panels, make_figure, sort_key
from tests.support.result_rows import plateau_row, result_row


def test_table_has_mean_seeds_and_paper(tmp_path):
    path = tmp_path / "listops.csv"
    results.append(
        path, [result_row("softmax:8", 0, 0.36), result_row("softmax:8", 1, 0.38), result_row("smgk:4", 0, 0.37)]
    )
    results.append(path, [plateau_row("softmax:8", seed, 750 + seed) for seed in (0, 1)])
    # The same training in two files counts once.
    again = tmp_path / "again.csv"
    results.append(again, [result_row("softmax:8", 1, 0.38)])
    results.append(path, [result_row("softmax:8", 0, 0.687, metric="baseline: bag of words")])
    models, files = [ModelSpec("softmax", 8), ModelSpec("smgk", 4)], [path, again]
    lines = report.write_report(config.load_recipe("listops"), models, "paper", files, tmp_path)
    table = (tmp_path / "listops.md").read_text()
    assert lines[1][:5] == ["softmax:8", "37.00 ± 1.41", "36.0 38.0", "750 751", "37.03"]
    assert "bag of words 68.7 %" in table
    # One seed: the interval of the test set, 1.96 · sqrt(0.37 · 0.63 / 2000).
    assert lines[2][1] == "37.00 ± 2.12"
    assert "| smgk:4 |" in table
    with pytest.raises(ValueError, match="no results"):
        report.write_report(config.load_recipe("listops"), [ModelSpec("mgk", 1)], "paper", [path], tmp_path)


def test_solo_times_are_in_the_table_and_are_not_a_training(tmp_path):
    path = tmp_path / "listops.csv"
    results.append(path, [result_row("smgk:4", 0, 12.5, "train", "step_ms_alone")])
    results.append(path, [result_row("smgk:4", 0, 77, "train", "peak_mem_mb_alone")])
    recipe, row = config.load_recipe("listops"), ModelSpec("smgk", 4)
    assert sweep.is_timed(results.read([path]), recipe, row, "paper")
    assert not sweep.is_trained(results.read([path]), recipe, row, "paper", 0)
    results.append(path, [result_row("smgk:4", 0, 0.37)])
    assert sweep.is_trained(results.read([path]), recipe, row, "paper", 0)
    lines = report.write_report(recipe, [row], "paper", [path], tmp_path)
    assert lines[1][-2:] == ["12.5", "77"]
    assert "Step time: each model timed in isolation" in (tmp_path / "listops.md").read_text()
    # All solo metrics include the forward pass; the latest measurement counts.
    assert not sweep.is_timed(results.read([path]), recipe, row, "paper", metrics=sweep.SOLO_METRICS)
    results.append(
        path,
        [
            result_row("smgk:4", 0, value, "train", name)
            for name, value in zip(sweep.SOLO_METRICS, (9, 4, 70), strict=True)
        ],
    )
    assert sweep.is_timed(results.read([path]), recipe, row, "paper", metrics=sweep.SOLO_METRICS)
    assert report.write_report(recipe, [row], "paper", [path], tmp_path)[1][-2:] == ["9.0", "70"]


def test_step_times_of_concurrent_jobs_are_not_in_the_table(tmp_path):
    path, recipe, row = tmp_path / "listops.csv", config.load_recipe("listops"), ModelSpec("smgk", 4)
    results.append(path, [result_row("smgk:4", 0, 0.37)])
    assert report.write_report(recipe, [row], "paper", [path], tmp_path)[1][-2:] == ["—", "100"]
    assert "not timed in isolation" in (tmp_path / "listops.md").read_text()
    # A training beside which no other job ran.
    results.append(path, sweep.to_solo_rows(results.read([path])))
    assert sweep.is_timed(results.read([path]), recipe, row, "paper")
    assert report.write_report(recipe, [row], "paper", [path], tmp_path)[1][-2:] == ["5.0", "100"]
    # A run that was finished before has no step time.
    assert sweep.to_solo_rows([{**results.read([path])[0], "step_ms": "nan"}]) == []


def test_seeds_on_the_plateau_are_not_in_the_mean(tmp_path):
    """One seed of softmax:8, both seeds of smgk:4 and none of linear:8 leave the plateau."""
    recipe, path = config.load_recipe("listops"), tmp_path / "listops.csv"
    accuracies_of = {"softmax:8": (0.20, 0.36), "smgk:4": (0.37, 0.37), "linear:8": (0.20, 0.21)}
    for row, accuracies in accuracies_of.items():
        for seed, accuracy in enumerate(accuracies):
            results.append(
                path, [result_row(row, seed, accuracy), plateau_row(row, seed, 500 if accuracy > 0.3 else 0)]
            )
            right = np.arange(2000) < 2000 * accuracy
            predictions.save(
                tmp_path, predictions.PredictionsKey("listops", ModelSpec.parse(row), "paper", seed, "test"), right
            )
    first, second, third = report.write_report(
        recipe, [ModelSpec.parse(row) for row in accuracies_of], "paper", [path], tmp_path
    )[1:]
    assert first[1:3] == ["36.00 ± 2.10 (1 of 2 seeds)", "20.0 36.0"]
    assert second[3].startswith("+1.00 ± ")
    assert third[1:4] == ["20.50 ± 0.71", "20.0 21.0", "n/a: linear:8 stayed on the plateau"]
    # Nor is there a difference if the first model stayed on the plateau.
    swapped = report.write_report(recipe, [ModelSpec("linear", 8), ModelSpec("smgk", 4)], "paper", [path], tmp_path)
    assert swapped[2][3] == "n/a: linear:8 stayed on the plateau"


@pytest.mark.parametrize(
    "rows", [["softmax:8"], ["softmax:8", "smgk:4"], [str(row) for row in config.load_recipe("listops").rows]]
)
def test_labels_of_the_plot_do_not_overlap(tmp_path, rows):
    path, recipe = tmp_path / "listops.csv", config.load_recipe("listops")
    for n, row in enumerate(rows):
        results.append(path, [result_row(row, seed, 0.2 + 0.006 * n + seed / 100) for seed in (0, 1)])
        results.append(path, [result_row(row, 0, 12345.678, "train", "step_ms_alone")])
    summaries = report.summarize(results.read([path]), recipe, [ModelSpec.parse(row) for row in rows], "paper")
    figure = make_figure(summaries, recipe, chance=17.6)
    figure.draw_without_rendering()
    score_axes, *cost_axes = figure.axes
    titles = [
        text.get_window_extent()
        for text in (*figure.texts, *(axes.title for axes in cost_axes), score_axes.xaxis.label)
    ]
    names = [text.get_window_extent() for text in score_axes.get_yticklabels()]
    assert len(names) == len(rows)
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in (*titles, *names))
    assert not any(a.overlaps(b) for a, b in itertools.combinations([*titles, *names], 2))
    for axes in cost_axes:
        numbers = [text.get_window_extent() for text in axes.texts]
        assert len(numbers) == len(rows)
        assert all(box.x1 <= axes.bbox.x1 for box in numbers)
        assert not any(a.overlaps(b) for a, b in itertools.combinations(numbers, 2))


def test_plot_needs_three_models(tmp_path):
    recipe, rows = config.load_recipe("listops"), ["softmax:8", "smgk:4", "mgk:4"]
    path, picture = tmp_path / "listops.csv", tmp_path / "listops.png"
    for n, row in enumerate(rows, 1):
        results.append(path, [result_row(row, 0, 0.37)])
        report.write_report(recipe, [ModelSpec.parse(row) for row in rows[:n]], "paper", [path], tmp_path)
        assert picture.exists() == (n == 3)
    # A plot of more models does not stay beside the table of two.
    report.write_report(recipe, [ModelSpec.parse(row) for row in rows[:2]], "paper", [path], tmp_path)
    assert not picture.exists()


def test_models_with_the_same_heads_are_together():
    rows = "mgk:4 linear:8 softmax:8/4 smgk:8 softmax:4 mlk:4 softmax:8 smgk:8/4".split()
    ordered = sorted((ModelSpec.parse(row) for row in rows), key=sort_key)
    assert [str(row) for row in ordered] == (
        "softmax:8 smgk:8 softmax:8/4 smgk:8/4 softmax:4 mgk:4 linear:8 mlk:4".split()
    )


def test_units_of_the_costs_follow_the_largest_value():
    summary = report.ModelSummary(ModelSpec("softmax", 4), params=116_000, flops=15_500_000)
    larger = report.ModelSummary(ModelSpec("softmax", 8), params=42_000_000, flops=6_700_000_000, step_ms=2.0)
    assert cost_panels([summary]) == [("parameters, thousands", [116.0]), ("MFLOPs per forward pass", [15.5])]
    (params, _), (flops, values) = cost_panels([summary, larger])
    assert (params, flops) == ("parameters, millions", "GFLOPs per forward pass")
    assert values == [0.0155, 6.7]


def test_lines_of_all_models_are_the_interval_of_the_test_set(tmp_path):
    """The deviation over two seeds that are close does not make a model look more certain than one with one seed."""
    path, recipe = tmp_path / "listops.csv", config.load_recipe("listops")
    rows = {"softmax:8": (0.37, 0.371), "smgk:4": (0.37,), "mgk:4": (0.371,)}
    for row, accuracies in rows.items():
        results.append(path, [result_row(row, seed, value) for seed, value in enumerate(accuracies)])
    models = [ModelSpec.parse(row) for row in rows]
    axes = make_figure(report.summarize(results.read([path]), recipe, models, "paper"), recipe).axes[0]
    widths = [np.ptp(container[2][0].get_segments()[0][:, 0]) for container in axes.containers]
    assert widths == pytest.approx([2 * report.binomial_half_width(37, 2000)] * 3, rel=1e-2)
    assert "line: 95 % interval of the test set" in axes.get_xlabel().replace("\n", " ")


def test_dollar_signs_in_the_title_are_not_tex(tmp_path):
    path, recipe = tmp_path / "listops.csv", replace(config.load_recipe("listops"), title=r"$\frac{$ and $x_$")
    results.append(path, [result_row("smgk:4", 0, 0.2)])
    summaries = report.summarize(results.read([path]), recipe, [ModelSpec.parse("smgk:4")], "paper")
    make_figure(summaries, recipe).savefig(tmp_path / "figure.png")


def test_differences_are_paired_by_example(tmp_path):
    """smgk:4 errs on the same examples as softmax:8, mgk:4 on others: only the interval of the latter is wide."""
    recipe, path = config.load_recipe("listops"), tmp_path / "listops.csv"
    draw = np.random.default_rng(0)
    hard = draw.random(2000) < 0.6
    correct = {"softmax:8": ~hard, "smgk:4": ~hard, "mgk:4": draw.random(2000) < 0.4}
    correct["smgk:4"][:20] = True
    for row, right in correct.items():
        results.append(path, [result_row(row, 0, right.mean())])
        predictions.save(
            tmp_path, predictions.PredictionsKey("listops", ModelSpec.parse(row), "paper", 0, "test"), right
        )
    lines = report.write_report(recipe, [ModelSpec.parse(row) for row in correct], "paper", [path], tmp_path)
    column = lines[0].index("minus softmax:8, test")
    gained = (correct["smgk:4"] & hard).sum()
    assert lines[1][column] == ""
    assert lines[2][column] == f"+{gained / 20:.2f} ± {196 * (gained / 2000) ** 0.5 / 2000**0.5:.2f}"
    assert float(lines[3][column].split("± ")[1]) > 2.5
    assert "on the same examples" in (tmp_path / "listops.md").read_text()


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
def test_notes_describe_only_what_the_table_has(tmp_path, name, metric, seeds, means, words):
    recipe, path = config.load_recipe(name), tmp_path / "results.csv"
    for row, count in zip(recipe.rows, seeds, strict=False):
        for seed in range(count):
            result = result_row(str(row), seed, 0.3 + seed / 10, metric=metric)
            settings = recipe.training
            result |= {"steps": settings.steps, "lr": settings.lr, "batch": settings.batch_size, "recipe": name}
            results.append(path, [result])
    report.write_report(recipe, list(recipe.rows), "paper", [path], tmp_path)
    note = (tmp_path / f"{name}.md").read_text().splitlines()[-1]
    assert "± is" not in note if means is None else means in note
    assert ("frequent words" in note) == words


def test_differences_prefer_the_test_split_to_equally_large_ones(tmp_path):
    recipe, path = config.load_recipe("listops"), tmp_path / "listops.csv"
    right = np.arange(2000) % 3 == 0
    for row in ("softmax:8", "smgk:4"):
        for split in ("dev", "test"):
            results.append(path, [result_row(row, 0, right.mean(), split)])
            predictions.save(
                tmp_path, predictions.PredictionsKey("listops", ModelSpec.parse(row), "paper", 0, split), right
            )
    lines = report.write_report(recipe, [ModelSpec("softmax", 8), ModelSpec("smgk", 4)], "paper", [path], tmp_path)
    assert "minus softmax:8, test" in lines[0]


def test_difference_in_another_unit_names_it(tmp_path):
    recipe, path = config.load_recipe("bytes"), tmp_path / "bytes.csv"
    settings = recipe.training
    for row in ("softmax:2", "smgk:2"):
        result = result_row(row, 0, 100.0, "test", sweep.metric_format(recipe).metric)
        result |= {"recipe": "bytes", "steps": settings.steps, "lr": settings.lr, "batch": settings.batch_size}
        results.append(path, [result])
        predictions.save(
            tmp_path, predictions.PredictionsKey("bytes", ModelSpec.parse(row), "paper", 0, "test"), np.full(8200, 4.6)
        )
    lines = report.write_report(recipe, [ModelSpec("softmax", 2), ModelSpec("smgk", 2)], "paper", [path], tmp_path)
    assert "minus softmax:2, test, nats per token" in lines[0]
