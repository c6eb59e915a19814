"""Former module paths, which work for one release with a DeprecationWarning that names the new path."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "mgk.analysis.survey": "mgk.analysis.analyse",
    "mgk.decoding": "mgk.models.generation",
    "mgk.evaluation": "mgk.training.evaluate",
    "mgk.generation": "mgk.models.generation",
    "mgk.graphs": "mgk.models.cuda_graphs",
    "mgk.hf.config": "mgk.hf.configuration",
    "mgk.hf.conversion": "mgk.hf.convert",
    "mgk.hf.models": "mgk.hf.modeling",
    "mgk.recipes": "mgk.training.config",
    "mgk.results": "mgk.training.results",
    "mgk.runs": "mgk.training.runs",
    "mgk.sliding": "mgk.models.sliding_window",
}


def _warn(old: str, new: str, stacklevel: int) -> None:
    message = f"{old} has moved: use {new}. The old path will be removed in the next release."
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel + 1)


class _Loader(Loader):
    """Load a former path as a module with the names of the new one."""

    def exec_module(self, module: ModuleType) -> None:
        target = MODULES[module.__name__]
        # Frames of the import system do not count: the warning points to the import statement.
        _warn(module.__name__, target, stacklevel=2)
        names = vars(importlib.import_module(target))
        vars(module).update({name: value for name, value in names.items() if not name.startswith("__")})


class _Finder(MetaPathFinder):
    """Find the former paths in MODULES."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, _Loader(), origin=MODULES[fullname]) if fullname in MODULES else None


def install() -> None:
    """Make the former paths importable. Nothing is imported until one is used."""
    # Last: an existing module takes precedence.
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def moved_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__` for names that have moved to other modules, {name: module}."""

    def getattribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # `from package import name` reads the attribute twice, first from the import system.
        if sys._getframe(1).f_globals.get("__name__") != "importlib._bootstrap":
            _warn(f"{package}.{name}", f"{modules[name]}.{name}", stacklevel=2)
        return getattr(importlib.import_module(modules[name]), name)

    return getattribute
