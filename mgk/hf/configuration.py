"""The settings of our models under Transformers' names."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from mgk._core.validation import fail, nearest, one_of
from mgk.models import DecoderConfig, EncoderConfig
from mgk.models.checkpoint import KINDS

# What Transformers calls those of our settings for which it has a name.
NAMES = {
    "max_length": "max_position_embeddings",
    "embed_dim": "hidden_size",
    "ffn_dim": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "num_classes": "num_labels",
}


class MGKConfig(PreTrainedConfig):
    """The settings of a model under Transformers' names: those of DecoderConfig, or for a classifier EncoderConfig.

    kind: "language-model" or "classifier". The settings that Transformers has no name for keep ours. `of` makes one
    from our configuration, `settings` gives that back.
    """

    model_type = "mgk"
    has_no_defaults_at_init: ClassVar[bool] = True
    kind: str = "language-model"
    tie_word_embeddings: bool = True

    def __post_init__(self, **given: Any) -> None:
        for field in dataclasses.fields(KINDS[one_of("kind", self.kind, KINDS)][0]):
            name = NAMES.get(field.name, field.name)
            if name != field.name and field.name in given:
                fail(field.name, f"is called {name} here")
            # The number of labels is Transformers' own: it follows from their names, or is 2.
            if name != "num_labels":
                if name not in given and field.default is dataclasses.MISSING:
                    fail(name, f"is needed for a {self.kind}")
                setattr(self, name, given.pop(name, field.default))
        for name in given:
            # Transformers takes any setting. One that is nearly ours is a slip.
            instead = nearest(name, self.__dict__, cutoff=0.85)
            if instead and not hasattr(type(self), name):
                warnings.warn(f"{name} is no setting of MGKConfig{instead}", stacklevel=2)
        super().__post_init__(**given)
        self.settings()

    @classmethod
    def of(cls, config: DecoderConfig | EncoderConfig) -> MGKConfig:
        """From the configuration of one of our models."""
        kind = next(name for name, (config_class, _) in KINDS.items() if isinstance(config, config_class))
        fields = dataclasses.fields(config)
        return cls(kind=kind, **{NAMES.get(field.name, field.name): getattr(config, field.name) for field in fields})

    def settings(self) -> DecoderConfig | EncoderConfig:
        """The configuration of our model; a ValueError names what is wrong in it."""
        config_class = KINDS[self.kind][0]
        names = [field.name for field in dataclasses.fields(config_class)]
        config: DecoderConfig | EncoderConfig = config_class(**{n: getattr(self, NAMES.get(n, n)) for n in names})
        return config
