"""Read archives whose contents may be damaged, or larger than memory: a file of megabytes can hold gigabytes."""

from __future__ import annotations

import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mgk._core.io import DataError

# Bytes of the longest extended header of an archive.
MAX_HEADER = 1 << 20


class BoundedTarInfo(tarfile.TarInfo):
    """Member of an archive; refuses headers that would need much memory."""

    def _proc_member(self, archive: tarfile.TarFile) -> Any:
        if self.type not in tarfile.REGULAR_TYPES and self.size > MAX_HEADER:
            raise tarfile.ReadError(f"a header of {self.size:,} bytes")
        return super()._proc_member(archive)  # type: ignore[misc]


def read_tar(
    path: Path, name_of: Callable[[str], str | None], max_member: int, remedy: str
) -> Iterator[tuple[str, bytes]]:
    """Yield regular files of a tar archive, compressed or not, without unpacking it to disk.

    Args:
        path: The archive.
        name_of: Maps the path of a member to its name in the result, or to None to leave it out.
        max_member: Largest size of a member in bytes.
        remedy: End of error messages.

    Yields:
        Name and contents of a member.

    Raises:
        DataError: The archive is damaged, or a member is too large.
    """
    try:
        with tarfile.open(path, "r|*", tarinfo=BoundedTarInfo) as archive:
            for member in archive:
                name = name_of(member.name)
                if name and member.isfile():
                    if member.size > max_member:
                        raise tarfile.ReadError(f"{name} has {member.size:,} bytes")
                    content = archive.extractfile(member)
                    assert content is not None
                    yield name, content.read()
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        raise DataError(f"{path} is damaged or incomplete ({error}): {remedy}") from error


def read_npz(path: Path, names: Sequence[str], max_member: int, remedy: str) -> list[np.ndarray]:
    """Return arrays of an .npz file.

    Args:
        path: The file.
        names: Names of the arrays.
        max_member: Largest size of an array in bytes.
        remedy: End of error messages.

    Raises:
        DataError: The file is damaged, or has no such array, or a larger one.
    """
    arrays = []
    try:
        with zipfile.ZipFile(path) as archive:
            for name in names:
                member = archive.getinfo(f"{name}.npy")
                if member.file_size > max_member:
                    raise ValueError(f"{name} has {member.file_size:,} bytes")
                with archive.open(member) as file:
                    arrays.append(np.lib.format.read_array(file, allow_pickle=False))
    # An encrypted member is a RuntimeError; an unknown compression is its subclass NotImplementedError. A header may
    # announce an array that no memory can hold.
    except (
        *(OSError, ValueError, KeyError, EOFError, RuntimeError, MemoryError, OverflowError),
        *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    ) as error:
        raise DataError(f"{path} is damaged ({error}): {remedy}") from error
    return arrays
