"""Training harness: recipes, runs, evaluation, results and sweeps. README.md describes the life of a run."""
