"""The Typer app of `mgk`, with the options and checks of options that several commands share."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mgk import __version__
from mgk._core.io import check_writable, remove_stale_temporaries
from mgk._core.validation import fail, positive_integer
from mgk.cli.help_texts import examples_epilog
from mgk.training import config, results
from mgk.training.config import ModelSpec, Recipe

if TYPE_CHECKING:
    from mgk.tasks import Task

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train, compare and analyze transformers whose attention keys are mixtures of Gaussians.",
    epilog=examples_epilog("mgk compare demo --out mine", "mgk train demo --variant smgk --heads 2")
    + "\n\nEnvironment variables: MGK_DATA is the default data directory. MGK_PLUGINS lists modules to import first, "
    "separated by commas, which register tasks and recipes. MGK_TRACEBACK=1 shows the traceback of an error.",
)


def check_bounds(option: str, least: int, most: int | None = None) -> Callable[[int | None], int | None]:
    """Return a callback of an option that raises unless its value is in [least, most]; None stands for no value."""

    def check(value: int | None) -> int | None:
        if value is not None and value < least:
            fail(option, f"must be at least {least}, got {value}")
        if value is not None and most is not None and value > most:
            fail(option, f"must be at most {most}, got {value}")
        return value

    return check


def _parse_data_dir(text: str) -> Path:
    """Return a path. Path("") is the current directory, and an unset shell variable would select it."""
    if not text:
        raise typer.BadParameter("must be a directory, got ''")
    return Path(text)


DataDir = Annotated[
    Path | None,
    typer.Option(parser=_parse_data_dir, metavar="PATH", help="Data directory; default: $MGK_DATA, or ./data."),
]
RunDataDir = Annotated[
    Path | None,
    typer.Option(
        parser=_parse_data_dir, metavar="PATH", help="Data directory; default: $MGK_DATA, or that of the run."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Override a setting of the recipe: key=value or model.key=value (keys below); may be repeated."
    ),
]

KeepCheckpoints = Annotated[
    int,
    typer.Option(
        callback=check_bounds("--keep-checkpoints", 1, 1000),
        help="Checkpoints to keep in a run directory, with checksums. A damaged one is replaced by the one before it.",
    ),
]


# Default of --logger; mgk.training.trackers imports Lightning, which takes seconds.
DEFAULT_LOGGER = "tensorboard"
LoggerNames = Annotated[
    str,
    typer.Option(
        "--logger", help="Experiment trackers, separated by commas: tensorboard, csv, wandb, mlflow; or none."
    ),
]


def resolve_data_dir(option: Path | None, description: dict[str, Any] | None = None) -> Path:
    """Return the data directory: --data-dir, $MGK_DATA, the one in a run's description, or ./data."""
    return option or Path(os.environ.get("MGK_DATA") or (description or {}).get("data_dir") or "data")


def check_same_data(run: Path, description: dict[str, Any], task: Task, data_dir: Path) -> dict[str, bool]:
    """Warn if a run was trained on data other than that in `data_dir`.

    Returns:
        {"same_data": ...} for the printed results; empty if the run's description has no data checksum.
    """
    if "data" not in description:
        return {}
    is_same = task.checksum(data_dir) == description["data"]
    if not is_same:
        print(f"{data_dir} is not the data that {run} was trained on", file=sys.stderr)
    return {"same_data": is_same}


def parse_rows(option: str | None, recipe: Recipe) -> list[ModelSpec]:
    """Return the models of --rows (default: all rows of the recipe) without duplicates."""
    from mgk.training.equal_time import EqualTimeSpec

    rows = list(recipe.rows) if option is None else [EqualTimeSpec.parse(text, "--rows") for text in option.split(",")]
    if not rows:
        fail("--rows", f"is required: recipe {recipe.name} defines no rows")
    return list(dict.fromkeys(rows))


def import_hf(subject: str) -> None:
    """Import mgk.hf, which registers its models with Transformers, and silence the warnings of the Hub.

    Args:
        subject: Command or option that needs it, for the message if the extra `hf` is missing.
    """
    try:
        import mgk.hf  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{subject} needs the extra 'hf' ({error.name} is missing): pip install 'mgk[hf]', or '.[hf]' in a clone"
        ) from error
    # Without a network, each attempt to reach the Hub prints a warning.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def check_output_directory(option: str, path: Path) -> None:
    """Raise if a directory cannot be created or written to, before any work is done."""
    try:
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    except (OSError, ValueError) as error:
        # Too long, a loop of symbolic links, or a null byte.
        fail(option, f"{path}: {getattr(error, 'strerror', None) or error}")
    if not existing.is_dir():
        fail(option, f"{path}: {existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        fail(option, f"{path}: {existing} is not writable")
    try:
        check_writable(existing)
    except OSError as error:
        fail(option, f"{path}: {existing} is not writable ({error.strerror})")


def check_results_file(option: str, path: Path, extra: Sequence[str] = ()) -> None:
    """Raise if results cannot be appended to a file, before any work is done; `extra` are columns of its own."""
    results.check_file(option, path, extra)
    check_output_directory(option, Path(os.path.realpath(path)).parent)


def remove_result_temporaries(file: Path, recipe: str) -> None:
    """Remove the temporary files that killed processes left next to a results file."""
    folder = Path(os.path.realpath(file)).parent
    for directory in (folder, folder / "curves", folder / "answers" / recipe):
        remove_stale_temporaries(directory)


def apply_steps(recipe: str, settings: list[str] | None, steps: int | None) -> list[str]:
    """Add --steps to the settings; the warm-up is scaled in proportion unless it is set explicitly."""
    overrides = list(settings or [])
    if steps is None:
        return overrides
    positive_integer("--steps", steps)
    training = config.load_recipe(recipe).training
    if not any(setting.partition("=")[0].strip().removeprefix("training.") == "warmup" for setting in overrides):
        overrides.append(f"warmup={round(training.warmup * steps / training.steps)}")
    return [*overrides, f"steps={steps}"]


def _print_version(requested: bool) -> None:
    if requested:
        print(f"mgk {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
