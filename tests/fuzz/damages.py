"""Damages of single files: functions that change a path in place."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

Damage = Callable[[Path], None]


def remove(path: Path) -> None:
    """Remove a file or a directory."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace(content: bytes | str) -> Damage:
    """Return a damage that replaces a file by one with this content."""

    def damage(path: Path) -> None:
        remove(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def truncate(path: Path) -> None:
    """Keep the first half of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def cut_last_byte(path: Path) -> None:
    """Remove the last byte of a file."""
    path.write_bytes(path.read_bytes()[:-1])


def append_zeros(path: Path) -> None:
    """Append zeros to a file, as some file systems do after a crash."""
    path.write_bytes(path.read_bytes() + bytes(512))


def fill_with_zeros(path: Path) -> None:
    """Replace the content of a file by zeros."""
    path.write_bytes(bytes(path.stat().st_size))


def make_directory(path: Path) -> None:
    """Replace a file by an empty directory."""
    remove(path)
    path.mkdir(parents=True)


def make_loop(path: Path) -> None:
    """Replace a file by a symbolic link to itself."""
    remove(path)
    path.symlink_to(path.name)


def make_dangling_link(path: Path) -> None:
    """Replace a file by a symbolic link to a missing file."""
    remove(path)
    path.symlink_to("missing-target")


GARBAGE = np.random.default_rng(0).integers(0, 256, 3000, dtype=np.uint8).tobytes()
FILE_DAMAGES: dict[str, Damage] = {
    "removed": remove,
    "empty": replace(b""),
    "truncated": truncate,
    "last byte cut": cut_last_byte,
    "garbage": replace(GARBAGE),
    "zeros": fill_with_zeros,
    "zeros appended": append_zeros,
    "directory": make_directory,
    "link loop": make_loop,
    "dangling link": make_dangling_link,
}
# Contents in place of JSON: name, text.
WRONG_JSON: dict[str, str] = {
    "list": "[]",
    "null": "null",
    "number": "5",
    "text": '"text"',
    "mapping": "{}",
    "nested list": "[[5]]",
    "NaN": "NaN",
    "deep nesting": "[" * 100_000,
    "deep mapping": '{"a":' * 100_000,
    "not UTF-8": "\udcff",
    "long integer": "9" * 10_000,
    "byte order mark": "\ufeff{}",
}


def wrong_json(name: str) -> Damage:
    """Return the damage that writes an entry of WRONG_JSON."""
    return replace(WRONG_JSON[name].encode(errors="surrogateescape"))


def npy(array: np.ndarray) -> bytes:
    """Return an array as the bytes of a .npy file; an array of objects is pickled."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def npy_with_header(descr: str, shape: str, body: bytes = bytes(64)) -> bytes:
    """Return a .npy file with a header that may not fit its body."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body


def make_fifo(path: Path) -> None:
    """Replace a file by a named pipe without a writer."""
    remove(path)
    os.mkfifo(path)
