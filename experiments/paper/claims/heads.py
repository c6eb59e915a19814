"""Claim about heads: higher ranks and less similar heads, from the tables that `mgk analyze` writes."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from experiments.paper import verdicts
from experiments.paper.claims.quality import BASELINES
from experiments.paper.comparisons import ONE_SEED, Difference
from experiments.statistics import half_width, pooled_spread
from mgk._core.markdown import format_number, format_signed, markdown_table
from mgk.training import results
from mgk.training.config import ModelSpec

# Name of a model in these tables: "mgk:4 bytes seed 0".
MODEL = re.compile(r"(?P<row>[\w-]+:[\d/]+) .*seed (?P<seed>\d+)")


@dataclass
class HeadStats:
    """Measurements of one analysed run."""

    row: ModelSpec
    seed: int
    numbers: dict[str, float] = field(default_factory=dict)  # by measure
    losses: dict[str, float] = field(default_factory=dict)  # by split: mean of the last quarter of the records


class HeadComparison(NamedTuple):
    """A mixture and a baseline compared by one measure."""

    mixture: ModelSpec
    baseline: ModelSpec
    measure: str
    difference: Difference
    verdict: str


# Measure -> its table, and the value of a line of it. The paper claims higher values for mixtures.
MEASURES: dict[str, tuple[str, Callable[[dict[str, str]], float]]] = {
    "rank, % of full": ("ranks.csv", lambda line: 100 * float(line["rank"]) / float(line["size"])),
    "effective rank, % of full": ("ranks.csv", lambda line: 100 * float(line["effective_rank"]) / float(line["size"])),
    "dissimilarity of two heads' maps": ("pairs.csv", lambda line: float(line["jensen_shannon_bits"])),
    "dissimilarity of two heads' outputs": ("pairs.csv", lambda line: 1 - float(line["cka"] or "nan")),
}

# Losses that show how far a model has trained, by split. Ranks change during training: they are comparable only between
# models at equal losses.
LOSSES = {"train": "training loss, nats", "dev": "dev loss, nats"}


def read(folder: Path) -> list[HeadStats]:
    """Read an analysis: means over layers of the means over matrices or pairs of heads."""
    models: dict[str, HeadStats] = {}
    for name, (table, value) in MEASURES.items():
        layers: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for line in results.read([folder / table]):
            layers[line["model"]][line["layer"]].append(value(line))
        for model, by_layer in layers.items():
            match = MODEL.fullmatch(model)
            if match is None:
                continue
            stats = models.setdefault(model, HeadStats(ModelSpec.parse(match["row"]), int(match["seed"])))
            stats.numbers[name] = statistics.mean(statistics.mean(values) for values in by_layer.values())
    curves = folder / "curves.csv"
    lines = results.read([curves]) if curves.exists() else []
    for model, stats in models.items():
        for split in LOSSES:
            columns = {"run": model, "split": split, "metric": "loss"}
            losses = [float(line["value"]) for line in lines if columns.items() <= line.items()]
            if losses:
                stats.losses[split] = statistics.mean(losses[-max(1, len(losses) // 4) :])
    return list(models.values())


def loss_difference(models: list[HeadStats], first: ModelSpec, second: ModelSpec, split: str) -> float | None:
    """Return the difference of two models' losses at the end of training, in nats; None if one was not recorded."""
    losses = [
        [stats.losses[split] for stats in models if stats.row == row and split in stats.losses]
        for row in (first, second)
    ]
    return statistics.mean(losses[0]) - statistics.mean(losses[1]) if all(losses) else None


def compare(models: list[HeadStats], first: ModelSpec, second: ModelSpec, measure: str) -> Difference | None:
    """Compare two models by one measurement.

    The interval is over seeds only: the matrices of one model are not a sample of models.
    """

    def values(row: ModelSpec) -> list[float]:
        return [stats.numbers[measure] for stats in models if stats.row == row and measure in stats.numbers]

    a, b = values(first), values(second)
    if not a or not b:
        return None
    spread = pooled_spread([values(row) for row in dict.fromkeys(stats.row for stats in models)])
    width = None if spread is None else half_width([spread.error(len(a), len(b))])
    remark = ONE_SEED if spread is None else ""
    return Difference("", statistics.mean(a) - statistics.mean(b), width, 0.0, width, (len(a), len(b)), remark)


def judge(models: list[HeadStats]) -> list[HeadComparison]:
    """Compare mixtures with baselines that have the same number of heads, and with those that have twice the number."""
    comparisons = []
    rows = list(dict.fromkeys(stats.row for stats in models))
    for mixture in rows:
        for heads in (mixture.heads, 2 * mixture.heads):
            baseline = ModelSpec(BASELINES.get(mixture.variant, ""), heads)
            for measure in MEASURES:
                difference = compare(models, mixture, baseline, measure)
                if difference is not None:
                    verdict = verdicts.better(difference)
                    comparisons.append(HeadComparison(mixture, baseline, measure, difference, verdict))
    return comparisons


def table(models: list[HeadStats]) -> str:
    """Format the differences of each pair of models by all measures, with verdicts."""
    lines = [["pair", *MEASURES, *LOSSES.values(), "verdict"]]
    comparisons = judge(models)
    for mixture, baseline in dict.fromkeys((item.mixture, item.baseline) for item in comparisons):
        of_pair = [item for item in comparisons if (item.mixture, item.baseline) == (mixture, baseline)]
        differences = {item.measure: item.difference for item in of_pair}
        cells = [_format_difference(differences.get(measure)) for measure in MEASURES]
        cells += [format_signed(loss_difference(models, mixture, baseline, split), 3) for split in LOSSES]
        verdict = verdicts.overall([item.verdict for item in of_pair])
        remarks = dict.fromkeys(item.difference.remark for item in of_pair if item.difference.remark)
        lines.append([f"{mixture} − {baseline}", *cells, f"**{verdict}**" + "".join(f" ({text})" for text in remarks)])
    return markdown_table(lines)


def _format_difference(difference: Difference | None) -> str:
    if difference is None:
        return "–"
    width = "" if difference.half_width is None else f" ± {format_number(difference.half_width)}"
    return format_signed(difference.difference) + width
