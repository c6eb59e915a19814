"""Models built from the attention layer, and their files.

Shapes: B batch size, L sequence length, S number of keys, T total length of packed sequences or of a text, N number of
sequences or positions, d embed_dim, V vocabulary size.
"""

from mgk.models.checkpoint import load_model, save_model
from mgk.models.decoder import DecoderConfig, LanguageModel
from mgk.models.encoder import Classifier, EncoderConfig
from mgk.models.vision import VisionConfig, VisionTransformer

__all__ = [
    "Classifier",
    "DecoderConfig",
    "EncoderConfig",
    "LanguageModel",
    "VisionConfig",
    "VisionTransformer",
    "load_model",
    "save_model",
]
