"""What the subcommands share: the application they join, and options that mean the same everywhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from mgk import __version__
from mgk.recipes import Row

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train and compare transformers whose attention keys are mixtures of Gaussians.",
)

DataDir = Annotated[Path | None, typer.Option(help="Where the data lives; by default $MGK_DATA, else ./data.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="A setting, key=value or model.key=value.")]


def data_directory(given: Path | None) -> Path:
    return given or Path(os.environ.get("MGK_DATA", "data"))


def progress(stage: str, done: int, total: int) -> None:
    end = "\n" if done >= total else "\r"
    if sys.stderr.isatty() or done >= total:
        print(f"{stage}: {done:,} of {total:,}", end=end, file=sys.stderr, flush=True)


def run_directory(runs: Path, recipe: str, row: Row, preset: str, seed: int) -> Path:
    return runs / recipe / f"{str(row).replace(':', '-').replace('/', 'kv')}-{preset}-s{seed}"


def steps_setting(steps: int | None) -> list[str]:
    return [] if steps is None else [f"steps={steps}"]


def _version(asked: bool) -> None:
    if asked:
        print(f"mgk {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it and leave.")
    ] = False,
) -> None:
    pass
