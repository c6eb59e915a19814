"""Rows of the CSV files in results/, as all experiments read them."""

from __future__ import annotations

from pathlib import Path

from mgk._core.validation import fail
from mgk.training import results
from mgk.training.config import ModelSpec

Row = dict[str, str]
Rows = list[Row]


def read_results(folder: Path) -> Rows:
    """Return the rows of all CSV files in a results directory."""
    return results.read(sorted(folder.glob("*.csv")))


def model_of(row: Row) -> ModelSpec:
    """Return the model of a row.

    Missing value heads are as many as the heads, missing key heads as many as the value heads.

    Raises:
        ValueError: The row has no number of heads: it would be missing from every mean.
    """
    if not str(row.get("heads", "")).isdecimal():  # rows that are not written yet have numbers
        fail("results", f"has a row of {row.get('recipe')}, {row['variant']}, without heads: {row}")
    heads, kv_heads, key_heads = (int(row.get(name) or 0) for name in ("heads", "kv_heads", "key_heads"))
    return ModelSpec(row["variant"], heads, None if kv_heads in (0, heads) else kv_heads, key_heads or None)
