"""The page of evidence: the parts between markers are made from results/, what lies outside them is written by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mgk import results as files
from mgk.checks import fail
from mgk.evidence import claims, costs, figures, heads, plan, probe, verdicts
from mgk.evidence.claims import Part
from mgk.evidence.figures import Picture
from mgk.evidence.runs import find
from mgk.evidence.tables import markdown

MADE = re.compile(r"<!-- made: (?P<name>[\w-]+) -->\n.*?<!-- end -->", re.DOTALL)

Row = dict[str, str]


@dataclass(frozen=True)
class Evidence:
    """The text of each part that is made, and the pictures."""

    parts: dict[str, str]
    pictures: list[Picture]


def gather(results: Path, analyses: Iterable[Path]) -> Evidence:
    """analyses: folders that `mgk analyze` wrote."""
    rows = [row for row in files.read(sorted(results.glob("*.csv"))) if "recipe" in row]
    parts = [Part(each, find(rows, each.recipe, results)) for each in plan.EXPERIMENTS]
    seen = {folder.name: heads.read(folder) for folder in sorted(analyses)}
    seen = {name: found for name, found in seen.items() if heads.judged(found)}
    text = {
        "rules": verdicts.RULES,
        "summary": summary(parts, seen, rows),
        "runs": _joined(claims.runs_table(part) for part in parts),
        "half": _joined(claims.table(part, found) for part in parts if (found := claims.half(part))),
        "same": _joined(claims.table(part, found) for part in parts if (found := claims.same(part))),
        "linear": _joined(claims.gap_table(part, found) for part in parts if (found := claims.gaps(part))),
        "heads": _joined(f"**{name}**\n\n{heads.table(found)}" for name, found in seen.items()),
        "cost": cost(parts, rows),
        "retrieval": probe.text(rows),
        "queue": plan.table(rows, results),
    }
    return Evidence(text, [figures.ends(parts), figures.curves(parts, results)])


def found_analyses(results: Path, figures: Path) -> list[Path]:
    """Those of trained models among the results, and those of small models beside the figures."""
    return [path.parent for folder in (results, figures) for path in sorted(folder.glob("*/pairs.csv"))]


def _joined(texts: Iterable[str]) -> str:
    return "\n\n".join(texts) or f"{verdicts.MISSING[0].upper()}{verdicts.MISSING[1:]}."


def cost(parts: list[Part], rows: list[Row]) -> str:
    """Recipes that differ in the schedule alone have the same models: the first that was run stands for them."""
    text, tasks = [], set()
    for part in parts:
        found = costs.of_part(part, rows)
        if costs.ratios(found) and part.found.recipe.task not in tasks:
            tasks.add(part.found.recipe.task)
            text.append(f"**{part.title}**\n\n{costs.table(found)}")
    steps = costs.of_steps(rows)
    if costs.ratios(steps):
        text.append(f"**A training step of the LRA encoder, length 4,096, batch 32**\n\n{costs.table(steps)}")
    return _joined([*text, costs.operator_table(rows)])


def summary(parts: list[Part], seen: dict[str, list[heads.Seen]], rows: list[Row]) -> str:
    lines = [["claim", "on", "verdict", "pairs"]]

    def add(claim: str, where: str, found: list[str]) -> None:
        if found:
            lines.append([claim, where, f"**{verdicts.overall(found)}**", verdicts.counted(found)])

    for part in parts:
        judged = claims.half(part)
        add("1. half the heads suffice", part.title, [each.verdict for each in judged if not each.control])
        add("1, control: … without a mixture", part.title, [each.verdict for each in judged if each.control])
    for part in parts:
        add("2. with the same heads the mixture is better", part.title, [each.verdict for each in claims.same(part)])
    for part in parts:
        found = [each.judged.verdict for each in claims.gaps(part)]
        add("3. MLK narrows the gap to softmax", part.title, found)
    for name, each in seen.items():
        add("4. ranks are higher, heads less alike", name, [verdict for *_, verdict in heads.judged(each)])
    for figure, what, _ in [entry for entry in plan.FIGURES if entry[0] in ("2", "6")]:
        if not any(name.endswith("-analysis") for name in seen):
            add("4. ranks are higher, heads less alike", f"{what} (Fig. {figure})", [verdicts.MISSING])
    sources = {part.title: costs.ratios(costs.of_part(part, rows)) for part in parts}
    sources["training step, length 4,096"] = costs.ratios(costs.of_steps(rows))
    for name in (*costs.COUNTS, *costs.MEASURED.values()):
        found = [costs.judge(name, r.get(name)) for ratios in sources.values() for *_, r in ratios]
        add(f"5. {name} fall{'' if name in costs.COUNTS else 's'}", "all of these", found)
    return markdown(lines)


def fill(page: str, parts: dict[str, str]) -> str:
    """The page with its made parts made anew."""

    def made(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in parts:
            fail("page", f"has a marker for {name!r}; the parts are {', '.join(parts)}")
        return f"<!-- made: {name} -->\n{parts[name]}\n<!-- end -->"

    if not MADE.search(page):
        fail("page", "has no part to fill: mark one as <!-- made: summary --> … <!-- end -->, each on its own line")
    return MADE.sub(made, page)


def empty(parts: dict[str, str]) -> str:
    """A page that has a marker for every part."""
    return "# Evidence\n\n" + "\n".join(f"<!-- made: {name} -->\n<!-- end -->\n" for name in parts)
