"""Claim about heads: higher ranks and less similar heads, from the tables that `mgk analyze` writes."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from experiments.paper import verdicts
from experiments.paper.claims.quality import BASELINES
from experiments.paper.intervals import ONE_SEED, Difference
from experiments.statistics import half_width, pooled_spread
from mgk._core.io import format_number, format_signed, markdown_table
from mgk.training import results
from mgk.training.config import ModelSpec

# Name of a model in these tables: "mgk:4 bytes seed 0".
MODEL = re.compile(r"(?P<row>[\w-]+:[\d/]+) .*seed (?P<seed>\d+)")


@dataclass
class HeadStats:
    """Measurements of one analysed run."""

    row: ModelSpec
    seed: int
    numbers: dict[str, float] = field(default_factory=dict)

    losses: dict[str, float] = field(default_factory=dict)  # by split: mean of the last quarter of the records


# Measure: its table, and the value of a line. The paper claims higher values for mixtures.
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


def judge(models: list[HeadStats]) -> list[tuple[ModelSpec, ModelSpec, str, Difference, str]]:
    """Compare mixtures with baselines that have the same number of heads, and with those that have twice the number."""
    comparisons = []
    rows = list(dict.fromkeys(stats.row for stats in models))
    for mixture in rows:
        for heads in (mixture.heads, 2 * mixture.heads):
            baseline = ModelSpec(BASELINES.get(mixture.variant, ""), heads)
            for measure in MEASURES:
                result = compare(models, mixture, baseline, measure) if baseline in rows else None
                if result is not None:
                    comparisons.append((mixture, baseline, measure, result, verdicts.better(result)))
    return comparisons


def table(models: list[HeadStats]) -> str:
    lines = [["pair", *MEASURES, *LOSSES.values(), "verdict"]]
    comparisons = judge(models)
    for pair in dict.fromkeys((mixture, baseline) for mixture, baseline, *_ in comparisons):
        by_measure = {
            measure: (result, verdict) for *names, measure, result, verdict in comparisons if tuple(names) == pair
        }
        cells = []
        for measure in MEASURES:
            result = by_measure.get(measure, (None, ""))[0]
            width = "" if result is None or result.half_width is None else f" ± {format_number(result.half_width)}"
            cells.append("–" if result is None else format_signed(result.difference) + width)
        remarks = dict.fromkeys(result.remark for result, _ in by_measure.values() if result.remark)
        verdict = verdicts.overall([verdict for _, verdict in by_measure.values()])
        cells += [format_signed(loss_difference(models, *pair, split), 3) for split in LOSSES]
        lines.append([f"{pair[0]} − {pair[1]}", *cells, f"**{verdict}**" + "".join(f" ({text})" for text in remarks)])
    return markdown_table(lines)
