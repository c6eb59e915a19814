"""mgk evidence, replaced by `python -m experiments.paper`."""

from __future__ import annotations

import shlex

import typer

from mgk.cli.app import app


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def evidence(context: typer.Context) -> None:
    """Print the command that replaces this one."""
    command = shlex.join(["python", "-m", "experiments.paper", *context.args])
    raise ValueError(f"`mgk evidence` has moved out of the package. In a clone of the repository run: {command}")
