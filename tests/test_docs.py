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

ROOT = Path(__file__).parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "experiments/*.md", "mgk/*/README.md")
    for path in sorted(ROOT.glob(pattern))
}
# Cells of tutorials are {code-cell} blocks: `make docs` runs them.
TUTORIALS = [name for name in PAGES if name.startswith("docs/tutorials/")]
# Packages whose public names need an example, and names of data, which have none.
PACKAGES = ("mgk", "mgk.models", "mgk.analysis", "mgk.hf", "mgk.distributed")
NO_EXAMPLE = {"PRESETS", "VARIANTS"}


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


def public_objects() -> list[tuple[str, object]]:
    """Return the public functions and classes of PACKAGES."""
    names = [(package, name) for package in PACKAGES for name in importlib.import_module(package).__all__]
    return [
        (f"{package}.{name}", getattr(importlib.import_module(package), name))
        for package, name in names
        if name not in NO_EXAMPLE
    ]


@pytest.fixture
def _one_process_group():
    """Form the process group of one rank that examples of mgk.distributed use."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name, item", public_objects(), ids=lambda item: item if isinstance(item, str) else "")
def test_docstring_examples(name, item, request, tmp_path, monkeypatch):
    """Run the examples in the docstring of a public object and of its methods; the object itself needs one."""
    monkeypatch.chdir(tmp_path)
    if name.startswith("mgk.distributed."):
        request.getfixturevalue("_one_process_group")
    members = [member for _, member in inspect.getmembers(item, inspect.isroutine)] if inspect.isclass(item) else []
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    for part in [item, *(member for member in members if "mgk" in (getattr(member, "__module__", "") or ""))]:
        torch.manual_seed(0)
        for case in finder.find(part, name, globs={"mgk": mgk, "torch": torch}):
            runner.run(case, out=report.append)
    assert not runner.failures, "".join(report)
    assert ">>> " in (inspect.getdoc(item) or ""), f"{name} has no example"


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
