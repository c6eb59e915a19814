"""The code in the documentation runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["README.md", "docs/guide.md", "docs/language-model.md", "docs/analysis.md"])
def test_code_blocks_run(name):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, name, "exec"), scope)


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as they are linked to."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "results").glob("*.md")]:
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            target, _, anchor = link.partition("#")
            if "://" in link:
                continue
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(there), f"{page.name}: {link}"
