"""Training harness: recipes, runs, evaluation, results and sweeps. README.md describes the life of a run."""

from mgk._core.deprecated_paths import moved_names

__getattr__ = moved_names(__name__, {"Run": "mgk.training.trainer", "fit": "mgk.training.trainer"})
