"""What the subcommands share: the application they join, and options that mean the same everywhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mgk import __version__
from mgk._core.validation import fail, positive_integer
from mgk.training import config
from mgk.training.config import ModelSpec, Recipe

if TYPE_CHECKING:
    from mgk.tasks import Task

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train and compare transformers whose attention keys are mixtures of Gaussians.",
)

# With sequences as long, or more parameters, few would wait for a training on a CPU.
LONG, LARGE = 1000, 10_000_000

DataDir = Annotated[Path | None, typer.Option(help="Where the data lives; by default $MGK_DATA, else ./data.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="A setting, key=value or model.key=value.")]


def data_directory(given: Path | None, run: dict[str, Any] | None = None) -> Path:
    """run: the description of a run, which knows where its data lay."""
    elsewhere = os.environ.get("MGK_DATA") or (run or {}).get("data_dir") or "data"
    return given or Path(elsewhere)


def check_same_data(run: Path, description: dict[str, Any], task: Task, data_dir: Path) -> dict[str, bool]:
    """Whether a run was trained on this data, for its line of results; said, where it was not. Runs that do not know
    what they were trained on say nothing."""
    if "data" not in description:
        return {}
    same = task.checksum(data_dir) == description["data"]
    if not same:
        print(f"{data_dir} is not the data that {run} was trained on", file=sys.stderr)
    return {"same_data": same}


def warn_if_gpu_recommended(recipe: Recipe, length: int, parameters: int) -> None:
    """Said before a training on a CPU."""
    if length >= LONG or parameters > LARGE:
        size = f"{parameters:,} parameters, sequences of {length:,}"
        print(f"{recipe.name} ({size}) is meant for a GPU; on a CPU try `mgk compare demo`", file=sys.stderr)


def progress(stage: str, done: int, total: int) -> None:
    end = "\n" if done >= total else "\r"
    if sys.stderr.isatty() or done >= total:
        print(f"{stage}: {done:,} of {total:,}", end=end, file=sys.stderr, flush=True)


def parse_rows(given: str | None, recipe: Recipe) -> list[ModelSpec]:
    """--rows, or all of the recipe's; each once."""
    rows = list(recipe.rows) if given is None else [ModelSpec.parse(text, "--rows") for text in given.split(",")]
    if not rows:
        fail("--rows", f"is needed: recipe {recipe.name} has none of its own")
    return list(dict.fromkeys(rows))


def check_folder(option: str, path: Path) -> None:
    """Found out before the work rather than after it: whether the folder can be made, or written to if it is there."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir():
        fail(option, f"{path}: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        fail(option, f"{path}: {there} is not writable")


def check_file(option: str, path: Path) -> None:
    """As `check_folder`, for a file that will be written."""
    check_folder(option, path.parent)
    if path.is_dir():
        fail(option, f"{path} is a folder, not a file")


def apply_steps(recipe: str, settings: list[str] | None, steps: int | None) -> list[str]:
    """The settings given, and --steps as one of them; the warm-up keeps its share of the steps unless it is set too."""
    given = list(settings or [])
    if steps is None:
        return given
    positive_integer("--steps", steps)
    training = config.load(recipe).training
    if not any(each.partition("=")[0].strip().removeprefix("training.") == "warmup" for each in given):
        given.append(f"warmup={round(training.warmup * steps / training.steps)}")
    return [*given, f"steps={steps}"]


def _version(asked: bool) -> None:
    if asked:
        print(f"mgk {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
