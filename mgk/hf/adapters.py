"""Adapters of PEFT on changed models: the parameters that a conversion adds are trained and saved with an adapter."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.utils import is_peft_available

from mgk._core.validation import fail

ADDED_MODULE = "mgk"  # name of the submodule of a converted layer
# Settings of an adapter by which a user decides about the added modules.
OPTIONS = ("modules_to_save", "exclude_modules", "target_parameters")


def check_no_adapters(model: Any, verb: str, changed: str) -> None:
    """Raise a ValueError if a model has adapters: their base model would not have the changes.

    Args:
        model: A model, possibly of PEFT.
        verb: The change, for the message: "convert".
        changed: Its participle: "converted".
    """
    if getattr(model, "peft_config", None):
        fail(
            "model",
            f"has adapters: {verb} and save it without them, and add adapters to the {changed} model; "
            "model.merge_and_unload() keeps what they have learned",
        )


def train_added_modules(model: PreTrainedModel, configs: dict[str, Any]) -> None:
    """Add the modules of a conversion to `modules_to_save` of new adapters; PEFT would freeze and not save them.

    Adapters that name these modules in one of OPTIONS, and those that are loaded for inference, are not changed.

    Args:
        model: A model to which PEFT has added its layers.
        configs: Configurations of the adapters, by name.
    """
    from peft.utils import set_additional_trainable_modules

    names = [name for name, _ in [*model.named_modules(), *model.named_parameters()] if ADDED_MODULE in name.split(".")]
    if not names:
        return
    for adapter, config in configs.items():
        if config.inference_mode or not hasattr(config, "modules_to_save"):
            continue
        if not any(_names_added_module(getattr(config, option, None), names) for option in OPTIONS):
            config.modules_to_save = [*(config.modules_to_save or []), ADDED_MODULE]
            set_additional_trainable_modules(model, config, model.config.to_dict(), adapter)


def _names_added_module(patterns: str | Iterable[str] | None, names: list[str]) -> bool:
    """Return whether an option of PEFT mentions the added modules: a list of names, or a regular expression.

    Args:
        patterns: Value of the option.
        names: Names of the added modules and of their parameters.
    """
    if isinstance(patterns, str):
        # An expression for all modules does not mention these.
        return ADDED_MODULE in patterns and any(re.fullmatch(patterns, name) for name in names)
    return any(ADDED_MODULE in pattern.split(".") for pattern in patterns or [])


def enable_added_modules(model: PreTrainedModel) -> None:
    """Enable `modules_to_save`: PreTrainedModel.disable_adapters disables them, but enable_adapters leaves them so."""
    from peft.utils import ModulesToSaveWrapper

    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            module.enable_adapters(True)


def check_added_modules(missing_keys: Iterable[str]) -> None:
    """Raise a ValueError if Transformers has not loaded the added modules of an adapter; 5.17 does not."""
    if any(f".{ADDED_MODULE}." in key for key in missing_keys):
        fail(
            "adapter",
            f"has mixture keys that Transformers {transformers.__version__} does not load: "
            "use peft.PeftModel.from_pretrained, or a newer Transformers",
        )


def copy_default_targets(model_type: str, changed_type: str) -> None:
    """Give a model type of changed models PEFT's default `target_modules` of the original type."""
    if not is_peft_available():
        return
    from peft.utils import constants

    for name, targets in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(targets, dict) and model_type in targets:
            targets.setdefault(changed_type, targets[model_type])
