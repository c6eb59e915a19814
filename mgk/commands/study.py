"""mgk study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mgk import recipes
from mgk.commands.analyze import analyze
from mgk.commands.common import DataDir, Settings, app, chosen_rows, with_steps
from mgk.commands.compare import compare
from mgk.recipes import run_directory


@app.command()
def study(
    recipe: Annotated[str, typer.Argument(help="The recipe of a language model, by name or as a YAML file.")],
    rows: Annotated[str | None, typer.Option(help="variant:heads,…; default: all rows of the recipe.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0 to N-1 of each row.")] = 1,
    preset: Annotated[str, typer.Option(help="paper, ref-lra or ref-lm.")] = "paper",
    steps: Annotated[int | None, typer.Option(help="Instead of the recipe's.")] = None,
    settings: Settings = None,
    data_dir: DataDir = None,
    matrices: Annotated[int | None, typer.Option(min=1, help="Attention matrices to rank in each layer.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Trainings at once; default 1, or 4 on a GPU.")] = None,
    alone: Annotated[
        bool | None, typer.Option(help="Time each model by itself; default: if its training did not.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where everything worth keeping goes: no weights.")] = Path("results"),
    runs: Annotated[Path, typer.Option(help="Where the runs' directories go.")] = Path("runs"),
) -> None:
    """Train, evaluate, sample, draw and analyse in one go; --out then holds all but the weights."""
    from mgk import tasks
    from mgk.study import sample
    from mgk.tasks.corpus import Corpus

    chosen = recipes.load(recipe).with_settings(with_steps(recipe, settings, steps))
    if not isinstance(tasks.task(chosen.task), Corpus):
        raise ValueError(f"recipe {recipe} trains no language model: use mgk compare")
    models = chosen_rows(rows, chosen)
    compare(recipe, rows, seeds, preset, steps, settings, data_dir, jobs, alone, out=out, runs=runs)
    directories = [run_directory(runs, chosen.name, row, preset, seed) for row in models for seed in range(seeds)]
    # A run whose result was already known has not been trained again, and may not be here.
    found = [directory for directory in directories if (directory / "best").is_dir()]
    for directory in found:
        print(f"samples: {sample(directory, out)}")
    if found:
        # Curves, attention maps, ranks and what else there is to see in the heads.
        analyze(found, split="dev", matrices=matrices, data_dir=data_dir, out=out / f"{chosen.name}-analysis")
