"""The subcommands of `mgk`, a file each; importing one adds it to the application."""

from mgk.commands import compare, generate, study, train
from mgk.commands.common import app

__all__ = ["app", "compare", "generate", "study", "train"]
