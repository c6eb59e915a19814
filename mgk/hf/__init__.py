"""Integration with Transformers: the models of mgk.models as its classes, and its models with mixture keys.

Importing this package registers the classes with AutoConfig, AutoModelForCausalLM and
AutoModelForSequenceClassification, and the model types of converted models (mgk-bert, mgk-llama, ...) with all Auto
classes. Shapes: B batch size, H query heads, Hk key heads, M components, L queries, S keys,
D head dimension, E value dimension, V vocabulary size.
"""

from __future__ import annotations

try:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
except ModuleNotFoundError as error:
    message = "mgk.hf requires the extra 'hf': pip install 'mgk[hf]', or '.[hf]' in a clone"
    raise ModuleNotFoundError(message, name=error.name) from error

from mgk.hf.configuration import MGKConfig
from mgk.hf.convert import convert, load_converted
from mgk.hf.modeling import MGKCache, MGKForCausalLM, MGKForSequenceClassification, MGKPreTrainedModel
from mgk.hf.registration import register_model_types
from mgk.hf.tokenizer import tokenizer_of_run
from mgk.hf.upcycling import UpcycleReport, upcycle

__all__ = [
    "MGKCache",
    "MGKConfig",
    "MGKForCausalLM",
    "MGKForSequenceClassification",
    "MGKPreTrainedModel",
    "UpcycleReport",
    "convert",
    "load_converted",
    "tokenizer_of_run",
    "upcycle",
]

AutoConfig.register("mgk", MGKConfig, exist_ok=True)
AutoModelForCausalLM.register(MGKConfig, MGKForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(MGKConfig, MGKForSequenceClassification, exist_ok=True)
register_model_types()
