"""Run the study and write its page: python -m experiments.cost_quality."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from experiments.commands import add_plugin
from mgk._core.validation import fail, number
from mgk.cli import run_app
from mgk.cli.app import DataDir, check_output_directory, resolve_data_dir
from mgk.cli.cluster_options import (
    ClusterName,
    GpusPerNode,
    MaxParallel,
    Partition,
    TimeLimit,
    read_cluster_options,
)
from mgk.cli.progress import print_progress

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def study(
    results: Annotated[Path, typer.Option(help="Results directory.")] = Path("results"),
    page: Annotated[Path, typer.Option(help="Page to write.")] = Path("docs/cost-quality.md"),
    figures: Annotated[
        Path | None, typer.Option(help="Directory for the figure; default: figures/ next to the page.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Plan of the runs; default: the plan.yaml of the study.")] = None,
    run: Annotated[bool, typer.Option("--run", help="First run the planned runs without results.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="With --run: concurrent runs; default: 4 on a GPU.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="With --run: stop after this time; the same command continues.")
    ] = None,
    stage: Annotated[
        list[str] | None, typer.Option(help="With --run: a stage of the plan to run; repeat for several. Default: all.")
    ] = None,
    data_dir: DataDir = None,
    runs: Annotated[Path, typer.Option(help="With --run: parent directory of the run directories.")] = Path("runs"),
    cluster: ClusterName = None,
    partition: Partition = None,
    gpus_per_node: GpusPerNode = None,
    time_limit: TimeLimit = None,
    max_parallel: MaxParallel = None,
) -> None:
    """Run the study of cost and quality, and write its page from the results."""
    from experiments.cost_quality.page import write_page
    from experiments.cost_quality.picture import pictures
    from experiments.cost_quality.plan import PLAN, load_plan
    from experiments.cost_quality.run import run as run_plan
    from experiments.cost_quality.summary import summarize
    from experiments.result_rows import read_results
    from mgk._core.io import write_atomically

    if minutes is not None:
        number("--minutes", minutes, 0, above=True)
    if cluster is not None and not run:
        fail("--cluster", "has no effect without --run: add --run")
    if stage and not run:
        fail("--stage", "has no effect without --run: add --run")
    resources = read_cluster_options(cluster, partition, gpus_per_node, time_limit, max_parallel)
    loaded = load_plan(plan or PLAN)
    failed = []
    if run:
        check_output_directory("--results", results)
        check_output_directory("--runs", runs)
        data = resolve_data_dir(data_dir)
        failed = run_plan(loaded, results, runs, data, jobs, minutes, print_progress, resources, stage or ())
    rows = read_results(results)
    summaries = summarize(loaded, rows)
    if not summaries and run:
        if failed:
            raise ValueError(f"{len(failed)} failed: {'; '.join(failed)}")
        print(f"No run is finished yet, so {page} is not written. Run the same command again to continue.")
        return
    if not summaries:
        raise ValueError(f"--results {results} has no run of the plan: add --run")
    page.parent.mkdir(parents=True, exist_ok=True)
    text = write_page(loaded, rows, results)
    folder = figures or page.parent / "figures"
    for picture in pictures(loaded, summaries):
        path = picture.write(folder)
        text += f"\n![Perplexity against cost]({os.path.relpath(path, page.parent)})\n"
    write_atomically(page, text)
    print(page)
    if failed:
        raise ValueError(f"{len(failed)} failed: {'; '.join(failed)}")


def main() -> None:
    add_plugin("experiments.cost_quality")
    run_app(lambda: app, "python -m experiments.cost_quality", sys.argv[1:])


if __name__ == "__main__":
    main()
