"""Objectives: loss, metrics and evaluation of each kind of task.

An objective is one class and one entry of OBJECTIVES. The training loop calls it with example indices and uses its
loss; reports use its metric format.
"""

from __future__ import annotations

from typing import Any

from mgk.training.objectives.base import Metric, MetricFormat, NotFiniteError, Objective
from mgk.training.objectives.classification import Classification
from mgk.training.objectives.image_classification import ImageClassification
from mgk.training.objectives.language_modelling import LanguageModelling

__all__ = [
    "OBJECTIVES",
    "Classification",
    "ImageClassification",
    "LanguageModelling",
    "Metric",
    "MetricFormat",
    "NotFiniteError",
    "Objective",
    "objective_for",
]

OBJECTIVES: dict[str, type[Objective]] = {
    "classification": Classification,
    "image-classification": ImageClassification,
    "language-model": LanguageModelling,
}


def objective_for(config: Any) -> type[Objective]:
    """Return the objective that trains models with this configuration."""
    return next(objective for objective in OBJECTIVES.values() if isinstance(config, objective.config_class))
