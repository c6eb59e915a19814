"""Configuration of the models, with the field names of Transformers."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from mgk._core.validation import fail, one_of, spelling_hint
from mgk.hf.readme import write_readme
from mgk.models import DecoderConfig, EncoderConfig
from mgk.models.checkpoint import KINDS

# Transformers' names of the fields of DecoderConfig and EncoderConfig.
NAMES = {
    "max_length": "max_position_embeddings",
    "embed_dim": "hidden_size",
    "ffn_dim": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "num_classes": "num_labels",
}
# Auto classes of the kinds.
AUTO_CLASSES = {"language-model": "AutoModelForCausalLM", "classifier": "AutoModelForSequenceClassification"}


class MGKConfig(PreTrainedConfig):
    """Configuration of a language model or classifier.

    It has the fields of DecoderConfig or EncoderConfig, under Transformers' names where it has one (hidden_size for
    embed_dim, ...).

    Attributes:
        kind: "language-model" or "classifier".
        tie_word_embeddings: Must be True for language models.

    Examples:
        >>> mgk.hf.MGKConfig(vocab_size=64, hidden_size=32, num_attention_heads=2, head_dim=16).variant
        'smgk'
    """

    model_type = "mgk"
    has_no_defaults_at_init: ClassVar[bool] = True
    kind: str = "language-model"
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        for field in dataclasses.fields(KINDS[one_of("kind", self.kind, KINDS)][0]):
            name = NAMES.get(field.name, field.name)
            if name != field.name and field.name in kwargs:
                fail(field.name, f"is called {name} in MGKConfig")
            # num_labels is set by Transformers: the number of label names, or 2.
            if name != "num_labels":
                if name not in kwargs and field.default is dataclasses.MISSING:
                    fail(name, f"is required for a {self.kind}")
                setattr(self, name, kwargs.pop(name, field.default))
        for name in kwargs:
            # Transformers accepts any name; one that is close to a field is probably a typo.
            suggestion = spelling_hint(name, self.__dict__, cutoff=0.85)
            if suggestion and not hasattr(type(self), name):
                warnings.warn(f"{name} is not a setting of MGKConfig{suggestion}", stacklevel=2)
        super().__post_init__(**kwargs)
        self.settings()

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save the configuration, and a README that shows how to load the model."""
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
        write_readme(save_directory, self.model_type, AUTO_CLASSES[self.kind])

    @classmethod
    def of(cls, config: DecoderConfig | EncoderConfig) -> MGKConfig:
        """Convert the configuration of a LanguageModel or Classifier.

        Examples:
            >>> config = mgk.models.DecoderConfig(64, num_layers=2, embed_dim=32, num_heads=2)
            >>> mgk.hf.MGKConfig.of(config).num_hidden_layers
            2
        """
        kind = next(name for name, (config_class, _) in KINDS.items() if isinstance(config, config_class))
        fields = dataclasses.fields(config)
        return cls(kind=kind, **{NAMES.get(field.name, field.name): getattr(config, field.name) for field in fields})

    def settings(self) -> DecoderConfig | EncoderConfig:
        """Return the DecoderConfig or EncoderConfig; raise a ValueError if a field is invalid.

        Examples:
            >>> config = mgk.hf.MGKConfig(vocab_size=64, hidden_size=32, num_attention_heads=2)
            >>> config.settings().num_heads
            2
        """
        config_class = KINDS[self.kind][0]
        names = [field.name for field in dataclasses.fields(config_class)]
        config: DecoderConfig | EncoderConfig = config_class(**{n: getattr(self, NAMES.get(n, n)) for n in names})
        return config
