"""The function `mgk.hf.upcycle`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mgk._core.eval_mode import eval_mode
from mgk._core.progress import Progress, no_progress
from mgk._core.validation import fail, flag, number, one_of, positive_integer
from mgk.hf.adapters import check_no_adapters
from mgk.hf.convert import convert
from mgk.hf.registration import describe_changes, is_changed
from mgk.hf.resized_heads import ENTRY, find_projections
from mgk.hf.upcycling.budget import HeadCounts, cache_width, choose_head_counts, divisors
from mgk.hf.upcycling.calibration import Batch, make_calibration
from mgk.hf.upcycling.distil import distil
from mgk.hf.upcycling.fidelity import measure_fidelity, run_model
from mgk.hf.upcycling.layers import MergeableLayer, find_layers
from mgk.hf.upcycling.moments import Moments, collect_moments
from mgk.hf.upcycling.own_models import check_own_model, find_own_layers, is_own_model, set_head_counts
from mgk.hf.upcycling.refit import refit_outputs
from mgk.hf.upcycling.report import LayerReport, UpcycleReport
from mgk.hf.upcycling.weights import METHODS, MergedLayer, merge_heads, read_weights, write_weights

# Tokens per dimension of the keys of a layer: below the first, their covariance is too noisy to merge by; more than the
# second are used for the distillation alone.
MIN_TOKENS, MAX_TOKENS = 2, 20


def upcycle(
    model: PreTrainedModel,
    *,
    num_key_heads: int | None = None,
    num_value_heads: int | None = None,
    cache: float | None = None,
    calibration: Any,
    tokenizer: Any = None,
    mixture: bool = False,
    num_components: int = 2,
    method: str = "svd",
    refit: bool | None = None,
    length: int = 256,
    batch_size: int = 32,
    distil_steps: int = 0,
    learning_rate: float = 3e-4,
    trainable: str = "attention",
    seed: int = 0,
    state: str | Path | None = None,
    progress: Progress | None = None,
) -> tuple[Any, UpcycleReport]:
    """Return a copy of a pretrained model with fewer key heads and value heads, and a report.

    Query heads that share a key or a value are chosen by the energy that their merge loses. Keys are merged by a joint
    SVD weighted with the queries of the text, values by one weighted with the output projection; the factors move into
    the query and output projections. Rotary embeddings restrict the merges of keys to forms that commute with them.

    Args:
        model: A Transformers model whose layers use the AttentionInterface, or an `MGKForCausalLM` of the variant
            softmax, without `cache` and `mixture`. It is not changed.
        num_key_heads: Key heads per layer; divides the present number. Default: unchanged.
        num_value_heads: Value heads per layer; divides the present number. Default: unchanged.
        cache: Size of the cache relative to the present one, between 0 and 1; chooses the numbers per layer. Excludes
            num_key_heads and num_value_heads.
        calibration: Texts (with `tokenizer`), or inputs of the model as dictionaries of tensors, similar to those that
            the model is used for. A tenth is held out to measure the fidelity. Merges use the first 20 tokens per
            dimension of the keys of a layer, the distillation all.
        tokenizer: Tokenizer of the texts.
        mixture: Add mixture keys (sMGK) to the merged heads; outputs are initially unchanged, see `mgk.hf.convert`.
        num_components: Number of Gaussians per key of a mixture.
        method: "svd"; "mean" averages neighbouring heads as grouped-query attention is initialized, for comparison.
        refit: Fit the output projections to the original outputs by least squares. Default: with method "svd".
        length: Maximum number of tokens per sample.
        batch_size: Samples per batch.
        distil_steps: Training steps that fit the hidden states and logits, or embeddings, to the original model.
        learning_rate: Peak learning rate of the distillation.
        trainable: "attention" trains attention and normalization layers, "all" the whole model.
        seed: Seed of the order of the samples and of mixture keys.
        state: Folder for the state of the distillation; an interrupted one continues from it.
        progress: Called with the stage, the number of finished steps and their total.

    Returns:
        The new model, which `save_pretrained` writes and the Auto classes load after `import mgk.hf`, and the report.

    Examples:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
        >>> model = BertModel(BertConfig(vocab_size=64, **sizes)).eval()
        >>> batches = [{"input_ids": torch.randint(64, (4, 16))} for _ in range(8)]
        >>> smaller, report = mgk.hf.upcycle(model, num_key_heads=1, calibration=batches)
        >>> smaller.config.model_type, report.cache
        ('mgk-bert', 0.625)
    """
    settings = {
        "num_key_heads": num_key_heads, "num_value_heads": num_value_heads, "cache": cache, "mixture": mixture,
        "num_components": num_components, "method": method, "refit": method == "svd" if refit is None else refit,
        "length": length, "batch_size": batch_size, "distil_steps": distil_steps, "learning_rate": learning_rate,
        "trainable": trainable, "seed": seed,
    }  # fmt: skip
    _check_settings(settings)
    _check_model(model)
    is_own = is_own_model(model)
    if is_own:
        check_own_model(model, settings)
    report_progress = progress or no_progress
    data = make_calibration(model, calibration, tokenizer, length=length, batch_size=batch_size, seed=seed)
    layers = find_own_layers(model) if is_own else find_layers(model, data.batches[0])
    numbers = None if cache is not None else _requested_head_counts(layers, num_key_heads, num_value_heads)
    width = max(layer.kv_heads * layer.key_dim for layer in layers)
    selected = data.first_batches(MAX_TOKENS * width)
    report_progress("calibrating", 0, 1)
    moments = collect_moments(model, layers, selected)
    report_progress("calibrating", 1, 1)
    tokens = max(item.tokens for item in moments.values())
    if tokens < MIN_TOKENS * width:
        fail("calibration", f"has {tokens:,} tokens, and at least {MIN_TOKENS * width:,} are needed: add more text")
    if numbers is None:
        assert cache is not None
        # A batch of the calibration text: the held-out text must not choose the numbers that it judges.
        numbers = _head_counts_for_cache(model, layers, moments, data.batches[0], cache, method, report_progress)
    student, merged = _merge(model, layers, moments, numbers, method, report_progress)
    _check_runs(student, selected[0])
    changed = [layer for layer in layers if layer.name in merged]
    if settings["refit"] and changed:
        refit_outputs(model, changed, find_copies(student, changed), selected, tokens)
    if mixture:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            convert(student, num_components=num_components, example=data.batches[0])
    quality = {"merged": measure_fidelity(model, student, data.held_out)}
    losses: list[dict[str, float]] = []
    if distil_steps:
        losses = distil(
            model, student, [layer.name for layer in layers], data.batches, steps=distil_steps,
            learning_rate=learning_rate, trainable=trainable, seed=seed, state=state, settings=settings,
            progress=report_progress,
        )  # fmt: skip
        quality["distilled"] = measure_fidelity(model, student, data.held_out)
    report = UpcycleReport(
        layers=[_describe_layer(layer, numbers[layer.name], merged.get(layer.name)) for layer in layers],
        parameters=(_parameters(model), _parameters(student)),
        cache_bytes=_cache_bytes(model, layers, numbers),
        fidelity=quality,
        calibration_tokens=tokens,
        settings=settings,
        distillation=losses,
    )
    return student, report


def find_copies(student: PreTrainedModel, layers: Sequence[MergeableLayer]) -> list[MergeableLayer]:
    """Return the same layers of a copy of the model."""
    return [_copy_of(layer, student) for layer in layers]


def _copy_of(layer: MergeableLayer, student: PreTrainedModel) -> MergeableLayer:
    parent = student.base_model.get_submodule(layer.name.rpartition(".")[0])
    module = student.base_model.get_submodule(layer.name)
    projections = find_projections(module, parent)
    assert projections is not None
    return replace(layer, module=module, projections=projections)


def _check_settings(settings: dict[str, Any]) -> None:
    if settings["cache"] is None:
        if settings["num_key_heads"] is None and settings["num_value_heads"] is None:
            fail("num_key_heads", "is required, or num_value_heads or cache")
    else:
        if settings["num_key_heads"] is not None or settings["num_value_heads"] is not None:
            fail("cache", "chooses the numbers of heads: omit num_key_heads and num_value_heads")
        if not 0 < number("cache", settings["cache"]) <= 1:
            fail("cache", f"must be above 0 and at most 1, got {settings['cache']}")
    for name in ("num_key_heads", "num_value_heads"):
        if settings[name] is not None:
            positive_integer(name, settings[name])
    for name in ("num_components", "length", "batch_size"):
        positive_integer(name, settings[name])
    if settings["distil_steps"] != 0:
        positive_integer("distil_steps", settings["distil_steps"])
    number("learning_rate", settings["learning_rate"], 0, above=True)
    one_of("method", settings["method"], METHODS)
    one_of("trainable", settings["trainable"], ("attention", "all"))
    number("seed", settings["seed"], 0)
    for name in ("mixture", "refit"):
        flag(name, settings[name])


def _check_model(model: Any) -> None:
    # First, because a PEFT model is not a PreTrainedModel either.
    check_no_adapters(model, "upcycle", "upcycled")
    if not isinstance(model, PreTrainedModel):
        fail("model", f"must be a Transformers model, got {type(model).__name__}: load it with from_pretrained")
    if is_changed(model.config):
        fail("model", "has mixture keys or merged heads already: upcycle the original model")
    if getattr(model, "hf_quantizer", None) is not None or getattr(model.config, "quantization_config", None):
        fail("model", "is quantized: upcycle it before quantizing it")


def _requested_head_counts(
    layers: Sequence[MergeableLayer], key_heads: int | None, value_heads: int | None
) -> HeadCounts:
    numbers: HeadCounts = {}
    for layer in layers:
        for name, kind, count in (("num_key_heads", "key", key_heads), ("num_value_heads", "value", value_heads)):
            if count is not None and layer.kv_heads % count:
                fail(name, f"= {count} must divide the number of {kind} heads, {layer.kv_heads} ({layer.name})")
        if layer.fixed_keys and key_heads not in (None, layer.kv_heads):
            fail("num_key_heads", f"cannot change: {layer.fixed_keys}; set num_value_heads alone")
        numbers[layer.name] = (key_heads or layer.kv_heads, value_heads or layer.kv_heads)
    return numbers


def _head_counts_for_cache(
    model: PreTrainedModel,
    layers: Sequence[MergeableLayer],
    moments: dict[str, Moments],
    batch: Batch,
    cache: float,
    method: str,
    progress: Progress,
) -> HeadCounts:
    """Choose the numbers of heads by the error of the last hidden states on one batch, with one layer merged."""
    with eval_mode(model):
        expected = run_model(model, batch)
    energy = float(expected.hidden[-1][expected.mask].float().square().sum())
    done = 0
    total = sum((len(divisors(layer.kv_heads)) - 1) * (1 if layer.fixed_keys else 2) for layer in layers)

    def loss(layer: MergeableLayer, key_heads: int, value_heads: int) -> float:
        nonlocal done
        student = _copy_with_layers(model, [layer])
        (changed,) = find_copies(student, [layer])
        merged = merge_heads(layer, read_weights(layer), moments[layer.name], key_heads, value_heads, method)
        write_weights(changed, merged.weights)
        with eval_mode(student):
            actual = run_model(student, batch)
        done += 1
        progress("measuring layers", done, total)
        difference = (actual.hidden[-1] - expected.hidden[-1])[expected.mask].float()
        return float(difference.square().sum()) / energy

    return choose_head_counts(layers, cache, loss)


def _copy_with_layers(model: PreTrainedModel, layers: Sequence[MergeableLayer]) -> PreTrainedModel:
    """Copy a model; parameters outside of the given layers are shared with the original."""
    changed = {
        id(parameter)
        for layer in layers
        for part in (layer.module, layer.projections.output)
        for parameter in part.parameters()
    }
    tensors = [*model.parameters(), *model.buffers()]
    shared = {id(tensor): tensor for tensor in tensors if id(tensor) not in changed}
    return copy.deepcopy(model, shared)


def _merge(
    model: PreTrainedModel,
    layers: Sequence[MergeableLayer],
    moments: dict[str, Moments],
    numbers: HeadCounts,
    method: str,
    progress: Progress,
) -> tuple[PreTrainedModel, dict[str, MergedLayer]]:
    """Return a copy of the model with merged heads, and the merges of the layers whose numbers change."""
    student = copy.deepcopy(model)
    merged: dict[str, MergedLayer] = {}
    layers = [layer for layer in layers if numbers[layer.name] != (layer.kv_heads, layer.kv_heads)]
    for done, (layer, changed) in enumerate(zip(layers, find_copies(student, layers), strict=True), 1):
        merged[layer.name] = merge_heads(layer, read_weights(layer), moments[layer.name], *numbers[layer.name], method)
        write_weights(changed, merged[layer.name].weights)
        progress("merging layers", done, len(layers))
    sizes = {layer.name: [*numbers[layer.name], layer.key_dim, layer.value_dim] for layer in layers}
    if sizes and is_own_model(student):
        set_head_counts(student, *next(iter(numbers.values())))
    elif sizes:
        describe_changes(student, **{ENTRY: sizes})
    return student, merged


def _check_runs(student: PreTrainedModel, batch: Batch) -> None:
    """Raise a ValueError if the layers of a merged model reshape their keys to a fixed number of heads."""
    try:
        with eval_mode(student):
            student(**batch)
    except (RuntimeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), "")
        name = getattr(student, "original_class", type(student)).__name__
        raise ValueError(f"model is a {name}, whose attention layers fix the number of key heads: {reason}") from error


def _describe_layer(layer: MergeableLayer, numbers: tuple[int, int], merged: MergedLayer | None) -> LayerReport:
    key_heads, value_heads = numbers
    return LayerReport(
        name=layer.name,
        heads=layer.heads,
        key_heads=(layer.kv_heads, key_heads),
        value_heads=(layer.kv_heads, value_heads),
        key_loss=0.0 if merged is None else merged.key_loss,
        value_loss=0.0 if merged is None else merged.value_loss,
    )


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _cache_bytes(model: PreTrainedModel, layers: Sequence[MergeableLayer], numbers: HeadCounts) -> tuple[int, int]:
    size = model.dtype.itemsize
    before = sum(cache_width(layer, layer.kv_heads, layer.kv_heads) for layer in layers)
    after = sum(cache_width(layer, *numbers[layer.name]) for layer in layers)
    return before * size, after * size
