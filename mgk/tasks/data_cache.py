"""Prepared data: directories under `data_dir`/.mgk, written once, named after and verified by checksums."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mgk._core.checksums import file_checksum
from mgk._core.io import ABANDONED, locked, write_atomically
from mgk._core.progress import Progress, no_progress

FORMAT = 1  # version of the file formats; enters the name of the directory
MANIFEST = "cache.json"
VERIFIED = "verified.json"  # sizes and modification times at the last verification

# Stamps that could not be written, by path.
_unwritten: dict[str, dict[str, Any]] = {}


def prepare_directory(
    data_dir: Path,
    name: str,
    *,
    settings: dict[str, Any],
    files: Sequence[str],
    build: Callable[[Path], dict[str, Any]],
    progress: Progress = no_progress,
    verify: bool = False,
) -> Path:
    """Return the directory of the prepared data; build it first if it is missing or damaged.

    The directory is named after a checksum of settings and source, so its contents never change: a changed source
    gets a new directory. Several processes may call this at the same time.

    Args:
        data_dir: Data directory; the result is `data_dir`/.mgk/`name`/<checksum>.
        name: Name of the task.
        settings: Settings of the task.
        files: Source files, relative to `data_dir`.
        build: Function that writes the prepared data to a directory and returns its metadata.
        progress: Progress callback.
        verify: Whether to read source and prepared data in full; otherwise only if sizes or modification times differ
            from those of the last verification.
    """
    root = data_dir / ".mgk" / name
    root.mkdir(parents=True, exist_ok=True)
    source = _source_checksum(root, data_dir, files, progress, verify)
    manifest = {"format": FORMAT, "settings": settings, "source": source}
    directory = root / json_checksum(manifest)[:16]
    if is_intact(directory, verify):
        return directory
    with locked(root / f".{directory.name}.lock"):
        # Another process may have built it while this one waited for the lock.
        if not is_intact(directory, verify=True):
            _build_directory(root, directory, manifest, build)
    return directory


def find_prepared(data_dir: Path, name: str, settings: dict[str, Any], verify: bool) -> Path | None:
    """Return data prepared with these settings if its source is missing, as after copying only .mgk.

    Returns:
        The directory, or None unless there is exactly one match.
    """
    expected = json.loads(json.dumps(settings))
    matches = []
    for directory in sorted((data_dir / ".mgk" / name).glob("[0-9a-f]*")):
        if is_intact(directory, verify):
            manifest = read_manifest(directory)
            # Manifests of earlier versions list the download instructions, "source", among the settings.
            stored = {key: value for key, value in manifest.get("settings", {}).items() if key != "source"}
            if manifest.get("format") == FORMAT and stored == expected:
                matches.append(directory)
    return matches[0] if len(matches) == 1 else None


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest of a directory: format, settings, source, facts and files."""
    manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(manifest, dict):
        raise ValueError(f"{directory / MANIFEST} is not a manifest")
    return manifest


def is_intact(directory: Path, verify: bool) -> bool:
    """Return whether all files of the manifest exist with their sizes and checksums.

    Unless `verify`, files whose sizes and modification times are those of the last verification are not read.
    """
    try:
        files = read_manifest(directory)["files"]
        stats = {name: (directory / name).stat() for name in files}
        if any(stats[name].st_size != expected["bytes"] for name, expected in files.items()):
            return False
        state = json_checksum([files, {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}])
        if not verify and _read_stamp(directory / VERIFIED, state):
            return True
        if any(file_checksum(directory / name) != expected["sha256"] for name, expected in files.items()):
            return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    _write_stamp(directory / VERIFIED, {"seen": state})
    return True


def json_checksum(value: Any) -> str:
    """Return the SHA-256 of a value's JSON text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _build_directory(
    root: Path, directory: Path, manifest: dict[str, Any], build: Callable[[Path], dict[str, Any]]
) -> None:
    for unfinished in root.glob(".making-*"):
        with contextlib.suppress(OSError):
            if time.time() - unfinished.stat().st_mtime > ABANDONED:
                shutil.rmtree(unfinished, ignore_errors=True)
    temporary = root / f".making-{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        metadata = build(temporary)
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": file_checksum(path)}
            for path in sorted(temporary.iterdir())
        }
        (temporary / MANIFEST).write_text(
            json.dumps({**manifest, "facts": metadata, "files": files}, indent=1), encoding="utf-8"
        )
        if directory.exists():
            # Move the damaged directory away first: a directory cannot be renamed to an existing one.
            damaged = root / f".making-{uuid.uuid4().hex}"
            directory.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        try:
            temporary.rename(directory)
        except OSError:
            # On file systems without locks another process may have built the same contents first.
            if not is_intact(directory, verify=True):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _source_checksum(root: Path, data_dir: Path, files: Sequence[str], progress: Progress, verify: bool) -> str:
    """Return a checksum of the names and contents of the source files.

    Unless `verify`, the checksum stored in source.json is returned if no size or modification time has changed.
    """
    # os.path instead of pathlib, which takes seconds for IMDb's 50,000 files.
    paths = [os.path.join(data_dir, name) for name in files]
    stats = [os.stat(path) for path in paths]
    state = json_checksum([[name, stat.st_size, stat.st_mtime_ns] for name, stat in zip(files, stats, strict=True)])
    stored_file = root / "source.json"
    if not verify and (stamp := _read_stamp(stored_file, state)) and "checksum" in stamp:
        return str(stamp["checksum"])
    contents = []
    for done, path in enumerate(paths):
        if done % 1000 == 0:
            progress("checksum", done, len(paths))
        contents.append(file_checksum(path))
    if paths:
        progress("checksum", len(paths), len(paths))
    checksum = json_checksum([list(files), contents])
    _write_stamp(stored_file, {"seen": state, "checksum": checksum})
    return checksum


def _read_stamp(path: Path, state: str) -> dict[str, Any] | None:
    """Return the stamp that was written for this state of the files, if any."""
    stamps = [_unwritten.get(os.path.abspath(path))]
    with contextlib.suppress(OSError, ValueError):
        stamps.append(json.loads(path.read_text(encoding="utf-8")))
    return next((stamp for stamp in stamps if isinstance(stamp, dict) and stamp.get("seen") == state), None)


def _write_stamp(path: Path, stamp: dict[str, Any]) -> None:
    """Write a stamp; if that fails, as on a read-only file system, keep it for this process."""
    if _read_stamp(path, stamp["seen"]) == stamp:
        return
    try:
        write_atomically(path, json.dumps(stamp))
    except OSError:
        _unwritten[os.path.abspath(path)] = stamp
