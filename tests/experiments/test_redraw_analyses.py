"""Figures of analyses, redrawn from their CSV files."""

import csv
import shutil
from pathlib import Path

import pytest

from experiments.redraw_analyses import read_similarities, redraw

RESULTS = Path(__file__).parents[2] / "results"


def test_figures_are_drawn_from_the_tables(tmp_path):
    for table in (RESULTS / "demo-analysis").glob("*.csv"):
        shutil.copy(table, tmp_path)
    names = {path.name for path in redraw(tmp_path)}
    assert {"ranks.png", "curves.png", *(f"similarity-{n}.png" for n in range(1, 5))} <= names
    assert all((tmp_path / name).stat().st_size > 1000 for name in names)
    (tmp_path / "ranks.csv").unlink()
    with pytest.raises(ValueError, match=r"has no ranks.csv"):
        redraw(tmp_path)


def test_similarities_are_those_of_the_analysis():
    folder = RESULTS / "demo-analysis"
    similarities = read_similarities(folder / "pairs.csv")
    with (folder / "layers.csv").open(newline="") as file:
        layers = list(csv.DictReader(file))
    assert len(layers) == sum(map(len, similarities.values()))
    for row in layers:
        similarity = similarities[row["model"]][int(row["layer"]) - 1]
        assert similarity.different["maps"] == pytest.approx(float(row["different_by_maps"]), rel=1e-4)
        assert len(set(similarity.groups)) == int(row["groups"])
