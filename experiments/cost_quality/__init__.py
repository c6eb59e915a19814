"""Quality of mixture keys per training time and per byte of cache, in a modern decoder and in vision.

Importing this package registers its task, recipes and rival layers with `mgk`.
"""

from pathlib import Path

import experiments.cost_quality.query_shifts
import experiments.cost_quality.rivals  # noqa: F401  (both register layers)
from experiments.cost_quality.tasks import ENWIKI_BPE, ENWIKI_BPE_SMALL
from mgk.tasks import register_task
from mgk.training.config import RECIPE_DIRECTORIES

RECIPES = Path(__file__).parent / "recipes"

register_task(ENWIKI_BPE)
register_task(ENWIKI_BPE_SMALL)
if RECIPES.is_dir() and RECIPES not in RECIPE_DIRECTORIES:
    RECIPE_DIRECTORIES.append(RECIPES)
