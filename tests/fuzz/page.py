"""Write the tables of docs/robustness.md from results/fuzz.csv and results/faults.csv: `python -m tests.fuzz.page`."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "robustness.md"
FUZZ_COLUMNS = ("kind", "tried", "clean_before", "clean", "date", "python", "torch", "commit", "command")
# Marker in the page, results file, its columns before and after, header of the table.
TABLES = (
    (
        "fuzz",
        "fuzz.csv",
        "clean_before",
        "clean",
        ["bad input", "tried", "clean at aa005c7", "clean", "commit", "date"],
    ),
    ("faults", "faults.csv", "survived_before", "survived", ["fault", "tried", "before", "survived", "commit", "date"]),
)


def render(page: str, results: Path = ROOT / "results") -> str:
    """Return the page with the tables between its markers written from the results files that exist."""
    for name, file, before, after, header in TABLES:
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        if (results / file).exists():
            head, _, rest = page.partition(start)
            page = head + start + _table(results / file, before, after, header) + "\n" + end + rest.partition(end)[2]
    return page


def _table(path: Path, before: str, after: str, header: list[str]) -> str:
    from mgk._core.markdown import markdown_table
    from mgk.training.results import latest

    with path.open(newline="", encoding="utf-8") as file:
        rows = latest(csv.DictReader(file), ["kind"])
    columns = ("kind", "tried", before, after, "commit", "date")
    return markdown_table([header, *([row[column] or "–" for column in columns] for row in rows)])


def main() -> int:
    """Rewrite the page; with --check only compare it."""
    page = PAGE.read_text(encoding="utf-8")
    rendered = render(page)
    if "--check" in sys.argv[1:]:
        return 0 if rendered == page else 1
    PAGE.write_text(rendered, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
