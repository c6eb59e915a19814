"""mgk recipes."""

from __future__ import annotations

from mgk import recipes
from mgk.commands.common import app


@app.command("recipes")
def list_recipes() -> None:
    """List the recipes that come with the package."""
    names = recipes.names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:{width}s}  {recipes.load(name).title}")
