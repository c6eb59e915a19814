"""mgk recipes."""

from __future__ import annotations

from typing import Annotated

import typer

from mgk.cli.app import app
from mgk.cli.help_texts import epilog
from mgk.training import config


@app.command("recipes", epilog=epilog("recipes"))
def list_recipes(
    name: Annotated[
        str | None, typer.Argument(help="Print the YAML file of this recipe, as a template for a new one.")
    ] = None,
) -> None:
    """List the available recipes, or print one."""
    if name is not None:
        print(config.recipe_text(name), end="")
        return
    names = config.recipe_names()
    width = max(map(len, names))
    for recipe in names:
        print(f"{recipe:{width}s}  {config.load_recipe(recipe).title}")
