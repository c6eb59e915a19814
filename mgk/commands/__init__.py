"""The subcommands of `mgk`, a file each; importing one adds it to the application."""

from mgk.commands import bench, compare, generate, study, train
from mgk.commands.common import app

__all__ = ["app", "bench", "compare", "generate", "study", "train"]
