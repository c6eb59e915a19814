"""mgk compare."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mgk._core.io import exclusive
from mgk._core.validation import fail, number, one_of
from mgk.cli.app import (
    DEFAULT_LOGGER,
    DataDir,
    KeepCheckpoints,
    LoggerNames,
    Settings,
    app,
    apply_steps,
    check_output_directory,
    check_results_file,
    parse_rows,
    prepare_data,
    remove_result_temporaries,
    resolve_data_dir,
    warn_if_gpu_recommended,
)
from mgk.cli.cluster_options import (
    ClusterName,
    GpusPerNode,
    MaxParallel,
    Partition,
    TimeLimit,
    read_cluster_options,
)
from mgk.cli.help_texts import epilog
from mgk.training import config, results
from mgk.training.config import ModelSpec, Recipe
from mgk.variants import PRESETS

if TYPE_CHECKING:
    from mgk.tasks import Task
    from mgk.training.equal_time import EqualTimeSpec
    from mgk.training.job_queue import Job
    from mgk.training.trainer import Run

# Limit of --seeds: all runs are planned before the first starts.
MAX_SEEDS = 10_000


@app.command(epilog=epilog("compare", settings=True))
def compare(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe (see `mgk recipes`) or a YAML file.")],
    rows: Annotated[
        str | None,
        typer.Option(
            help="Models as variant:heads, separated by commas: softmax:8,smgk:4. smgk:8/4 has 4 key and value heads, "
            "smgk:8/1/4 has 1 key and 4 value heads. softmax:8@time=smgk:8 trains as many steps as fit into the "
            "training time of smgk:8, by step times measured in isolation. Default: all rows of the recipe."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=MAX_SEEDS, help="Number of seeds per row, counted from 0.")] = 1,
    preset: Annotated[str, typer.Option(help="Attention preset: paper, ref-lra or ref-lm.")] = "paper",
    steps: Annotated[int | None, typer.Option(help="Training steps; default: the recipe's.")] = None,
    settings: Settings = None,
    data_dir: DataDir = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Number of concurrent training runs; default: 4 on a GPU, otherwise 1.")
    ] = None,
    alone: Annotated[
        bool | None,
        typer.Option(help="Time each model in isolation, including inference; default: only models not yet timed."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Stop after this time; runs save a checkpoint, and the same command resumes them."),
    ] = None,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Only rewrite the table and plot from the results in --out; needs no data.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Directory for results, table and plot.")] = Path("results"),
    runs: Annotated[Path, typer.Option(help="Parent directory of the run directories.")] = Path("runs"),
    keep_checkpoints: KeepCheckpoints = config.KEEP_CHECKPOINTS,
    logger: LoggerNames = DEFAULT_LOGGER,
    cluster: ClusterName = None,
    partition: Partition = None,
    gpus_per_node: GpusPerNode = None,
    time_limit: TimeLimit = None,
    max_parallel: MaxParallel = None,
) -> None:
    """Train the rows of a recipe with several seeds and compare them in a table and a plot.

    Runs whose results are already in --out are skipped.
    """
    import torch

    from mgk import tasks
    from mgk.training import sweep
    from mgk.training.cluster import execute_jobs
    from mgk.training.equal_time import EqualTimeSpec, record_steps
    from mgk.training.evaluate import count_parameters
    from mgk.training.job_queue import resolve_max_running
    from mgk.training.runs import run_path
    from mgk.training.trackers import parse_loggers
    from mgk.training.trainer import Run

    overrides = apply_steps(recipe, settings, steps)
    loaded = config.load_recipe(recipe).with_settings(overrides)
    models = parse_rows(rows, loaded)
    one_of("--preset", preset, PRESETS)
    parse_loggers(logger)
    equal_time = [model for model in models if isinstance(model, EqualTimeSpec)]
    if equal_time and cluster is not None:
        fail(
            "--rows",
            f"{equal_time[0]} needs step times in isolation, which --cluster does not measure: omit one of them",
        )
    cluster_options = read_cluster_options(cluster, partition, gpus_per_node, time_limit, max_parallel)
    if minutes is not None:
        number("--minutes", minutes, 0, above=True)
    # Models with the recipe's steps: those of the table, and those whose step times give the steps of other rows.
    trained = [model for model in models if not isinstance(model, EqualTimeSpec)]
    base = list(dict.fromkeys([*trained, *(timed for row in equal_time for timed in row.timed_models)]))
    if redraw:
        stored = _read_results(out, loaded)
        setups = sweep.setups_of(stored, loaded, base, preset)
        recipes: dict[EqualTimeSpec, Recipe] = _equal_time_recipes(stored, loaded, equal_time, preset, setups)
        for row, changed in recipes.items():
            setups |= sweep.setups_of(stored, changed, [row], preset)
        _write_report(loaded, models, preset, out, setups, recipes)
        return

    check_output_directory("--out", out)
    check_output_directory("--runs", runs)
    # New results are appended to this file; existing results are read from every CSV file in --out.
    result_file = out / f"{loaded.name}.csv"
    check_results_file("--out", result_file)
    data = resolve_data_dir(data_dir)
    task = tasks.get_task(loaded.task)
    prepare_data(task, data)
    first_runs = {
        model: Run(loaded, model, preset, 0, data, run_path(runs, loaded.name, model, preset, 0)) for model in base
    }
    setups = {model: run.setup(task) for model, run in first_runs.items()}
    lock, remedy = out / f".{loaded.name}.compare.lock", "wait until it ends, or pass another --out"
    with exclusive(lock, f"{out} (mgk compare {loaded.name})", remedy):
        remove_result_temporaries(result_file, loaded.name)

        def missing_jobs(recipe_of: Mapping[Any, Recipe]) -> list[Job]:
            """Return the jobs of these rows that the results lack."""
            all_rows = _read_results(out, loaded)
            return [
                sweep.train_job(
                    changed,
                    model,
                    seed,
                    preset=preset,
                    data_dir=data,
                    out=out,
                    runs=model.runs_folder(runs) if isinstance(model, EqualTimeSpec) else runs,
                    recipe_argument=recipe,
                    overrides=[*overrides, *([] if changed is loaded else [f"steps={changed.training.steps}"])],
                    keep_checkpoints=None if keep_checkpoints == config.KEEP_CHECKPOINTS else keep_checkpoints,
                    logger=None if logger == DEFAULT_LOGGER else logger,
                )
                for seed in range(seeds)
                for model, changed in recipe_of.items()
                if not sweep.is_trained(all_rows, changed, model, preset, seed, setups[model])
            ]

        pending = missing_jobs(dict.fromkeys(trained, loaded))
        total = len(trained) * seeds
        if len(pending) < total:
            skipped = f"{total - len(pending)} of {total} runs are already in {out} and are skipped"
            print(f"{skipped} (use another --out to repeat them)", file=sys.stderr)
        if pending and cluster_options is None and not torch.cuda.is_available():
            warn_if_gpu_recommended(
                loaded, task.max_length, count_parameters(first_runs[pending[0].row].model_config(task))
            )

        max_running = resolve_max_running(jobs)
        deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
        queue = execute_jobs(pending, max_running, minutes, cluster_options)
        if cluster_options is not None:
            # This machine has other hardware than the nodes: its times would not be comparable.
            alone = alone or False
        failed, unfinished = queue.failed, queue.unfinished
        if failed and not results.read([result_file]):
            raise ValueError(f"all {len(failed)} runs failed; see log.txt in their run directories")
        if unfinished:
            progress = f"{len(unfinished)} of {len(pending)} runs are not finished after {minutes:g} minutes"
            print(f"{progress}; the same command resumes them", file=sys.stderr)
            if not results.read([result_file]):
                return

        finished = [job for job in pending if job not in failed and job not in unfinished]
        if max_running == 1 and alone is None:
            for job in finished:
                rows_of_job = sweep.filter_rows(
                    results.read([result_file]), loaded, job.row, preset, job.seed, setups[job.row]
                )
                results.append(result_file, sweep.to_solo_rows(rows_of_job))
        if not unfinished and alone is not False:
            all_rows = _read_results(out, loaded)
            # A run that trained alone has timed its model, unless it was too short; it never times inference.
            candidates = base if alone or max_running > 1 else [job.row for job in finished]
            candidates = [*candidates, *(timed for row in equal_time for timed in row.timed_models)]
            metrics = sweep.SOLO_METRICS if alone else sweep.SOLO_TRAINING_METRICS
            untimed = [
                first_runs[model]
                for model in dict.fromkeys(candidates)
                if not sweep.is_timed(all_rows, loaded, model, preset, setups[model], metrics)
            ]
            for profile in _profile(untimed, task, max_running, deadline):
                results.append(result_file, profile)
        recipes = {}
        if equal_time and not unfinished:
            stored = _read_results(out, loaded)
            recipes = _equal_time_recipes(stored, loaded, equal_time, preset, setups)
            for row, changed in recipes.items():
                record_steps(result_file, stored, loaded, row, preset, changed.training.steps)
                setups[row] = Run(changed, row.model, preset, 0, data, Path()).setup(task)
                print(f"{row}: {changed.training.steps:,} steps in the training time of {row.time_of}", file=sys.stderr)
            _check_resolved(equal_time, recipes, alone, deadline)
            later = missing_jobs(recipes)
            pending = [*pending, *later]
            rest = None if minutes is None else max(0.0, deadline - time.monotonic()) / 60
            queue = execute_jobs(later, max_running, rest, cluster_options)
            failed, unfinished = [*failed, *queue.failed], queue.unfinished
            if unfinished:
                print(f"{len(unfinished)} runs are not finished; the same command resumes them", file=sys.stderr)
                score = sweep.metric_format(loaded).metric
                if not any(row["metric"] == score for row in _read_results(out, loaded)):
                    return
        _write_report(loaded, models, preset, out, setups, recipes)
        if failed:
            raise ValueError(f"{len(failed)} of {len(pending)} runs failed; see log.txt in their run directories")


def _equal_time_recipes(
    rows: list[dict[str, str]],
    recipe: Recipe,
    specs: list[EqualTimeSpec],
    preset: str,
    setups: dict[ModelSpec, str],
) -> dict[EqualTimeSpec, Recipe]:
    """Return the recipe of each row with the training time of another; rows without step times are omitted."""
    from mgk.training.equal_time import steps_of, with_steps

    steps = {spec: steps_of(rows, recipe, spec, preset, setups) for spec in specs}
    return {spec: with_steps(recipe, count) for spec, count in steps.items() if count is not None}


def _check_resolved(
    specs: list[EqualTimeSpec], recipes: dict[EqualTimeSpec, Recipe], alone: bool | None, deadline: float
) -> None:
    """Raise if step times are missing for a reason other than the time limit."""
    missing = [str(spec) for spec in specs if spec not in recipes]
    if missing and alone is False:
        fail("--no-alone", f"leaves out the step times that {', '.join(missing)} needs: omit it")
    if missing and time.monotonic() < deadline:
        raise ValueError(f"the step times that {', '.join(missing)} needs could not be measured")


def _read_results(out: Path, recipe: Recipe) -> list[dict[str, str]]:
    """Read all results files in a directory and check the scores of a recipe."""
    from mgk.training.sweep import metric_format

    metric = metric_format(recipe).metric
    rows = []
    for path in sorted(out.glob("*.csv")):
        rows_of_file = results.read([path])
        results.check_numbers(path, rows_of_file, recipe.name, metric)
        rows += rows_of_file
    return rows


def _profile(runs: list[Run], task: Task, max_running: int, deadline: float) -> Iterator[list[dict[str, Any]]]:
    """Yield the result rows of each profiled run. No profile starts after `deadline`.

    On a GPU, up to `max_running` runs warm up at the same time.
    """
    import torch

    from mgk.training import profiling

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = max_running if device.type == "cuda" else 1
    for start in range(0, len(runs), size):
        if time.monotonic() >= deadline:
            names = ", ".join(str(run.row) for run in runs[start:])
            print(f"time limit reached before timing {names}; the same command continues there", file=sys.stderr)
            return
        group = runs[start : start + size]
        names = ", ".join(str(run.row) for run in group)
        print(f"timing {names} in isolation, {profiling.TOTAL_STEPS} steps (--no-alone skips this)", file=sys.stderr)
        if size > 1:
            yield from profiling.profile_many(group, task, device)
        else:
            yield profiling.profile_run(group[0], task, device)


def _write_report(
    recipe: Recipe,
    models: list[ModelSpec],
    preset: str,
    out: Path,
    setups: dict[ModelSpec, str],
    recipes: Mapping[EqualTimeSpec, Recipe],
) -> None:
    """Write the table and plot to `out`, and print the table."""
    from rich.console import Console
    from rich.table import Table

    from mgk.training import report

    lines = report.write_report(recipe, models, preset, sorted(out.glob("*.csv")), out, setups, recipes)
    table = Table(*lines[0], title=recipe.title)
    for line in lines[1:]:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(f"table: {out / recipe.name}.md   plot: {out / recipe.name}.png   results: {out / recipe.name}.csv")
