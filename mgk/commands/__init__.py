"""The subcommands of `mgk`, a file each; importing one adds it to the application."""

from mgk.commands import analyze, bench, compare, data, evaluate, evidence, flops, generate, recipes, study, train
from mgk.commands.common import app

__all__ = [
    "analyze",
    "app",
    "bench",
    "compare",
    "data",
    "evaluate",
    "evidence",
    "flops",
    "generate",
    "recipes",
    "study",
    "train",
]
