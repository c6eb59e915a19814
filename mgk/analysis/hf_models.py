"""Models of the Transformers library: loading, inputs from text, ids and images, and capture of attention calls.

The only module of mgk.analysis that imports transformers. Transformers' attention function is replaced by one that runs
this package's operators, whose calls are intercepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from mgk._core.calls import mixture_call
from mgk._core.validation import fail, first_line
from mgk.analysis.capture import LayerHandler, attention_layers, push_names
from mgk.analysis.capture import capture_attention as capture_native_attention
from mgk.analysis.inputs import PATH_HINT
from mgk.functional import run_mixture
from mgk.hf.attention_interface import replace_attention, with_infinite_mask
from mgk.hf.convert import load_converted
from mgk.hf.mixture_keys import UNSUPPORTED, add_bias
from mgk.hf.registration import find_model_class, is_changed
from mgk.hf.tokenizer import has_vocabulary
from mgk.hf.upcycling.layers import find_layers

ATTENTION_NAME = "mgk_capture"


def load(name: str, device: torch.device | str = "cpu", *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a pretrained model in fp32 and eval mode.

    Args:
        name: A directory, or the name of a model on the Hugging Face Hub.
        device: Device of the model.
        trust_remote_code: Run the Python code of the model's repository, if its configuration names some.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        model = _load(config, name, trust_remote_code).to(device)
    # Missing and damaged files raise many types; the first line of the message names the cause.
    except Exception as error:
        _check_trusted(name, error, trust_remote_code)
        raise ValueError(f"--hf {name} cannot be loaded: {first_line(error)}") from error
    return model.eval()


def _check_trusted(name: str, error: Exception, trust_remote_code: bool) -> None:
    """Raise an error that names the option, if loading failed because code of the repository was not run."""
    if not trust_remote_code and "trust_remote_code" in str(error):
        reason = "needs Python code of its repository: read that code, then pass --trust-remote-code to run it"
        raise ValueError(f"--hf {name} {reason}") from error


def _load(config: Any, name: str, trust_remote_code: bool) -> Any:
    if is_changed(config):
        return load_converted(name, dtype=torch.float32, trust_remote_code=trust_remote_code)
    model_class = find_model_class(config) or transformers.AutoModel
    return model_class.from_pretrained(
        name, dtype=torch.float32, use_safetensors=True, trust_remote_code=trust_remote_code
    )


def variant_of(config: Any) -> str:
    """Return the variant of a model's attention: that of mgk.hf's models and of mixture keys, else softmax."""
    changes = getattr(config, "mgk", None) or {}
    return str(changes.get("variant") or getattr(config, "variant", None) or "softmax")


class Mergeability(NamedTuple):
    """Heads of a model that `mgk upcycle` can merge."""

    reason: str  # why it can merge none, or ""
    keys_are_fixed: bool  # it can merge values alone


def check_mergeable(model: PreTrainedModel, sample: dict[str, Any]) -> Mergeability:
    """Return whether `mgk upcycle` can merge heads of a model.

    Args:
        model: The model.
        sample: Inputs of the model.
    """
    if is_changed(model.config):
        return Mergeability("its heads were changed already: upcycle the original model", keys_are_fixed=False)
    try:
        layers = find_layers(model, sample)
    # The analysis is complete: a layer that the probe does not understand must not end it.
    except Exception as error:
        reason = first_line(error)
        if isinstance(error, ValueError):
            reason = f"it {reason.removeprefix('model ')}"
        return Mergeability(reason, keys_are_fixed=False)
    return Mergeability("", keys_are_fixed=any(layer.fixed_keys for layer in layers))


def _attention_function(layer_stack: list[str], names: dict[nn.Module, str]) -> Any:
    """Return an attention function that runs this package's operators under the name of the calling layer."""

    def attend(
        module: nn.Module,
        query: Tensor,  # [B, H, L, D]
        key: Tensor,  # [B, Hk, S, D]
        value: Tensor,  # [B, Hk, S, E]
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        position_bias: Tensor | None = None,
        **extras: Any,
    ) -> tuple[Tensor, None]:
        for name in UNSUPPORTED:
            if extras.get(name) is not None:
                fail("--hf", f"names a model whose attention uses {name}, which is not supported")
        mask = attention_mask
        if mask is not None and mask.is_floating_point():
            mask = with_infinite_mask(mask)[..., : key.shape[2]]
        if position_bias is not None:
            mask = add_bias(mask, position_bias)
        call = mixture_call(query, key.unsqueeze(2), value, mask, scale=scaling, similarity="dot")
        layer_stack.append(names[module])
        try:
            output = run_mixture(call, "auto")
        finally:
            layer_stack.pop()
        return output.transpose(1, 2).contiguous(), None

    return attend


@contextmanager
def _named_calls(names: dict[nn.Module, str], layer_stack: list[str]) -> Iterator[None]:
    """Name the operator calls of the layers that mgk.hf has changed, which keep their attention function."""
    changed = {module: name for module, name in names.items() if hasattr(module, "shared_config")}
    if any(getattr(module, "sinks", None) is not None for module in changed):
        fail("--hf", "names a model whose attention uses s_aux, which is not supported")
    with push_names(changed, layer_stack):
        yield


@contextmanager
def capture_attention(model: nn.Module, handler: LayerHandler) -> Iterator[None]:
    """Pass every attention call of a Transformers model to a handler, including those of this package's layers."""
    assert isinstance(model, PreTrainedModel)
    names = {module: name for name, module in model.named_modules()}
    layer_stack: list[str] = []
    with (
        _named_calls(names, layer_stack),
        replace_attention(model, ATTENTION_NAME, _attention_function(layer_stack, names)) as replaced,
    ):
        if not replaced and not attention_layers(model):
            fail("--hf", f"names a {type(model).__name__}, whose attention function cannot be replaced")
        with capture_native_attention(model, handler, layer_stack):
            yield


def from_text(
    name: str, texts: Sequence[str], length: int | None, min_length: int, *, trust_remote_code: bool = False
) -> tuple[list[dict[str, Any]], list[str]]:
    """Encode texts with a model's tokenizer.

    Args:
        name: The model's directory or name.
        texts: One text per sample.
        length: Truncate to this many tokens.
        min_length: Shortest permitted text, in tokens.
        trust_remote_code: Run the Python code of the tokenizer's repository, if its configuration names some.

    Returns:
        The samples, and the tokens of the first.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        _check_trusted(name, error, trust_remote_code)
        tokenizer = None
    if not has_vocabulary(tokenizer):
        raise ValueError(f"--text needs a tokenizer, and {name} has none: pass token ids with --ids")
    samples: list[dict[str, Any]] = []
    tokens: list[list[str]] = []
    if length is not None:
        length = min(length, tokenizer.model_max_length)
    for text in texts:
        ids = tokenizer(text, truncation=length is not None, max_length=length)["input_ids"]
        if len(ids) < min_length:
            fail("--text", f"is {len(ids)} tokens long, and at least {min_length} are needed; {PATH_HINT}")
        samples.append({"input_ids": torch.tensor([ids])})
        tokens.append([str(token) for token in tokenizer.convert_ids_to_tokens(ids)])
    return samples, tokens[0]


def from_ids(rows: Sequence[Sequence[int]], model: PreTrainedModel) -> list[dict[str, Any]]:
    """Check token ids against the model's vocabulary and make samples of them."""
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
    highest = max(max(row) for row in rows)
    if vocabulary is not None and highest >= vocabulary:
        fail("--ids", f"holds {highest}, and the model's vocabulary ends at {vocabulary - 1}")
    return [{"input_ids": torch.tensor([list(row)])} for row in rows]


def from_images(
    paths: Sequence[Path], name: str, model: PreTrainedModel, *, trust_remote_code: bool = False
) -> list[dict[str, Any]]:
    """Load images with the model's image processor; without one, resize them and scale their values to [-1, 1].

    Args:
        paths: One image file per sample.
        name: The model's directory or name.
        model: The model.
        trust_remote_code: Run the Python code of the processor's repository, if its configuration names some.

    Returns:
        The samples.
    """
    from PIL import Image

    size, channels = getattr(model.config, "image_size", None), getattr(model.config, "num_channels", 3)
    if size is None:
        fail("--images", f"needs a vision model, and {type(model).__name__} has no image_size")
    height, width = (size, size) if isinstance(size, int) else size
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        _check_trusted(name, error, trust_remote_code)
        processor = None
    samples = []
    for path in paths:
        if not path.is_file():
            raise ValueError(f"--images: {path} is not a file")
        # A damaged PNG is a SyntaxError, a damaged TIFF or BMP may be a ValueError.
        try:
            image = Image.open(path).convert("RGB" if channels == 3 else "L")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(f"--images: {path} is not a readable image ({error})") from error
        if processor is not None:
            samples.append(dict(processor(image, return_tensors="pt")))
            continue
        pixels = torch.from_numpy(np.array(image.resize((width, height)))).float().reshape(height, width, channels)
        samples.append({"pixel_values": (pixels / 127.5 - 1).permute(2, 0, 1)[None]})
    return samples
