"""All commands of `mgk`, one file each. Importing a command adds it to the app."""

from mgk.cli import analyze, bench, compare, data, evaluate, evidence, flops, generate, recipes, train, upcycle
from mgk.cli.app import app

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
    "upcycle",
]
