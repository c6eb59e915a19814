"""Models around the attention layer, and how they lie on disk: weights as safetensors, configuration as JSON."""

from mgk.models.checkpoint import load_model, save_model
from mgk.models.decoder import DecoderConfig, LanguageModel
from mgk.models.encoder import Classifier, EncoderConfig

__all__ = ["Classifier", "DecoderConfig", "EncoderConfig", "LanguageModel", "load_model", "save_model"]
