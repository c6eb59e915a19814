"""mgk data."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from mgk.cli.app import DataDir, app, print_progress, resolve_data_dir


@app.command()
def data(
    task: Annotated[str, typer.Argument(help="Name of a task or of a recipe, or `all`.")],
    data_dir: DataDir = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of processes; default: one per core.")] = None,
) -> None:
    """Prepare and verify the data of a task, or print where to download it."""
    from mgk import tasks
    from mgk.training import config

    data_path = resolve_data_dir(data_dir)
    if task not in tasks.TASKS and task in config.recipe_names():
        task = config.load_recipe(task).task
    missing = []
    for selected in tasks.TASKS.values() if task == "all" else [tasks.get_task(task)]:
        try:
            selected.prepare(data_path, workers or os.cpu_count() or 1, print_progress)
        except tasks.DataError as error:
            if task != "all":
                raise
            missing.append(selected.name)
            print(f"{selected.name}: {error}", file=sys.stderr)
            continue
        for name in selected.splits:
            split = selected.split(data_path, name)
            print(f"{selected.name} {name}: {len(split):,} examples, {len(split.tokens):,} tokens")
        for name, accuracies in selected.baselines(data_path).items():
            scores = "; ".join(f"{split} {100 * accuracy:.1f} %" for split, accuracy in accuracies.items())
            print(f"{selected.name} baseline, {name}: {scores}")
    if missing:
        raise ValueError(f"no data for {', '.join(missing)}")
