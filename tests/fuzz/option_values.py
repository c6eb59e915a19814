"""Every option and argument of every command, with values that are empty, out of range or of the wrong kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fuzz import materials
from tests.fuzz.harness import Case

# A command line per command that ends quickly. TEXT and RUN are the shared data and run.
BASES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "train": (("tiny.yaml",), {"--data-dir": "TEXT", "--out": "out", "--accelerator": "cpu"}),
    "compare": (
        ("tiny.yaml",),
        {"--data-dir": "TEXT", "--out": "results", "--runs": "runs", "--rows": "smgk:1", "--minutes": "1e-9"},
    ),
    "eval": (("RUN",), {"--data-dir": "TEXT"}),
    "generate": (("RUN",), {"--prompt": "the", "--max-tokens": "3"}),
    "analyze": (
        ("RUN",),
        {
            **{"--data-dir": "TEXT", "--out": "out", "--matrices": "2", "--removal": "0"},
            **{"--length": "8", "--map-size": "16"},
        },
    ),
    "flops": (
        ("tiny.yaml",),
        {"--variants": "smgk", "--heads": "1", "--lengths": "8", "--data-dir": "TEXT", "--out": "out"},
    ),
    "bench": ((), {"--only": "speed", "--shapes": "1x2x16x8", "--variants": "smgk"}),
    "data": (("bytes",), {"--data-dir": "text"}),
    "recipes": ((), {}),
}
# Commands of the table "options of upcycle", which commit aa005c7 does not have.
NEW_BASES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "upcycle": (
        ("ENCODER",),
        {"--text": "words.txt", "--out": "out", "--key-heads": "2", "--distil-steps": "1", "--batch": "4"},
    ),
}
FLAGS = {"--alone", "--no-alone", "--redraw", "--graphs", "--no-graphs", "--trust-remote-code", "--help", "--version"}
FLAGS |= {"--mixture", "--train-all"}
# Options whose value is a number of iterations: huge ones are valid, and take as long as they say.
UNBOUNDED = {"--steps", "--max-tokens", "--minutes", "--distil-steps"}
VALUES: dict[str, str] = {
    "empty": "",
    "negative": "-1",
    "zero": "0",
    "huge": str(10**30),
    "largest": str(2**63 - 1),
    "nan": "nan",
    "inf": "inf",
    "float": "1.5",
    "text": "abc",
    "unicode": "ünï→😀",
    "dollar": "a$b$c",
    "newline": "a\nb",
    "brackets": "[/red] {x}",
    "long": "x" * 5000,
    "traversal": "../../../../../../../proc/mgk/x",
    "missing": "nowhere/deep/file.txt",
    "directory": "folder",
    "file": "file",
    "null byte": "a\0b",
    "invalid UTF-8": "a\udcffb",
}


def list_options() -> dict[str, list[tuple[str, bool]]]:
    """Return the options and arguments of each command, and whether each is an argument."""
    import typer.main

    from mgk.cli import commands

    group: Any = typer.main.get_command(commands.app)
    return {
        command: [
            (parameter.opts[0], parameter.param_type_name == "argument")
            for parameter in group.commands[command].params
            if parameter.opts[0] not in FLAGS
        ]
        for command in (BASES | NEW_BASES)
        if command in group.commands
    }


def _options_of_this_version() -> dict[str, list[tuple[str, bool]]]:
    """Return `list_options` of the package beside the tests, also while another version of it is imported."""
    code = "import json\nfrom tests.fuzz.option_values import list_options\nprint(json.dumps(list_options()))"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, text=True).stdout
    return {command: [(name, flag) for name, flag in names] for command, names in json.loads(output).items()}


def cases() -> Iterator[Case]:
    """Yield the table: every option and argument with every value."""
    return _cases(BASES)


def upcycle() -> Iterator[Case]:
    """Yield the same for `mgk upcycle`."""
    return _cases(NEW_BASES)


def _cases(bases: dict[str, tuple[tuple[str, ...], dict[str, str]]]) -> Iterator[Case]:
    import mgk

    is_this_version = Path(mgk.__file__).is_relative_to(Path(__file__).parents[2])
    options = list_options() if is_this_version else _options_of_this_version()
    for command, (arguments, settings) in bases.items():
        for option, is_argument in options[command]:
            for name, value in VALUES.items():
                if option in UNBOUNDED and name in ("huge", "largest"):
                    continue
                rest = {key: text for key, text in settings.items() if key != option}
                positional = (value,) if is_argument else arguments
                if option == "--hf":
                    positional, rest = (), {"--text": "eight words are enough for this one test"}
                words = [*(word for pair in rest.items() for word in pair), *(() if is_argument else (option, value))]
                separated = ("--", *positional) if positional else ()
                yield Case(
                    f"{command} {option} {name}",
                    (command, *map(_fill, (*words, *separated))),
                    _prepare,
                    _mentions(option, value),
                    is_json=command == "eval",
                )


def _mentions(option: str, value: str) -> tuple[str, ...]:
    # Messages escape what is not printable.
    values = (value[:50], ascii(value[:50])[1:-1]) if len(value) > 1 else ()
    names = (option, option.lstrip("-").replace("-", "_"), "run directory", "out of memory", f"got {value!r}")
    return tuple(text for text in (*names, *values, value.split("/")[-1][:50]) if text.strip())


def _fill(argument: str) -> str:
    paths = {"TEXT": materials.text, "RUN": materials.shared_run, "ENCODER": materials.encoder}
    return str(paths[argument]()) if argument in paths else argument


def _prepare(directory: Path) -> None:
    (directory / "tiny.yaml").write_text(materials.RECIPE)
    (directory / "file").write_text("one line of text\n")
    (directory / "folder").mkdir()
    (directory / "words.txt").write_text(materials.CALIBRATION)
    materials.copy("text", directory / "text")
