"""Per-example predictions of each run on the test splits, stored in the results directory.

Comparing two models on the same examples gives a tighter interval than comparing two separate accuracies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mgk._core.io import replacing
from mgk.training.config import ModelSpec

# Token losses are stored as means over blocks of this many positions.
BLOCK = 512
# Intervals use means over blocks of this many positions: losses of shorter blocks are correlated.
INDEPENDENT_BLOCK = 4096


@dataclass(frozen=True)
class PredictionsKey:
    """Run and split of a predictions file; `setup` is the hash of the run's settings and data."""

    recipe: str
    row: ModelSpec
    preset: str
    seed: int
    split: str
    setup: str = ""

    def path(self, results: Path) -> Path:
        """Return the path of the file in a results directory."""
        parts = (self.row.file_name, self.preset, f"s{self.seed}", self.split, self.setup)
        return results / "answers" / self.recipe / f"{'-'.join(part for part in parts if part)}.npz"


def save(results: Path, key: PredictionsKey, predictions: np.ndarray) -> None:
    """Write correctness as packed bits, or losses as means over blocks of tokens."""
    path = key.path(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, temporary.open("wb") as file:
        if predictions.dtype == bool:
            np.savez_compressed(file, bits=np.packbits(predictions), count=np.int64(len(predictions)))
        else:
            whole = len(predictions) // BLOCK * BLOCK
            means = predictions[:whole].reshape(-1, BLOCK).mean(1) if whole else predictions[:0]
            np.savez_compressed(file, means=means.astype(np.float32))


def read(results: Path, key: PredictionsKey) -> np.ndarray | None:
    """Return one value per example or block of INDEPENDENT_BLOCK tokens, or None if the file does not exist.

    Tokens after the last whole block are dropped.
    """
    path = key.path(results)
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as arrays:
        if "bits" in arrays:
            return np.unpackbits(arrays["bits"], count=int(arrays["count"])).astype(np.float64)
        means, group = np.asarray(arrays["means"], dtype=np.float64), INDEPENDENT_BLOCK // BLOCK
        blocks: np.ndarray = means[: len(means) // group * group].reshape(-1, group).mean(1)
        return blocks


@dataclass(frozen=True)
class Difference:
    """Mean difference of two models, with the half width of its 95 % interval over examples (not over seeds)."""

    mean: float
    half_width: float


def paired_difference(ours: list[np.ndarray], theirs: list[np.ndarray]) -> Difference | None:
    """Compute the mean of ours minus theirs over the same examples, each side averaged over its seeds.

    Args:
        ours: Predictions of one model, one array per seed.
        theirs: Predictions of the other model.

    Returns:
        The difference with Student's t interval, or None if a side is empty, the lengths differ, or there are fewer
        than two examples or blocks.
    """
    from scipy import stats

    lengths = {len(predictions) for predictions in (*ours, *theirs)}
    if not ours or not theirs or len(lengths) != 1 or len(ours[0]) < 2:
        return None
    difference = np.mean(ours, axis=0) - np.mean(theirs, axis=0)
    error = difference.std(ddof=1) / math.sqrt(len(difference))
    return Difference(float(difference.mean()), float(stats.t.ppf(0.975, len(difference) - 1) * error))
