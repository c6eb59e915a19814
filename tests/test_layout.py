"""Check the layout of the repository: size of files, public modules, contents of the wheel, no monkeypatching."""

import ast
import fnmatch
import re
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path for folder in ("mgk", "experiments", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)
# At most ten modules, besides the two files whose names Python reserves.
MODULES = "attention cache equations features functional multihead precompile rotary variants".split()


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_file_is_long():
    paths = [*SOURCES, *(ROOT / "tests").rglob("*.py")]
    lines = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert not {path: count for path, count in lines.items() if count > 450}


def test_modules_of_the_package_root():
    assert sorted(path.stem for path in (ROOT / "mgk").glob("*.py")) == ["__init__", "__main__", *MODULES]
    assert len(MODULES) <= 10


def test_core_lists_its_modules():
    docstring = (ROOT / "mgk" / "_core" / "__init__.py").read_text(encoding="utf-8")
    modules = {path.stem for path in (ROOT / "mgk" / "_core").glob("*.py")} - {"__init__"}
    assert set(re.findall(r"`(\w+)`", docstring)) == modules


def test_wheel_holds_the_library_alone():
    config = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (include,) = re.findall(r"^include = \[(.+)\]$", config, re.MULTILINE)
    packages = setuptools.find_packages(str(ROOT), include=re.findall(r'"(.+?)"', include))
    assert {package.partition(".")[0] for package in packages} == {"mgk"}
    # Every folder with code is a package, and every other file of the package is listed as package data.
    assert {name(path.parent).replace("/", ".") for path in (ROOT / "mgk").rglob("*.py")} == set(packages)
    (data,) = re.findall(r"^mgk = \[(.+)\]$", config, re.MULTILINE)
    patterns = re.findall(r'"(.+?)"', data)
    files = [path.relative_to(ROOT / "mgk").as_posix() for path in (ROOT / "mgk").rglob("*") if path.is_file()]
    data_files = [path for path in files if not path.endswith((".py", ".pyc", ".md"))]
    assert data_files
    assert not [path for path in data_files if not any(fnmatch.fnmatch(path, pattern) for pattern in patterns)]


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_no_module_patches_another(path):
    """Check that no file assigns to an attribute of an imported module of the repository."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    folders = {"mgk", "experiments"}
    modules = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in folders
        for alias in node.names
        if alias.name.islower()
    }
    targets = [
        target
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete)
        for target in (node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target])
    ]
    patched = [
        ast.unparse(target)
        for target in targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in modules
    ]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr"]
    patched += [ast.unparse(call) for call in calls if ast.unparse(call.args[0]) in modules]
    assert not patched
