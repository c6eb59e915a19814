"""What each model said about each example of a test set, kept beside the results: two models are then compared on the
same examples, which is much tighter than two accuracies side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mgk._core.io import replacing
from mgk.training.config import ModelSpec

# Positions of a text whose losses are averaged into one number: neighbours depend on one another.
BLOCK = 512


@dataclass(frozen=True)
class PredictionsKey:
    """Which run's answers, on which split."""

    recipe: str
    row: ModelSpec
    preset: str
    seed: int
    split: str
    setup: str = ""  # of the run: its settings and data

    def path(self, results: Path) -> Path:
        named = "-".join(
            part for part in (self.row.file_name, self.preset, f"s{self.seed}", self.split, self.setup) if part
        )
        return results / "answers" / self.recipe / f"{named}.npz"


def keep(results: Path, place: PredictionsKey, answers: np.ndarray) -> None:
    """Writes right or wrong as bits, losses as means of blocks."""
    path = place.path(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, temporary.open("wb") as file:
        if answers.dtype == bool:
            np.savez_compressed(file, bits=np.packbits(answers), count=np.int64(len(answers)))
        else:
            whole = len(answers) // BLOCK * BLOCK
            means = answers[:whole].reshape(-1, BLOCK).mean(1) if whole else answers[:0]
            np.savez_compressed(file, means=means.astype(np.float32))


def read(results: Path, place: PredictionsKey) -> np.ndarray | None:
    """One number an example (or block), None if it was not kept."""
    path = place.path(results)
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as kept:
        if "bits" in kept:
            return np.unpackbits(kept["bits"], count=int(kept["count"])).astype(np.float64)
        return np.asarray(kept["means"], dtype=np.float64)


@dataclass(frozen=True)
class Difference:
    mean: float
    half_width: float  # of the 95 % interval over examples; what other seeds would say is not in it


def paired(ours: list[np.ndarray], theirs: list[np.ndarray]) -> Difference | None:
    """Mean of ours minus theirs over the same examples, each side averaged over its seeds."""
    if not ours or not theirs or len({len(each) for each in (*ours, *theirs)}) != 1 or len(ours[0]) < 2:
        return None
    difference = np.mean(ours, axis=0) - np.mean(theirs, axis=0)
    return Difference(float(difference.mean()), float(1.96 * difference.std(ddof=1) / math.sqrt(len(difference))))
