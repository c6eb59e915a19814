"""Check the documentation: code blocks and docstring examples run, commands and links on pages are right."""

import doctest
import importlib
import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import typer

import mgk
import mgk.hf
from mgk.backends import LINEAR_BACKENDS, MIXTURE_BACKENDS
from mgk.cli import commands
from mgk.tasks import TASKS

ROOT = Path(__file__).parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "experiments/*.md", "mgk/*/README.md")
    for path in sorted(ROOT.glob(pattern))
}
# Cells of tutorials are {code-cell} blocks: `make docs` runs them.
TUTORIALS = [name for name in PAGES if name.startswith("docs/tutorials/")]
# Packages whose public names are in the API reference, except names of data.
PACKAGES = ("mgk", "mgk.models", "mgk.analysis", "mgk.hf", "mgk.distributed")
DATA = {"PRESETS", "VARIANTS"}
# Documented objects without an example: results of functions whose examples show them.
NO_EXAMPLE = {"mgk.equations.AttentionOutput", "mgk.equations.MStep"}


def fenced(page: str) -> list[tuple[str, str]]:
    """Return the language and the text of every fenced block of a page; directives have their name in braces."""
    blocks: list[tuple[str, str]] = []
    language: str | None = None
    lines: list[str] = []
    for line in PAGES[page].splitlines():
        if not line.startswith("```"):
            lines.append(line)
        elif language is None:
            language, lines = line[3:].strip(), []
        else:
            blocks.append((language, "\n".join(lines) + "\n"))
            language = None
    return blocks


def run_under_torchrun(code: str, script: Path) -> None:
    script.write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def _tables_are_restored():
    """Undo the registrations of pages that show how to add a backend or a variant."""
    tables = [MIXTURE_BACKENDS, LINEAR_BACKENDS, mgk.VARIANTS, mgk.PRESETS]
    copies = [dict(table) for table in tables]
    yield
    for table, copy in zip(tables, copies, strict=True):
        table.clear()
        table.update(copy)


@pytest.mark.usefixtures("_tables_are_restored")
@pytest.mark.parametrize("page", [page for page in PAGES if any(language == "python" for language, _ in fenced(page))])
def test_code_blocks_run(page, tmp_path):
    blocks = [block for language, block in fenced(page) if language == "python"]
    if any("WORLD_SIZE" in block for block in blocks):
        run_under_torchrun("".join(blocks), tmp_path / "script.py")
        return
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), scope)


def test_guide_has_one_block_that_is_not_run():
    """Check that every block is marked as Python, which `test_code_blocks_run` runs, except one."""
    assert sorted(language for language, _ in fenced("docs/guide.md"))[:2] == ["", "python"]
    (code,) = (text for language, text in fenced("docs/guide.md") if not language)
    assert "from_run" in code


def public_names() -> list[str]:
    """Return the names of the public functions and classes of PACKAGES."""
    packages = {package: importlib.import_module(package) for package in PACKAGES}
    return [f"{package}.{name}" for package, module in packages.items() for name in module.__all__ if name not in DATA]


def reference_names() -> list[str]:
    """Return the names of the functions, classes and members in the API reference."""
    names: list[str] = []
    for page in (page for page in PAGES if page.startswith("docs/api/")):
        module = ""
        for line in PAGES[page].splitlines():
            directive, _, argument = line.strip().removeprefix(".. ").partition(":: ")
            if directive == "currentmodule":
                module = argument
            elif directive in ("autofunction", "autoclass"):
                names.append(argument if argument.startswith("mgk.") else f"{module}.{argument}")
                documented = names[-1]
            elif directive == "automodule":
                functions = vars(importlib.import_module(argument)).values()
                names += [f"{argument}.{item.__name__}" for item in functions if is_defined_in(item, argument)]
            elif line.strip().startswith(":members: "):
                names += [f"{documented}.{member}" for member in line.partition(":members: ")[2].split(", ")]
    return names


def is_defined_in(item: object, module: str) -> bool:
    return (inspect.isroutine(item) or inspect.isclass(item)) and item.__module__ == module


def resolve(name: str) -> object:
    """Return the object with a dotted name; a function hides a module of the same name, as in mgk.analysis.analyse."""
    item: object = mgk
    for part in name.split(".")[1:]:
        if inspect.ismodule(item) and not hasattr(item, part):
            importlib.import_module(f"{item.__name__}.{part}")
        item = getattr(item, part)
    return item


@pytest.fixture
def _one_process_group():
    """Form the process group of one rank that examples of mgk.distributed use."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", reference_names())
def test_docstring_examples(name, request, tmp_path, monkeypatch):
    """Run the examples in the docstring of an object in the API reference, which needs one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mgk.tasks.TASKS", dict(TASKS))
    if name.startswith("mgk.distributed."):
        request.getfixturevalue("_one_process_group")
    item = resolve(name)
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    torch.manual_seed(0)
    for case in finder.find(item, name, globs={"mgk": mgk, "torch": torch}):
        runner.run(case, out=report.append)
    assert not runner.failures, "".join(report)
    assert name in NO_EXAMPLE or ">>> " in (inspect.getdoc(item) or ""), f"{name} has no example"


def test_public_names_are_in_the_reference():
    assert set(public_names()) <= set(reference_names())


def command_lines() -> list[str]:
    """Return the lines of all blocks without a language on all pages, continued lines joined."""
    blocks = [block for page in PAGES for language, block in fenced(page) if not language]
    return [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def test_commands_on_pages_have_the_options_used():
    commands_by_name = typer.main.get_command(commands.app).commands
    lines = [match[1] for line in command_lines() if (match := re.search(r"(?:^|-m |\bPLUGINS=\S+ )mgk (.*)", line))]
    calls = [shlex.split(line.partition("||")[0], comments=True) for line in lines]
    assert len(calls) > 10
    for command, *words in calls:
        parameters = commands_by_name[command].params
        options = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options, command


def test_other_commands_on_pages_exist():
    """Check targets of make, scripts and modules of python and torchrun, and extras of pip install."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    inline = [text for page in PAGES.values() for text in re.findall(r"`([^`\n]+)`", page)]
    for line in [*command_lines(), *inline]:
        if match := re.match(r"make ([a-z-]+)", line):
            assert match[1] in targets, line
        if match := re.match(r"(?:python|torchrun) (?:-\S+ (?:\d+ )?)*(\S+\.py)", line):
            assert (ROOT / match[1]).is_file() or match[1] == "script.py", line
        if match := re.match(r"python -m (experiments[a-z_.]*)(?![A-Z])", line):
            assert importlib.util.find_spec(match[1]), line
        if match := re.search(r"pip install [\"']?(?:\.|mgk)\[([\w,]+)\]", line):
            assert set(match[1].split(",")) <= set(extras), line


def anchors(page: str) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_have_targets():
    pages = {ROOT / name: text for name, text in PAGES.items()}
    pages |= {path: path.read_text(encoding="utf-8") for path in (ROOT / "results").glob("*.md")}
    for path, text in pages.items():
        links = re.findall(r"\]\(([^)\s]+)\)|<(?:img|source)[^>]* src(?:set)?=\"([^\"]+)\"", text)
        for link in (first or second for first, second in links):
            target, _, anchor = link.partition("#")
            if "://" in link:
                continue
            file = (path.parent / target) if target else path
            assert file.exists(), f"{path.name}: {link}"
            assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), f"{path.name}: {link}"


def test_every_tutorial_is_a_notebook():
    assert len(TUTORIALS) == 4
    for page in TUTORIALS:
        assert PAGES[page].startswith("---\nfile_format: mystnb\n"), page
        assert sum(language == "{code-cell} python" for language, _ in fenced(page)) >= 4, page
        assert not any(language == "python" for language, _ in fenced(page)), page


def test_readme_is_short():
    assert len(PAGES["README.md"].splitlines()) <= 150


def test_diagram_is_up_to_date():
    """Compare the picture of a mixture key with its script, as python docs/figures/mixture_key.py writes it."""
    script = ROOT / "docs" / "figures" / "mixture_key.py"
    scope = runpy.run_path(str(script))
    assert script.with_name("mixture-key.svg").read_text(encoding="utf-8") == scope["picture"]()
