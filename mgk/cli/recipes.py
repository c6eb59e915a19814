"""mgk recipes."""

from __future__ import annotations

from typing import Annotated

import typer

from mgk.cli.app import app
from mgk.training import config


@app.command("recipes")
def list_recipes(
    name: Annotated[str | None, typer.Argument(help="Print this one: a start for a YAML file of your own.")] = None,
) -> None:
    """List the recipes that come with the package, or print one."""
    if name is not None:
        print(config.text(name), end="")
        return
    names = config.names()
    width = max(map(len, names))
    for each in names:
        print(f"{each:{width}s}  {config.load(each).title}")
