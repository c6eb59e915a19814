"""HTML report: a single file with style, script, data and images, which opens from disk without a network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from mgk import __version__
from mgk._core.io import write_atomically
from mgk._core.palette import OTHER, colour_of
from mgk.analysis.analyse import Analysis
from mgk.analysis.attention_maps import LOWEST, PALETTE, TILE, Maps, png
from mgk.analysis.flops import HeadCost, ModelCost
from mgk.analysis.layer import Layer
from mgk.analysis.report.curves import Curve
from mgk.analysis.report.findings import sentences
from mgk.analysis.report.verdicts import NEARLY_UNIFORM, Advice, headline
from mgk.analysis.similarity import SAME_GROUP

# Tiles are embedded in the page if their total size in bytes is at most this; otherwise they stay separate files.
MAX_EMBEDDED_BYTES = 12 << 20
# Significant digits of learning curves, whose differences can be small.
CURVE_DIGITS = 9


@dataclass(frozen=True)
class AnalyzedModel:
    """A model in the report, with its analysis and costs."""

    name: str
    about: str  # description of the samples
    analysis: Analysis
    tokens: list[str]  # of the first sample, whose maps are shown
    costs: list[ModelCost]  # with other variants and numbers of heads
    cost: ModelCost | None = None  # of the model itself
    one_head: HeadCost | None = None  # estimate, if costs were not counted
    tiles: Path | None = None  # folder of the tiles of large maps
    advice: Advice | None = None  # command that acts on the findings
    variant: str = "softmax"  # decides the colour


def write_report(path: Path, models: list[AnalyzedModel], curves: list[Curve], files: list[str], command: str) -> None:
    """Write the report.

    Args:
        path: The HTML file.
        models: Models of the report, in order.
        curves: Learning curves of all runs.
        files: Names of the figures and tables next to the report, linked in its footer.
        command: Command line, for the footer.
    """
    data = {
        "version": __version__,
        "command": command,
        "files": files,
        "same_group": SAME_GROUP,
        "nearly_uniform": NEARLY_UNIFORM,
        "lowest": LOWEST,
        "tile": TILE,
        "colours": {**{name: colour_of(name) for name in _variants(models)}, "": OTHER},
        "palette": base64.b64encode(PALETTE).decode(),
        "models": [_model_data(model, path.parent) for model in models],
    }
    parts = {name: _asset(name) for name in ("report.css", "charts.js", "report.js")}
    # "</script>" in the data would end the script.
    data = {**_rounded(data), "curves": [_rounded(asdict(curve), CURVE_DIGITS) for curve in curves]}
    parts["data"] = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    page = _asset("report.html")
    for name, part in parts.items():
        page = page.replace(f"/*{name}*/", part)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page.replace("/*policy*/", _content_security_policy(page), 1))


def _variants(models: list[AnalyzedModel]) -> set[str]:
    return {model.variant for model in models} | {cost.variant for model in models for cost in model.costs}


def _content_security_policy(page: str) -> str:
    """Return a policy that allows the page's scripts, by hash, its styles, and images in it or beside it."""
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    directives = (
        "default-src 'none'",
        "script-src " + " ".join(f"'sha256-{digest}'" for digest in hashes),
        # The charts set style attributes, which a hash cannot allow.
        "style-src 'unsafe-inline'",
        "img-src data: 'self' file:",
        "base-uri 'none'",
        "form-action 'none'",
    )
    return "; ".join(directives)


def _asset(name: str) -> str:
    return (resources.files("mgk.analysis") / "report" / "assets" / name).read_text(encoding="utf-8")


def _model_data(model: AnalyzedModel, folder: Path) -> dict[str, Any]:
    analysis = model.analysis
    return {
        "name": model.name,
        "variant": model.variant,
        "about": model.about,
        "headline": headline(analysis),
        "sentences": sentences(analysis, model.costs, model.cost, model.one_head),
        "advice": None if model.advice is None else asdict(model.advice),
        "heads": analysis.heads,
        "different": analysis.different,
        "chance": analysis.different_by_chance,
        "samples": analysis.samples,
        "shortest": analysis.shortest,
        "longest": analysis.longest,
        "threshold": analysis.threshold,
        "tokens": model.tokens,
        "costs": [asdict(cost) for cost in model.costs],
        "cost": None if model.cost is None else asdict(model.cost),
        "layers": [_layer_data(layer, folder, model.tiles) for layer in analysis.layers],
    }


def _layer_data(layer: Layer, folder: Path, tiles: Path | None) -> dict[str, Any]:
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
        "chance": similarity.different_by_chance,
        "concentration": similarity.concentration,
        "mixture": None if layer.mixture is None else asdict(layer.mixture),
        "usage": None if layer.usage is None else asdict(layer.usage),
        "removal": None if layer.removal is None else asdict(layer.removal),
        "maps": _map_data(layer.maps, folder, tiles),
    }


def _map_data(maps: Maps, folder: Path, tiles: Path | None) -> dict[str, Any]:
    return {
        "queries": maps.queries,
        "keys": maps.keys,
        "factor": maps.factor,
        "pooled": {name: [_data_uri(png(levels)) for levels in heads] for name, heads in maps.pooled.items()},
        "columns": maps.tile_columns,
        "tiles": _tile_sources(maps, folder, tiles),
    }


def _tile_sources(maps: Maps, folder: Path, tiles: Path | None) -> list[list[str]]:
    """Return image sources of each head's tiles: data URIs if their total size permits, else paths."""
    if tiles is None or not maps.tiles:
        return []
    embedded = sum(file.stat().st_size for file in tiles.glob("*.png")) <= MAX_EMBEDDED_BYTES

    def source(name: str) -> str:
        if not name:
            return ""
        file = tiles / name
        return _data_uri(file.read_bytes()) if embedded else file.relative_to(folder).as_posix()

    return [[source(name) for name in head] for head in maps.tiles]


def _data_uri(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def _rounded(value: Any, digits: int = 5) -> Any:
    """Convert arrays to lists and round floats to some significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(part, digits) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part, digits) for part in value]
    if isinstance(value, np.ndarray):
        return _rounded(value.tolist(), digits)
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value
