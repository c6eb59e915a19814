"""Check the documentation: code blocks run, commands have the options that are used, links have targets."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from mgk.cli import commands

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["README.md", "docs/guide.md", "docs/language-model.md", "docs/analysis.md"])
def test_code_blocks_run(name):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, name, "exec"), scope)


def fenced(name: str) -> list[tuple[str, str]]:
    """Return the language and the text of every fenced block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_guide_has_one_block_that_is_not_run():
    """Check that every block is marked as Python, which `test_code_blocks_run` runs, except one."""
    assert sorted(language for language, _ in fenced("docs/guide.md"))[:2] == ["", "python"]
    (code,) = (text for language, text in fenced("docs/guide.md") if not language)
    assert "from_run" in code


def test_commands_on_pages_have_the_options_used():
    commands_by_name = typer.main.get_command(commands.app).commands
    pages = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    lines = [line for page in pages for language, block in fenced(page) if not language for line in block.splitlines()]
    calls = [shlex.split(line, comments=True) for line in lines if line.startswith("mgk ")]
    assert len(calls) > 10
    for _, command, *words in calls:
        parameters = commands_by_name[command].params
        options = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options, command


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_have_targets():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "results").glob("*.md")]:
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            target, _, anchor = link.partition("#")
            if "://" in link:
                continue
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(path), f"{page.name}: {link}"
