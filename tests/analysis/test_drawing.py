"""Helpers of the figures."""

import itertools

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from mgk.analysis.report.drawing import End, label_ends, save_png, shorten_names, spread_apart
from mgk.analysis.report.figures import alternating_dashes


def test_positions_are_spread_around_their_mean():
    assert spread_apart([], 1) == []
    assert spread_apart([3.0, 1.0], 1) == [3.0, 1.0]
    assert spread_apart([2.0, 2.0, 2.0], 1) == pytest.approx([1.0, 2.0, 3.0])
    assert spread_apart([0.0, 0.2, 9.0], 1) == pytest.approx([-0.4, 0.6, 9.0])
    assert spread_apart([2.0, 2.0], 1, high=2) == [1.0, 2.0]
    assert spread_apart([0.0, 0.0], 1, low=0) == [0.0, 1.0]
    # Neighbours of a spread block are moved too, if they are closer than the distance.
    positions = np.random.default_rng(0).random(20)
    spread = np.array(spread_apart(list(positions), 0.1))
    order = np.argsort(positions)
    assert (np.diff(spread[order]) >= 0.1 - 1e-9).all()
    assert spread.mean() == pytest.approx(positions.mean())


def test_labels_of_equal_ends_do_not_overlap():
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    ends = [End(1, 0.5, f"line {n}", "black") for n in range(6)]
    for end in ends:
        axes.plot([0, end.x], [0, end.y])
    label_ends(axes, ends)
    figure.draw_without_rendering()
    boxes = sorted((Text.get_window_extent(text) for text in axes.texts), key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 for low, high in itertools.pairwise(boxes))
    assert all(box.x1 <= figure.bbox.x1 for box in boxes)


def test_shared_words_of_names_are_left_out():
    assert shorten_names(["a:8 x seed 3", "b:8 x seed 2"]) == (
        {"a:8 x seed 3": "a:8 seed 3", "b:8 x seed 2": "b:8 seed 2"},
        "x",
    )
    assert shorten_names(["a", "a"]) == ({"a": "a"}, "")
    assert shorten_names([]) == ({}, "")
    assert shorten_names(["a x y", "b y"]) == ({"a x y": "a x y", "b y": "b y"}, "")


def test_coinciding_lines_fill_the_gaps_of_one_another():
    styles = alternating_dashes({"a": [1.0, 2.0], "b": [1.0, 2.001], "c": [3.0, 4.0]})
    assert styles["c"] == "-"
    (first, (dash, gap)), (second, pattern) = styles["a"], styles["b"]
    assert pattern == (dash, gap)
    assert dash == gap == abs(first - second)


def test_png_files_keep_their_fields(tmp_path):
    figure = Figure(figsize=(2, 1))
    figure.subplots().barh([0], [1], color="#d55e00")
    save_png(figure, tmp_path / "a.png", 50, {"Drawn from": "abc", "Software": None})
    with Image.open(tmp_path / "a.png") as image:
        assert (image.size, image.text) == ((100, 50), {"Drawn from": "abc"})
        assert (0xD5, 0x5E, 0) in {colour for _, colour in image.convert("RGB").getcolors()}
