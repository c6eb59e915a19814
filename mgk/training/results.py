"""Results files: CSV with one row per run, split and metric. Tables and plots are generated from them."""

from __future__ import annotations

import csv
import os
import platform
import re
import stat
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mgk._core.io import locked, replacing
from mgk._core.validation import fail
from mgk.training.config import ModelSpec

COLUMNS = (
    "recipe task dataset variant preset components heads kv_heads seed steps lr batch length dtype backend split "
    "n_examples metric value params flops step_ms peak_mem_mb gpu torch date commit command setup "
    "key_heads"
).split()
# Files of earlier versions and of benchmarks/cpu.py lack these columns. `key_heads` is empty if it equals `kv_heads`.
OPTIONAL_COLUMNS = frozenset({"setup", "key_heads"})
# Columns of a training run's results that hold integers.
COUNTS = ("heads", "seed", "n_examples", "params", "flops")


def environment() -> dict[str, str]:
    """Return the GPU, the torch version, the date and the commit, as result columns."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu {platform.machine()}",
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
    }


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Return the commit of this checkout, with "+" if it has changes; $MGK_COMMIT overrides it."""
    if "MGK_COMMIT" in os.environ:
        return os.environ["MGK_COMMIT"]

    def git(*arguments: str) -> str:
        result = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True)
        return result.stdout.strip() if result.returncode == 0 else ""

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except FileNotFoundError:
        return ""


def read(paths: Iterable[Path]) -> list[dict[str, str]]:
    """Read the rows of all files that exist; raise a ValueError that names a file that is not CSV."""
    rows: list[dict[str, str]] = []
    for path in paths:
        if path.exists():
            try:
                with path.open(newline="", encoding="utf-8") as file:
                    rows.extend(csv.DictReader(file))
            except (UnicodeDecodeError, csv.Error) as error:
                raise ValueError(f"{path} is not a results file ({error}): move it to another directory") from None
    return rows


def check_numbers(path: Path, rows: Iterable[dict[str, str]], recipe: str, metric: str) -> None:
    """Raise a ValueError that names the line if a score of a recipe is not a number where it should be one."""
    for number, row in enumerate(rows, start=2):
        if row.get("recipe") != recipe:
            continue
        if missing := [name for name in COLUMNS if name not in row and name not in OPTIONAL_COLUMNS]:
            fail(str(path), f"is not a results file (its first line lacks the column {missing[0]}): move it away")
        if row["metric"] not in (metric, "plateau_left_at_step"):
            continue
        wrong = [name for name in COUNTS if not re.fullmatch(r"[0-9]{1,18}", row.get(name) or "")]
        wrong += [name for name in ("value", "peak_mem_mb") if not _is_number(row.get(name))]
        if not wrong and row["metric"] == "accuracy" and not 0 <= float(row["value"]) <= 1:
            wrong = ["value"]
        if wrong:
            fail(str(path), f"is damaged: line {number} has a wrong {wrong[0]}; remove the line, or restore the file")


def _is_number(text: str | None) -> bool:
    try:
        float(text or "")
    except ValueError:
        return False
    return True


def rows_not_in(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that a results file does not contain yet."""
    existing = {tuple(row.get(column) or "" for column in COLUMNS) for row in read([path])}

    def as_written(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple("" if row.get(column) is None else str(row[column]) for column in COLUMNS)

    return [row for row in rows if as_written(row) not in existing]


def check_file(option: str, path: Path, extra: Sequence[str] = ()) -> None:
    """Raise a ValueError unless rows can be appended: to a results file, an empty file or a new one.

    Symbolic links are followed.

    Args:
        option: Option that names the file, for the message.
        path: The CSV file; it may be missing.
        extra: Columns of this file besides COLUMNS.
    """
    lock = _lock_file(Path(os.path.realpath(path)))
    try:
        if lock.is_symlink() or (lock.exists() and not (lock.is_file() and os.access(lock, os.W_OK))):
            fail(option, f"{path}: {lock} must be a regular, writable file: remove it")
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            fail(option, f"{path} is a directory, not a file")
        if not stat.S_ISREG(status.st_mode):
            fail(option, f"{path} is not a regular file: use another path")
        # os.access ignores the permissions for root.
        if not status.st_mode & 0o222 or not os.access(path, os.W_OK):
            fail(option, f"{path} is read-only: make it writable, or use another path")
        if status.st_size and (reason := _foreign_content(path, [*COLUMNS, *extra])):
            fail(option, f"{path} {reason}: use another path")
    except FileNotFoundError:
        return
    except OSError as error:
        fail(option, f"{path}: {error.strerror or error}")


def append(path: Path, rows: list[dict[str, Any]], extra: Sequence[str] = ()) -> None:
    """Append rows to a results file, atomically; several processes may append at the same time.

    Args:
        path: The CSV file; created if missing, and refused if `check_file` refuses it.
        rows: One dict per row; missing columns stay empty.
        extra: Columns of this file besides COLUMNS.
    """
    columns = [*COLUMNS, *extra]
    unknown = {key for row in rows for key in row} - set(columns)
    if unknown:
        raise ValueError(f"results have no column {', '.join(sorted(unknown))}")
    # The target of a symbolic link, because the file is replaced by a new one.
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    check_file("results file", path, extra)
    with locked(_lock_file(path)):
        rows = [*read([path]), *rows]
        with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def _lock_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _foreign_content(path: Path, columns: Sequence[str]) -> str:
    """Return why a non-empty file is not a results file with these columns; empty if it is one."""
    reason = "is not a results file"
    try:
        with path.open(newline="", encoding="utf-8") as file:
            # Limited, because the file may be anything.
            header = next(csv.reader([file.readline(1 << 16)]), [])
            if missing := [name for name in COLUMNS if name not in header and name not in OPTIONAL_COLUMNS]:
                return f"{reason} (its first line lacks the column {missing[0]})"
            if unknown := [name for name in header if name not in columns]:
                return f"has the columns of another kind of results ({', '.join(unknown)})"
            if any(len(row) > len(header) for row in csv.reader(file)):
                return "is damaged (a row has more columns than the first line)"
    except (UnicodeDecodeError, csv.Error):
        return reason
    return ""


def latest(rows: Iterable[dict[str, str]], key: Sequence[str]) -> list[dict[str, str]]:
    """Return the last row for each combination of values in the columns `key`.

    Rows are appended to results files, so the last one is the latest measurement.
    """
    return list({tuple(row[column] for column in key): row for row in rows}.values())


def latest_value(rows: Iterable[dict[str, str]], metric: str) -> float | None:
    """Return the latest value of a metric, or None if it was not measured.

    The value is the median over the seeds that were measured on the last date, with the last commit and device of that
    date.
    """
    measurements = [row for row in rows if row["metric"] == metric]
    if not measurements:
        return None
    last_date = max(row["date"] for row in measurements)
    same_date = [row for row in measurements if row["date"] == last_date]
    last = same_date[-1]
    same = [row for row in same_date if (row["commit"], row.get("gpu")) == (last["commit"], last.get("gpu"))]
    return statistics.median(float(row["value"]) for row in latest(same, ["seed"]))


def curve_file(results: Path, recipe: str, spec: ModelSpec, preset: str, seed: int, setup: str | None = None) -> Path:
    """Return the path of a run's learning curve in a results directory.

    Args:
        results: Results directory.
        recipe: Name of the recipe.
        spec: The model.
        preset: Preset of the attention layers.
        seed: Seed of the run.
        setup: The run's setup hash if its settings differ from the recipe's, else None.
    """
    name = "-".join(part for part in (recipe, spec.file_name, preset, f"s{seed}", setup) if part)
    return results / "curves" / f"{name}.csv"


def curve_files(results: Path, recipe: str, spec: ModelSpec, preset: str) -> dict[int, Path]:
    """Return the existing learning curves of runs with the recipe's unchanged settings, by seed."""
    first = curve_file(results, recipe, spec, preset, 0)
    pattern = re.compile(rf"{re.escape(first.stem[:-1])}(\d+)\.csv")
    seeds = sorted(int(match[1]) for path in first.parent.glob("*.csv") if (match := pattern.fullmatch(path.name)))
    return {seed: curve_file(results, recipe, spec, preset, seed) for seed in seeds}
