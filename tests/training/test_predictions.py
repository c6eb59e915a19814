"""Predictions on disk."""

import numpy as np

from mgk.training import predictions
from mgk.training.config import ModelSpec


def test_predictions_are_read_back_and_losses_as_block_means(tmp_path):
    right = np.random.default_rng(1).random(1003) < 0.5
    key = predictions.PredictionsKey("a", ModelSpec("softmax", 8, 4), "paper", 2, "fresh")
    assert predictions.read(tmp_path, key) is None
    predictions.save(tmp_path, key, right)
    assert (predictions.read(tmp_path, key) == right).all()
    block = predictions.INDEPENDENT_BLOCK
    losses = np.random.default_rng(2).random(3 * block - 5).astype(np.float32)
    predictions.save(tmp_path, key, losses)
    expected = [losses[:block].mean(), losses[block : 2 * block].mean()]
    np.testing.assert_allclose(predictions.read(tmp_path, key), expected, rtol=1e-6)
    assert predictions.paired_difference([right.astype(float)], [losses]) is None
