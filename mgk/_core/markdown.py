"""Tables in Markdown, and numbers in them: a minus that is no hyphen, a dash for what is not known."""

from __future__ import annotations


def markdown_table(lines: list[list[str]]) -> str:
    header, *rest = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rest])


def signed(value: float | None, digits: int = 2) -> str:
    if value is None:
        return "–"
    shown = f"{value:+.{digits}f}"
    return shown.replace("-", "−") if float(shown) else shown[1:]


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−")
