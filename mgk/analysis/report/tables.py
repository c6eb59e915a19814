"""CSV tables that accompany the report."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mgk._core.io import write_atomically
from mgk.analysis.analyse import Analysis
from mgk.analysis.flops import ModelCost
from mgk.analysis.layer import Layer
from mgk.analysis.report.curves import Curve

Rows = Iterable[Sequence[Any]]


def write_csv(path: Path, columns: str, rows: Rows) -> None:
    """Write a CSV file with floats rounded to six significant digits.

    Args:
        path: The file.
        columns: Column names, separated by spaces.
        rows: Cells of each row.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns.split())
    writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue())


def _numbered_layers(analyses: dict[str, Analysis]) -> Iterable[tuple[str, int, Layer]]:
    for model, analysis in analyses.items():
        for number, layer in enumerate(analysis.layers):
            yield model, number + 1, layer


def _layers(analyses: dict[str, Analysis]) -> Rows:
    for model, number, layer in _numbered_layers(analyses):
        different, groups = layer.similarity.different, len(set(layer.similarity.groups))
        numbers = [different["maps"], different["cosine"], different.get("outputs", "")]
        yield model, number, layer.name, layer.kind, layer.heads, layer.components, *numbers, groups


def _heads(analyses: dict[str, Analysis]) -> Rows:
    for model, number, layer in _numbered_layers(analyses):
        for head in range(layer.heads):
            selected = layer.ranks.head == head
            ranked = int(selected.sum())
            means = [float(x[selected].mean()) if ranked else "" for x in (layer.ranks.rank, layer.ranks.effective)]
            removal = layer.removal
            change = "" if removal is None else float(removal.change[head])
            flipped = "" if removal is None or removal.flipped is None else float(removal.flipped[head])
            yield model, number, head + 1, layer.similarity.groups[head], ranked, *means, change, flipped


def _pairs(analyses: dict[str, Analysis]) -> Rows:
    for model, number, layer in _numbered_layers(analyses):
        divergence, cosine, cka = layer.similarity.divergence, layer.similarity.cosine, layer.similarity.cka
        for a in range(layer.heads):
            for b in range(a + 1, layer.heads):
                alignment = "" if cka is None else float(cka[a, b])
                yield model, number, a + 1, b + 1, float(divergence[a, b]), float(cosine[a, b]), alignment


def _concentration(analyses: dict[str, Analysis]) -> Rows:
    for model, number, layer in _numbered_layers(analyses):
        similarity = layer.similarity
        if similarity.concentration is not None:
            chance = similarity.different_by_chance.get("maps", "")
            shared = (layer.key_heads, layer.value_heads, similarity.different["maps"], chance)
            for head, bits in enumerate(similarity.concentration.tolist(), 1):
                yield model, number, *shared, head, bits


def _ranks(analyses: dict[str, Analysis]) -> Rows:
    for model, number, layer in _numbered_layers(analyses):
        ranks = layer.ranks
        columns = (x.tolist() for x in (ranks.head + 1, ranks.size, ranks.rank, ranks.effective))
        for row in zip(*columns, strict=True):
            yield model, number, *row


def _components(analyses: dict[str, Analysis]) -> Rows:
    for model, number, layer in _numbered_layers(analyses):
        mixture = layer.mixture
        if mixture is None:
            continue
        for head in range(layer.heads):
            for r in range(layer.components):
                nearest = float(np.delete(mixture.distance[head, r], r).min())
                shares = [float(mixture.prior[head, r]), float(mixture.answered[head, r])]
                of_head = [float(x[head]) for x in (mixture.decided, mixture.other_choice, mixture.moved)]
                yield model, number, head + 1, r + 1, *shares, nearest, *of_head


def write_tables(
    directory: Path, analyses: dict[str, Analysis], costs: dict[str, list[ModelCost]], curves: list[Curve]
) -> list[str]:
    """Write one CSV file per kind of result; tables without rows are omitted.

    Args:
        directory: Folder of the files.
        analyses: Analyses by model name.
        costs: Counted costs by model name.
        curves: Learning curves.

    Returns:
        The names of the files.
    """
    tables: dict[str, tuple[str, Rows]] = {
        "layers": (
            "model layer name kind heads components different_by_maps different_by_cosine different_by_outputs groups",
            _layers(analyses),
        ),
        "heads": ("model layer head group matrices mean_rank mean_effective_rank change flipped", _heads(analyses)),
        "pairs": ("model layer head_a head_b jensen_shannon_bits cosine cka", _pairs(analyses)),
        "concentration": (
            "model layer key_heads value_heads different_by_maps different_by_chance head bits_from_uniform",
            _concentration(analyses),
        ),
        "ranks": ("model layer head size rank effective_rank", _ranks(analyses)),
        "components": (
            "model layer head component prior answered nearest_distance decided other_choice moved",
            _components(analyses),
        ),
        "costs": (
            "model variant heads length params flops",
            (
                (model, c.variant, c.heads, c.length, c.params, c.flops)
                for model, counted in costs.items()
                for c in counted
            ),
        ),
        "curves": (
            "run split metric step value",
            (
                (curve.run, curve.split, curve.metric, step, value)
                for curve in curves
                for step, value in zip(curve.steps, curve.values, strict=True)
            ),
        ),
    }
    written = []
    for name, (columns, cells) in tables.items():
        rows = list(cells)
        if rows:
            write_csv(directory / f"{name}.csv", columns, rows)
            written.append(f"{name}.csv")
    return written
