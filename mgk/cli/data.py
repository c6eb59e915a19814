"""mgk data."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from mgk.cli.app import DataDir, app, print_progress, resolve_data_dir


@app.command()
def data(
    task: Annotated[str, typer.Argument(help="The task to prepare, by its name or a recipe's, or `all`.")],
    data_dir: DataDir = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: all cores.")] = None,
) -> None:
    """Prepare a task's data, verify it by checksum, and say where to get what is missing."""
    from mgk import tasks
    from mgk.training import config

    where = resolve_data_dir(data_dir)
    if task not in tasks.TASKS and task in config.names():
        task = config.load(task).task
    missing = []
    for chosen in tasks.TASKS.values() if task == "all" else [tasks.task(task)]:
        try:
            chosen.prepare(where, workers or os.cpu_count() or 1, print_progress)
        except tasks.DataError as error:
            if task != "all":
                raise
            missing.append(chosen.name)
            print(f"{chosen.name}: {error}", file=sys.stderr)
            continue
        for name in chosen.splits:
            split = chosen.split(where, name)
            print(f"{chosen.name} {name}: {len(split):,} examples, {len(split.tokens):,} tokens")
        for name, scores in chosen.baselines(where).items():
            told = "; ".join(f"{split} {100 * score:.1f} %" for split, score in scores.items())
            print(f"{chosen.name} baseline, {name}: {told}")
    if missing:
        raise ValueError(f"no data for {', '.join(missing)}")
