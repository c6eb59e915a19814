"""Checkpoints of sharded models and optimizers, which any number of ranks can load, without pickle."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from mgk._core.validation import fail
from mgk.distributed.safetensors_storage import Chunk, SafetensorsReader, SafetensorsWriter, StoredTensor, read_index

# The fused weight of SwiGLU, and its parts in a tensor-parallel model.
FUSED = re.compile(r"\.gate_and_up\.weight(?=\.|$)")
SPLIT = re.compile(r"\.(gate|up)\.weight(?=\.|$)")


def save_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    values: dict[str, Any] | None = None,
) -> None:
    """Save a model and its optimizer; all ranks call this together.

    Every rank writes its shards to a safetensors file. The directory appears when it is complete, and replaces an
    earlier checkpoint of the same name. Also for models that are not sharded, and for one process without a process
    group.

    Args:
        directory: Directory on a disk that all ranks share.
        model: A model, sharded by `tensor_parallel` or `fully_shard`, or not.
        optimizer: The optimizer of the model's parameters.
        values: Further values that JSON can represent, such as the step.

    Raises:
        ValueError: The directory exists and has files other than those of a checkpoint.

    Examples:
        >>> mgk.distributed.save_checkpoint("checkpoint", mgk.Attention(32, 4), values={"step": 100})
    """
    tensors, groups = _collect_state(model, optimizer)
    index_values = {"param_groups": groups, "values": values or {}}
    writer = SafetensorsWriter(Path(directory), index_values)
    with _plain_messages():
        dcp.save(tensors, storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=False))
    if dist.is_initialized():
        # No rank may read the directory before the coordinator has renamed it.
        dist.barrier()


def load_checkpoint(
    directory: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Load a checkpoint into a model and its optimizer, in place; all ranks call this together.

    The number of ranks and the sharding may differ from those of the saved model. Every rank reads its shards only.

    Args:
        directory: Directory written by `save_checkpoint`.
        model: A model of the saved configuration.
        optimizer: An optimizer of the saved kind, with the same parameter groups. Default: only the model is loaded.

    Returns:
        The values that were saved.

    Raises:
        ValueError: The directory is not a complete checkpoint, or one of another model or optimizer.

    Examples:
        >>> mgk.distributed.save_checkpoint("checkpoint", mgk.Attention(32, 4), values={"step": 100})
        >>> mgk.distributed.load_checkpoint("checkpoint", mgk.Attention(32, 4))
        {'step': 100}
    """
    directory = Path(directory)
    stored, index_values = read_index(directory)
    tensors, groups = _collect_state(model, optimizer)
    renamed = _rename_split_weights(stored, tensors)
    _check_same_tensors(directory, tensors, renamed, optimizer is not None)
    if optimizer is not None:
        _check_same_groups(directory, groups, index_values["param_groups"])
    reader = SafetensorsReader(directory, {name: renamed[name] for name in tensors})
    with _plain_messages():
        dcp.load(tensors, storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=False))
    _restore_state(model, optimizer, tensors, index_values["param_groups"])
    result: dict[str, Any] = index_values["values"]
    return result


@torch.no_grad()
def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole state dict of a sharded model in the layout of one process; all ranks call this together.

    Save it with ``mgk.models.checkpoint.save_model(model, directory, weights)`` on one rank.

    Examples:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # under torchrun: the number of ranks
        >>> layer = mgk.distributed.tensor_parallel(mgk.Attention(32, 4), mesh)
        >>> mgk.distributed.gather_weights(layer)["query.weight"].shape
        torch.Size([32, 32])
    """
    state = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in model.state_dict().items()}
    result: dict[str, Tensor] = {}
    for name, x in state.items():
        match = SPLIT.search(name)
        if match is None:
            result[name] = x
        elif match.group(1) == "gate":
            up = state[SPLIT.sub(".up.weight", name)]
            result[SPLIT.sub(".gate_and_up.weight", name)] = torch.cat([x, up])
    return result


def _collect_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return the tensors of a model and its optimizer by name, and the numbers of the parameter groups."""
    tensors: dict[str, Any] = {f"model.{name}": x for name, x in get_model_state_dict(model).items()}
    groups: list[dict[str, Any]] = []
    if optimizer is not None:
        state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
        for parameter, entries in state["state"].items():
            for name, x in entries.items():
                if not isinstance(x, Tensor):
                    fail("optimizer", f"has a state {name!r} that is not a tensor: {type(x).__name__}")
                tensors[f"optimizer.{parameter}.{name}"] = x
        groups = [
            {name: _as_json(x) for name, x in group.items() if name != "params"} for group in state["param_groups"]
        ]
    return tensors, groups


def _as_json(x: Any) -> Any:
    return x.item() if isinstance(x, Tensor) else x


def _rename_split_weights(stored: dict[str, StoredTensor], names: dict[str, Any]) -> dict[str, StoredTensor]:
    """Return the stored tensors with the names of a model, in which SwiGLU is fused or split."""
    result = dict(stored)
    for name in names:
        if name in stored:
            continue
        match = SPLIT.search(name)
        if match is not None and (fused := SPLIT.sub(".gate_and_up.weight", name)) in stored:
            result[name] = _take_half(stored[fused], match.group(1) == "up")
        elif FUSED.search(name):
            gate, up = (stored.get(FUSED.sub(f".{part}.weight", name)) for part in ("gate", "up"))
            if gate is not None and up is not None:
                result[name] = _join_halves(gate, up)
    return result


def _take_half(fused: StoredTensor, is_second: bool) -> StoredTensor:
    """Return the first or second half of the rows of a stored tensor; a number is shared by both halves."""
    if not fused.shape:
        return fused
    rows = fused.shape[0] // 2
    low = rows if is_second else 0
    chunks = []
    for chunk in fused.chunks:
        first, last = max(chunk.offsets[0], low), min(chunk.offsets[0] + chunk.sizes[0], low + rows)
        if last > first:
            start = (chunk.start[0] + first - chunk.offsets[0], *chunk.start[1:])
            offsets, sizes = (first - low, *chunk.offsets[1:]), (last - first, *chunk.sizes[1:])
            chunks.append(Chunk(offsets, sizes, chunk.file, chunk.name, start))
    return StoredTensor((rows, *fused.shape[1:]), fused.dtype, tuple(chunks))


def _join_halves(first: StoredTensor, second: StoredTensor) -> StoredTensor:
    """Return two stored tensors as one, concatenated along the rows."""
    if not first.shape:
        return first
    rows = first.shape[0]
    moved = [
        Chunk((chunk.offsets[0] + rows, *chunk.offsets[1:]), chunk.sizes, chunk.file, chunk.name, chunk.start)
        for chunk in second.chunks
    ]
    return StoredTensor((rows + second.shape[0], *first.shape[1:]), first.dtype, (*first.chunks, *moved))


def _check_same_tensors(
    directory: Path, tensors: dict[str, Tensor], stored: dict[str, StoredTensor], with_optimizer: bool
) -> None:
    """Raise unless the checkpoint has the tensors of the model and the optimizer, with their shapes."""
    missing = [name for name in tensors if name not in stored]
    if missing:
        raise ValueError(
            f"{directory} has no {missing[0]} ({len(missing)} tensors are missing): it is of another model"
        )
    kinds = ("model.", "optimizer.") if with_optimizer else ("model.",)
    # A fused weight that was read as two parts, or the reverse, is not superfluous.
    known = {*tensors, *(SPLIT.sub(".gate_and_up.weight", name) for name in tensors)}
    known |= {FUSED.sub(f".{part}.weight", name) for part in ("gate", "up") for name in tensors}
    extra = [name for name in stored if name.startswith(kinds) and name not in known]
    if extra:
        raise ValueError(
            f"{directory} has {extra[0]}, which the model or its optimizer lacks ({len(extra)} such tensors)"
        )
    for name, x in tensors.items():
        if tuple(x.shape) != stored[name].shape:
            raise ValueError(f"{directory} has {name} of shape {list(stored[name].shape)}, the model {list(x.shape)}")


def _check_same_groups(directory: Path, groups: list[dict[str, Any]], stored: list[dict[str, Any]]) -> None:
    if len(groups) != len(stored):
        raise ValueError(f"{directory} has {len(stored)} parameter groups, the optimizer {len(groups)}")
    for current, saved in zip(groups, stored, strict=True):
        if current.keys() != saved.keys():
            names = ", ".join(sorted(current.keys() ^ saved.keys()))
            raise ValueError(f"{directory} is of another optimizer: parameter groups differ in {names}")


def _restore_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, tensors: dict[str, Tensor], groups: list[dict[str, Any]]
) -> None:
    """Pass loaded tensors to the model and the optimizer."""
    set_model_state_dict(
        model, {name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")}
    )
    if optimizer is None:
        return
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    for parameter, entries in state["state"].items():
        for name in entries:
            entries[name] = tensors[f"optimizer.{parameter}.{name}"]
    for group, saved in zip(state["param_groups"], groups, strict=True):
        for name, value in saved.items():
            if isinstance(group[name], Tensor):
                value = torch.full_like(group[name], value)
            group[name] = tuple(value) if isinstance(group[name], tuple) else value
    set_optimizer_state_dict(model, optimizer, state)


@contextmanager
def _plain_messages() -> Iterator[None]:
    """Raise the first error of a rank instead of a collection of tracebacks; ignore the lack of a process group."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
            yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        if isinstance(first, ValueError | OSError):
            raise first from None
        raise
