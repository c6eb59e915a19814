"""Check the help of the commands of the studies: examples that parse."""

import importlib
import shlex

import pytest
import typer

MODULES = {
    "experiments.paper": "experiments.paper.__main__",
    "experiments.upcycle": "experiments.upcycle.__main__",
    "experiments.upcycle.decoder": "experiments.upcycle.decoder",
}


@pytest.mark.parametrize("name", MODULES)
def test_help_has_examples_that_parse(name):
    command = typer.main.get_command(importlib.import_module(MODULES[name]).app)
    title, *examples = command.epilog.removeprefix("\b\n").splitlines()
    assert title in ("Example:", "Examples:")
    assert examples
    for example in examples:
        words = shlex.split(example)
        assert words[:3] == ["python", "-m", name]
        command.make_context(name, words[3:])
