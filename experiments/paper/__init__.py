"""Reproduction of the paper: recipes, the PeerRead stand-in for Retrieval, claims and verdicts.

Importing this package registers its tasks and recipes with `mgk`. `python -m experiments.paper` writes
docs/evidence.md.
"""

from pathlib import Path

from experiments.paper.peerread.task import PEERREAD_RANDOM, PeerRead
from mgk.tasks import register_task
from mgk.training.config import RECIPE_DIRECTORIES

RECIPES = Path(__file__).parent / "recipes"

for task in (PeerRead(), PEERREAD_RANDOM):
    register_task(task)
if RECIPES not in RECIPE_DIRECTORIES:
    RECIPE_DIRECTORIES.append(RECIPES)
