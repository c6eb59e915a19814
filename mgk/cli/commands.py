"""The subcommands of `mgk`, a file each; importing one adds it to the application."""

from mgk.cli import analyze, bench, compare, data, evaluate, evidence, flops, generate, recipes, train
from mgk.cli.common import app

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
    "train",
]
