"""Run commands of `mgk` on bad input and judge how they end.

The package is imported once; each case runs in a fork, in its own directory, with limits on time and memory.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Limits of one case: seconds in all and of the processor, address space, and resident memory with that of the imported
# packages. A loaded machine may take long for a case that needs little.
TIMEOUT = 600.0
PROCESSOR_TIME = 60
ADDRESS_SPACE = 8 << 30
RESIDENT = 3 << 29
# Packages outside mgk that commands import when they run.
PRELOADED = ("matplotlib.pyplot", "pytorch_lightning", "rich.progress", "rich.table", "torch.utils.tensorboard", "yaml")


@dataclass(frozen=True)
class Case:
    """A command line and the files that it reads.

    Attributes:
        name: Unique name in its table.
        arguments: Arguments of `mgk`.
        prepare: Function that writes the files of the case into its directory, the current one of the command.
        mentions: Texts of which a refusal must contain at least one; empty to accept any message.
        environment: Environment variables to set.
        must_fail: Whether success would be wrong.
        is_json: Whether every line on stdout must be JSON.
    """

    name: str
    arguments: tuple[str, ...]
    prepare: Callable[[Path], None] | None = None
    mentions: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    must_fail: bool = False
    is_json: bool = False


@dataclass(frozen=True)
class Outcome:
    """The end of a case, and the reason why it is not clean; empty if it is."""

    case: Case
    status: int
    stdout: str
    stderr: str
    fault: str
    seconds: float  # CPU time


def preload(package: Path | None = None) -> None:
    """Import all modules of mgk, from another checkout if its root is passed."""
    if package is not None:
        sys.path.insert(0, str(package))
    import mgk

    for module in pkgutil.walk_packages(mgk.__path__, "mgk."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    for name in PRELOADED:
        importlib.import_module(name)


def run_cases(cases: Sequence[Case], folder: Path, jobs: int = 1) -> Iterator[Outcome]:
    """Run the cases in `jobs` processes at a time and yield their outcomes as they end."""
    waiting = list(enumerate(cases))[::-1]
    running: dict[int, tuple[Case, Path, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            number, case = waiting.pop()
            directory = folder / f"{number}"
            (directory / "here").mkdir(parents=True)
            if case.prepare is not None:
                case.prepare(directory / "here")
            sys.stdout.flush()
            sys.stderr.flush()
            process = os.fork()
            if process == 0:
                _run_child(case, directory)
            running[process] = (case, directory, time.monotonic() + TIMEOUT)
        process, status, usage = os.wait4(-1, os.WNOHANG)
        if process == 0:
            for process, (_, _, deadline) in running.items():
                if time.monotonic() > deadline:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process, signal.SIGKILL)
            time.sleep(0.005)
            continue
        case, directory, deadline = running.pop(process)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        is_late = time.monotonic() > deadline
        yield _judge(case, directory, os.waitstatus_to_exitcode(status), usage, is_late)
        shutil.rmtree(directory, ignore_errors=True)


def _run_child(case: Case, directory: Path) -> None:
    """Run a case in this process, a fork, and exit."""
    status = 70
    try:
        os.setpgid(0, 0)
        os.chdir(directory / "here")
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(directory / name, os.O_WRONLY | os.O_CREAT, 0o666), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
        resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_TIME, PROCESSOR_TIME))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ.update(case.environment)
        sys.path.insert(0, os.getcwd())
        status = call_main(case.arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def call_main(arguments: Sequence[str]) -> int:
    """Run `mgk` in this process and return its exit code."""
    cli = importlib.import_module("mgk.cli")
    sys.argv = ["mgk", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
    return 0


def _judge(case: Case, directory: Path, status: int, usage: resource.struct_rusage, is_late: bool) -> Outcome:
    texts = [
        (directory / name).read_text(encoding="utf-8", errors="replace") if (directory / name).exists() else ""
        for name in ("stdout", "stderr")
    ]
    fault = "hangs" if is_late else _fault(case, status, *texts, usage.ru_maxrss * 1024)
    return Outcome(case, status, *texts, fault, usage.ru_utime + usage.ru_stime)


def _fault(case: Case, status: int, stdout: str, stderr: str, memory: int) -> str:
    """Return why an outcome is not clean: empty if the command succeeded, or refused its input in one line."""
    if "Traceback (most recent call last)" in stderr + stdout:
        return "traceback"
    if memory > RESIDENT:
        return f"took {memory >> 20} MiB of memory"
    if case.is_json and not all(_is_json(line) for line in stdout.splitlines()):
        return "invalid JSON"
    if status == 0:
        return "accepted" if case.must_fail else ""
    if status != 2:
        return f"exit code {status}"
    messages = [line for line in stderr.splitlines() if re.match("mgk: (?!warning: )", line)]
    lines = stderr.rstrip("\n").split("\n")
    if len(messages) != 1 or lines[-1] != messages[0]:
        return "the message is not one line at the end"
    if case.mentions and not any(text in messages[0] for text in case.mentions):
        return f"the message does not name {' or '.join(case.mentions)}"
    return ""


def _is_json(line: str) -> bool:
    def refuse(name: str) -> Any:
        raise ValueError(name)

    try:
        json.loads(line, parse_constant=refuse)
    except ValueError:
        return False
    return True
