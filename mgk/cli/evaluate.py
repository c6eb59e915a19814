"""mgk eval."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from mgk._core.validation import one_of, positive_integer
from mgk.cli.app import RunDataDir, app, check_same_data, resolve_data_dir
from mgk.cli.help_texts import epilog


@app.command("eval", epilog=epilog("eval"))
def evaluate(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    split: Annotated[
        str | None, typer.Option(help="Split to evaluate; default: all test splits, for language models also dev.")
    ] = None,
    data_dir: RunDataDir = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Examples or windows per batch; default: that of the run.")
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Language models: positions scored per window (paper: 1); default: that of the run."),
    ] = None,
    precision: Annotated[str | None, typer.Option(help="bf16 or fp32; default: that of the run.")] = None,
) -> None:
    """Evaluate the best model of a run: accuracy, or perplexity with a sliding window."""
    import torch

    from mgk.models.run_directory import RunDirectory
    from mgk.training.config import PRECISIONS, TrainConfig
    from mgk.training.evaluate import load_objective
    from mgk.training.objectives import OBJECTIVES, NotFiniteError
    from mgk.training.runs import task_of_run

    for name, count in (("--batch-size", batch_size), ("--stride", stride)):
        if count is not None:
            positive_integer(name, count)
    if precision is not None:
        one_of("--precision", precision, PRECISIONS)
    description = RunDirectory(run).read_description("training")
    task = task_of_run(RunDirectory(run))
    if split is not None:
        one_of("--split", split, task.splits)
    if stride is not None and not OBJECTIVES[task.objective].uses_stride:
        raise ValueError(f"--stride applies only to language models; {run} is a run of {task.name}")
    options = {"eval_batch_size": batch_size, "precision": precision, "stride": stride}
    overrides = {name: value for name, value in options.items() if value is not None}
    try:
        settings = TrainConfig(**{**description["training"], "compile": False, **overrides})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{RunDirectory(run).description} is damaged: {error}") from None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = resolve_data_dir(data_dir, description)
    objective = load_objective(RunDirectory(run).existing_best_model(), settings, task, data, device, split)
    same_data = check_same_data(run, description, task, data)
    for name in objective.splits:
        try:
            metrics = list(objective.evaluate(name, None))
            values = {metric.metric: metric.value for metric in metrics}
            for metric, value in values.items():
                if not math.isfinite(value):
                    raise NotFiniteError(metric, name)
        except NotFiniteError as error:
            raise ValueError(f"{run}: {error}") from None
        line = {"run": str(run), "dataset": task.dataset, "split": name, "n_examples": metrics[0].n_examples}
        print(json.dumps({**line, **same_data, **values}))
