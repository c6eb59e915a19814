"""The claim about heads: attention ranks are higher and heads less alike, from the tables that `mgk analyze` writes."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from experiments.paper import verdicts
from experiments.paper.claims import BASELINES
from experiments.paper.statistics import Difference, pooled
from mgk._core.io import format_number, format_signed, markdown_table
from mgk.training import results
from mgk.training.config import ModelSpec

# A model in these tables: "mgk:4 bytes seed 0".
MODEL = re.compile(r"(?P<row>[\w-]+:[\d/]+) .*seed (?P<seed>\d+)")


@dataclass
class Seen:
    """One analysed run."""

    row: ModelSpec
    seed: int
    numbers: dict[str, float] = field(default_factory=dict)


# What is measured, the table it is in and how a line of it counts; more is what the paper claims.
MEASURES: dict[str, tuple[str, Callable[[dict[str, str]], float]]] = {
    "rank, % of full": ("ranks.csv", lambda line: 100 * float(line["rank"]) / float(line["size"])),
    "effective rank, % of full": ("ranks.csv", lambda line: 100 * float(line["effective_rank"]) / float(line["size"])),
    "unlikeness of two heads' maps": ("pairs.csv", lambda line: float(line["jensen_shannon_bits"])),
    "unlikeness of two heads' outputs": ("pairs.csv", lambda line: 1 - float(line["cka"] or "nan")),
}


def read(folder: Path) -> list[Seen]:
    """Means over layers of the means over matrices, or pairs of heads, of a layer."""
    found: dict[str, Seen] = {}
    for name, (table, value) in MEASURES.items():
        layers: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for each in results.read([folder / table]):
            layers[each["model"]][each["layer"]].append(value(each))
        for model, by_layer in layers.items():
            named = MODEL.fullmatch(model)
            if named is None:
                continue
            seen = found.setdefault(model, Seen(ModelSpec.parse(named["row"]), int(named["seed"])))
            seen.numbers[name] = statistics.mean(statistics.mean(values) for values in by_layer.values())
    return list(found.values())


def compare(seen: list[Seen], ours: ModelSpec, theirs: ModelSpec, measure: str) -> Difference | None:
    """The interval is over seeds alone: matrices of one model are no sample of models."""

    def values(row: ModelSpec) -> list[float]:
        return [each.numbers[measure] for each in seen if each.row == row and measure in each.numbers]

    a, b = values(ours), values(theirs)
    if not a or not b:
        return None
    spread = pooled([values(row) for row in dict.fromkeys(each.row for each in seen)])
    width = None if spread is None else spread.half_width(len(a), len(b))
    remark = "one seed each: what another would say is not known" if spread is None else ""
    return Difference("", statistics.mean(a) - statistics.mean(b), width, 0.0, (len(a), len(b)), remark)


def judged(seen: list[Seen]) -> list[tuple[ModelSpec, ModelSpec, str, Difference, str]]:
    """Mixtures against baselines with the same heads, and against those with twice as many."""
    found = []
    rows = list(dict.fromkeys(each.row for each in seen))
    for ours in rows:
        for heads in (ours.heads, 2 * ours.heads):
            theirs = ModelSpec(BASELINES.get(ours.variant, ""), heads)
            for measure in MEASURES:
                result = compare(seen, ours, theirs, measure) if theirs in rows else None
                if result is not None:
                    found.append((ours, theirs, measure, result, verdicts.better(result)))
    return found


def table(seen: list[Seen]) -> str:
    lines = [["pair", *MEASURES, "verdict"]]
    pairs = judged(seen)
    for ours, theirs in dict.fromkeys((ours, theirs) for ours, theirs, *_ in pairs):
        own = {measure: (result, verdict) for a, b, measure, result, verdict in pairs if (a, b) == (ours, theirs)}
        cells = []
        for measure in MEASURES:
            result = own.get(measure, (None, ""))[0]
            width = "" if result is None or result.half_width is None else f" ± {format_number(result.half_width)}"
            cells.append("–" if result is None else format_signed(result.difference) + width)
        remarks = dict.fromkeys(result.remark for result, _ in own.values() if result.remark)
        verdict = verdicts.overall([verdict for _, verdict in own.values()])
        lines.append([f"{ours} − {theirs}", *cells, f"**{verdict}**" + "".join(f" ({each})" for each in remarks)])
    return markdown_table(lines)
