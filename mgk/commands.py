"""The subcommands of `mgk`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from mgk import __version__, recipes, results
from mgk.checks import one_of, positive_integer
from mgk.recipes import Row
from mgk.variants import VARIANTS

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train and compare transformers whose attention keys are mixtures of Gaussians.",
)

DataDir = Annotated[Path | None, typer.Option(help="Where the data lives; by default $MGK_DATA, else ./data.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="A setting, key=value or model.key=value.")]


def data_directory(given: Path | None) -> Path:
    return given or Path(os.environ.get("MGK_DATA", "data"))


def _progress(stage: str, done: int, total: int) -> None:
    end = "\n" if done >= total else "\r"
    if sys.stderr.isatty() or done >= total:
        print(f"{stage}: {done:,} of {total:,}", end=end, file=sys.stderr, flush=True)


def _steps(steps: int | None) -> list[str]:
    return [] if steps is None else [f"steps={steps}"]


def _version(asked: bool) -> None:
    if asked:
        print(f"mgk {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or a YAML file; `mgk recipes` lists them.")],
    variant: Annotated[str | None, typer.Option(help="The kind of attention; default: the recipe's first row.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key heads, for grouped queries.")] = None,
    preset: Annotated[str, typer.Option(help="paper, ref-lra or ref-lm.")] = "paper",
    seed: int = 0,
    steps: Annotated[int | None, typer.Option(help="Instead of the recipe's.")] = None,
    settings: Settings = None,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="The run's directory; default runs/RECIPE/ROW-sSEED.")] = None,
    resume: Annotated[str | None, typer.Option(help="auto: go on from the last checkpoint, if there is one.")] = None,
    accelerator: Annotated[str, typer.Option(help="auto, cpu or gpu.")] = "auto",
    strategy: Annotated[str, typer.Option(help="auto (ddp under torchrun), ddp, fsdp.")] = "auto",
    results_file: Annotated[Path | None, typer.Option("--results", help="A CSV file to add the result to.")] = None,
) -> None:
    """Train one model and evaluate the best checkpoint on the test set."""
    from pytorch_lightning.utilities.exceptions import MisconfigurationException

    from mgk import tasks
    from mgk.evaluation import finish
    from mgk.training import Run, fit

    chosen = recipes.load(recipe).with_settings([*(settings or []), *_steps(steps)])
    first = chosen.rows[0] if chosen.rows else Row("smgk", 4)
    if variant is not None:
        one_of("--variant", variant, VARIANTS)
    for name, count in (("--heads", heads), ("--kv-heads", kv_heads)):
        if count is not None:
            positive_integer(name, count)
    row = Row(variant or first.variant, heads or first.heads, kv_heads)
    if resume not in (None, "auto"):
        raise ValueError(f"--resume must be auto, got {resume!r}")
    task = tasks.task(chosen.task)
    where = out or Path("runs") / chosen.name / f"{str(row).replace(':', '-').replace('/', 'kv')}-{preset}-s{seed}"
    data = data_directory(data_dir)
    task.prepare(data, os.cpu_count() or 1, _progress)
    run = Run(chosen, row, preset, seed, data, where)
    try:
        module, record = fit(run, task, resume=resume == "auto", accelerator=accelerator, strategy=strategy)
    except MisconfigurationException as error:
        raise ValueError(f"--accelerator or --strategy: {str(error).splitlines()[0]}") from error
    if record.stopped_by is not None:
        print(f"stopped at step {module.trainer.global_step}; go on with: --resume auto --out {where}", file=sys.stderr)
        raise typer.Exit(128 + record.stopped_by)
    if module.global_rank != 0:
        return
    rows = finish(run, task, module, record)
    if results_file is not None:
        results.append(results_file, rows)
    for each in rows:
        if each["metric"] == "accuracy":
            print(f"{row} seed {seed} {each['split']} accuracy {100 * each['value']:.2f} % of {each['n_examples']:,}")
    print(f"run: {where}")


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="The run's directory.")],
    split: str = "test",
    data_dir: DataDir = None,
    batch_size: int = 64,
) -> None:
    """Evaluate a run's best model on a split."""
    import torch

    from mgk import tasks
    from mgk.evaluation import read_run
    from mgk.models import Classifier, load_model
    from mgk.recipes import Training
    from mgk.training import Fit

    description = read_run(run)
    task = tasks.task(description["task"])
    model = load_model(run / "best", "cuda" if torch.cuda.is_available() else "cpu")
    assert isinstance(model, Classifier)
    settings = Training(**{**description["training"], "eval_batch_size": batch_size, "compile": False})
    judge = Fit(model, settings, description["seed"], {split: task.split(data_directory(data_dir), split)})
    judge.to(next(model.parameters()).device)
    judge.setup("test")
    correct = judge.correct(split)
    print(json.dumps({"run": str(run), "split": split, "n_examples": len(correct), "accuracy": float(correct.mean())}))


@app.command()
def data(
    task: Annotated[str, typer.Argument(help="The task to prepare, or `all`.")],
    data_dir: DataDir = None,
    workers: Annotated[int, typer.Option(help="Processes; default: all cores.")] = 0,
) -> None:
    """Prepare a task's data, verify it by checksum, and say where to get what is missing."""
    from mgk import tasks

    chosen = tasks.task(task)
    where = data_directory(data_dir)
    chosen.prepare(where, workers or os.cpu_count() or 1, _progress)
    for name in chosen.splits:
        split = chosen.split(where, name)
        print(f"{task} {name}: {len(split):,} examples, {len(split.tokens):,} tokens")


@app.command("recipes")
def list_recipes() -> None:
    """List the recipes that come with the package."""
    for name in recipes.names():
        print(f"{name:20s} {recipes.load(name).title}")


@app.command()
def compare(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or a YAML file.")],
    rows: Annotated[str | None, typer.Option(help="softmax:8,smgk:4,…; default: all rows of the recipe.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0 to N-1 of each row.")] = 1,
    preset: Annotated[str, typer.Option(help="paper, ref-lra or ref-lm.")] = "paper",
    steps: Annotated[int | None, typer.Option(help="Instead of the recipe's.")] = None,
    settings: Settings = None,
    data_dir: DataDir = None,
    jobs: Annotated[int, typer.Option(help="Trainings at once; default 1, or 4 on a GPU.")] = 0,
    out: Annotated[Path, typer.Option(help="Where results, table and picture go.")] = Path("results"),
    runs: Annotated[Path, typer.Option(help="Where the runs' directories go.")] = Path("runs"),
) -> None:
    """Train rows × seeds, several at once, and show side by side what was gained. Skips what out/ already has."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from mgk import compare as comparison
    from mgk import tasks

    overrides = [*(settings or []), *_steps(steps)]
    chosen = recipes.load(recipe).with_settings(overrides)
    models = [Row.parse(text) for text in rows.split(",")] if rows else list(chosen.rows)
    where = data_directory(data_dir)
    tasks.task(chosen.task).prepare(where, os.cpu_count() or 1, _progress)
    # Its own file, and any other of results/ that already has the row.
    own = out / f"{chosen.name}.csv"
    known = results.read(sorted(out.glob("*.csv")))
    wanted = [
        comparison.Job(
            row, seed, runs / chosen.name / f"{str(row).replace(':', '-').replace('/', 'kv')}-{preset}-s{seed}"
        )
        for row in models
        for seed in range(seeds)
        if not comparison.matching(known, chosen, row, preset, seed)
    ]
    command = [sys.executable, "-m", "mgk", "train", recipe, "--preset", preset, "--data-dir", str(where)]
    command += [part for override in overrides for part in ("--set", override)] + ["--results", str(own)]
    failed = comparison.run_jobs(wanted, command, jobs or (4 if torch.cuda.is_available() else 1))
    if failed and not results.read([own]):
        raise ValueError(f"all {len(failed)} trainings failed; their logs are in their directories")
    lines = comparison.report(chosen, models, preset, sorted(out.glob("*.csv")), out)
    shown = Table(*lines[0], title=chosen.title)
    for line in lines[1:]:
        shown.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 160).print(shown)
    print(f"table: {out / chosen.name}.md   picture: {out / chosen.name}.png   results: {own}")
    if failed:
        raise ValueError(f"{len(failed)} of {len(wanted)} trainings failed; their logs are in their directories")
