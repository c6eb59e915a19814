"""Compare results/ with the claims of the paper: python -m experiments.paper."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from experiments.commands import add_plugin
from mgk._core.validation import fail, number
from mgk.cli import run_app
from mgk.cli.app import DataDir, check_bounds, check_output_directory, resolve_data_dir
from mgk.cli.cluster_options import (
    ClusterName,
    GpusPerNode,
    MaxParallel,
    Partition,
    TimeLimit,
    read_cluster_options,
)
from mgk.cli.help_texts import examples_epilog
from mgk.cli.progress import print_progress

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


EXAMPLES = ("python -m experiments.paper", "python -m experiments.paper --run --minutes 30 --data-dir DIR")


@app.command(epilog=examples_epilog(*EXAMPLES))
def evidence(
    results: Annotated[Path, typer.Option(help="Results directory.")] = Path("results"),
    page: Annotated[
        Path,
        typer.Option(
            help="Page whose marked parts are regenerated, with the pages of the folder of its name; created if "
            "it does not exist."
        ),
    ] = Path("docs/evidence.md"),
    figures: Annotated[
        Path | None, typer.Option(help="Directory for the figures; default: figures/ next to the page.")
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="First run the planned experiments without results (hours on a GPU).")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            callback=check_bounds("--jobs", 1),
            help="With --run: concurrent training runs; default: 4 on a GPU, otherwise 1.",
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="With --run: stop after this time; the same command continues.")
    ] = None,
    data_dir: DataDir = None,
    runs: Annotated[Path, typer.Option(help="With --run: parent directory of the run directories.")] = Path("runs"),
    cluster: ClusterName = None,
    partition: Partition = None,
    gpus_per_node: GpusPerNode = None,
    time_limit: TimeLimit = None,
    max_parallel: MaxParallel = None,
) -> None:
    """Compare the results with the claims of the paper: tables, intervals, verdicts and figures."""
    from experiments.paper import run_missing
    from experiments.paper.evidence_page import gather
    from mgk._core.io import write_atomically
    from mgk._core.markdown import fill_marked_parts, page_of_markers

    if minutes is not None:
        number("--minutes", minutes, 0, above=True)
    if cluster is not None and not run:
        fail("--cluster", "has no effect without --run: add --run")
    resources = read_cluster_options(cluster, partition, gpus_per_node, time_limit, max_parallel)
    failed = []
    if run:
        check_output_directory("--results", results)
        check_output_directory("--runs", runs)
        failed = run_missing.run(results, runs, resolve_data_dir(data_dir), jobs, minutes, print_progress, resources)
    if not any(results.glob("*.csv")):
        raise ValueError(f"--results {results} has no CSV files: run mgk compare first, or add --run")
    folder = figures or page.parent / "figures"
    generated = gather(results)
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(page.with_suffix("").glob("*.md"))}
    pages[page] = page.read_text(encoding="utf-8") if page.exists() else page_of_markers("Evidence", generated.texts)
    filled = {path: fill_marked_parts(text, generated.texts) for path, text in pages.items()}
    if generated.excluded:
        print(f"Excluded, settings differ from the recipe: {', '.join(generated.excluded)}", file=sys.stderr)
    page.parent.mkdir(parents=True, exist_ok=True)
    for path, text in filled.items():
        write_atomically(path, text)
    for picture in generated.pictures:
        print(picture.write(folder))
    print("\n".join(map(str, filled)))
    if failed:
        raise ValueError(f"{len(failed)} failed: {'; '.join(failed)}")


def main() -> None:
    add_plugin("experiments.paper")
    run_app(lambda: app, "python -m experiments.paper", sys.argv[1:])


if __name__ == "__main__":
    main()
