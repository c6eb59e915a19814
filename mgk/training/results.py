"""What was measured: one row per run and metric, in CSV files that tables and pictures are made from."""

from __future__ import annotations

import csv
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mgk._core.io import locked, replacing
from mgk.training.config import ModelSpec

COLUMNS = (
    "recipe task dataset variant preset components heads kv_heads seed steps lr batch length dtype backend split "
    "n_examples metric value params flops step_ms peak_mem_mb gpu torch date commit command setup"
).split()


def environment() -> dict[str, str]:
    """The machine, the versions, the date and the commit."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu {platform.machine()}",
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
    }


def version_of(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit of the package's own checkout, with + when it has changes. $MGK_COMMIT says it where git cannot."""
    where = Path(__file__).parent
    if "MGK_COMMIT" in os.environ:
        return os.environ["MGK_COMMIT"]

    def git(*arguments: str) -> str:
        result = subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True)
        return result.stdout.strip() if result.returncode == 0 else ""

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except FileNotFoundError:
        return ""


def read(paths: Iterable[Path]) -> list[dict[str, str]]:
    """The rows of all these files that exist."""
    rows: list[dict[str, str]] = []
    for path in paths:
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                rows.extend(csv.DictReader(file))
    return rows


def rows_not_in(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the rows that a file of results does not have, as they are, already."""
    known = {tuple(row.get(column) or "" for column in COLUMNS) for row in read([path])}

    def written(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple("" if row.get(column) is None else str(row[column]) for column in COLUMNS)

    return [row for row in rows if written(row) not in known]


def append(path: Path, rows: list[dict[str, Any]], extra: Sequence[str] = ()) -> None:
    """Adds rows to a file of results, whole or not at all; several processes may do so at once.

    extra: the columns that this file has beyond those of all.
    """
    columns = [*COLUMNS, *extra]
    unknown = {key for row in rows for key in row} - set(columns)
    if unknown:
        raise ValueError(f"results have no column {', '.join(sorted(unknown))}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock")):
        rows = [*read([path]), *rows]
        with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def latest(rows: list[dict[str, str]], metric: str) -> float | None:
    """What was measured last: on the last day, by the commit that comes last of it; of several seeds the median."""
    own = [row for row in rows if row["metric"] == metric]
    if not own:
        return None
    last_day = max(row["date"] for row in own)
    commit = [row["commit"] for row in own if row["date"] == last_day][-1]
    last = {row["seed"]: float(row["value"]) for row in own if (row["date"], row["commit"]) == (last_day, commit)}
    return statistics.median(last.values())


def curve_file(results: Path, recipe: str, spec: ModelSpec, preset: str, seed: int, setup: str | None = None) -> Path:
    """Return the path of a run's learning curve in a results folder.

    Args:
        results: the folder of the results.
        recipe: the recipe's name.
        spec: the model.
        preset: the preset of the attention.
        seed: the seed of the run.
        setup: the run's setup hash if its settings differ from the recipe's, else None.
    """
    name = "-".join(part for part in (recipe, spec.file_name, preset, f"s{seed}", setup) if part)
    return results / "curves" / f"{name}.csv"


def curve_files(results: Path, recipe: str, spec: ModelSpec, preset: str) -> dict[int, Path]:
    """Return the existing learning curves of runs with the recipe's own settings, by seed."""
    first = curve_file(results, recipe, spec, preset, 0)
    pattern = re.compile(rf"{re.escape(first.stem[:-1])}(\d+)\.csv")
    seeds = sorted(int(match[1]) for path in first.parent.glob("*.csv") if (match := pattern.fullmatch(path.name)))
    return {seed: curve_file(results, recipe, spec, preset, seed) for seed in seeds}
