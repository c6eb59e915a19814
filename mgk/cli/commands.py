"""The app with all commands of `mgk`, one file each: importing a command adds it to the app.

A new command is a file that is imported here, with its examples in `help_texts.EXAMPLES`.
"""

from mgk.cli import analyze, bench, compare, data, evaluate, evidence, flops, generate, recipes, train, upcycle  # noqa: F401
from mgk.cli.app import app

__all__ = ["app"]
