"""The numbers as CSV files, beside the report."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mgk._core.io import write_atomically
from mgk.analysis.analyse import Analysis, Layer
from mgk.analysis.flops import ModelCost
from mgk.analysis.report.curves import Curve

Rows = Iterable[Sequence[Any]]


def write_csv(path: Path, columns: str, rows: Rows) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns.split())
    writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue())


def _each(analyses: dict[str, Analysis]) -> Iterable[tuple[str, int, Layer]]:
    for model, analysis in analyses.items():
        for number, layer in enumerate(analysis.layers):
            yield model, number + 1, layer


def _layers(analyses: dict[str, Analysis]) -> Rows:
    for model, number, layer in _each(analyses):
        different, groups = layer.similarity.different, len(set(layer.similarity.groups))
        found = [different["maps"], different["cosine"], different.get("outputs", "")]
        yield model, number, layer.name, layer.kind, layer.heads, layer.components, *found, groups


def _heads(analyses: dict[str, Analysis]) -> Rows:
    for model, number, layer in _each(analyses):
        for head in range(layer.heads):
            own = layer.ranks.head == head
            ranked = int(own.sum())
            means = [float(x[own].mean()) if ranked else "" for x in (layer.ranks.rank, layer.ranks.effective)]
            removal = layer.removal
            change = "" if removal is None else float(removal.change[head])
            flipped = "" if removal is None or removal.flipped is None else float(removal.flipped[head])
            yield model, number, head + 1, layer.similarity.groups[head], ranked, *means, change, flipped


def _pairs(analyses: dict[str, Analysis]) -> Rows:
    for model, number, layer in _each(analyses):
        found = layer.similarity
        for a in range(layer.heads):
            for b in range(a + 1, layer.heads):
                cka = "" if found.cka is None else float(found.cka[a, b])
                yield model, number, a + 1, b + 1, float(found.divergence[a, b]), float(found.cosine[a, b]), cka


def _ranks(analyses: dict[str, Analysis]) -> Rows:
    for model, number, layer in _each(analyses):
        ranks = layer.ranks
        columns = (x.tolist() for x in (ranks.head + 1, ranks.size, ranks.rank, ranks.effective))
        for row in zip(*columns, strict=True):
            yield model, number, *row


def _components(analyses: dict[str, Analysis]) -> Rows:
    for model, number, layer in _each(analyses):
        mixture = layer.mixture
        for head in range(layer.heads if mixture is not None else 0):
            assert mixture is not None
            for r in range(layer.components):
                others = [s for s in range(layer.components) if s != r]
                nearest = float(mixture.distance[head, r, others].min())
                shares = [float(mixture.prior[head, r]), float(mixture.answered[head, r])]
                whole = [float(x[head]) for x in (mixture.decided, mixture.other_choice, mixture.moved)]
                yield model, number, head + 1, r + 1, *shares, nearest, *whole


def write_tables(
    directory: Path, analyses: dict[str, Analysis], costs: dict[str, list[ModelCost]], curves: list[Curve]
) -> list[str]:
    """Writes what there is; returns the names of the files."""
    tables: dict[str, tuple[str, Rows]] = {
        "layers": (
            "model layer name kind heads components different_by_maps different_by_cosine different_by_outputs groups",
            _layers(analyses),
        ),
        "heads": ("model layer head group matrices mean_rank mean_effective_rank change flipped", _heads(analyses)),
        "pairs": ("model layer head_a head_b jensen_shannon_bits cosine cka", _pairs(analyses)),
        "ranks": ("model layer head size rank effective_rank", _ranks(analyses)),
        "components": (
            "model layer head component prior answered nearest_distance decided other_choice moved",
            _components(analyses),
        ),
        "costs": (
            "model variant heads length params flops",
            ((model, c.variant, c.heads, c.length, c.params, c.flops) for model, own in costs.items() for c in own),
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
    for name, (columns, rows) in tables.items():
        found = list(rows)
        if found:
            write_csv(directory / f"{name}.csv", columns, found)
            written.append(f"{name}.csv")
    return written
