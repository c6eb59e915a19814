"""Models of the Transformers library: loading them, giving them text, ids or images, and watching them attend.

The one file of the analysis that imports transformers. Its models look their attention function up by name; here they
find one that notes queries, keys and values, so that the weights are computed again in fp64 like those of our layers,
and no attentions of all layers have to be held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from mgk._core.calls import mixture_call
from mgk._core.validation import fail
from mgk.analysis.capture import Watcher, attention_layers
from mgk.analysis.capture import capture_attention as capture_native_attention
from mgk.analysis.inputs import PATH_HINT
from mgk.functional import run_mixture
from mgk.hf.attention_interface import find_model_class, replace_attention, with_infinite_mask

WATCHED = "mgk_watched"


def load(name: str, device: torch.device | str = "cpu") -> PreTrainedModel:
    """A pretrained model in fp32, from a directory or a hub, as the class that its configuration names."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(name)
        # What mgk.hf.convert has added is not in the class that the configuration names: it could not be loaded.
        converted = getattr(config, "mgk", None) is not None
        model = None if converted else _load(config, name)
    # Whatever a broken file or a missing one makes it raise: the first line says it.
    except Exception as error:
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(f"--hf {name} cannot be loaded: {said}") from error
    if model is None:
        fail("--hf", f"{name} has the mixture keys of mgk.hf.convert: only unconverted models are looked into")
    return model.to(device).eval()


def _load(config: Any, name: str) -> Any:
    chosen = find_model_class(config) or transformers.AutoModel
    return chosen.from_pretrained(name, dtype=torch.float32, use_safetensors=True)


def _attend(layer_stack: list[str], names: dict[nn.Module, str]) -> Any:
    """Return an attention function that runs on the operators under the name of the calling layer."""

    def attend(
        module: nn.Module,
        query: Tensor,  # [B, H, L, D]
        key: Tensor,  # [B, Hk, S, D]
        value: Tensor,  # [B, Hk, S, E]
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **extras: Any,
    ) -> tuple[Tensor, None]:
        for name in ("softcap", "s_aux"):
            if extras.get(name) is not None:
                fail("--hf", f"names a model whose attention has {name}, which is not covered")
        mask = attention_mask
        if mask is not None and mask.is_floating_point():
            mask = with_infinite_mask(mask)[..., : key.shape[2]]
        if (bias := extras.get("position_bias")) is not None:
            mask = bias if mask is None else bias + mask
        call = mixture_call(query, key.unsqueeze(2), value, mask, scale=scaling, similarity="dot")
        layer_stack.append(names[module])
        try:
            output = run_mixture(call, "auto")
        finally:
            layer_stack.pop()
        return output.transpose(1, 2).contiguous(), None

    return attend


@contextmanager
def capture_attention(model: nn.Module, watcher: Watcher) -> Iterator[None]:
    """`mgk.analysis.capture.capture_attention` for a Transformers model, which may have layers of ours inside."""
    assert isinstance(model, PreTrainedModel)
    names = {module: name for name, module in model.named_modules()}
    layer_stack: list[str] = []
    with replace_attention(model, WATCHED, _attend(layer_stack, names)) as replaced:
        if not replaced and not attention_layers(model):
            fail("--hf", f"names a {type(model).__name__}, which does not let its attention be watched")
        with capture_native_attention(model, watcher, layer_stack):
            yield


def from_text(
    name: str, texts: Sequence[str], length: int | None, least: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Each text as the model's own tokeniser has it, cut to `length`; and the tokens of the first."""
    try:
        tokeniser = transformers.AutoTokenizer.from_pretrained(name)
    except Exception:
        tokeniser = None
    # Where the files are missing, some classes come without a vocabulary instead of failing.
    if tokeniser is None or set(tokeniser.get_vocab()) <= set(tokeniser.all_special_tokens):
        raise ValueError(f"--text needs a tokeniser, and {name} has none: give token ids with --ids")
    samples: list[dict[str, Any]] = []
    tokens: list[list[str]] = []
    for text in texts:
        ids = tokeniser(text, truncation=length is not None, max_length=length)["input_ids"]
        if len(ids) < least:
            fail("--text", f"is {len(ids)} tokens long, and at least {least} are needed; {PATH_HINT}")
        samples.append({"input_ids": torch.tensor([ids])})
        tokens.append([str(token) for token in tokeniser.convert_ids_to_tokens(ids)])
    return samples, tokens[0]


def from_ids(rows: Sequence[Sequence[int]], model: PreTrainedModel) -> list[dict[str, Any]]:
    """Each row of token ids, checked against the vocabulary."""
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
    highest = max(max(row) for row in rows)
    if vocabulary is not None and highest >= vocabulary:
        fail("--ids", f"holds {highest}, and the model's vocabulary ends at {vocabulary - 1}")
    return [{"input_ids": torch.tensor([list(row)])} for row in rows]


def from_images(paths: Sequence[Path], name: str, model: PreTrainedModel) -> list[dict[str, Any]]:
    """Each image as the model's own processor has it; without one, scaled to its size and to values from -1 to 1."""
    from PIL import Image, UnidentifiedImageError

    size, channels = getattr(model.config, "image_size", None), getattr(model.config, "num_channels", 3)
    if size is None:
        fail("--images", f"needs a model of images, and {type(model).__name__} has no image_size")
    height, width = (size, size) if isinstance(size, int) else size
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(name)
    except Exception:
        processor = None
    samples = []
    for path in paths:
        try:
            image = Image.open(path).convert("RGB" if channels == 3 else "L")
        except (OSError, UnidentifiedImageError) as error:
            raise ValueError(f"--images: {path} is no image that can be read") from error
        if processor is not None:
            samples.append(dict(processor(image, return_tensors="pt")))
            continue
        pixels = torch.from_numpy(np.array(image.resize((width, height)))).float().reshape(height, width, channels)
        samples.append({"pixel_values": (pixels / 127.5 - 1).permute(2, 0, 1)[None]})
    return samples
