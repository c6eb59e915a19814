"""Measure merged versions of all-MiniLM-L6-v2: python -m experiments.upcycle."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from mgk._core.validation import number
from mgk.cli import run_app
from mgk.cli.app import DataDir, check_results_file, resolve_data_dir
from mgk.cli.help_texts import examples_epilog

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog=examples_epilog("python -m experiments.upcycle --data-dir DIR"))
def upcycle(
    results: Annotated[Path, typer.Option(help="CSV file of the measurements.")] = Path("results/upcycle.csv"),
    page: Annotated[Path, typer.Option(help="Page whose marked parts are written.")] = Path("docs/upcycling.md"),
    data_dir: DataDir = None,
    measure: Annotated[bool, typer.Option(help="Measure what the results lack; otherwise write the page only.")] = True,
    minutes: Annotated[float | None, typer.Option(help="Start no measurement after this time.")] = None,
) -> None:
    """Measure fidelity against the size of the cache, and write the page. The same command continues."""
    from experiments.upcycle import arms
    from experiments.upcycle.page import write_page
    from mgk.training import results as result_files

    if minutes is not None:
        number("--minutes", minutes, 0, above=True)
    check_results_file("--results", results, arms.EXTRA_COLUMNS)
    start = time.monotonic()
    planned = arms.plan()
    missing = [arm for arm in planned if not arms.is_measured(arm, result_files.read([results]))]
    has_latencies = any(row["metric"] == "latency_ms" for row in result_files.read([results]))
    if measure and (missing or not has_latencies):
        study = arms.Study(resolve_data_dir(data_dir))
        if not has_latencies:
            result_files.append(results, study.measure_latencies(), arms.EXTRA_COLUMNS)
        for done, arm in enumerate(missing, 1):
            if minutes is not None and time.monotonic() - start > 60 * minutes:
                break
            rows = study.measure(arm)
            result_files.append(results, rows, arms.EXTRA_COLUMNS)
            metrics = "  ".join(f"{row['metric']} {row['value']}" for row in rows)
            print(f"{done} of {len(missing)}: {arm}  {metrics}", file=sys.stderr, flush=True)
    for path in write_page(results, page):
        print(path)


def main() -> None:
    run_app(lambda: app, "python -m experiments.upcycle", sys.argv[1:])


if __name__ == "__main__":
    main()
