"""The command `mgk`. What it needs beyond the core is imported when it runs, and asked for in one line if missing."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)


def hard_exit(status: int) -> None:
    """Leaves a process that is one of several of a run, past Python's own end: a thread of their connection that still
    wants something of Python there aborts the process, and torchrun then stops the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# What the extra installs, as it is imported.
EXTRA = ("matplotlib", "pytorch_lightning", "rich", "tensorboard", "typer", "yaml")


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _missing(name: str | None) -> str:
    needed = f"this command needs the extra 'train' ({_package(name)} is missing)"
    return f"{needed}: pip install 'mgk[train]', or '.[train]' in a clone"


def format_error(error: Exception) -> str | None:
    """What is wrong with what was asked for, in one line; None for an error of ours."""
    if isinstance(error, ModuleNotFoundError) and _package(error.name) in EXTRA:
        return _missing(error.name)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ValueError | OSError):
        return str(error)
    # Typer's mistakes in a command line: their class is click's or its own, by version.
    if hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        where = "mgk" if context is None else context.command_path
        return f"{error.format_message().rstrip('.')} (see {where} --help)"
    return None


def load_plugins() -> None:
    """Import the modules named in MGK_PLUGINS, separated by commas: they register tasks and recipes of their own."""
    for name in filter(None, os.environ.get("MGK_PLUGINS", "").split(",")):
        try:
            importlib.import_module(name.strip())
        except ModuleNotFoundError as error:
            if _package(error.name) != _package(name.strip()):
                raise
            raise ValueError(f"MGK_PLUGINS names {name!r}, which cannot be imported: {error}") from None


def _load_app() -> Callable[..., int | None]:
    from mgk.cli import commands

    return commands.app


def main() -> None:
    run_app(_load_app, "mgk", sys.argv[1:] or ["--help"])


def run_app(load: Callable[[], Callable[..., int | None]], program: str, arguments: list[str]) -> NoReturn:
    """Run a Typer application and exit. Errors of the user become one line and exit code 2.

    Args:
        load: Imports and returns the application; a missing package of the extra is reported by name.
        program: Name shown in help texts.
        arguments: Command line without the program's name.
    """
    try:
        app = load()
    except ModuleNotFoundError as error:
        if _package(error.name) not in EXTRA:
            raise
        print(f"mgk: {_missing(error.name)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    # As Ctrl-C does, so that what a command has started is ended with it. Under nohup SIGHUP stays ignored.
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _leave)
    try:
        load_plugins()
        status = app(arguments, prog_name=program, standalone_mode=False)
    except Exception as error:
        told = format_error(error)
        if told is None or os.environ.get("MGK_TRACEBACK", "0") not in ("", "0"):
            raise
        print(f"mgk: {told}", file=sys.stderr)
        status = 2
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        hard_exit(status or 0)
    sys.exit(status)
