"""Saved models: model.safetensors, config.json and their checksums in one directory, without pickle.

`training.checkpoints` has the checkpoints of a run, `distributed.checkpoint` those of sharded models.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mgk._core.checksums import replacing_verified, verify, write_verified
from mgk._core.io import DataError, make_directory
from mgk._core.validation import fail, first_line
from mgk.models.decoder import DecoderConfig, LanguageModel
from mgk.models.encoder import Classifier, EncoderConfig
from mgk.models.vision import VisionConfig, VisionTransformer

# Configuration and model classes by the `kind` in config.json.
KINDS: dict[str, tuple[type, type]] = {
    "classifier": (EncoderConfig, Classifier),
    "language-model": (DecoderConfig, LanguageModel),
    "vision-transformer": (VisionConfig, VisionTransformer),
}
# Advice in the message about damaged files.
REMEDY = "train again, or use another directory"


def save_model(model: nn.Module, directory: str | Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write the weights, the configuration and the checksums of a model; each file is written atomically and durably.

    Args:
        model: A LanguageModel, Classifier or VisionTransformer.
        directory: Directory to write to; it is created if necessary.
        weights: State dict to save. Default: that of the model.

    Examples:
        >>> import tempfile
        >>> model = mgk.models.Classifier(mgk.models.EncoderConfig(vocab_size=16, num_classes=4, max_length=64))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mgk.models.save_model(model, folder)
        ...     again = mgk.models.load_model(folder)
    """
    kind = next((name for name, (_, model_class) in KINDS.items() if isinstance(model, model_class)), None)
    if kind is None:
        fail("model", f"must be a LanguageModel, Classifier or VisionTransformer, got {type(model).__name__}")
    directory = Path(directory)
    make_directory(directory)
    config: Any = model.config
    write_verified(directory / "config.json", json.dumps({"kind": kind, **dataclasses.asdict(config)}, indent=2))
    with replacing_verified(directory / "model.safetensors") as temporary:
        save_file({name: value.contiguous() for name, value in (weights or model.state_dict()).items()}, temporary)


def load_model(directory: str | Path, device: str | torch.device = "cpu") -> nn.Module:
    """Load a model that `save_model` wrote.

    Args:
        directory: Directory with model.safetensors and config.json, verified by checksums.json if that exists.
        device: Device of the model.

    Returns:
        The model in eval mode.

    Raises:
        ValueError: A file is missing or damaged.

    Examples:
        >>> model = mgk.models.load_model("runs/demo/smgk-2-paper-s0/best")  # doctest: +SKIP
    """
    directory = Path(directory)
    try:
        for name in ("config.json", "model.safetensors"):
            verify(directory / name)
        fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        if not isinstance(fields, dict) or fields.get("kind") not in KINDS:
            raise ValueError(f"kind in config.json must be {' or '.join(KINDS)}")
        config_class, model_class = KINDS[fields.pop("kind")]
        model: nn.Module = model_class(config_class(**fields))
        weights = load_file(directory / "model.safetensors")
        _check_weights(weights, model)
        model.load_state_dict(weights)
    except DataError:
        raise
    except FileNotFoundError as error:
        # FileNotFoundErrors of safetensors have no file name.
        missing = Path(error.filename or "model.safetensors").name
        raise ValueError(f"{directory} has no saved model: {missing} is missing") from error
    except OSError as error:
        raise ValueError(f"the model in {directory} cannot be read ({error.strerror or error})") from error
    except (ValueError, TypeError, SafetensorError, RuntimeError, OverflowError, MemoryError) as error:
        raise ValueError(f"the model in {directory} is damaged ({first_line(error)}): {REMEDY}") from error
    return model.to(device).eval()


def _check_weights(weights: dict[str, Tensor], model: nn.Module) -> None:
    """Raise a ValueError for weights that load but give wrong outputs: NaN, and integers in place of numbers."""
    for name, expected in model.state_dict().items():
        tensor = weights.get(name, expected)
        if tensor.is_floating_point() != expected.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}")
        if tensor.is_floating_point() and tensor.isnan().any():
            raise ValueError(f"{name} holds NaN")
