"""Example inputs of a Transformers model, made from its configuration: tokens, images, videos, audio."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from mgk._core.validation import fail

LENGTH = 12  # tokens
SAMPLES = 16_000  # of audio
FRAMES = 80  # of audio features


def make_example(model: PreTrainedModel) -> dict[str, Tensor]:
    """Make inputs that a model accepts, with the same values at every call.

    Args:
        model: A Transformers model.

    Returns:
        The arguments of `forward`: the model's main input, and what an encoder-decoder requires.
    """
    name = model.main_input_name
    parameters = inspect.signature(model.forward).parameters
    if name not in MAKERS and "input_ids" in parameters:
        name = "input_ids"
    if name not in MAKERS:
        fail("example", f"is required: {type(model).__name__} takes {name}")
    generator = torch.Generator().manual_seed(0)
    example = {name: MAKERS[name](model.config, generator)}
    is_encoder_decoder = getattr(model.config, "is_encoder_decoder", False)
    if is_encoder_decoder and "decoder_input_ids" in parameters and name != "decoder_input_ids":
        example["decoder_input_ids"] = _tokens(model.config, generator)
    return {key: _place(value, model) for key, value in example.items()}


def _place(value: Tensor, model: PreTrainedModel) -> Tensor:
    return value.to(model.device, model.dtype if value.is_floating_point() else None)


def _setting(config: PreTrainedConfig, *names: str, default: Any = None) -> Any:
    """Return the first setting that the configuration or one of its parts has."""
    parts = [config, *(getattr(config, part, None) for part in getattr(config, "sub_configs", {}))]
    for part in parts:
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return default


def _tokens(config: PreTrainedConfig, generator: torch.Generator) -> Tensor:
    """Return [B, L] tokens, none of which is a token with a special meaning, such as padding or an image."""
    text = config.get_text_config()
    size = int(_setting(text, "vocab_size") or _setting(config, "vocab_size", default=32))
    special = {
        token
        for part in (config, text)
        for name, value in vars(part).items()
        if name.endswith(("token_id", "token_index"))
        for token in (value if isinstance(value, list) else [value])
    }
    plain = torch.tensor([token for token in range(min(size, 1000)) if token not in special] or [0])
    longest = _setting(text, "max_position_embeddings", "n_positions", "max_source_positions", default=LENGTH)
    length = min(LENGTH, longest) if isinstance(longest, int) and longest > 0 else LENGTH
    # Decoders of audio take the codebooks of a sequence as rows of the batch.
    batch = _setting(config, "num_codebooks", default=2)
    return plain[torch.randint(len(plain), (batch, length), generator=generator)]


def _image_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    size = _setting(config, "image_size", "input_size", "crop_size", default=224)
    height, width = (size, size) if isinstance(size, int) else list(size)[-2:]
    return int(_setting(config, "num_channels", "in_channels", "in_chans", default=3)), int(height), int(width)


def _images(config: PreTrainedConfig, generator: torch.Generator) -> Tensor:
    """Return pixels [2, C, H, W], or [1, frames, C, H, W] for a model of videos."""
    shape = _image_shape(config)
    frames = _setting(config, "num_frames", "frames_per_clip")
    if isinstance(frames, int):
        return torch.randn(1, frames, *shape, generator=generator)
    return torch.randn(2, *shape, generator=generator)


def _videos(config: PreTrainedConfig, generator: torch.Generator) -> Tensor:
    frames = int(_setting(config, "frames_per_clip", "num_frames", default=8))
    return torch.randn(1, frames, *_image_shape(config), generator=generator)


def _waveform(config: PreTrainedConfig, generator: torch.Generator) -> Tensor:
    """Return sampled audio [1, T], or a spectrogram [1, frames, bins]."""
    bins, frames = _setting(config, "num_mel_bins"), _setting(config, "max_length")
    if isinstance(bins, int) and isinstance(frames, int):
        return torch.randn(1, frames, bins, generator=generator)
    return torch.randn(1, SAMPLES, generator=generator)


def _features(config: PreTrainedConfig, generator: torch.Generator) -> Tensor:
    """Return features of audio: [1, bins, frames] for Whisper and its relatives, otherwise [1, frames, bins]."""
    positions, bins = _setting(config, "max_source_positions"), _setting(config, "num_mel_bins")
    if isinstance(positions, int) and bins is not None and _setting(config, "input_feat_per_channel") is None:
        return torch.randn(1, bins, 2 * positions, generator=generator)
    bins = _setting(config, "input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins", default=80)
    return torch.randn(1, FRAMES, int(bins), generator=generator)


MAKERS: dict[str, Callable[[PreTrainedConfig, torch.Generator], Tensor]] = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "pixel_values": _images,
    "pixel_values_videos": _videos,
    "input_values": _waveform,
    "input_features": _features,
}
