"""Saved models."""

import pytest
import torch

from mgk.models import save_model


def test_save_of_an_unknown_model_raises(tmp_path):
    with pytest.raises(ValueError, match="model must be a LanguageModel, Classifier or VisionTransformer, got Linear"):
        save_model(torch.nn.Linear(2, 2), tmp_path / "model")
    assert not (tmp_path / "model").exists()
