"""mgk compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    check_bounds,
    check_output_directory,
    check_results_file,
    parse_rows,
    remove_result_temporaries,
    resolve_data_dir,
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
from mgk.cli.preparation import prepare_data
from mgk.training import config
from mgk.variants import PRESETS

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
    seeds: Annotated[
        int,
        typer.Option(callback=check_bounds("--seeds", 1, MAX_SEEDS), help="Number of seeds per row, counted from 0."),
    ] = 1,
    preset: Annotated[str, typer.Option(help="Attention preset: paper, ref-lra or ref-lm.")] = "paper",
    steps: Annotated[int | None, typer.Option(help="Training steps; default: the recipe's.")] = None,
    settings: Settings = None,
    data_dir: DataDir = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            callback=check_bounds("--jobs", 1),
            help="Number of concurrent training runs; default: 4 on a GPU, otherwise 1.",
        ),
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
    from mgk import tasks
    from mgk.training.comparison import Comparison, equal_time_rows, redraw_report
    from mgk.training.job_queue import resolve_max_running
    from mgk.training.trackers import parse_loggers

    overrides = apply_steps(recipe, settings, steps)
    loaded = config.load_recipe(recipe).with_settings(overrides)
    models = parse_rows(rows, loaded)
    one_of("--preset", preset, PRESETS)
    parse_loggers(logger)
    if cluster is not None and (equal_time := equal_time_rows(models)):
        fail(
            "--rows",
            f"{equal_time[0]} needs step times in isolation, which --cluster does not measure: omit one of them",
        )
    cluster_options = read_cluster_options(cluster, partition, gpus_per_node, time_limit, max_parallel)
    if minutes is not None:
        number("--minutes", minutes, 0, above=True)
    if redraw:
        redraw_report(loaded, models, preset, out)
        return

    check_output_directory("--out", out)
    check_output_directory("--runs", runs)
    check_results_file("--out", out / f"{loaded.name}.csv")
    data = resolve_data_dir(data_dir)
    task = tasks.get_task(loaded.task)
    prepare_data(task, data)
    comparison = Comparison(
        recipe=loaded,
        recipe_argument=recipe,
        overrides=overrides,
        models=models,
        preset=preset,
        seeds=seeds,
        task=task,
        data_dir=data,
        out=out,
        runs=runs,
        keep_checkpoints=keep_checkpoints,
        logger=logger,
        # With --cluster, this machine has other hardware than the nodes: its times would not be comparable.
        alone=alone if cluster is None else bool(alone),
        max_running=resolve_max_running(jobs),
        minutes=minutes,
        cluster=cluster_options,
    )
    lock, remedy = out / f".{loaded.name}.compare.lock", "wait until it ends, or pass another --out"
    with exclusive(lock, f"{out} (mgk compare {loaded.name})", remedy):
        remove_result_temporaries(comparison.result_file, loaded.name)
        comparison.execute()
