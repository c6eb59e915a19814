"""mgk compare."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mgk._core.validation import number, one_of
from mgk.cli.app import (
    DataDir,
    Settings,
    app,
    apply_steps,
    check_output_directory,
    parse_rows,
    print_progress,
    resolve_data_dir,
    warn_if_gpu_recommended,
)
from mgk.training import config, results
from mgk.variants import PRESETS

if TYPE_CHECKING:
    from mgk.tasks import Task
    from mgk.training.trainer import Run


@app.command()
def compare(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or a YAML file; `mgk recipes` lists them.")],
    rows: Annotated[
        str | None,
        typer.Option(
            help="variant:heads,… as in softmax:8,smgk:4; smgk:8/4: 4 key heads; default: all of the recipe's."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0 to N-1 of each row.")] = 1,
    preset: Annotated[str, typer.Option(help="paper, ref-lra or ref-lm.")] = "paper",
    steps: Annotated[int | None, typer.Option(help="Instead of the recipe's.")] = None,
    settings: Settings = None,
    data_dir: DataDir = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Trainings at once; default 1, or 4 on a GPU.")] = None,
    alone: Annotated[
        bool | None, typer.Option(help="Time each model by itself; default: if its training did not.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after so long; trainings save, and the same command goes on.")
    ] = None,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Only table and picture, of what out/ has; needs no data.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Where results, table and picture go.")] = Path("results"),
    runs: Annotated[Path, typer.Option(help="Where the runs' directories go.")] = Path("runs"),
) -> None:
    """Train rows × seeds, several at once, and show side by side what was gained. Skips what out/ already has."""
    import torch

    from mgk import tasks
    from mgk.training import sweep as comparison
    from mgk.training.evaluate import count_parameters
    from mgk.training.job_queue import chosen_at_once, run_jobs
    from mgk.training.run_dir import run_path
    from mgk.training.trainer import Run

    overrides = apply_steps(recipe, settings, steps)
    chosen = config.load(recipe).with_settings(overrides)
    models = parse_rows(rows, chosen)
    one_of("--preset", preset, PRESETS)
    if minutes is not None:
        number("--minutes", minutes, 0, above=True)
    if redraw:
        found = results.read(sorted(out.glob("*.csv")))
        _show(chosen, models, preset, out, comparison.setups_of(found, chosen, models, preset))
        return
    check_output_directory("--out", out)
    check_output_directory("--runs", runs)
    where = resolve_data_dir(data_dir)
    task = tasks.task(chosen.task)
    task.prepare(where, os.cpu_count() or 1, print_progress)
    first = {row: Run(chosen, row, preset, 0, where, run_path(runs, chosen.name, row, preset, 0)) for row in models}
    setups = {row: run.setup(task) for row, run in first.items()}
    # Its own file, and any other of results/ that already has the row.
    own = out / f"{chosen.name}.csv"
    known = results.read(sorted(out.glob("*.csv")))
    wanted = [
        comparison.train_job(
            chosen, row, seed, preset=preset, data_dir=where, out=out, runs=runs, given=recipe, overrides=overrides
        )
        for seed in range(seeds)
        for row in models
        if not comparison.is_trained(known, chosen, row, preset, seed, setups[row])
    ]
    total = len(models) * seeds
    if len(wanted) < total:
        told = f"{total - len(wanted)} of {total} trainings are already in {out} and not run again"
        print(f"{told} (another --out has its own)", file=sys.stderr)
    if wanted and not torch.cuda.is_available():
        warn_if_gpu_recommended(chosen, task.max_length, count_parameters(first[wanted[0].row].model_config(task)))
    at_once = chosen_at_once(jobs)
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    queue = run_jobs(wanted, at_once, minutes)
    failed, left = queue.failed, queue.left
    if failed and not results.read([own]):
        raise ValueError(f"all {len(failed)} trainings failed; their logs are in their directories")
    if left:
        told = f"{len(left)} of {len(wanted)} trainings are not done after {minutes:g} minutes"
        print(f"{told}; the same command goes on with them", file=sys.stderr)
        if not results.read([own]):
            return
    done = [job for job in wanted if job not in failed and job not in left]
    if at_once == 1 and alone is None:
        for job in done:
            mine = comparison.filter_rows(results.read([own]), chosen, job.row, preset, job.seed, setups[job.row])
            results.append(own, comparison.to_solo_rows(mine))
    # A training by itself has timed its model, unless it was too short.
    untimed = models if alone or at_once > 1 else dict.fromkeys(job.row for job in done)
    if not left and alone is not False:
        known = results.read(sorted(out.glob("*.csv")))
        # A training by itself has not timed inference; who asks for times wants that too.
        metrics = comparison.COSTS if alone else comparison.ALONE
        asked = [
            first[row] for row in untimed if not comparison.is_timed(known, chosen, row, preset, setups[row], metrics)
        ]
        for found in _timed_alone(asked, task, at_once, end):
            results.append(own, found)
    _show(chosen, models, preset, out, setups)
    if failed:
        raise ValueError(f"{len(failed)} of {len(wanted)} trainings failed; their logs are in their directories")


def _timed_alone(asked: list[Run], task: Task, at_once: int, end: float) -> Iterator[list[dict[str, Any]]]:
    """Rows of results of each; on a GPU several warm up at once. None is begun after `end`."""
    import torch

    from mgk.training import profiling

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = at_once if device.type == "cuda" else 1
    for first in range(0, len(asked), size):
        if time.monotonic() >= end:
            left = ", ".join(str(run.row) for run in asked[first:])
            print(f"the time is over: {left} not timed alone; the same command goes on with that", file=sys.stderr)
            return
        group = asked[first : first + size]
        names = ", ".join(str(run.row) for run in group)
        print(f"timing {names} alone, {profiling.COUNT} steps (--no-alone leaves this out)", file=sys.stderr)
        yield from (
            profiling.measure_in_turn(group, task, device) if size > 1 else [profiling.measure(group[0], task, device)]
        )


def _show(
    recipe: config.Recipe, models: list[config.ModelSpec], preset: str, out: Path, setups: dict[config.ModelSpec, str]
) -> None:
    """The table on the terminal; it and the picture in out/."""
    from rich.console import Console
    from rich.table import Table

    from mgk.training import report

    lines = report.write_report(recipe, models, preset, sorted(out.glob("*.csv")), out, setups)
    shown = Table(*lines[0], title=recipe.title)
    for line in lines[1:]:
        shown.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 160).print(shown)
    print(f"table: {out / recipe.name}.md   picture: {out / recipe.name}.png   results: {out / recipe.name}.csv")
