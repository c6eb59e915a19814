"""The page of evidence: the parts between markers are made from results/, what lies outside them is written by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from experiments.paper import claims, costs, figures, heads, means, plan, probe, speed, verdicts
from experiments.paper.claims import ExperimentResults
from experiments.paper.figures import Picture
from experiments.paper.recipe_results import find, own_settings
from mgk._core.io import format_number, format_signed, markdown_table
from mgk._core.validation import fail
from mgk.training import results as files

MADE = re.compile(r"<!-- made: (?P<name>[\w-]+) -->\n.*?<!-- end -->", re.DOTALL)

Record = dict[str, str]


@dataclass(frozen=True)
class Evidence:
    """The text of each part that is made, and the pictures."""

    parts: dict[str, str]
    pictures: list[Picture]
    left_out: list[str]  # trainings with other settings than their recipe's


def gather(results: Path) -> Evidence:
    measured = [row for row in files.read(sorted(results.glob("*.csv"))) if "recipe" in row]
    rows, left_out = own_settings(measured, [each.recipe for each in plan.EXPERIMENTS])
    parts = [ExperimentResults(each, find(rows, each.recipe, results)) for each in plan.EXPERIMENTS]
    seen = {folder.name: heads.read(folder) for folder in _analyses(results)}
    seen = {name: found for name, found in seen.items() if heads.judged(found)}
    text = {
        "rules": verdicts.RULES,
        "headline": headline(parts[0], rows),
        "fast": speed.sentence(rows),
        "speed": speed.table(rows),
        "summary": summary(parts, seen, rows),
        "runs": _joined([*(claims.runs_table(part) for part in parts), *_left_out(left_out)]),
        "averages": means.table(parts),
        "half": half(parts),
        "same": same(parts),
        "linear": linear(parts),
        "heads": _joined(
            [
                claims.sentence("ranks and heads", head_verdicts(seen)),
                *(f"**{name}**\n\n{heads.table(found)}" for name, found in seen.items()),
            ]
        ),
        "cost": cost(parts, rows),
        "ways": ways(parts),
        "retrieval": probe.text(rows),
        "queue": plan.table(rows, results),
    }
    pictures = [figures.differences(parts), figures.ends(parts), figures.curves(parts, results)]
    return Evidence(text, pictures, left_out)


def _left_out(names: list[str]) -> list[str]:
    return [f"Left out, since their settings are not the recipe's: {', '.join(names)}."] if names else []


def _analyses(results: Path) -> list[Path]:
    """The folders among the results that `mgk analyze` wrote."""
    return sorted(path.parent for path in results.glob("*/pairs.csv"))


def _joined(texts: Iterable[str]) -> str:
    return "\n\n".join(texts) or f"{verdicts.MISSING[0].upper()}{verdicts.MISSING[1:]}."


def headline(part: ExperimentResults, rows: list[Record]) -> str:
    """The one table that tells most: the largest baseline of a task, and what stands for it with half its heads."""
    found, full = part.found, part.rows[0]
    judged = {each.ours: each for each in claims.half(part) if each.theirs == full and each.compared}
    steps = {cost.row: cost.of.get("training step") for cost in costs.of_part(part, rows)}
    lines = [["model", "accuracy, %", f"minus {full}", "as good", "parameters", "GFLOPs", "training step"]]
    for row in (each for each in found.rows if each == full or each in judged):
        cells = [str(row), format_number(found.mean(row), found.scale.shown_digits), "", ""]
        if row in judged:
            result = judged[row].compared
            assert result is not None
            cells[2:] = [
                f"{format_signed(result.difference)} ± {format_number(result.half_width)}",
                judged[row].verdict,
            ]
        step = "–" if steps[row] is None else f"{steps[row]:.1f} ms"
        run = found.of(row)[0]
        lines.append([*cells, f"{run.params:,}", f"{run.flops / 1e9:.2f}", step])
    return markdown_table(lines)


def half(parts: list[ExperimentResults]) -> str:
    judged = {part.title: claims.half(part) for part in parts}
    text = []
    for baseline, family in claims.FAMILIES.items():
        text.append(claims.sentence(f"{family} with half the heads", _named(judged, family)))
        control = _named(judged, family, control=True)
        alike = [
            title for title, found in control.items() if verdicts.overall(found) in (verdicts.HOLDS, verdicts.SO_FAR)
        ]
        if alike:
            text[-1] += (
                f" But {baseline} with half the heads passes the same rule on {', '.join(alike)}: "
                "there it is not shown that the mixture was needed."
            )
    tables = [claims.table(part, judged[part.title]) for part in parts if judged[part.title]]
    keys = {part.title: own for part in parts if (own := claims.half_the_keys(part))}
    if keys:
        text.append(claims.sentence("half the key heads, which the paper has not", _verdicts(keys, False)))
        tables.append("All query heads and half the key heads:")
        tables += [claims.table(part, keys[part.title]) for part in parts if part.title in keys]
    return _joined([*text, *tables])


def same(parts: list[ExperimentResults]) -> str:
    judged = {part.title: claims.same(part) for part in parts}
    text = [claims.sentence(f"{each} with as many heads", _named(judged, each)) for each in claims.FAMILIES.values()]
    return _joined([*text, *(claims.table(part, judged[part.title]) for part in parts if judged[part.title])])


def linear(parts: list[ExperimentResults]) -> str:
    found = {part.title: claims.gaps(part) for part in parts}
    judged = {title: [gap.judged.verdict for gap in own] for title, own in found.items() if own}
    tables = (claims.gap_table(part, found[part.title]) for part in parts if found[part.title])
    return _joined([claims.sentence("MLK narrows the gap", judged), *tables])


def ways(parts: list[ExperimentResults]) -> str:
    judged = {part.title: own for part in parts if (own := claims.ways(part))}
    text = [
        claims.sentence(claim, _verdicts(judged, control))
        for claim, control in (("sMGK + Hard-E is as good as sMGK", False), ("the other ways of Table 4", True))
    ]
    tables = (claims.table(part, judged[part.title], "not claimed") for part in parts if part.title in judged)
    return _joined([*text, *tables])


def _verdicts(judged: dict[str, list[claims.Judged]], control: bool) -> dict[str, list[str]]:
    """By the tasks that have any."""
    wanted = {title: [each.verdict for each in found if each.control == control] for title, found in judged.items()}
    return {title: found for title, found in wanted.items() if found}


def _named(judged: dict[str, list[claims.Judged]], family: str, *, control: bool = False) -> dict[str, list[str]]:
    of_family = {title: [each for each in found if each.family == family] for title, found in judged.items()}
    return _verdicts(of_family, control)


def cost(parts: list[ExperimentResults], rows: list[Record]) -> str:
    found = {part.title: costs.of_part(part, rows) for part in parts if part.experiment.timed}
    text = [f"**{title}**\n\n{costs.table(each)}" for title, each in found.items() if costs.pairs(each)]
    steps = costs.of_steps(rows)
    if costs.pairs(steps):
        where = costs.machine(costs.step_rows(rows))
        text.append(f"**A training step of the LRA encoder, length 4,096, batch 32** ({where})\n\n{costs.table(steps)}")
    said = [f"{variant}: {claims.by_verdict(cost_verdicts(parts, rows, variant))}" for variant in claims.BASELINES]
    return _joined(["Verdict, half the heads cost less. " + ". ".join(said) + ".", *text, costs.operator_table(rows)])


def summary(parts: list[ExperimentResults], seen: dict[str, list[heads.Seen]], rows: list[Record]) -> str:
    """In brackets how many of the planned pairs have been measured, and what they say where they differ."""
    half = {part.title: claims.half(part) for part in parts}
    same = {part.title: claims.same(part) for part in parts}
    lines = [["claim", *(part.title for part in parts)]]

    def add(claim: str, found: dict[str, list[str]]) -> None:
        lines.append([claim, *(claims.cell(found.get(part.title, [])) for part in parts)])

    for baseline, family in claims.FAMILIES.items():
        add(f"1. half the heads suffice, {family}", _named(half, family))
        add(f"1. control: {baseline} with half the heads", _named(half, family, control=True))
    keys = {part.title: claims.half_the_keys(part) for part in parts}
    add("1. not in the paper: half the key heads suffice a mixture", _verdicts(keys, False))
    add("1. control: softmax with half the key heads", _verdicts(keys, True))
    for family in claims.FAMILIES.values():
        add(f"2. better with as many heads, {family}", _named(same, family))
    add("3. MLK narrows the gap", {part.title: [gap.judged.verdict for gap in claims.gaps(part)] for part in parts})
    learnt = {part.title: claims.ways(part) for part in parts}
    add("6. sMGK + Hard-E is as good as sMGK", _verdicts(learnt, False))
    add("6. not claimed: Soft-E, and MGK + Hard-E", _verdicts(learnt, True))
    analysed = [["claim", "analysis", "verdict"]]
    analysed += [["4. ranks are higher, heads less alike", *each] for each in _cells(head_verdicts(seen))]
    names = [*costs.COUNTS, *costs.MEASURED.values()]
    lower = [["claim", *names]]
    for variant in claims.BASELINES:
        found = cost_verdicts(parts, rows, variant)
        lower.append([f"5. {variant} with half the heads costs less", *(claims.cell(found[name]) for name in names)])
    return _joined([markdown_table(lines), markdown_table(analysed), markdown_table(lower)])


def _cells(found: dict[str, list[str]]) -> Iterable[tuple[str, str]]:
    return ((name, claims.cell(each)) for name, each in found.items())


def head_verdicts(seen: dict[str, list[heads.Seen]]) -> dict[str, list[str]]:
    """Of each analysis; those of the paper's own figures are missing until they are there."""
    found = {name: [verdict for *_, verdict in heads.judged(each)] for name, each in seen.items()}
    return found | {name: [verdicts.MISSING] for name in (each.folder for each in plan.ANALYSES) if name not in found}


def cost_verdicts(parts: list[ExperimentResults], rows: list[Record], variant: str) -> dict[str, list[str]]:
    """Of each quantity, over all tasks with models of their own; what was never measured is missing once."""
    timed = [part for part in parts if part.experiment.timed]
    sources = [*(costs.of_part(part, rows) for part in timed), costs.of_steps(rows)]
    pairs = [pair for source in sources for pair in costs.pairs(source) if pair[0].row.variant == variant]
    judged = [costs.judged(*pair) for pair in pairs]
    names = (*costs.COUNTS, *costs.MEASURED.values())
    found = {name: [each[name] for each in judged if name in each] for name in names}
    return {name: each or [verdicts.MISSING] for name, each in found.items()}


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
