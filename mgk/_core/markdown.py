"""Markdown: tables, numbers, and pages with generated parts between markers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mgk._core.validation import fail

MARKED = re.compile(r"<!-- made: (?P<name>[\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def markdown_table(lines: list[list[str]]) -> str:
    """Format a Markdown table; the first line is the header."""
    header, *rows = lines
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def format_number(value: float | None, digits: int = 2) -> str:
    """Format a number with a minus sign (not a hyphen), and None as a dash."""
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−")


def format_signed(value: float | None, digits: int = 2) -> str:
    """Format a number with its sign, a rounded zero without one, and None as a dash."""
    if value is None:
        return "–"
    text = f"{value:+.{digits}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def fill_marked_parts(page: str, texts: dict[str, str], *, keep_others: bool = False) -> str:
    """Replace the marked parts of a page by generated texts.

    Args:
        page: The page. Its parts are marked by <!-- made: NAME --> and <!-- end -->.
        texts: Texts by the names of the markers.
        keep_others: Whether the page may have other markers, whose parts stay.
    """

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        if name in texts:
            return f"<!-- made: {name} -->\n{texts[name]}\n<!-- end -->"
        if not keep_others:
            fail("page", f"has a marker for {name!r}; known markers are {', '.join(texts)}")
        return match[0]

    names = {match["name"] for match in MARKED.finditer(page)}
    if not names or (keep_others and not names & texts.keys()):
        marker = f"<!-- made: {next(iter(texts))} -->"
        fail("page", f"has no markers: add {marker} and <!-- end -->, each on its own line")
    return MARKED.sub(replace, page)


def page_of_markers(title: str, names: Iterable[str]) -> str:
    """Return a page with a marker for every name."""
    return f"# {title}\n\n" + "\n".join(f"<!-- made: {name} -->\n<!-- end -->\n" for name in names)
