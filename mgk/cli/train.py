"""mgk train."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from mgk._core.validation import fail, number, one_of, positive_integer
from mgk.cli.app import (
    DataDir,
    Settings,
    app,
    apply_steps,
    check_output_directory,
    check_output_file,
    print_progress,
    resolve_data_dir,
    warn_if_gpu_recommended,
)
from mgk.training import config, predictions, results
from mgk.training.config import ModelSpec
from mgk.variants import PRESETS, VARIANTS


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or a YAML file; `mgk recipes` lists them.")],
    variant: Annotated[
        str | None, typer.Option(help=f"{', '.join(VARIANTS)}; default: the recipe's first row.")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads; default: the recipe's first row.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key heads, for grouped queries.")] = None,
    preset: Annotated[str, typer.Option(help="paper, ref-lra or ref-lm.")] = "paper",
    seed: Annotated[int, typer.Option(help="Of the weights, the order of examples, and dropout.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Instead of the recipe's.")] = None,
    settings: Settings = None,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="The run's directory; default runs/RECIPE/ROW-PRESET-sSEED.")] = None,
    resume: Annotated[str | None, typer.Option(help="auto: go on from the last checkpoint, if there is one.")] = None,
    accelerator: Annotated[str, typer.Option(help="auto, cpu or gpu.")] = "auto",
    strategy: Annotated[str, typer.Option(help="auto (ddp under torchrun), ddp, fsdp.")] = "auto",
    graphs: Annotated[
        bool,
        typer.Option(
            help="On one GPU: record steps as CUDA graphs, by which small models train up to 3 times as fast."
        ),
    ] = True,
    results_file: Annotated[Path | None, typer.Option("--results", help="A CSV file to add the result to.")] = None,
) -> None:
    """Train one model and evaluate the best checkpoint on the test set."""
    from pytorch_lightning.accelerators import CUDAAccelerator, MPSAccelerator
    from pytorch_lightning.utilities.exceptions import MisconfigurationException

    from mgk import tasks
    from mgk._core.io import write_atomically
    from mgk.models.run_directory import RunDirectory
    from mgk.training.distributed import shutdown_distributed
    from mgk.training.evaluate import count_parameters, evaluate_run
    from mgk.training.run_dir import run_path
    from mgk.training.trainer import STRATEGIES, Run, fit

    own = config.load(recipe)
    chosen = own.with_settings(apply_steps(recipe, settings, steps))
    first = chosen.rows[0] if chosen.rows else ModelSpec("smgk", 4)
    if variant is not None:
        one_of("--variant", variant, VARIANTS)
    for name, count in (("--heads", heads), ("--kv-heads", kv_heads)):
        if count is not None:
            positive_integer(name, count)
    row = ModelSpec(variant or first.variant, heads or first.heads, kv_heads)
    if row.heads % (row.kv_heads or 1):
        fail("--kv-heads", f"= {row.kv_heads} must divide the number of heads, {row.heads}")
    one_of("--preset", preset, PRESETS)
    number("--seed", seed, 0)
    one_of("--accelerator", accelerator, ("auto", "cpu", "gpu"))
    one_of("--strategy", strategy, STRATEGIES)
    gpu = CUDAAccelerator.is_available() or MPSAccelerator.is_available()
    if accelerator == "gpu" and not gpu:
        fail("--accelerator", "is gpu, but PyTorch finds none here: take cpu")
    if resume not in (None, "auto"):
        fail("--resume", f"must be auto, got {resume!r}")
    task = tasks.task(chosen.task)
    where = out or run_path(Path("runs"), chosen.name, row, preset, seed)
    data = resolve_data_dir(data_dir)
    check_output_directory("--out", where)
    if results_file is not None:
        check_output_file("--results", results_file)
    task.prepare(data, os.cpu_count() or 1, print_progress)
    run = Run(chosen, row, preset, seed, data, where)
    if os.environ.get("RANK", "0") == "0":
        count = count_parameters(run.model_config(task))
        print(
            f"{row}, {count:,} parameters, on {task.dataset}: {chosen.training.steps:,} steps",
            file=sys.stderr,
        )
        if accelerator == "cpu" or not gpu:
            warn_if_gpu_recommended(chosen, task.max_length, count)
    try:
        module, record = fit(
            run, task, resume=resume == "auto", accelerator=accelerator, strategy=strategy, graphs=graphs
        )
    except MisconfigurationException as error:
        raise ValueError(f"--accelerator or --strategy: {str(error).splitlines()[0]}") from error
    shutdown_distributed()
    if record.stopped_by is not None:
        again = shlex.join(["mgk", *sys.argv[1:], *(["--resume", "auto"] if resume is None else [])])
        print(f"stopped at step {module.trainer.global_step}; go on with: {again}", file=sys.stderr)
        raise typer.Exit(128 + record.stopped_by)
    if module.global_rank != 0:
        return
    files = RunDirectory(where)
    # A run that was already done keeps the times and the memory that were measured while it trained.
    is_finished = files.result.exists() and not record.steps
    rows = json.loads(files.result.read_text()) if is_finished else evaluate_run(run, task, module, record)
    if results_file is not None:
        new = results.rows_not_in(results_file, rows)
        if new:
            results.append(results_file, new)
        else:
            print(f"{results_file} has the results of this run already", file=sys.stderr)
        setup = run.setup(task)
        for split, said in module.objective.read_predictions(where):
            predictions.save(
                results_file.parent, predictions.PredictionsKey(chosen.name, row, preset, seed, split, setup), said
            )
        changed = None if chosen == own else setup
        curve = results.curve_file(results_file.parent, chosen.name, row, preset, seed, changed)
        curve.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(curve, files.metrics.read_text())
    objective = module.objective
    for each in rows:
        if each["metric"] == objective.test_metric(chosen.training):
            how = "" if each["metric"] == objective.metric else f" ({each['metric']})"
            told = f"{each['split']} {objective.format_metric(each['value'])}{how} of {each['n_examples']:,}"
            print(f"{row} seed {seed} on {each['dataset']}: {told}")
    print(f"run: {where}")
