"""Storage of torch.distributed.checkpoint in safetensors files and one JSON file, without pickle.

Every rank writes the chunks of tensors that it has to one file. checkpoint.json lists the chunks of every tensor with
their offsets, from which any number of ranks can read any parts.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from mgk._core.io import DataError, write_atomically
from mgk._core.validation import fail

INDEX = "checkpoint.json"
FORMAT = "mgk-sharded-1"
REMEDY = "use another checkpoint"


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor, and the stored tensor that contains it."""

    offsets: tuple[int, ...]  # in the whole tensor
    sizes: tuple[int, ...]
    file: str
    name: str  # in the file
    start: tuple[int, ...]  # of the block in the stored tensor


@dataclass(frozen=True)
class StoredTensor:
    """Shape, dtype and chunks of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class SafetensorsWriter(StorageWriter):
    """Write one safetensors file per rank, and checkpoint.json last; the directory appears when it is complete.

    Args:
        directory: Directory on a disk that all ranks share. An existing checkpoint is replaced; a directory with other
            files is an error.
        values: Values that JSON can represent, stored with the tensors.
    """

    def __init__(self, directory: Path, values: dict[str, Any]) -> None:
        self.directory, self.values = directory, values
        # The same name on all ranks. A leftover of a killed process is removed by the next one.
        self.temporary = directory.with_name(f".{directory.name}.tmp")

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make an empty temporary directory; only the coordinator is called, before any rank writes."""
        if self.directory.exists() and not _is_replaceable(self.directory):
            fail("directory", f"{self.directory} exists and is not a sharded checkpoint: choose another name")
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(parents=True)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the chunks of this rank."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        file = f"rank-{rank:05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        results = []
        for item in plan.items:
            if item.tensor_data is None:
                raise ValueError(f"{item.index.fqn} is not a tensor: pass numbers and texts as values")
            chunk = planner.resolve_data(item)
            assert isinstance(chunk, Tensor)
            name = "@".join([item.index.fqn, ",".join(map(str, item.index.offset or ()))])
            # A copy: safetensors does not write tensors that share memory with others.
            tensors[name] = chunk.detach().cpu().clone(memory_format=torch.contiguous_format)
            results.append(WriteResult(item.index, tensors[name].nbytes, {"file": file, "name": name}))
        if tensors:
            save_file(tensors, self.temporary / file)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write checkpoint.json and rename the directory; only the coordinator is called, after all ranks."""
        locations = {
            (chunk.index.fqn, tuple(chunk.index.offset or ())): chunk.storage_data
            for chunks_of_rank in results
            for chunk in chunks_of_rank
        }
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            chunks = [
                {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **locations[name, tuple(chunk.offsets)]}
                for chunk in entry.chunks
            ]
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[name] = {"shape": list(entry.size), "dtype": dtype, "chunks": chunks}
        index = {"format": FORMAT, "values": self.values, "tensors": tensors}
        write_atomically(self.temporary / INDEX, json.dumps(index))
        former = self.directory.with_name(f".{self.directory.name}.former")
        shutil.rmtree(former, ignore_errors=True)
        if self.directory.exists():
            self.directory.rename(former)
        self.temporary.rename(self.directory)
        shutil.rmtree(former, ignore_errors=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _is_replaceable(directory: Path) -> bool:
    """Return whether a directory is a checkpoint or empty; others would lose their files."""
    return directory.is_dir() and ((directory / INDEX).exists() or not any(directory.iterdir()))


def read_index(directory: Path) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Return the tensors and the values of a checkpoint.

    Raises:
        DataError: The directory is not a complete checkpoint.
    """
    former = directory.with_name(f".{directory.name}.former")
    if not directory.exists() and (former / INDEX).exists():
        raise DataError(f"{directory} was being replaced when a process was killed: rename {former} to it")
    try:
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise ValueError(f"format {index['format']!r} is not {FORMAT!r}")
        tensors = {name: _parse_entry(entry) for name, entry in index["tensors"].items()}
        return tensors, dict(index["values"])
    except FileNotFoundError:
        raise DataError(f"{directory} is not a sharded checkpoint: {INDEX} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{directory / INDEX} is damaged ({error}): {REMEDY}") from error


def _parse_entry(entry: dict[str, Any]) -> StoredTensor:
    chunks = []
    for chunk in entry["chunks"]:
        file = str(chunk["file"])
        if Path(file).name != file:
            raise ValueError(f"{file!r} is not the name of a file")
        offsets, sizes = tuple(map(int, chunk["offsets"])), tuple(map(int, chunk["sizes"]))
        chunks.append(Chunk(offsets, sizes, file, str(chunk["name"]), (0,) * len(offsets)))
    dtype = getattr(torch, str(entry["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {entry['dtype']!r} is not a dtype of torch")
    return StoredTensor(tuple(map(int, entry["shape"])), dtype, tuple(chunks))


class SafetensorsReader(StorageReader):
    """Read chunks of tensors from the files of a checkpoint.

    Args:
        directory: Directory of the checkpoint.
        tensors: The stored tensors, by the names under which they are loaded.
    """

    def __init__(self, directory: Path, tensors: dict[str, StoredTensor]) -> None:
        self.directory, self.tensors = directory, tensors

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return shapes and chunks of all tensors."""
        entries: dict[str, Any] = {}
        for name, tensor in self.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(x.offsets), torch.Size(x.sizes)) for x in tensor.chunks]
            entries[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks)
        return Metadata(entries)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the requested blocks to the tensors of this rank."""
        requests: dict[str, list[tuple[Chunk, Any]]] = {}
        for item in plan.items:
            chunk = self._find(item.storage_index)
            requests.setdefault(chunk.file, []).append((chunk, item))
        for file, items in requests.items():
            try:
                with safe_open(self.directory / file, framework="pt") as stored:
                    for chunk, item in items:
                        _read_block(stored, chunk, item, planner)
            except FileNotFoundError:
                raise DataError(f"{self.directory / file} is missing: {REMEDY}") from None
            except SafetensorError as error:
                raise DataError(f"{self.directory / file} is damaged ({error}): {REMEDY}") from error
        return _done(None)

    def _find(self, index: MetadataIndex) -> Chunk:
        offsets = tuple(index.offset or ())
        return next(chunk for chunk in self.tensors[index.fqn].chunks if chunk.offsets == offsets)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _read_block(stored: Any, chunk: Chunk, item: Any, planner: LoadPlanner) -> None:
    target = planner.resolve_tensor(item)
    if chunk.offsets:
        starts = [start + offset for start, offset in zip(chunk.start, item.storage_offsets, strict=True)]
        block = tuple(slice(start, start + size) for start, size in zip(starts, item.lengths, strict=True))
        source = stored.get_slice(chunk.name)[block]
    else:
        source = stored.get_tensor(chunk.name)
    target.detach().copy_(source)
    planner.commit_tensor(item, target)
