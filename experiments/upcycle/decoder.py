"""Merge the heads of trained decoders of the study: python -m experiments.upcycle.decoder --runs RUNS --data-dir DIR.

Appends perplexities, speeds and sizes of caches to RESULTS/upcycle-decoder.csv, and writes the page from them.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

import experiments.cost_quality  # noqa: F401  (registers the tasks and recipes of the study)
from mgk._core.validation import number
from mgk.cli import run_app
from mgk.cli.app import DataDir, check_output_directory, check_results_file, resolve_data_dir
from mgk.cli.help_texts import examples_epilog

LENGTHS = "8192,32768"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog=examples_epilog("python -m experiments.upcycle.decoder --runs RUNS --data-dir DIR"))
def decoder(
    runs: Annotated[Path, typer.Option(help="Parent directory of the study's run directories.")] = Path("runs"),
    out: Annotated[Path, typer.Option("--results", help="Results directory.")] = Path("results"),
    recipe: Annotated[str, typer.Option(help="Recipe of the runs.")] = "study",
    model: Annotated[str, typer.Option(help="Model of the runs, softmax:HEADS.")] = "softmax:8",
    seeds: Annotated[str | None, typer.Option(help="Seeds separated by commas; default: all finished runs.")] = None,
    plan: Annotated[Path | None, typer.Option(help="Plan with the judged split; default: that of the study.")] = None,
    lengths: Annotated[str, typer.Option(help="Tokens in the cache for the speeds; empty for none.")] = LENGTHS,
    device: Annotated[str | None, typer.Option(help="Device; default: cuda if it is available.")] = None,
    page: Annotated[Path, typer.Option(help="Page whose marked parts are written.")] = Path("docs/upcycling.md"),
    data_dir: DataDir = None,
    measure: Annotated[bool, typer.Option(help="Measure what the results lack; otherwise write the page only.")] = True,
    minutes: Annotated[float | None, typer.Option(help="Start no measurement after this time.")] = None,
) -> None:
    """Measure perplexity, speed and cache of merged decoders, and write the page. The same command continues."""
    from experiments.cost_quality.decoding import parse_device, parse_lengths
    from experiments.cost_quality.plan import PLAN, load_plan
    from experiments.upcycle import decoder_arms
    from experiments.upcycle.decoder_page import write_section
    from mgk.training import results
    from mgk.training.config import ModelSpec, load_recipe

    if minutes is not None:
        number("--minutes", minutes, 0, above=True)
    cached_tokens, model_device = parse_lengths(lengths), parse_device(device)
    end = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    file = out / f"{decoder_arms.RECIPE}.csv"
    if measure:
        check_output_directory("--results", out)
        check_results_file("--results", file, decoder_arms.EXTRA_COLUMNS)
        study = decoder_arms.DecoderStudy(
            load_recipe(recipe),
            ModelSpec.parse(model, "--model"),
            runs,
            resolve_data_dir(data_dir),
            load_plan(plan or PLAN).judged_split,
            model_device,
        )
        missing = study.missing(results.read([file]), decoder_arms.select_seeds(seeds, list(study.runs)))
        for done, (arm, seed) in enumerate(missing, 1):
            if time.monotonic() > end:
                break
            rows = study.measure(arm, seed, out)
            results.append(file, rows, decoder_arms.EXTRA_COLUMNS)
            print(
                f"{done} of {len(missing)}: {arm}, seed {seed}: {rows[0]['metric']} {rows[0]['value']:.3f}", flush=True
            )
        for spec, length in study.missing_speeds(results.read([file]), cached_tokens):
            if time.monotonic() > end:
                break
            rows = study.measure_speed(spec, length)
            results.append(file, rows, decoder_arms.EXTRA_COLUMNS)
            print(f"{spec}, {length:,} tokens: " + ", ".join(f"{r['metric']} {r['value']}" for r in rows), flush=True)
    write_section(out, page)
    print(page)


def main() -> None:
    run_app(lambda: app, "python -m experiments.upcycle.decoder", sys.argv[1:])


if __name__ == "__main__":
    main()
