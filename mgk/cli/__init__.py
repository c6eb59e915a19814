"""The command `mgk`.

Importing this package does not import Typer, so that a missing package of the extra `train` is reported in one line.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

# Import names of the packages that the extra `train` installs.
EXTRA = ("filelock", "matplotlib", "psutil", "pytorch_lightning", "rich", "tensorboard", "tokenizers", "typer", "yaml")


def main() -> None:
    """Run the command line of `mgk` and exit."""
    run_app(_load_app, "mgk", sys.argv[1:] or ["--help"])


def _load_app() -> Callable[..., int | None]:
    from mgk.cli import commands

    return commands.app


def run_app(load: Callable[[], Callable[..., int | None]], program: str, arguments: list[str]) -> NoReturn:
    """Run a Typer app and exit. User errors become one line on stderr and exit code 2.

    Args:
        load: Function that imports and returns the app; a missing package of the extra `train` is reported by name.
        program: Name of the command in help texts.
        arguments: Command line without the program name.
    """
    try:
        app = load()
    except ModuleNotFoundError as error:
        if _top_level_package(error.name) not in EXTRA:
            raise
        print(f"mgk: {_missing_extra_message(error.name)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    # Raise SystemExit, as Ctrl-C raises KeyboardInterrupt, so that commands end their child processes.
    # nohup sets SIGHUP to be ignored, which must not be overridden.
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _exit_on_signal)
    try:
        load_plugins()
        status = app(arguments, prog_name=program, standalone_mode=False)
    except Exception as error:
        message = format_error(error)
        if message is None or os.environ.get("MGK_TRACEBACK", "0") not in ("", "0"):
            raise
        print(f"mgk: {message}", file=sys.stderr)
        status = 2
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        hard_exit(status or 0)
    sys.exit(status)


def load_plugins() -> None:
    """Import the modules listed in MGK_PLUGINS (separated by commas), which register tasks and recipes."""
    for name in filter(None, map(str.strip, os.environ.get("MGK_PLUGINS", "").split(","))):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if _top_level_package(error.name) != _top_level_package(name):
                raise
            raise ValueError(f"MGK_PLUGINS names {name!r}, which cannot be imported: {error}") from None


def format_error(error: Exception) -> str | None:
    """Return the one-line message of a user error, or None for an error in mgk itself."""
    if isinstance(error, ModuleNotFoundError) and _top_level_package(error.name) in EXTRA:
        return _missing_extra_message(error.name)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ValueError | OSError):
        return str(error)
    # Usage errors: depending on the version, Typer raises click's classes or its own.
    if hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        command = "mgk" if context is None else context.command_path
        return f"{error.format_message().rstrip('.')} (see {command} --help)"
    return None


def hard_exit(status: int) -> None:
    """Exit with os._exit, for a rank of a distributed run.

    NCCL threads can abort the process during interpreter shutdown, after which torchrun stops the other ranks.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _exit_on_signal(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _top_level_package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _missing_extra_message(module: str | None) -> str:
    return (
        f"this command needs the extra 'train' ({_top_level_package(module)} is missing): "
        "pip install 'mgk[train]', or '.[train]' in a clone"
    )
