"""Check the help of every command: two examples that parse and the keys of --set; and the plan of `mgk data all`."""

import dataclasses
import shlex

import pytest
import typer
from typer.testing import CliRunner

from mgk.cli import commands
from mgk.cli.help_texts import EXAMPLES, epilog
from mgk.training.config import TrainConfig

COMMANDS = {
    name: command for name, command in typer.main.get_command(commands.app).commands.items() if not command.hidden
}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_two_examples_that_parse(name):
    examples = EXAMPLES[name]
    assert len(examples) == 2
    for example in examples:
        program, command, *words = shlex.split(example.partition(" > ")[0])
        assert (program, command) == ("mgk", name)
        # Parses the options and their types, without running the command.
        COMMANDS[name].make_context(name, words)
    text = CliRunner().invoke(commands.app, [name, "--help"]).output
    assert all(example.split(" --")[0] in text for example in examples)


def test_help_lists_the_keys_of_set():
    with_settings = [name for name, command in COMMANDS.items() if any("--set" in p.opts for p in command.params)]
    assert {"train", "compare", "flops"} <= set(with_settings)
    for name in with_settings:
        assert COMMANDS[name].epilog == epilog(name, settings=True), name
        for field in dataclasses.fields(TrainConfig):
            assert field.name in COMMANDS[name].epilog
        assert "head_dim" in COMMANDS[name].epilog
        assert "num_heads" not in COMMANDS[name].epilog  # an option, not a setting


def test_data_prints_what_it_will_do(tmp_path, monkeypatch):
    prepared = []
    monkeypatch.setattr("mgk.cli.data.prepare_data", lambda task, *_: prepared.append(task.name))
    monkeypatch.setattr("mgk.tasks.TASKS", {name: commands_task(name) for name in ("listops-short", "text")})
    (tmp_path / "a.txt").write_text("x" * 3_000_000)
    result = CliRunner().invoke(commands.app, ["data", "all", "--data-dir", str(tmp_path)])
    plan = result.stderr.splitlines()
    assert plan[0] == f"Data in {tmp_path}; nothing is downloaded:"
    assert "generates" in plan[1]
    assert "on one core" in plan[1]
    assert "text: skipped, its source files are missing" in plan[2]


def commands_task(name):
    from mgk.tasks import TASKS

    return TASKS[name]
