"""Redraw the figures of analyses from the CSV files beside them: python -m experiments.redraw_analyses.

It draws ranks, similarities and learning curves. The attention maps are not in the CSV files: only `mgk analyze` draws
them.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from experiments.result_rows import Row
from mgk._core.validation import fail
from mgk.analysis.layer import Ranks
from mgk.analysis.report.curves import Curve
from mgk.analysis.report.figures import draw_curves, draw_ranks, draw_similarity
from mgk.analysis.similarity import Similarity, similarity_of_pairs
from mgk.training import results
from mgk.training.config import ModelSpec


def read_ranks(path: Path) -> dict[str, list[Ranks]]:
    """Read the ranks of each layer of each model from ranks.csv."""
    return {
        model: [
            Ranks(
                np.array([int(row["head"]) - 1 for row in rows]),
                np.array([int(row["size"]) for row in rows]),
                np.array([int(row["rank"]) for row in rows]),
                np.array([float(row["effective_rank"]) for row in rows]),
            )
            for rows in layers
        ]
        for model, layers in _rows_of_layers(path).items()
    }


def read_similarities(path: Path) -> dict[str, list[Similarity]]:
    """Read the similarities of the heads of each layer of each model from pairs.csv."""
    similarities: dict[str, list[Similarity]] = {}
    for model, layers in _rows_of_layers(path).items():
        for rows in layers:
            heads = max(int(row["head_b"]) for row in rows)
            divergence, cosine = np.zeros((heads, heads)), np.eye(heads)
            for row in rows:
                a, b = int(row["head_a"]) - 1, int(row["head_b"]) - 1
                divergence[a, b] = divergence[b, a] = float(row["jensen_shannon_bits"])
                cosine[a, b] = cosine[b, a] = float(row["cosine"])
            similarities.setdefault(model, []).append(similarity_of_pairs(divergence, cosine))
    return similarities


def read_curves(path: Path) -> list[Curve]:
    """Read the learning curves from curves.csv."""
    curves: dict[tuple[str, str, str], Curve] = {}
    for row in results.read([path]):
        key = row["run"], row["split"], row["metric"]
        curve = curves.setdefault(key, Curve(*key, [], []))
        curve.steps.append(int(row["step"]))
        curve.values.append(float(row["value"]))
    return list(curves.values())


def _rows_of_layers(path: Path) -> dict[str, list[list[Row]]]:
    """Return the rows of each layer of each model, in the order of the file."""
    models: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in results.read([path]):
        models[row["model"]][row["layer"]].append(row)
    return {model: list(layers.values()) for model, layers in models.items()}


def redraw(folder: Path) -> list[Path]:
    """Redraw the figures of a folder that `mgk analyze` has written, and return their paths."""
    if not (folder / "ranks.csv").exists():
        fail("FOLDERS", f"{folder} has no ranks.csv: it is not a folder of `mgk analyze`")
    ranks = read_ranks(folder / "ranks.csv")
    # The name of a model begins with its row: "smgk:4 demo seed 0".
    variants = {model: ModelSpec.parse(model.partition(" ")[0]).variant for model in ranks}
    written = draw_ranks(ranks, variants, folder, "ranks")
    similarities = read_similarities(folder / "pairs.csv")
    for model, layers in similarities.items():
        suffix = "" if len(ranks) == 1 else f"-{list(ranks).index(model) + 1}"
        written += draw_similarity(layers, model, folder, f"similarity{suffix}")
    if (folder / "curves.csv").exists():
        written += draw_curves(read_curves(folder / "curves.csv"), variants, folder, "curves")
    return [folder / name for name in written]


def main(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders that `mgk analyze` has written; default: results/*-analysis.")
    ] = None,
) -> None:
    """Redraw ranks, similarities and learning curves of analyses from their CSV files."""
    for folder in folders or sorted(Path("results").glob("*-analysis")):
        for path in redraw(folder):
            print(path)


if __name__ == "__main__":
    typer.run(main)
