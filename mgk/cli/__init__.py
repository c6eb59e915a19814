"""The command `mgk`.

Importing this package does not import Typer, so that a missing package of the extra `train` is reported in one line.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

# Import names of the packages that the extra `train` installs.
TRAIN_PACKAGES = (
    "filelock", "matplotlib", "psutil", "pytorch_lightning", "rich", "scipy", "tensorboard", "tokenizers", "typer",
    "yaml",
)  # fmt: skip
# Messages of PyTorch for a failed allocation, and for sizes that no memory can hold.
OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|ALLOC_FAILED|Storage size calculation overflowed|"
    r"Overflow when unpacking long|numel: integer multiplication overflow",
    re.IGNORECASE,
)
# Hints for commands of earlier versions.
REMOVED_COMMANDS = {"study": "; it was removed: run mgk compare, mgk generate and mgk analyze"}
LONGEST_MESSAGE = 1500  # characters


def main() -> None:
    """Run the command line of `mgk` and exit."""
    run_app(_load_app, "mgk", sys.argv[1:] or ["--help"])


def _load_app() -> Callable[..., int | None]:
    from mgk.cli import commands

    return commands.app


def run_app(load: Callable[[], Callable[..., int | None]], program: str, arguments: list[str]) -> NoReturn:
    """Run a Typer app and exit. User errors become one line on stderr and exit code 2, Ctrl-C exit code 130.

    Args:
        load: Function that imports and returns the app; a missing package of the extra `train` is reported by name.
        program: Name of the command in help texts.
        arguments: Command line without the program name.
    """
    try:
        status = _run(load, program, arguments)
    except KeyboardInterrupt:
        status = _report("interrupted", 128 + signal.SIGINT)
    except BrokenPipeError:
        # The reader of the output has ended, as in `mgk recipes | head -1`. Python flushes stdout once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except (Exception, SystemExit) as error:
        message = format_error(error)
        if message is None or os.environ.get("MGK_TRACEBACK", "0") not in ("", "0"):
            raise
        status = _report(message, 2)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        hard_exit(status or 0)
    sys.exit(status)


def _run(load: Callable[[], Callable[..., int | None]], program: str, arguments: list[str]) -> int | None:
    app = load()
    # Raise SystemExit, as Ctrl-C raises KeyboardInterrupt, so that commands end their child processes.
    # nohup sets SIGHUP to be ignored, which must not be overridden.
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _exit_on_signal)
    load_plugins()
    try:
        status = app(arguments, prog_name=program, standalone_mode=False)
        # An error of a full disk must be reported here, not at the end of the interpreter.
        sys.stdout.flush()
        return status
    except Exception as error:
        # Typer replaces KeyboardInterrupt and EOFError by Abort.
        if type(error).__name__ == "Abort" and error.__cause__ is not None:
            raise error.__cause__ from None
        raise


def _report(message: str, status: int) -> int:
    """Print a message in one line on stderr and return the exit code."""
    message = "".join(character if character.isprintable() else _escape(character) for character in message)
    if len(message) > LONGEST_MESSAGE:
        message = f"{message[: LONGEST_MESSAGE // 2]} … {message[-LONGEST_MESSAGE // 4 :]}"
    print(f"mgk: {message}", file=sys.stderr)
    return status


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def load_plugins() -> None:
    """Import the modules listed in MGK_PLUGINS (separated by commas), which register tasks and recipes.

    Errors of a module pass through, with the module's name as their attribute `plugin`.
    """
    for name in filter(None, map(str.strip, os.environ.get("MGK_PLUGINS", "").split(","))):
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            if isinstance(error, ModuleNotFoundError) and _top_level_package(error.name) == _top_level_package(name):
                raise ValueError(f"MGK_PLUGINS names {name!r}, which cannot be imported: {error}") from None
            error.plugin = name  # type: ignore[union-attr]
            raise


def format_error(error: Exception | SystemExit) -> str | None:
    """Return the one-line message of a user error, or None for an error in mgk itself."""
    if (plugin := getattr(error, "plugin", None)) is not None:
        reason = ": ".join(filter(None, (type(error).__name__, *str(error).splitlines()[:1])))
        return f"MGK_PLUGINS names {plugin!r}, which raises {reason} (MGK_TRACEBACK=1 shows where)"
    if isinstance(error, ModuleNotFoundError) and _top_level_package(error.name) in TRAIN_PACKAGES:
        return _missing_extra_message(error.name)
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    if isinstance(error, UnicodeEncodeError):
        # An argument of the command line with bytes that are not UTF-8.
        text = error.object[max(0, error.start - 100) : error.end + 100]
        return f"{text!r} is not valid UTF-8: use another name or text"
    if isinstance(error, ValueError | OSError):
        return str(error)
    if isinstance(error, EOFError):
        return f"the input ends too early ({error})"
    # torch.OutOfMemoryError is a RuntimeError, as are the errors of its allocator on a CPU; sizes above 64 bits raise
    # TypeError or OverflowError.
    if isinstance(error, MemoryError | RuntimeError | TypeError | OverflowError) and is_out_of_memory(error):
        reason = next(iter(str(error).splitlines()), "")
        return f"out of memory: use smaller sizes, such as a smaller batch or model ({reason or 'MemoryError'})"
    # Usage errors: depending on the version, Typer raises click's classes or its own.
    if hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        command = "mgk" if context is None else context.command_path
        return f"{error.format_message().rstrip('.')}{_suggest_command(error)} (see {command} --help)"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory, or the largest size of a tensor, does not suffice."""
    return isinstance(error, MemoryError) or OUT_OF_MEMORY.search(f"{type(error).__name__} {error}") is not None


def _suggest_command(error: Any) -> str:
    """Return a hint for a command that was removed; Typer suggests similar names itself."""
    match = re.match(r"No such command '(.*?)'", error.format_message(), re.DOTALL)
    return "" if match is None else REMOVED_COMMANDS.get(match[1], "")


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
