"""mgk data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mgk.cli.app import DataDir, app, check_bounds, resolve_data_dir
from mgk.cli.help_texts import epilog
from mgk.cli.preparation import describe_preparation, prepare_data

if TYPE_CHECKING:
    from mgk.tasks import Task


@app.command(epilog=epilog("data"))
def data(
    task: Annotated[str, typer.Argument(help="Name of a task or of a recipe, or `all`.")],
    data_dir: DataDir = None,
    workers: Annotated[
        int | None,
        typer.Option(callback=check_bounds("--workers", 1), help="Number of processes; default: one per core."),
    ] = None,
) -> None:
    """Prepare and verify the data of a task, or print where to download it."""
    from mgk import tasks
    from mgk.training import config

    data_path = resolve_data_dir(data_dir)
    if task not in tasks.TASKS and task in config.recipe_names():
        task = config.load_recipe(task).task
    if task != "all":
        _prepare_and_print(tasks.get_task(task), data_path, workers)
        return
    _print_plan(list(tasks.TASKS.values()), data_path)
    missing = []
    for selected in tasks.TASKS.values():
        try:
            _prepare_and_print(selected, data_path, workers)
        except tasks.DataError as error:
            missing.append(selected.name)
            print(f"{selected.name}: {error}", file=sys.stderr)
    if missing:
        raise ValueError(f"no data for {', '.join(missing)}")


def _prepare_and_print(task: Task, data_dir: Path, workers: int | None) -> None:
    """Prepare the data of a task, and print the sizes of its splits and the accuracies of its baselines."""
    prepare_data(task, data_dir, workers)
    for name in task.splits:
        split = task.split(data_dir, name)
        print(f"{task.name} {name}: {len(split):,} examples, {len(split.tokens):,} tokens")
    for name, accuracies in task.baselines(data_dir).items():
        scores = "; ".join(f"{split} {100 * accuracy:.1f} %" for split, accuracy in accuracies.items())
        print(f"{task.name} baseline, {name}: {scores}")


def _print_plan(all_tasks: list[Task], data_dir: Path) -> None:
    """Describe the preparation of each task, before the first one starts."""
    from mgk.tasks import DataError

    print(f"Data in {data_dir}; nothing is downloaded:", file=sys.stderr)
    for task in all_tasks:
        try:
            description = describe_preparation(task, data_dir)
        except (DataError, OSError):
            description = (
                f"{task.name}: skipped, its source files are missing (run `mgk data {task.name}` for the list)"
            )
        print(f"  {description}", file=sys.stderr)
