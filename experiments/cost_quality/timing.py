"""Time models of a recipe in isolation, without training them: python -m experiments.cost_quality.timing RECIPE.

The command is started by `python -m experiments.cost_quality --run` before the runs of a stage. Results are appended to
RESULTS/RECIPE.csv.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from experiments.commands import add_plugin
from experiments.cost_quality.plan import PRESET
from mgk import tasks
from mgk.cli import run_app
from mgk.cli.app import DataDir, check_output_directory, resolve_data_dir
from mgk.training import profiling, results
from mgk.training.config import ModelSpec, load_recipe
from mgk.training.trainer import Run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def timing(
    recipe: Annotated[str, typer.Argument(help="Recipe of the models.")],
    rows: Annotated[str, typer.Option(help="Models, separated by commas.")],
    out: Annotated[Path, typer.Option("--results", help="Results directory.")] = Path("results"),
    jobs: Annotated[int, typer.Option(min=1, help="Models that compile at the same time, on a GPU.")] = 1,
    minutes: Annotated[float, typer.Option(help="Start no timing after this time.")] = math.inf,
    data_dir: DataDir = None,
) -> None:
    """Time models of a recipe in isolation, and append the results."""
    end = time.monotonic() + 60 * minutes
    loaded, data = load_recipe(recipe), resolve_data_dir(data_dir)
    check_output_directory("--results", out)
    file = out / f"{loaded.name}.csv"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = tasks.get_task(loaded.task)
    runs = [Run(loaded, ModelSpec.parse(text), PRESET, 0, data, Path()) for text in rows.split(",")]
    command = shlex.join(["python", "-m", "experiments.cost_quality.timing", *sys.argv[1:]])
    for profile in profiling.profile_in_groups(runs, task, device, jobs, end):
        results.append(file, [{**row, "command": command} for row in profile])


def main() -> None:
    add_plugin("experiments.cost_quality")
    run_app(lambda: app, "python -m experiments.cost_quality.timing", sys.argv[1:])


if __name__ == "__main__":
    main()
