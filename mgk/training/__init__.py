"""Training harness: recipes, runs, evaluation, results and sweeps. README.md describes the life of a run.

Shapes: B examples of a batch, L tokens of an example or segment, T tokens of a packed batch.
"""

from mgk._core.deprecated_paths import moved_names

__getattr__ = moved_names(__name__, {"Run": "mgk.training.trainer", "fit": "mgk.training.trainer"})
