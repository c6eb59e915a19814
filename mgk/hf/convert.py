"""Conversion of pretrained Transformers models to mixture keys; the outputs are initially unchanged."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from mgk._core.eval_mode import eval_mode
from mgk._core.validation import fail, first_line, number, one_of, positive_integer
from mgk.hf.adapters import check_no_adapters
from mgk.hf.attention_interface import replace_layer_attention
from mgk.hf.example_inputs import make_example
from mgk.hf.mixture_keys import NAME, MixtureKeys, install, remove
from mgk.hf.registration import (
    change_config,
    changed_model_class,
    describe_changes,
    find_model_class,
    is_changed,
    register_builder,
)
from mgk.variants import VARIANTS

PROBE = "mgk_probe"
Model = TypeVar("Model", bound=PreTrainedModel)
# Arguments of from_pretrained that determine the files of a model, for its configuration too.
SOURCE_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")

# Reasons against variants other than smgk, by similarity, keys, assignment or prior.
REASONS = {
    "linear": "softmax attention has no exact linear form",
    "dot": "the model already uses softmax attention",
    "independent": "independent keys need projections that the model does not have",
    "hard": "hard assignment is not supported for these models",
    "em": "a prior from EM is not supported for these models",
}


@dataclass(frozen=True)
class AttentionLayerInfo:
    """A layer that uses the AttentionInterface, with the sizes, device and dtype of its keys."""

    module: nn.Module
    key_heads: int
    head_dim: int
    factory: dict[str, Any]


def convert(
    model: Model,
    *,
    variant: str = "smgk",
    num_components: int = 2,
    layers: int | str | Iterable[int | str] | None = None,
    shift_std: float = 1.0,
    example: Mapping[str, Any] | None = None,
) -> Model:
    """Replace the keys of a model's softmax attention by mixture keys, in place, with initially unchanged outputs.

    Each layer gets a submodule `mgk` with shifts [Hk, M, D], a prior over the components, and τ [Hk], initially 0; its
    projections are not changed. Layers are converted if they use Transformers' AttentionInterface when the model runs
    on the example. Caches, `generate` and masks remain those of Transformers.

    Args:
        model: A Transformers model.
        variant: "smgk", the only variant that requires no new projections.
        num_components: Number of Gaussians per key, M.
        layers: Layers to convert: indices in the order of the modules, or patterns of names in model.base_model such
            as "layers.0.*". Default: all. Other layers are not changed.
        shift_std: Standard deviation of the initial shifts.
        example: Inputs of the model, used to find its layers and to check that the outputs do not change. Default: a
            few tokens, an image or audio, by the model's main input and configuration.

    Returns:
        The model, now of a subclass with its own model type. Save it with `save_pretrained`; after `import mgk.hf` the
        Auto classes and pipelines load it.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
        ... )
        >>> model = mgk.hf.convert(LlamaForCausalLM(config))
        >>> [name for name, _ in model.named_parameters() if ".mgk." in name]
        ['model.layers.0.self_attn.mgk.shift', ...]
    """
    _check_variant(variant)
    positive_integer("num_components", num_components)
    number("shift_std", shift_std, 0, above=True)
    _check_model(model)
    example = make_example(model) if example is None else example
    try:
        before = _run_example(model, example)
    except Exception as error:
        raise ValueError(f"example is not an input that {type(model).__name__} accepts: {first_line(error)}") from error
    attention_layers = _find_attention_layers(model, example)
    if not attention_layers:
        fail("model", f"is a {type(model).__name__}, none of whose layers uses Transformers' AttentionInterface")
    selected = {name: attention_layers[name] for name in _select_layers(list(attention_layers), layers)}
    shapes = {name: [layer.key_heads, num_components, layer.head_dim] for name, layer in selected.items()}
    configs = [layer.module.config for layer in selected.values()]
    for name, layer in selected.items():
        install(layer.module, MixtureKeys(*shapes[name], shift_std=shift_std, **layer.factory))
    try:
        _check_unchanged(model, before, _run_example(model, example))
    except Exception:
        for layer, config in zip(selected.values(), configs, strict=True):
            remove(layer.module, config)
        raise
    describe_changes(model, variant=variant, layers=shapes)
    return model


def load_converted(
    folder: str | Path,
    *,
    model_class: type[PreTrainedModel] | None = None,
    dtype: torch.dtype | str = "auto",
    device_map: Any = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Any:
    """Load a model with mixture keys or merged heads that `save_pretrained` wrote, with the class that was saved.

    `AutoModel.from_pretrained` and the other Auto classes load the same model. This function also loads folders of
    earlier versions, from which they would drop the mixture keys with a warning, and custom code.

    Args:
        folder: A folder, or the name of a model on the hub.
        model_class: Class of the model. Default: the class that was saved.
        dtype: As in `from_pretrained`.
        device_map: As in `from_pretrained`.
        attn_implementation: "sdpa" or "eager", as in `from_pretrained`.
        trust_remote_code: Run the Python code of the folder, if its configuration names some.
        **options: Other arguments of `from_pretrained`, such as `quantization_config`, `revision` and `tp_plan`.

    Returns:
        The model.

    Examples:
        >>> model = mgk.hf.load_converted("folder")  # doctest: +SKIP
    """
    if not Path(folder).is_dir() and str(folder).count("/") != 1:
        fail("folder", f"{folder} is neither a folder nor a model on the hub (owner/name)")
    source = {name: options[name] for name in SOURCE_OPTIONS if name in options}
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **source)
    if not is_changed(config):
        fail("folder", f"{folder} has no converted model: use from_pretrained, then mgk.hf.convert")
    original: Any = find_model_class(config) if model_class is None else model_class
    if original is None:
        fail("model_class", f"is required: Transformers has no {(config.architectures or ['?'])[0]}")
    has_custom_code = config.is_remote_code()
    if not has_custom_code:
        change_config(config)
    options = {"device_map": device_map, "attn_implementation": attn_implementation, **options}
    model = changed_model_class(original).from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
        **{name: value for name, value in options.items() if value is not None},
    )
    if has_custom_code:
        model.__class__ = original
    return model


def _check_variant(variant: Any) -> None:
    axes = VARIANTS[one_of("variant", variant, VARIANTS)]
    for value in (axes.similarity, axes.keys, axes.assignment, axes.prior):
        if value in REASONS:
            fail("variant", f"must be 'smgk', got {variant!r}: {REASONS[value]}")


def _check_model(model: Any) -> None:
    # First, because a PEFT model is not a PreTrainedModel either.
    check_no_adapters(model, "convert", "converted")
    if not isinstance(model, PreTrainedModel):
        fail("model", f"must be a Transformers model, got {type(model).__name__}: load it with from_pretrained")
    if any(isinstance(module, MixtureKeys) for module in model.modules()):
        fail("model", "has already been converted")
    if "layers" in (getattr(model.config, NAME, None) or {}):
        fail("model", "was saved with mixture keys and loaded without them: use mgk.hf.load_converted")


def _add_mixture_keys(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    """Install new mixture keys in the layers that `convert` has changed, before their weights are loaded."""
    _check_variant(settings["variant"])
    layers = {name: [positive_integer(name, size) for size in shape] for name, shape in settings["layers"].items()}
    for name, (heads, components, head_dim) in layers.items():
        module = model.base_model.get_submodule(name)
        # A model that makes its base model with an Auto class has them already.
        if not hasattr(module, NAME):
            install(module, MixtureKeys(heads, components, head_dim))


register_builder("layers", _add_mixture_keys)


def _run_example(model: PreTrainedModel, example: Mapping[str, Any]) -> list[Tensor]:
    """Return all floating-point outputs in eval mode, with a fixed seed."""
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with eval_mode(model), torch.random.fork_rng(devices):
        torch.manual_seed(0)
        output = model(**example)
    values = output.values() if isinstance(output, Mapping) else output
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def _find_attention_layers(model: PreTrainedModel, example: Mapping[str, Any]) -> dict[str, AttentionLayerInfo]:
    """Return the layers that use the AttentionInterface, {name: info}, in the order of the modules."""
    layers: dict[nn.Module, AttentionLayerInfo] = {}

    def probe(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **extras: Any
    ) -> tuple[Tensor, None]:
        layer = AttentionLayerInfo(module, key.shape[1], key.shape[3], {"device": key.device, "dtype": key.dtype})
        first = layers.setdefault(module, layer)
        if (first.key_heads, first.head_dim) != (layer.key_heads, layer.head_dim):
            fail("model", f"has a {type(module).__name__} whose keys have different shapes in different calls")
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    with replace_layer_attention(model, PROBE, probe):
        _run_example(model, example)
    return {name: layers[module] for name, module in model.base_model.named_modules() if module in layers}


def _select_layers(names: list[str], layers: Any) -> list[str]:
    if layers is None:
        return names
    selected: set[str] = set()
    for item in [layers] if isinstance(layers, int | str) else layers:
        if isinstance(item, str):
            matches = [name for name in names if fnmatch.fnmatchcase(name, item)]
        elif isinstance(item, int) and not isinstance(item, bool) and -len(names) <= item < len(names):
            matches = [names[item]]
        else:
            matches = []
        if not matches:
            fail("layers", f"has no match for {item!r}: the {len(names)} layers are {names[0]!r} to {names[-1]!r}")
        selected.update(matches)
    if not selected:
        fail("layers", "must select at least one layer")
    return [name for name in names if name in selected]


def _check_unchanged(model: PreTrainedModel, before: list[Tensor], after: list[Tensor]) -> None:
    """Raise a ValueError if the outputs have changed: a layer then computes more than softmax attention."""
    for old, new in zip(before, after, strict=True):
        tolerance = torch.finfo(old.dtype).eps ** 0.5
        largest = float(old.abs().nan_to_num(0, 0, 0).max()) if old.numel() else 0.0
        if not torch.isclose(new, old, rtol=tolerance, atol=tolerance * largest, equal_nan=True).all():
            difference = float((new - old).abs().max())
            fail(
                "model",
                f"is a {type(model).__name__} whose attention is not pure softmax attention: "
                f"its outputs change by {difference:g}",
            )
