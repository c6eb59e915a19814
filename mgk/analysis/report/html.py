"""One HTML file that holds everything: style, script, numbers and pictures. It needs no network and opens from disk."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from mgk import __version__
from mgk._core.io import write_atomically
from mgk.analysis.analyse import Analysis, Layer
from mgk.analysis.attention_maps import LOWEST, PALETTE, TILE, Maps, png
from mgk.analysis.flops import ModelCost, PerHead
from mgk.analysis.report import findings
from mgk.analysis.report.curves import Curve
from mgk.analysis.similarity import SAME_GROUP

# Tiles go into the page as long as they are together no larger than this, in bytes; else they stay files beside it.
EMBEDDED = 12 << 20


@dataclass(frozen=True)
class AnalyzedModel:
    """A model of the report."""

    name: str
    about: str  # what it was run on
    analysis: Analysis
    tokens: list[str]  # of the sample whose maps are shown
    costs: list[ModelCost]
    own: ModelCost | None = None  # the model itself among `costs`
    one_head: PerHead | None = None  # an estimate, where nothing could be counted
    tiles: Path | None = None  # where those of large maps lie


def write_report(
    path: Path, subjects: list[AnalyzedModel], curves: list[Curve], files: list[str], command: str
) -> None:
    """Writes the page. `files` are named at its end."""
    data = {
        "version": __version__,
        "command": command,
        "files": files,
        "same_group": SAME_GROUP,
        "lowest": LOWEST,
        "tile": TILE,
        "palette": base64.b64encode(PALETTE).decode(),
        "models": [_subject(subject, path.parent) for subject in subjects],
        "curves": [asdict(curve) for curve in curves],
    }
    parts = {name: _page(name) for name in ("report.css", "charts.js", "report.js")}
    # In a script, "</" could end it.
    parts["data"] = json.dumps(_rounded(data), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    page = _page("report.html")
    for name, part in parts.items():
        page = page.replace(f"/*{name}*/", part)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page)


def _page(name: str) -> str:
    return (resources.files("mgk.analysis") / "report" / "assets" / name).read_text(encoding="utf-8")


def _subject(subject: AnalyzedModel, folder: Path) -> dict[str, Any]:
    analysis = subject.analysis
    return {
        "name": subject.name,
        "about": subject.about,
        "headline": findings.headline(analysis),
        "sentences": findings.sentences(analysis, subject.costs, subject.own, subject.one_head),
        "heads": analysis.heads,
        "different": analysis.different,
        "samples": analysis.samples,
        "shortest": analysis.shortest,
        "longest": analysis.longest,
        "threshold": analysis.threshold,
        "tokens": subject.tokens,
        "costs": [asdict(cost) for cost in subject.costs],
        "own": None if subject.own is None else asdict(subject.own),
        "layers": [_layer(layer, folder, subject.tiles) for layer in analysis.layers],
    }


def _layer(layer: Layer, folder: Path, tiles: Path | None) -> dict[str, Any]:
    similarity = layer.similarity
    return {
        "name": layer.name,
        "kind": layer.kind,
        "heads": layer.heads,
        "components": layer.components,
        "ranks": asdict(layer.ranks),
        "divergence": similarity.divergence,
        "cosine": similarity.cosine,
        "cka": similarity.cka,
        "order": similarity.order,
        "groups": similarity.groups,
        "different": similarity.different,
        "mixture": None if layer.mixture is None else asdict(layer.mixture),
        "usage": None if layer.usage is None else asdict(layer.usage),
        "removal": None if layer.removal is None else asdict(layer.removal),
        "maps": _maps(layer.maps, folder, tiles),
    }


def _maps(maps: Maps, folder: Path, tiles: Path | None) -> dict[str, Any]:
    return {
        "queries": maps.queries,
        "keys": maps.keys,
        "factor": maps.factor,
        "pooled": {name: [_uri(png(levels)) for levels in heads] for name, heads in maps.pooled.items()},
        "columns": maps.tile_columns,
        "tiles": _tiles(maps, folder, tiles),
    }


def _tiles(maps: Maps, folder: Path, tiles: Path | None) -> list[list[str]]:
    """For each head its tiles: in the page where they are small enough, else as the names of files."""
    if tiles is None or not maps.tiles:
        return []
    # All layers have as many tiles: what one may hold follows from what the directory holds.
    inside = sum(file.stat().st_size for file in tiles.glob("*.png")) <= EMBEDDED

    def place(name: str) -> str:
        if not name:
            return ""
        file = tiles / name
        return _uri(file.read_bytes()) if inside else file.relative_to(folder).as_posix()

    return [[place(name) for name in head] for head in maps.tiles]


def _uri(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def _rounded(value: Any) -> Any:
    """Plain numbers of at most five digits, which is all that a picture can show."""
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    if isinstance(value, np.ndarray):
        return _rounded(value.tolist())
    return float(f"{value:.5g}") if isinstance(value, float) else value
