"""Distillation of a merged model from the original: hidden states, and logits or embeddings."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from mgk._core.io import replacing
from mgk._core.progress import Progress
from mgk._core.validation import fail
from mgk.hf.mixture_keys import MixtureKeys
from mgk.hf.upcycling.calibration import Batch
from mgk.hf.upcycling.fidelity import Outputs, run_model

WARMUP = 5  # steps
SAVE_EVERY = 50  # steps
LOG_EVERY = 10  # steps
MAX_NORM = 1.0
WEIGHT_DECAY = 0.01
# Mixture keys learn with a higher rate: τ starts at 0, where shifts and priors have no gradient.
MIXTURE_RATE = 30.0
STATE_FILE = "distillation.safetensors"


def distil(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    layers: Sequence[str],
    batches: Sequence[Batch],
    *,
    steps: int,
    learning_rate: float,
    trainable: str,
    seed: int,
    state: str | Path | None,
    settings: dict[str, Any],
    progress: Progress,
) -> list[dict[str, float]]:
    """Train a merged model to compute the hidden states, and logits or embeddings, of the original.

    Dropout is off. The order of the batches depends on the seed alone, so that an interrupted distillation continues
    with the same result. A model in half precision is trained in fp32, because small steps would be lost, and rounded
    at the end.

    Args:
        teacher: The original model.
        student: The merged model, trained in place.
        layers: Names of the attention layers in student.base_model.
        batches: Training batches.
        steps: Number of steps, one batch each.
        learning_rate: Peak of the learning rate, which decays along a cosine.
        trainable: "attention" for attention and normalization layers, "all" for all parameters.
        seed: Seed of the order of the batches.
        state: Folder of the saved state, or None.
        settings: Settings that must be those of a saved state.
        progress: Called with the stage, the step and the number of steps.

    Returns:
        The losses, one entry per LOG_EVERY steps.
    """
    dtypes = {name: tensor.dtype for name, tensor in student.state_dict().items()}
    if student.dtype in (torch.float16, torch.bfloat16):
        student.float()
    parameters = _trainable_parameters(student, layers, trainable)
    optimizer = _make_optimizer(student, parameters, learning_rate)
    rates = [group["lr"] for group in optimizer.param_groups]
    folder = None if state is None else Path(state)
    fingerprint = "" if folder is None else _fingerprint(settings, teacher, student, batches)
    done, log = (0, []) if folder is None else _load_state(folder, fingerprint, parameters, optimizer)
    order = _batch_order(len(batches), steps, seed)
    requires_grad = {name: parameter.requires_grad for name, parameter in student.named_parameters()}
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(name in parameters)
    modes = teacher.training, student.training
    teacher.eval()
    student.eval()
    try:
        for step in range(done, steps):
            factor = min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            batch = batches[order[step]]
            with torch.no_grad():
                expected = run_model(teacher, batch)
            hidden_loss, output_loss = _losses(run_model(student, _with_dtype(batch, student.dtype)), expected)
            optimizer.zero_grad(set_to_none=True)
            (hidden_loss + output_loss).backward()
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), MAX_NORM)
            optimizer.step()
            if step % LOG_EVERY == 0 or step + 1 == steps:
                log.append({"step": step, "hidden": hidden_loss.item(), "output": output_loss.item()})
                if not math.isfinite(log[-1]["hidden"] + log[-1]["output"]):
                    fail("learning_rate", f"= {learning_rate:g} is too large: the loss is not finite at step {step}")
            if folder is not None and (step + 1) % SAVE_EVERY == 0:
                _save_state(folder, fingerprint, parameters, optimizer, step + 1, log)
            progress("distilling", step + 1, steps)
    finally:
        optimizer.zero_grad(set_to_none=True)
        _restore_dtypes(student, dtypes)
        teacher.train(modes[0])
        student.train(modes[1])
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(requires_grad[name])
    return log


def _with_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def _restore_dtypes(model: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.dtype != dtypes[name]:
            tensor.data = tensor.data.to(dtypes[name])


def _losses(actual: Outputs, expected: Outputs) -> tuple[Tensor, Tensor]:
    """Return the error of the hidden states relative to their energy, and that of the logits or embeddings."""
    keep = expected.mask
    errors = [
        (new[keep] - old[keep]).float().square().mean() / old[keep].float().square().mean().clamp(min=1e-12)
        for new, old in zip(actual.hidden[1:], expected.hidden[1:], strict=True)
    ]
    hidden = torch.stack(errors).mean()
    if actual.logits is None or expected.logits is None:
        return hidden, (1 - (actual.embedding() * expected.embedding()).sum(-1)).mean()
    new, old = (item[keep].float().log_softmax(-1) for item in (actual.logits, expected.logits))
    return hidden, (old.exp() * (old - new)).sum(-1).mean()


def _trainable_parameters(student: nn.Module, layers: Sequence[str], trainable: str) -> dict[str, nn.Parameter]:
    """Return the parameters to train, by name."""
    if trainable == "all":
        return dict(student.named_parameters())
    base: Any = student.base_model
    # The output projection of BERT belongs to the parent of the attention layer.
    parents = [base.get_submodule(name.rpartition(".")[0]) for name in layers]
    selected = {
        id(parameter)
        for name, parent in zip(layers, parents, strict=True)
        for part in (base.get_submodule(name), getattr(parent, "output", None))
        if isinstance(part, nn.Module)
        for parameter in part.parameters()
    }
    norms = [module for module in student.modules() if type(module).__name__.endswith("Norm")]
    selected |= {id(parameter) for module in norms for parameter in module.parameters()}
    return {name: parameter for name, parameter in student.named_parameters() if id(parameter) in selected}


def _make_optimizer(student: nn.Module, parameters: dict[str, nn.Parameter], rate: float) -> torch.optim.AdamW:
    mixture = {
        id(parameter)
        for module in student.modules()
        if isinstance(module, MixtureKeys)
        for parameter in module.parameters()
    }
    usual = [parameter for parameter in parameters.values() if id(parameter) not in mixture]
    extra = [parameter for parameter in parameters.values() if id(parameter) in mixture]
    groups: list[dict[str, Any]] = [{"params": usual, "lr": rate, "weight_decay": WEIGHT_DECAY}]
    if extra:
        groups.append({"params": extra, "lr": rate * MIXTURE_RATE, "weight_decay": 0.0})
    return torch.optim.AdamW(groups)


def _batch_order(count: int, steps: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    order: list[int] = []
    while len(order) < steps:
        epoch = list(range(count))
        generator.shuffle(epoch)
        order += epoch
    return order[:steps]


def _fingerprint(settings: dict[str, Any], teacher: nn.Module, student: nn.Module, batches: Sequence[Batch]) -> str:
    """Return a hash of the settings, the original model, the shapes of the merged one and the training inputs."""

    def content(tensor: Tensor) -> bytes:
        # As bytes, because NumPy has no bf16.
        data: bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return data

    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(str([(name, list(tensor.shape)) for name, tensor in student.state_dict().items()]).encode())
    for name, tensor in teacher.state_dict().items():
        digest.update(name.encode() + content(tensor))
    for batch in batches:
        for name, value in batch.items():
            if isinstance(value, Tensor):
                digest.update(name.encode() + content(value))
    return digest.hexdigest()[:16]


def _save_state(
    folder: Path,
    fingerprint: str,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.AdamW,
    step: int,
    log: list[dict[str, float]],
) -> None:
    """Write weights, optimizer state, step and losses to one file, so that they always belong together."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, parameter in parameters.items():
        tensors[f"weight/{name}"] = parameter.detach()
        for key in ("exp_avg", "exp_avg_sq"):
            if parameter in optimizer.state:
                tensors[f"{key}/{name}"] = optimizer.state[parameter][key]
    metadata = {"step": str(step), "fingerprint": fingerprint, "losses": json.dumps(log)}
    with replacing(folder / STATE_FILE) as temporary:
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, temporary, metadata)


@torch.no_grad()
def _load_state(
    folder: Path, fingerprint: str, parameters: dict[str, nn.Parameter], optimizer: torch.optim.AdamW
) -> tuple[int, list[dict[str, float]]]:
    """Restore a saved state; return the number of finished steps and the losses so far."""
    path = folder / STATE_FILE
    if not path.exists():
        return 0, []
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        saved_fingerprint, step = metadata["fingerprint"], int(metadata["step"])
        # Version 0.2 and earlier wrote the losses to another file.
        log = json.loads(metadata.get("losses", "[]"))
    except Exception as error:
        raise ValueError(f"{folder} has a damaged state of the distillation: delete the folder") from error
    if saved_fingerprint != fingerprint:
        fail("state", f"{folder} holds the distillation of another model, text or settings: delete the folder")
    for name, parameter in parameters.items():
        parameter.copy_(tensors[f"weight/{name}"])
        if f"exp_avg/{name}" in tensors:
            moments = {key: tensors[f"{key}/{name}"].to(parameter) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    return step, log
