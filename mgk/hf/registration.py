"""Model types of changed Transformers models: `mgk-bert` for a BERT with other attention layers, and so on.

A changed model has a subclass of its original class, MGKBertModel, and a subclass of its configuration, MGKBertConfig,
whose entry `mgk` describes the changes. The constructor of the subclass repeats them before weights are loaded.
Importing mgk.hf registers all model types with the Auto classes; the subclasses are made when they are first used.
The original classes only warn about another model type and would drop the changes; an entry of config.json makes them
raise an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_utils import _CAN_RECORD_REGISTRY
from transformers.models.auto import (
    feature_extraction_auto,
    image_processing_auto,
    modeling_auto,
    processing_auto,
    tokenization_auto,
    video_processing_auto,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from mgk._core.validation import fail
from mgk.hf.adapters import check_added_modules, copy_default_targets, enable_added_modules, train_added_modules
from mgk.hf.readme import write_readme

ENTRY = "mgk"  # of config.json
TYPE_PREFIX = "mgk-"  # of a model type
CLASS_PREFIX = "MGK"  # of a class
# Entries of config.mgk that do not change a model by themselves.
DESCRIPTIONS = {"requires", "variant"}
# Written to config.json for its readers: Transformers without this package reports an unknown model type. Of that
# message only the model type can be chosen, so the README of a saved model names the package too.
REQUIRES = "pip install mgk, or its clone; then import mgk.hf before from_pretrained"

# Entry of config.json that names an attention function which Transformers does not have: its classes raise an error
# that shows the name.
GUARD = "attn_implementation"
GUARD_PREFIX = "mgk, which needs"

Builder = Callable[[PreTrainedModel, dict[str, Any]], None]

# Functions that change a new model as an entry of config.mgk describes, in the order of their calls.
_builders: dict[str, Builder] = {}
# Subclasses by original class.
_classes: dict[type, type] = {}


def register_builder(entry: str, build: Builder, *, first: bool = False) -> None:
    """Register the function that changes a new model as an entry of config.mgk describes.

    Args:
        entry: Name of the entry, a dictionary by names of layers in model.base_model.
        build: Called with the model and config.mgk at the end of the model's constructor, possibly on the meta device.
            Afterwards the model must have the modules and parameter shapes of the saved model.
        first: Call it before the functions registered so far.
    """
    entries = {name: function for name, function in _builders.items() if name != entry}
    _builders.clear()
    _builders.update({entry: build, **entries} if first else {**entries, entry: build})


def describe_changes(model: PreTrainedModel, **entries: Any) -> None:
    """Add entries to config.mgk and give a model that was changed in place its own model type.

    The classes of the model and of its configuration change to subclasses, so that the model is saved under its own
    type and the Auto classes load the same model. Custom code of a repository keeps its classes.

    Args:
        model: The changed model.
        **entries: Descriptions of the changes, from which the registered functions repeat them.
    """
    settings = {"requires": REQUIRES, **(getattr(model.config, ENTRY, None) or {}), **entries}
    setattr(model.config, ENTRY, settings)
    if not model.is_remote_code():
        change_config(model.config)
        model.__class__ = changed_model_class(type(model))
        # Constructors enter the class here; without an entry, output_hidden_states has no effect.
        _CAN_RECORD_REGISTRY[str(type(model))] = model._can_record_outputs


def change_config(config: PreTrainedConfig) -> None:
    """Change the class of a configuration, in place, to that of changed models."""
    config.__class__ = changed_config_class(type(config))
    # Configurations from a file have the type of the file as an attribute too.
    vars(config).pop("model_type", None)


def apply_changes(model: PreTrainedModel, settings: Any) -> None:
    """Change a new model as config.mgk describes.

    Args:
        model: A model of the original architecture, without weights.
        settings: config.mgk. None changes nothing.
    """
    if settings is None:
        return
    name = getattr(model, "original_class", type(model)).__name__
    problem = f"the model has a config.json whose {ENTRY!r} does not match {name}"
    if not isinstance(settings, dict):
        raise ValueError(problem)
    unknown = sorted(settings.keys() - _builders.keys() - DESCRIPTIONS)
    if unknown:
        raise ValueError(f"the model has a config.json with {ENTRY}.{unknown[0]}, which needs a newer version of mgk")
    if not settings.keys() & _builders.keys():
        raise ValueError(problem)
    for entry, build in _builders.items():
        if entry in settings:
            try:
                build(model, settings)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(problem) from error


def is_changed(config: PreTrainedConfig) -> bool:
    """Return whether a configuration describes a changed model."""
    return getattr(config, ENTRY, None) is not None


class ChangedConfig:
    """Mixin of configurations of changed models: in files they have an entry that the original classes reject."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a configuration from the entries of a file."""
        if str(config_dict.get(GUARD)).startswith(GUARD_PREFIX):
            config_dict = {name: value for name, value in config_dict.items() if name != GUARD}
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]

    @classmethod
    def from_json_file(cls, json_file: Any) -> Any:
        """Make a configuration from a file."""
        return cls.from_dict(cls._dict_from_json_file(json_file))  # type: ignore[attr-defined]

    def to_json_file(self, json_file_path: Any, use_diff: bool = True) -> None:
        """Write the configuration, with the entry that the original classes reject."""
        entries = json.loads(self.to_json_string(use_diff=use_diff))  # type: ignore[attr-defined]
        entries[GUARD] = f"{GUARD_PREFIX} 'import mgk.hf' and {self._auto_class_name()}"
        Path(json_file_path).write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save the configuration, and a README that shows how to load the model."""
        # Saving a model calls this method, on the first process only.
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)  # type: ignore[misc]
        name = self._auto_class_name()
        write_readme(save_directory, self.model_type, name if name.startswith("Auto") else "AutoModel")  # type: ignore[attr-defined]

    def _auto_class_name(self) -> str:
        names = getattr(self, "architectures", None) or []
        autos = [
            auto.__name__
            for auto in _auto_classes()
            if any(cls.__name__ in names for cls in _as_tuple(auto._model_mapping.get(type(self), None)))
        ]
        # Some classes list models of other tasks too: BART for masked language models and pretraining.
        preferred = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")
        return next((name for name in (*preferred, *autos) if name in autos), "an Auto class")


class ChangedModel:
    """Mixin of changed models: a constructor that repeats the changes, and strict loading of their layers."""

    original_class: ClassVar[Any]

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        assert isinstance(self, PreTrainedModel)
        apply_changes(self, getattr(config, ENTRY, None))

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        output_loading_info: bool = False,
        ignore_mismatched_sizes: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load a model as PreTrainedModel.from_pretrained does; raise a ValueError if changed layers lack weights."""
        model, info = super().from_pretrained(  # type: ignore[misc]
            pretrained_model_name_or_path,
            *args,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # an error is raised below
            **kwargs,
        )
        layers = [name for entry in _builders for name in (getattr(model.config, ENTRY, None) or {}).get(entry, {})]
        wrong = set() if ignore_mismatched_sizes else set(map(str, info["mismatched_keys"]))
        for kind in ("missing_keys", "unexpected_keys"):
            wrong |= {str(key) for key in info[kind] if any(f"{layer}." in str(key) for layer in layers)}
        if wrong:
            source = pretrained_model_name_or_path
            fail("folder", f"{source} has weights that do not match its config.json: {', '.join(sorted(wrong))}")
        return (model, info) if output_loading_info else model

    @property
    def peft_config(self) -> dict[str, Any]:
        """Configurations of the adapters of PEFT, by name."""
        if "adapters" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no adapters")
        configs: dict[str, Any] = self.__dict__["adapters"]
        return configs

    @peft_config.setter
    def peft_config(self, configs: dict[str, Any]) -> None:
        # PEFT sets this once it has frozen the model and added its layers.
        self.__dict__["adapters"] = configs
        assert isinstance(self, PreTrainedModel)
        train_added_modules(self, configs)

    @peft_config.deleter
    def peft_config(self) -> None:
        del self.__dict__["adapters"]

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter as PreTrainedModel.load_adapter does; raise a ValueError if it drops added modules."""
        info = super().load_adapter(*args, **kwargs)  # type: ignore[misc]
        check_added_modules(info.missing_keys)
        return info

    def enable_adapters(self) -> None:
        """Enable the adapters that `disable_adapters` has disabled."""
        super().enable_adapters()  # type: ignore[misc]
        assert isinstance(self, PreTrainedModel)
        enable_added_modules(self)

    def _get_static_cache_init_shape(self) -> Any:
        # Chunked prefill allocates a static cache with the heads of the configuration. None leaves it to the first
        # forward, which knows the numbers of key heads and value heads of each layer.
        has_other_heads = "heads" in (getattr(self.config, ENTRY, None) or {})  # type: ignore[attr-defined]
        return None if has_other_heads else super()._get_static_cache_init_shape()  # type: ignore[misc]

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return whether the original class is custom code, whose unsaved buffers Transformers does not initialize."""
        return bool(cls.original_class.is_custom_code())

    # Transformers reads these from the source code of the class's module.
    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return bool(cls.original_class._can_set_attn_implementation())

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return bool(cls.original_class._can_set_experts_implementation())


def changed_config_class(original: type[PreTrainedConfig]) -> Any:
    """Return the configuration class of changed models; make and register it at the first call."""
    if original.model_type.startswith(TYPE_PREFIX):
        return original
    if original not in _classes:
        model_type = TYPE_PREFIX + original.model_type
        attributes = {"model_type": model_type, "__module__": __name__, "__doc__": original.__doc__}
        changed: Any = type(CLASS_PREFIX + original.__name__, (ChangedConfig, original), attributes)
        _classes[original] = changed
        AutoConfig.register(model_type, changed, exist_ok=True)
        _copy_conversions(original.model_type, model_type)
        copy_default_targets(original.model_type, model_type)
        for auto in _auto_classes():
            classes = _as_tuple(auto._model_mapping.get(original, None))
            models = tuple(
                changed_model_class(cls)
                for cls in classes
                if _is_subclass(cls, PreTrainedModel) and cls.config_class is original
            )
            if models:
                auto._model_mapping.register(changed, models if len(models) > 1 else models[0], exist_ok=True)
        for mapping in _processor_mappings():
            if (processors := mapping.get(original, None)) is not None:
                mapping.register(changed, processors, exist_ok=True)
    return _classes[original]


def changed_model_class(original: type[PreTrainedModel]) -> Any:
    """Return the class of changed models of a class; make it at the first call."""
    if issubclass(original, ChangedModel):
        return original
    if original not in _classes:
        attributes = {
            "original_class": original,
            "config_class": changed_config_class(original.config_class),
            "__module__": __name__,
            "__doc__": original.__doc__,
        }
        # Making the configuration class has made this class too, if an Auto class lists it.
        if original not in _classes:
            _classes[original] = type(CLASS_PREFIX + original.__name__, (ChangedModel, original), attributes)
            _copy_conversions(original.__name__, CLASS_PREFIX + original.__name__)
    return _classes[original]


def find_model_class(config: Any) -> Any:
    """Return the model class named by a configuration, from Transformers or its Auto classes; None if unknown."""
    names = [name.removeprefix(CLASS_PREFIX) for name in config.architectures or []] if is_changed(config) else []
    for name in [*(config.architectures or []), *names]:
        original: Any = getattr(transformers, name, None)
        if _is_subclass(original, PreTrainedModel):
            return changed_model_class(original) if is_changed(config) else original
    for auto in _auto_classes():
        for cls in _as_tuple(auto._model_mapping.get(type(config), None)):
            if cls.__name__ in (config.architectures or []):
                return cls
    return None


class _UnusedConfig(type):
    """Metaclass of the placeholders of configuration classes that are made at their first use."""

    model_type: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _resolve(cls)(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_resolve(cls), name)


def _resolve(cls: _UnusedConfig) -> Any:
    return changed_config_class(CONFIG_MAPPING[cls.model_type.removeprefix(TYPE_PREFIX)])


def register_model_types() -> None:
    """Register the model types of changed models with AutoConfig, without importing the original classes."""
    for model_type, name in CONFIG_MAPPING_NAMES.items():
        attributes = {"model_type": TYPE_PREFIX + model_type, "__module__": __name__}
        unused: Any = _UnusedConfig(CLASS_PREFIX + name, (), attributes)
        AutoConfig.register(TYPE_PREFIX + model_type, unused, exist_ok=True)


def _auto_classes() -> Iterator[Any]:
    for name, value in vars(modeling_auto).items():
        if name.startswith("AutoModel") and getattr(value, "_model_mapping", None) is not None:
            yield value


def _is_subclass(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def _as_tuple(classes: Any) -> tuple[Any, ...]:
    """Return the classes that an Auto class lists for a configuration: none, one or several."""
    if classes is None:
        return ()
    return tuple(classes) if isinstance(classes, tuple | list) else (classes,)


def _processor_mappings() -> list[Any]:
    return [
        tokenization_auto.TOKENIZER_MAPPING,
        image_processing_auto.IMAGE_PROCESSOR_MAPPING,
        video_processing_auto.VIDEO_PROCESSOR_MAPPING,
        feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING,
        processing_auto.PROCESSOR_MAPPING,
    ]


def _copy_conversions(original: str, changed: str) -> None:
    """Rename and merge weights of changed models in files as for the original model type or class."""
    conversions = get_checkpoint_conversion_mapping(original)
    if conversions is not None:
        register_checkpoint_conversion_mapping(changed, conversions, overwrite=True)


def __getattr__(name: str) -> Any:
    """Return the subclass of a class of Transformers, for pickle and for libraries that import classes by name."""
    for original, changed in _classes.items():
        if changed.__name__ == name and original.__module__ != __name__:
            return changed
    base: Any = getattr(transformers, name.removeprefix(CLASS_PREFIX), None) if name.startswith(CLASS_PREFIX) else None
    if _is_subclass(base, PreTrainedModel) and base.config_class is not None:
        return changed_model_class(base)
    if _is_subclass(base, PreTrainedConfig) and base.model_type:
        return changed_config_class(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
