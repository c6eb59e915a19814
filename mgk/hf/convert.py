"""A pretrained Transformers model becomes one with mixture keys that computes the same and learns from there."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, PreTrainedConfig, PreTrainedModel

from mgk._core.eval_mode import eval_mode
from mgk._core.validation import fail, number, one_of, positive_integer
from mgk.hf.attention_interface import find_model_class
from mgk.hf.mixture import NAME, MixtureKeys, install, remove, renamed
from mgk.variants import VARIANTS

PROBE = "mgk_probe"
Model = TypeVar("Model", bound=PreTrainedModel)

# Why not each of the variants that are not shifted, soft and with a learned prior.
REASONS = {
    "linear": "softmax attention has no exact linear form",
    "dot": "the model is that already",
    "independent": "components with keys of their own need projections that the model does not have",
    "hard": "a hard assignment is not offered for these models",
    "em": "a prior from EM is not offered for these models",
}


@dataclass(frozen=True)
class AttentionLayerInfo:
    """A layer that looked its attention function up, and what it gave it."""

    module: nn.Module
    key_heads: int
    head_dim: int
    place: dict[str, Any]


def convert(
    model: Model,
    *,
    variant: str = "smgk",
    num_components: int = 2,
    layers: int | str | Iterable[int | str] | None = None,
    shift_std: float = 1.0,
    example: Mapping[str, Any] | None = None,
) -> Model:
    """Gives a model's softmax attention mixture keys, in place: the same outputs, and it can learn from there.

    Each layer gets a module `mgk` with shifts [Hk, M, D], a prior over components and τ [Hk], which is 0 at first; the
    projections stay. The layers are those that take their attention function from Transformers' AttentionInterface
    while the model runs the example. Caches, `generate` and masks stay Transformers' own.

    Args:
        variant: "smgk", the one that needs no new projections.
        num_components: Gaussians a key, M.
        layers: which of them: numbers (counted in the order of the modules), or patterns for their names in
            model.base_model, as "layers.0.*". Default: all. The others keep the attention that they have.
        shift_std: of the random shifts.
        example: inputs to run the model on, to see its layers and that nothing has changed. Default:
            model.dummy_inputs, a few tokens.

    Returns:
        The model. `save_pretrained` saves it; mgk.hf.load_converted reads it.
    """
    _check_variant(variant)
    positive_integer("num_components", num_components)
    number("shift_std", shift_std, 0, above=True)
    if not isinstance(model, PreTrainedModel):
        fail("model", f"must be a Transformers model, got {type(model).__name__}")
    if any(isinstance(module, MixtureKeys) for module in model.modules()):
        fail("model", "has been converted already")
    if getattr(model.config, NAME, None) is not None:
        fail("model", "was saved with mixture keys and loaded without them: use mgk.hf.load_converted")
    example = _example(model) if example is None else example
    try:
        before = _outputs(model, example)
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"example is nothing that {type(model).__name__} runs on: {reason}") from error
    seen = _seen(model, example)
    if not seen:
        fail("model", f"is a {type(model).__name__}, none of whose layers uses Transformers' AttentionInterface")
    chosen = {name: seen[name] for name in _chosen(list(seen), layers)}
    for layer in chosen.values():
        sizes = (layer.key_heads, num_components, layer.head_dim)
        install(layer.module, MixtureKeys(*sizes, layer.module.config, shift_std=shift_std, **layer.place))
    try:
        _check_unchanged(model, before, _outputs(model, example))
    except Exception:
        for layer in chosen.values():
            remove(layer.module)
        raise
    shapes = {name: [layer.key_heads, num_components, layer.head_dim] for name, layer in chosen.items()}
    setattr(model.config, NAME, {"variant": variant, "layers": shapes})
    return model


def load_converted(
    folder: str | Path,
    *,
    model_class: type[PreTrainedModel] | None = None,
    dtype: torch.dtype | str = "auto",
    device_map: Any = None,
    attn_implementation: str | None = None,
) -> Any:
    """A converted model from where `save_pretrained` has put it, a folder or a hub.

    model_class is by default the class that was saved; dtype, device_map and attn_implementation ("sdpa" or "eager")
    are those of `from_pretrained`, which alone would leave the mixture keys out.
    """
    if not Path(folder).is_dir() and str(folder).count("/") != 1:
        fail("folder", f"{folder} is neither a folder nor the name of a hub's model, owner/name")
    config = AutoConfig.from_pretrained(folder)
    saved = getattr(config, NAME, None)
    if saved is None:
        fail("folder", f"{folder} holds no converted model: use from_pretrained, then mgk.hf.convert")
    origin: Any = find_model_class(config) if model_class is None else model_class
    if origin is None:
        fail("model_class", f"is needed: Transformers has no {(config.architectures or ['?'])[0]}")

    def build(self: Any, config: PreTrainedConfig) -> None:
        origin.__init__(self, config)
        _restore(self, saved)

    # Under the name and in the module of the original, from which Transformers reads what a class can do.
    converted: Any = type(origin.__name__, (origin,), {"__init__": build, "__module__": origin.__module__})
    options = {"device_map": device_map, "attn_implementation": attn_implementation}
    model, found = converted.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below
        **{name: value for name, value in options.items() if value is not None},
    )
    wrong = {str(key) for keys in found.values() for key in keys if f".{NAME}." in str(key)}
    wrong |= set(map(str, found["mismatched_keys"]))
    if wrong:
        fail("folder", f"{folder} does not hold what its config.json says: {', '.join(sorted(wrong))}")
    model.__class__ = origin
    return model


def _check_variant(variant: Any) -> None:
    axes = VARIANTS[one_of("variant", variant, VARIANTS)]
    for value in (axes.similarity, axes.keys, axes.assignment, axes.prior):
        if value in REASONS:
            fail("variant", f"must be 'smgk', got {variant!r}: {REASONS[value]}")


def _restore(model: PreTrainedModel, saved: Any) -> None:
    """Empty mixture keys in the layers that had them."""
    try:
        _check_variant(saved["variant"])
        layers = {name: [positive_integer(name, size) for size in shape] for name, shape in saved["layers"].items()}
        for name, (heads, components, head_dim) in layers.items():
            module = model.base_model.get_submodule(name)
            install(module, MixtureKeys(heads, components, head_dim, module.config))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"folder holds a config.json whose {NAME!r} does not fit {type(model).__name__}") from error


def _example(model: PreTrainedModel) -> dict[str, Any]:
    example = model.dummy_inputs
    if model.main_input_name not in example:
        fail("example", f"is needed: {type(model).__name__} takes {model.main_input_name}")
    return {name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in example.items()}


def _outputs(model: PreTrainedModel, example: Mapping[str, Any]) -> list[Tensor]:
    """What the model makes of the example, the same whenever it is asked."""
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with eval_mode(model), torch.random.fork_rng(devices):
        torch.manual_seed(0)
        output = model(**example)
    parts = output.values() if isinstance(output, Mapping) else output
    return [part for part in parts if isinstance(part, Tensor) and part.is_floating_point()]


def _seen(model: PreTrainedModel, example: Mapping[str, Any]) -> dict[str, AttentionLayerInfo]:
    """The layers that look their attention function up, by name, in the order of the modules."""
    seen: dict[nn.Module, AttentionLayerInfo] = {}

    def note(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **extras: Any
    ) -> tuple[Tensor, None]:
        layer = AttentionLayerInfo(module, key.shape[1], key.shape[3], {"device": key.device, "dtype": key.dtype})
        first = seen.setdefault(module, layer)
        if (first.key_heads, first.head_dim) != (layer.key_heads, layer.head_dim):
            fail("model", f"has a {type(module).__name__} whose keys change their shape from call to call")
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(PROBE, note)
    configs = {
        module: module.config
        for module in model.base_model.modules()
        if not isinstance(module, PreTrainedModel) and isinstance(getattr(module, "config", None), PreTrainedConfig)
    }
    try:
        for module, config in configs.items():
            module.config = renamed(config, PROBE)
        _outputs(model, example)
    finally:
        for module, config in configs.items():
            module.config = config
    return {name: seen[module] for name, module in model.base_model.named_modules() if module in seen}


def _chosen(names: list[str], layers: Any) -> list[str]:
    if layers is None:
        return names
    chosen: set[str] = set()
    for wanted in [layers] if isinstance(layers, int | str) else layers:
        if isinstance(wanted, str):
            found = [name for name in names if fnmatch.fnmatchcase(name, wanted)]
        elif isinstance(wanted, int) and not isinstance(wanted, bool) and -len(names) <= wanted < len(names):
            found = [names[wanted]]
        else:
            found = []
        if not found:
            fail("layers", f"has {wanted!r}; the model has {len(names)}, from {names[0]!r} to {names[-1]!r}")
        chosen.update(found)
    if not chosen:
        fail("layers", "must name at least one")
    return [name for name in names if name in chosen]


def _check_unchanged(model: PreTrainedModel, before: list[Tensor], after: list[Tensor]) -> None:
    """Whatever a layer computes that its attention function was not told of ends here."""
    for old, new in zip(before, after, strict=True):
        limit = torch.finfo(old.dtype).eps ** 0.5
        size = float(old.abs().nan_to_num(0, 0, 0).max()) if old.numel() else 0.0
        if not torch.isclose(new, old, rtol=limit, atol=limit * size, equal_nan=True).all():
            off = float((new - old).abs().max())
            fail(
                "model", f"is a {type(model).__name__} whose attention is not softmax alone: outputs change by {off:g}"
            )
