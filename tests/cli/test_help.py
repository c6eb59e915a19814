"""Check the help of every command: two examples that parse and the keys of --set; and the plan of `mgk data all`."""

import dataclasses
import shlex

import pytest
import typer
from typer.testing import CliRunner

from mgk.cli import commands
from mgk.cli.help_texts import EXAMPLES, WIDTH, attribute_meanings, epilog
from mgk.cli.preparation import describe_preparation
from mgk.models import DecoderConfig, EncoderConfig, VisionConfig
from mgk.training.config import TrainConfig

COMMANDS = {
    name: command for name, command in typer.main.get_command(commands.app).commands.items() if not command.hidden
}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_two_examples_that_parse(name):
    examples = EXAMPLES[name]
    assert len(examples) == 2
    assert all(len(example) + 2 <= WIDTH for example in examples), "a broken line cannot be copied"
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
        lines = [line.split() for line in COMMANDS[name].epilog.splitlines()]
        assert "num_heads" not in [words[0] for words in lines if words]  # an option, not a setting
        assert ["embed_dim", "Dimension", "of", "the", "model"] in lines
        assert ["schedule", "Learning"] in [words[:2] for words in lines]


@pytest.mark.parametrize("config", [TrainConfig, EncoderConfig, DecoderConfig, VisionConfig])
def test_every_setting_has_a_meaning(config):
    meanings = attribute_meanings(config)
    assert list(meanings) == [field.name for field in dataclasses.fields(config)]
    assert all(3 < len(meaning) < 150 and "\n" not in meaning for meaning in meanings.values())


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
    assert plan[2] == "  text: skipped, its source files are missing (run `mgk data text` for the list)"


def test_preparation_is_described(tmp_path):
    task = commands_task("bytes")
    (tmp_path / "a.txt").write_text("x" * 1200)
    assert describe_preparation(task, tmp_path) == "bytes: reads 1 file, 2 kB, about 1 s on one core"
    (tmp_path / "b.txt").write_text("x" * 3_000_000)
    assert describe_preparation(task, tmp_path) == "bytes: reads 2 files, 3 MB, about 1 s on one core"
    task.prepare(tmp_path)
    assert describe_preparation(task, tmp_path) == "bytes: already prepared; will be verified"


def commands_task(name):
    from mgk.tasks import TASKS

    return TASKS[name]
