"""Former module paths give the objects of the new ones, with a DeprecationWarning."""

import importlib
import subprocess
import sys

import pytest

import mgk.training
from mgk._core import deprecated_paths
from mgk._core.deprecated_paths import MODULES

OPTIONAL = {"mgk.hf": "transformers", "mgk.training": "pytorch_lightning"}


def unload_former_paths():
    for name in MODULES:
        sys.modules.pop(name, None)
        package, _, attribute = name.rpartition(".")
        if package in sys.modules:
            vars(sys.modules[package]).pop(attribute, None)


@pytest.fixture(autouse=True)
def fresh_former_paths():
    """Import each former path afresh, and unload it after the test."""
    unload_former_paths()
    yield
    unload_former_paths()


@pytest.mark.parametrize(("old", "new"), MODULES.items(), ids=MODULES)
def test_former_path_has_the_objects_of_the_new_one(old, new):
    pytest.importorskip(OPTIONAL.get(new.rpartition(".")[0], "torch"))
    target = importlib.import_module(new)
    with pytest.warns(DeprecationWarning, match=rf"^{old} has moved: use {new}\.") as caught:
        module = importlib.import_module(old)
    assert len(caught) == 1
    names = [name for name in vars(target) if not name.startswith("__")]
    assert names
    assert all(getattr(module, name) is getattr(target, name) for name in names)
    assert importlib.import_module(new) is target
    assert target.__spec__.name == new


@pytest.mark.parametrize(
    "statement", ["import mgk.generation", "from mgk.generation import generate", "from mgk import generation"]
)
def test_warning_points_to_the_import_statement(statement):
    with pytest.warns(DeprecationWarning, match=r"^mgk\.generation has moved: use mgk\.models\.generation\.") as caught:
        exec(compile(f"\n\n{statement}", "user_code.py", "exec"), {})
    assert [(warning.filename, warning.lineno) for warning in caught] == [("user_code.py", 3)]


def test_former_paths_are_not_real_modules():
    """A module in the place of a former path would shadow it."""
    finders = [finder for finder in sys.meta_path if not isinstance(finder, deprecated_paths._Finder)]
    for name in MODULES:
        path = sys.modules[name.rpartition(".")[0]].__path__ if name.count(".") == 1 else None
        specs = [finder.find_spec(name, path) for finder in finders if path and hasattr(finder, "find_spec")]
        assert not any(specs), name


def test_unknown_module_is_still_missing():
    with pytest.raises(ModuleNotFoundError, match=r"mgk\.generations"):
        importlib.import_module("mgk.generations")


@pytest.mark.parametrize("name", ["Run", "fit"])
def test_names_of_the_former_training_module(name):
    pytest.importorskip("pytorch_lightning")
    trainer = importlib.import_module("mgk.training.trainer")
    with pytest.warns(DeprecationWarning, match=rf"^mgk\.training\.{name} has moved: use mgk\.training\.trainer\."):
        assert getattr(mgk.training, name) is getattr(trainer, name)
    with pytest.raises(AttributeError, match="has no attribute 'walk'"):
        _ = mgk.training.walk


def test_import_of_a_former_name_warns_once():
    pytest.importorskip("pytorch_lightning")
    with pytest.warns(DeprecationWarning, match=r"^mgk\.training\.Run has moved") as caught:
        exec(compile("\n\nfrom mgk.training import Run", "user_code.py", "exec"), {})
    assert [(warning.filename, warning.lineno) for warning in caught] == [("user_code.py", 3)]


def test_import_of_the_package_warns_of_nothing_and_imports_no_target():
    code = "import sys, mgk; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert not done.stderr
    assert not {*MODULES, *MODULES.values()} & set(done.stdout.split())
