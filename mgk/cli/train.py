"""mgk train."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mgk._core.validation import fail, number, one_of, positive_integer
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
    remove_result_temporaries,
    resolve_data_dir,
)
from mgk.cli.help_texts import epilog
from mgk.cli.preparation import prepare_data
from mgk.models.attention_layer import known_variants
from mgk.training import config, predictions, results
from mgk.training.config import ModelSpec
from mgk.variants import PRESETS, VARIANTS

if TYPE_CHECKING:
    from mgk.tasks import Task
    from mgk.training.objectives import Objective
    from mgk.training.trainer import Run


@app.command(epilog=epilog("train", settings=True))
def train(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe (see `mgk recipes`) or a YAML file.")],
    variant: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(VARIANTS)}; default: that of the recipe's first row.")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads; default: those of the recipe's first row.")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="Key and value heads, for grouped-query attention; default: --heads.")
    ] = None,
    key_heads: Annotated[
        int | None, typer.Option(help="Key heads, if different from the value heads; default: --kv-heads.")
    ] = None,
    preset: Annotated[str, typer.Option(help="Attention preset: paper, ref-lra or ref-lm.")] = "paper",
    seed: Annotated[int, typer.Option(help="Seed for weights, example order and dropout.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Training steps; default: the recipe's.")] = None,
    settings: Settings = None,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory; default: in runs/RECIPE, named by row, preset and seed.")
    ] = None,
    resume: Annotated[str | None, typer.Option(help="auto: continue from the newest good checkpoint, if any.")] = None,
    accelerator: Annotated[str, typer.Option(help="auto, cpu or gpu.")] = "auto",
    strategy: Annotated[str, typer.Option(help="auto (ddp under torchrun), ddp or fsdp.")] = "auto",
    graphs: Annotated[
        bool,
        typer.Option(help="Capture steps as CUDA graphs on a single GPU; small models train up to 3 times as fast."),
    ] = True,
    results_file: Annotated[Path | None, typer.Option("--results", help="CSV file to append the results to.")] = None,
    keep_checkpoints: KeepCheckpoints = config.KEEP_CHECKPOINTS,
    logger: LoggerNames = DEFAULT_LOGGER,
) -> None:
    """Train one model and evaluate its best checkpoint on the test splits."""
    from pytorch_lightning.accelerators import CUDAAccelerator, MPSAccelerator
    from pytorch_lightning.utilities.exceptions import MisconfigurationException

    from mgk import tasks
    from mgk.training.evaluate import count_parameters, evaluate_run
    from mgk.training.process_group import is_first_rank, shutdown_distributed
    from mgk.training.runs import run_path
    from mgk.training.signals import EVALUATING, deferred_stop, stop_with_parent
    from mgk.training.trackers import parse_loggers
    from mgk.training.trainer import STRATEGIES, Run, fit, lock_run, warn_if_gpu_recommended

    stop_with_parent()
    unchanged = config.load_recipe(recipe)
    loaded = unchanged.with_settings(apply_steps(recipe, settings, steps))
    default_row = loaded.rows[0] if loaded.rows else ModelSpec("smgk", 4)
    if variant is not None:
        one_of("--variant", variant, known_variants())
    for name, count in (("--heads", heads), ("--kv-heads", kv_heads), ("--key-heads", key_heads)):
        if count is not None:
            positive_integer(name, count)
    row = ModelSpec(variant or default_row.variant, heads or default_row.heads, kv_heads, key_heads)
    for name, count in (("--kv-heads", row.kv_heads), ("--key-heads", row.key_heads)):
        if row.heads % (count or 1):
            fail(name, f"= {count} must divide the number of heads, {row.heads}")
    one_of("--preset", preset, PRESETS)
    number("--seed", seed, 0)
    one_of("--accelerator", accelerator, ("auto", "cpu", "gpu"))
    one_of("--strategy", strategy, STRATEGIES)
    has_gpu = CUDAAccelerator.is_available() or MPSAccelerator.is_available()
    if accelerator == "gpu" and not has_gpu:
        fail("--accelerator", "is gpu, but PyTorch detects no GPU: use cpu")
    if resume not in (None, "auto"):
        fail("--resume", f"must be auto, got {resume!r}")
    loggers = parse_loggers(logger)
    task = tasks.get_task(loaded.task)
    directory = out or run_path(Path("runs"), loaded.name, row, preset, seed)
    data = resolve_data_dir(data_dir)
    check_output_directory("--out", directory)
    if results_file is not None:
        check_results_file("--results", results_file)

    prepare_data(task, data)
    run = Run(loaded, row, preset, seed, data, directory)
    with lock_run(run):
        if is_first_rank():
            count = count_parameters(run.model_config(task))
            model = f"{row}, {count:,} parameters"
            print(f"{model}, on {task.dataset}: {loaded.training.steps:,} steps", file=sys.stderr)
            if accelerator == "cpu" or not has_gpu:
                warn_if_gpu_recommended(loaded, task.max_length, count)
        try:
            module, callback = fit(
                run,
                task,
                resume=resume == "auto",
                accelerator=accelerator,
                strategy=strategy,
                graphs=graphs,
                keep_checkpoints=keep_checkpoints,
                loggers=loggers,
            )
        except MisconfigurationException as error:
            raise ValueError(f"--accelerator or --strategy: {str(error).splitlines()[0]}") from error
        shutdown_distributed()
        if callback.stopped_by is not None and module.trainer.global_step < loaded.training.steps:
            command = shlex.join(["mgk", *sys.argv[1:], *(["--resume", "auto"] if resume is None else [])])
            print(f"Stopped at step {module.trainer.global_step}. Resume with: {command}", file=sys.stderr)
            raise typer.Exit(128 + callback.stopped_by)
        if callback.stopped_by is not None and module.global_rank == 0:
            print(EVALUATING, file=sys.stderr)
        if module.global_rank != 0:
            return

        # A run that had already finished keeps the times and the memory measured during training, also if its newest
        # checkpoint is damaged and the last steps were repeated.
        is_finished = run.files.result.exists() and (not callback.steps or callback.is_resumed)
        # A signal here must not lose the results: the run would be evaluated again, or never on a machine that ends.
        with deferred_stop():
            rows = run.files.read_result() if is_finished else evaluate_run(run, task, module, callback)
            if results_file is not None:
                _append_results(results_file, rows, run, task, module.objective, is_default=loaded == unchanged)
        _print_scores(rows, run, module.objective)
        print(f"run: {directory}")


def _print_scores(rows: list[dict[str, Any]], run: Run, objective: Objective) -> None:
    """Print the test metric of each split."""
    metric = objective.test_metric(run.recipe.training)
    for result in rows:
        if result["metric"] == metric:
            score = f"{result['split']} {objective.format_metric(result['value'])}"
            note = objective.describe_test(run.recipe.training, result["n_examples"])
            print(f"{run.row} seed {run.seed} on {result['dataset']}: {score} ({note})")


def _append_results(
    file: Path, rows: list[dict[str, Any]], run: Run, task: Task, objective: Objective, is_default: bool
) -> None:
    """Store predictions and learning curve next to a results file, and append the new rows to it.

    The rows are last, because a run with rows is not repeated: a killed command must not leave one without predictions.

    Args:
        file: Results file (CSV).
        rows: Result rows of the run.
        run: The run.
        task: Task of the run.
        objective: Objective that reads the predictions from the run directory.
        is_default: Whether the recipe's settings are unchanged; otherwise the curve's file name includes the hash.
    """
    from mgk._core.io import write_atomically

    remove_result_temporaries(file, run.recipe.name)
    if unknown := sorted({column for row in rows for column in row} - set(results.COLUMNS)):
        fail(str(run.files.result), f"is damaged: it has the unknown column {unknown[0]}; remove it to evaluate again")
    name, setup = run.recipe.name, run.setup(task)
    for split, values in objective.read_predictions(run.directory):
        key = predictions.PredictionsKey(name, run.row, run.preset, run.seed, split, setup)
        predictions.save(file.parent, key, values)
    curve = results.curve_file(file.parent, name, run.row, run.preset, run.seed, None if is_default else setup)
    curve.parent.mkdir(parents=True, exist_ok=True)
    try:
        metrics = run.files.metrics.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{run.files.metrics} is damaged: {error}") from None
    write_atomically(curve, metrics)
    if new_rows := results.rows_not_in(file, rows):
        results.append(file, new_rows)
    else:
        print(f"{file} already has the results of this run", file=sys.stderr)
