"""The picture of the study of cost and quality."""

import itertools

import numpy as np
import pytest

from experiments.cost_quality import page, picture, summary
from experiments.cost_quality.picture import Box
from experiments.cost_quality.plan import load_plan
from mgk.training.config import load_recipe
from tests.experiments.cost_quality.test_study import result_row


def test_pareto_front():
    points = [(3.0, 1.0), (1.0, 5.0), (2.0, 2.0), (2.5, 3.0), (4.0, 1.0)]
    assert picture.pareto_front(points) == [(1.0, 5.0), (2.0, 2.0), (3.0, 1.0)]


@pytest.fixture(scope="module")
def rows():
    """Results of all planned arms of the study with the recipe's steps and settings."""
    generator, recipe, rows = np.random.default_rng(0), load_recipe("study"), []
    for number, (arm, seeds) in enumerate(load_plan().arms.items()):
        if arm.recipe == "study" and not arm.overrides and arm.time_of is None:
            columns = {
                "key_heads": str(arm.model.key_heads or ""),
                "params": str(30_000_000 + 1_000_000 * (number % 4)),
            }
            step_ms = 60 + 2 * number
            rows.append(result_row(recipe, arm.model, 0, "step_ms_alone", step_ms, split="train", **columns))
            loss = 3.9 + 0.005 * number
            for seed in range(seeds):
                value = loss + generator.normal(0, 0.004)
                rows.append(result_row(recipe, arm.model, seed, "loss_stride_512", value, **columns))
    return rows


def test_picture_has_every_arm_and_labels_the_front_and_the_headline(rows):
    plan = load_plan()
    summaries = summary.summarize(plan, rows)
    figure = picture.draw(plan, summaries, "study")
    assert figure.get_size_inches()[0] * picture.DPI == 880
    headline = {"softmax:8", "smgk:8", "softmax:8/4", "smgk:8/4"}
    for axis, (_, cost_of) in zip(figure.axes, picture.PANELS, strict=True):
        assert len(axis.containers) == len(summaries) == 23
        points = {(cost_of(item), item.quality): str(arm) for arm, item in summaries.items()}
        front = {points[point] for point in picture.pareto_front(list(points))}
        assert {text.get_text() for text in axis.texts} == headline | front
        assert axis.lines[0].get_drawstyle() == "steps-post"
        # Every interval is in the panel.
        low, high = axis.get_ylim()
        for container in axis.containers:
            [segments] = [line.get_segments() for line in container[2]]
            assert all(low < y < high for y in np.concatenate(segments)[:, 1])
    cache = [cost_of for title, cost_of in picture.PANELS if title.startswith("cache, KiB")]
    assert [cache[0](item) for arm, item in summaries.items() if str(arm) == "softmax:8"] == [16.0]


def test_labels_and_markers_do_not_overlap(rows):
    plan = load_plan()
    figure = picture.draw(plan, summary.summarize(plan, rows), "study")
    figure.canvas.draw()
    for axis in figure.axes:
        boxes = [Box(*text.get_window_extent().extents) for text in axis.texts]
        points = [
            axis.transData.transform((line[0].get_xdata()[0], line[0].get_ydata()[0])) for line in axis.containers
        ]
        markers = [Box(x - 3, y - 3, x + 3, y + 3) for x, y in points]
        assert not any(first.overlaps(second) for first, second in itertools.combinations(boxes, 2))
        assert not any(label.overlaps(marker) for label in boxes for marker in markers)
        assert not any(first.overlaps(second) for first, second in itertools.combinations(markers, 2))
        assert all(box.is_inside(Box(*figure.bbox.extents)) for box in boxes)


def test_labels_that_find_no_room_overlap_as_little_as_possible():
    frame = Box(0, 0, 40, 12)
    places = picture.place_labels([(20, 10)] * 2, [(5, 6)] * 2, [], frame)
    assert places[0].is_inside(frame)
    assert len(places) == 2


def test_few_arms_have_no_picture(rows):
    plan = load_plan()
    assert picture.plotted_recipe(summary.summarize(plan, rows)) == "study"
    # Two arms are too few: neither page has the picture.
    two = [row for row in rows if (row["variant"], row["heads"]) in (("gaussian", "8"),)]
    assert picture.plotted_recipe(summary.summarize(plan, two)) is None
    assert "](figures/study.png)" not in page.evidence_section(plan, two, plan_folder(), "figures/study.png")
    # With one seed of each arm the picture has no intervals.
    assert picture.plotted_recipe(summary.summarize(plan, [row for row in rows if str(row["seed"]) == "0"])) is None


def plan_folder():
    """Return the folder of the plan, which has no stored losses."""
    from experiments.cost_quality.plan import PLAN

    return PLAN.parent
