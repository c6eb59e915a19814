"""Classification of images by a patch transformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgk.models import VisionConfig, VisionTransformer
from mgk.training.config import ModelSpec, Recipe
from mgk.training.data import DeviceDataset
from mgk.training.objectives.classification import Classification


class ImageClassification(Classification):
    """Cross-entropy and accuracy of a VisionTransformer; an example is the pixels of an image in reading order."""

    config_class, model_class = VisionConfig, VisionTransformer

    @classmethod
    def make_config(cls, recipe: Recipe, row: ModelSpec, preset: str, task: Any, data_dir: Path) -> Any:
        return cls.resolve_config(recipe, row, preset, {"num_classes": task.num_classes})

    def load_split(self, split: Any) -> DeviceDataset:
        return DeviceDataset(split, self.task.max_length, self.device)

    def predict(self, tokens: Tensor, ends: Tensor) -> Tensor:
        config = self.model.config
        images = tokens.reshape(-1, config.channels, config.image_size, config.image_size)
        logits: Tensor = self.network(images.to(torch.uint8))
        return logits

    @staticmethod
    def run_example(model: Any, length: int) -> None:
        config = model.config
        model(torch.empty(1, config.channels, config.image_size, config.image_size))
