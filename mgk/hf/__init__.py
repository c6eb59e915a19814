"""Our models as models of the Transformers library, and its models with mixture keys.

Importing this package makes its Auto classes know our models.
"""

from __future__ import annotations

try:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("mgk.hf needs the extra 'hf': pip install 'mgk[hf]'", name=error.name) from error

from mgk.hf.cache import MGKCache
from mgk.hf.configuration import MGKConfig
from mgk.hf.convert import convert, load_converted
from mgk.hf.modeling import MGKForCausalLM, MGKForSequenceClassification, MGKPreTrainedModel
from mgk.hf.tokenizer import tokenizer_of_run

__all__ = [
    "MGKCache",
    "MGKConfig",
    "MGKForCausalLM",
    "MGKForSequenceClassification",
    "MGKPreTrainedModel",
    "convert",
    "load_converted",
    "tokenizer_of_run",
]

AutoConfig.register("mgk", MGKConfig, exist_ok=True)
AutoModelForCausalLM.register(MGKConfig, MGKForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(MGKConfig, MGKForSequenceClassification, exist_ok=True)
