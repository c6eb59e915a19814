"""Rows of the CSV files in results/, as all experiments read them."""

from __future__ import annotations

from pathlib import Path

from mgk.training import results
from mgk.training.config import ModelSpec

Row = dict[str, str]
Rows = list[Row]


def read_results(folder: Path) -> Rows:
    """Return the rows of all CSV files in a results directory."""
    return results.read(sorted(folder.glob("*.csv")))


def model_of(row: Row) -> ModelSpec:
    """Return the model of a row; a number of key heads or value heads that is not stored is that of the heads."""
    heads, kv_heads, key_heads = (int(row.get(name) or 0) for name in ("heads", "kv_heads", "key_heads"))
    return ModelSpec(row["variant"], heads, None if kv_heads in (0, heads) else kv_heads, key_heads or None)
