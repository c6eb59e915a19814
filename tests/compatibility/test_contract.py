"""Compare public names, arguments, options and setup hashes with those of commit aa005c7."""

import dataclasses
import importlib
import inspect
import json
from pathlib import Path

import pytest
import typer

import experiments.paper  # noqa: F401  (registers the recipes and tasks of the reproduction)
import mgk
import mgk.models
from mgk import tasks
from mgk.cli import commands as commands_module
from mgk.training import config, results
from mgk.training.trainer import Run

FIXTURES = Path(__file__).parents[1] / "fixtures" / "aa005c7"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))
CONTRACT = json.loads((FIXTURES / "contract.json").read_text(encoding="utf-8"))


class FakeData:
    """A task with a fixed data checksum and vocabulary size, so that no data is needed."""

    def __init__(self, task, words):
        self.task, self.words = task, words

    def __getattr__(self, name):
        return getattr(self.task, name)

    def checksum(self, data_dir):
        return "0123456789ab"

    def vocabulary(self, data_dir):
        return range(self.words)


@pytest.mark.parametrize("name", EXPECTED["setups"])
def test_setup_hashes_are_stable(name):
    """The hash identifies results: a new value would train every model again."""
    recipe = config.load_recipe(name)
    task = FakeData(tasks.get_task(recipe.task), 1000)
    hashes = {
        f"{row} {preset}": Run(recipe, row, preset, 0, Path("data"), Path("run")).setup(task)
        for row in recipe.rows
        for preset in CONTRACT["presets"]
    }
    assert hashes == EXPECTED["setups"][name]


def fields(kind):
    return [field.name for field in dataclasses.fields(kind)]


def test_config_fields_keep_their_order():
    """New fields come last."""
    kinds = {
        "mgk.Variant": mgk.Variant,
        "mgk.Preset": mgk.Preset,
        "mgk.models.EncoderConfig": mgk.models.EncoderConfig,
        "mgk.models.DecoderConfig": mgk.models.DecoderConfig,
        "recipe": config.Recipe,
        "training": config.TrainConfig,
        "row": config.ModelSpec,
    }
    assert kinds.keys() == EXPECTED["fields"].keys()
    for name, before in EXPECTED["fields"].items():
        assert fields(kinds[name])[: len(before)] == before, name


def jsonable(record):
    return json.loads(json.dumps(dataclasses.asdict(record)))


@pytest.mark.parametrize("kind", ["variants", "presets"])
def test_variants_and_presets_are_unchanged(kind):
    table = getattr(mgk, kind.upper())
    for name, before in EXPECTED[kind].items():
        after = jsonable(table[name])
        assert {key: after[key] for key in before} == before, name


def to_json(value):
    """Convert a default value to its JSON form."""
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def arguments(function):
    """List each argument as [name, kind, default or "required"]."""
    return [
        [item.name, item.kind.name.lower(), "required" if item.default is item.empty else to_json(item.default)]
        for item in inspect.signature(function).parameters.values()
    ]


def is_compatible(before, after):
    """Check that every call valid for `before` is valid for `after`."""
    positional = [item for item in before if item[1] != "keyword_only"]
    return after[: len(positional)] == positional and all(item in after for item in before)


@pytest.mark.parametrize("module", CONTRACT["all"])
def test_public_names_are_stable(module):
    if module == "mgk.hf":
        pytest.importorskip("transformers")
    owner = importlib.import_module(module)
    assert set(CONTRACT["all"][module]) <= set(owner.__all__)
    assert all(hasattr(owner, name) for name in owner.__all__)


@pytest.mark.parametrize("path", [*CONTRACT["arguments"], *CONTRACT["methods"]])
def test_public_arguments_are_stable(path):
    if path.startswith("mgk.hf."):
        pytest.importorskip("transformers")
    before = {**CONTRACT["arguments"], **CONTRACT["methods"]}[path]
    names = path.split(".")
    depth = 2 if names[1] in ("hf", "models") else 1
    target = importlib.import_module(".".join(names[:depth]))
    for name in names[depth:]:
        target = getattr(target, name)
    assert is_compatible(before, arguments(target)), arguments(target)


def commands():
    """Return the parameters of every command in the form of contract.json."""
    return {
        name: [
            {
                "name": parameter.name,
                "kind": parameter.param_type_name,
                "spelled": [*parameter.opts, *parameter.secondary_opts],
                "required": parameter.required,
                "default": to_json(parameter.default),
            }
            for parameter in command.params
            if parameter.name != "help"
        ]
        for name, command in typer.main.get_command(commands_module.app).commands.items()
    }


# `mgk study` is deleted; `mgk evidence` prints the command that replaces it.
REMOVED = ("study", "evidence")


@pytest.mark.parametrize("name", [name for name in CONTRACT["commands"] if name not in REMOVED])
def test_command_options_are_stable(name):
    """Compare arguments by position, options by spelling, whether they are required, and defaults."""

    def select(parameters, kind):
        keys = ("spelled", "required", "default")
        return [{key: item[key] for key in keys if key in item} for item in parameters if item["kind"] == kind]

    before, after = CONTRACT["commands"][name], commands()[name]
    arguments_before = [{**item, "spelled": None} for item in select(before, "argument")]
    assert [{**item, "spelled": None} for item in select(after, "argument")] == arguments_before
    for option in select(before, "option"):
        matches = [item for item in select(after, "option") if set(option["spelled"]) <= set(item["spelled"])]
        assert matches, option
        (same,) = matches
        assert (same["required"], same["default"]) == (option["required"], option["default"]), option


def test_names_are_stable():
    assert set(CONTRACT["presets"]) <= set(mgk.PRESETS)
    assert set(CONTRACT["recipes"]) <= set(config.recipe_names())
    assert set(CONTRACT["tasks"]) <= set(tasks.TASKS)
    # New columns come last, and files without them can be read.
    before = CONTRACT["results"]
    assert results.COLUMNS[: len(before)] == before
    assert set(results.COLUMNS[len(before) :]) <= results.OPTIONAL_COLUMNS
    assert list(results.read([FIXTURES / "results.csv"])[0]) == CONTRACT["results"]


@pytest.mark.parametrize(("kind", "variant"), [("mixture", "smgk"), ("linear", "smlk")])
def test_backend_names_are_stable(kind, variant):
    for name in CONTRACT["backends"][kind]:
        assert mgk.Attention(8, 2, variant=variant, backend=name).backend == name
    with pytest.raises(ValueError, match="backend"):
        mgk.Attention(8, 2, variant=variant, backend="other")
