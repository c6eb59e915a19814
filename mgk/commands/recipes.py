"""mgk recipes."""

from __future__ import annotations

from mgk import recipes
from mgk.commands.common import app


@app.command("recipes")
def list_recipes() -> None:
    """List the recipes that come with the package."""
    for name in recipes.names():
        print(f"{name:20s} {recipes.load(name).title}")
