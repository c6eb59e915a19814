"""mgk evidence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mgk.commands.common import app


@app.command()
def evidence(
    results: Annotated[Path, typer.Option(help="Where the measurements are.")] = Path("results"),
    page: Annotated[
        Path, typer.Option(help="Its marked parts are made anew; a page that is not there is begun.")
    ] = Path("docs/evidence.md"),
    figures: Annotated[Path | None, typer.Option(help="Where pictures go; default: figures/ beside the page.")] = None,
) -> None:
    """Hold what results/ has against the paper's claims: tables, intervals, verdicts, pictures. Trains nothing."""
    from mgk.evidence.page import empty, fill, gather
    from mgk.files import write_atomically

    if not any(results.glob("*.csv")):
        raise ValueError(f"--results {results} has no CSV files: run mgk compare first")
    folder = figures or page.parent / "figures"
    made = gather(results)
    text = page.read_text(encoding="utf-8") if page.exists() else empty(made.parts)
    filled = fill(text, made.parts)
    if made.left_out:
        print(f"left out, of other settings than the recipe's: {', '.join(made.left_out)}", file=sys.stderr)
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, filled)
    for picture in made.pictures:
        print(picture.write(folder))
    print(page)
