"""Table and plot of a sweep, computed from result files."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mgk._core.io import write_atomically
from mgk._core.markdown import markdown_table
from mgk.training import predictions, results
from mgk.training.config import ModelSpec, Recipe
from mgk.training.equal_time import EqualTimeSpec
from mgk.training.objectives import MetricFormat
from mgk.training.predictions import Difference
from mgk.training.sweep import filter_rows, metric_format

NOT_MEASURED = "—"
MAJORITY = "always the most frequent class"

# Fewer models are not plotted: the table has their numbers.
MIN_PLOTTED = 3


@dataclass
class ModelSummary:
    """Results of one model of a sweep over all its seeds: one row of the table."""

    row: ModelSpec
    values: dict[str, dict[int, float]] = field(default_factory=dict)  # split -> seed -> score, in the table's unit
    examples: dict[str, int] = field(default_factory=dict)  # split -> number of examples
    params: int = 0
    flops: int = 0
    steps: int = 0
    step_ms: float | None = None  # timed in isolation; step times of concurrent jobs are not comparable
    memory_mb: float = math.nan
    left_plateau: dict[int, int] = field(default_factory=dict)  # seed -> step, 0 if never
    # Difference from the first model on the same examples, in the table's unit, or the reason why there is none.
    difference: Difference | str = ""

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for values in self.values.values() for seed in values})

    @property
    def stuck(self) -> bool:
        """True if no seed left the initial plateau of the task."""
        return all(self.left_plateau.get(seed) == 0 for seed in self.seeds)

    @property
    def counted_seeds(self) -> list[int]:
        """Seeds that enter the mean: those that left the plateau, or all if none did."""
        return [seed for seed in self.seeds if self.stuck or self.left_plateau.get(seed) != 0]

    def scores(self, split: str) -> list[float]:
        """Return the scores of the counted seeds on a split."""
        values = self.values.get(split, {})
        return [values[seed] for seed in self.counted_seeds if seed in values]

    def spread(self, split: str, style: MetricFormat) -> float | None:
        """Return the standard deviation over seeds; for one seed, the sampling error of an accuracy."""
        scores = self.scores(split)
        if len(scores) > 1:
            return statistics.stdev(scores)
        return binomial_half_width(scores[0], self.examples[split]) if scores and style.metric == "accuracy" else None


def binomial_half_width(percent: float, examples: int) -> float:
    """Return half the width of the 95 % interval of an accuracy, in per cent."""
    share = percent / 100
    return float(196 * (share * (1 - share) / examples) ** 0.5)


def summarize(
    rows: list[dict[str, str]],
    recipe: Recipe,
    models: list[ModelSpec],
    preset: str,
    recipes: Mapping[EqualTimeSpec, Recipe] | None = None,
) -> list[ModelSummary]:
    """Summarize the results of each model, in the order of `models`; models without results are omitted.

    Args:
        rows: Rows of results files.
        recipe: Recipe of the sweep.
        models: Rows of the table.
        preset: Preset of the sweep.
        recipes: Recipes of the rows that have the training time of another model.
    """
    style = metric_format(recipe)
    summaries = []
    for model in models:
        changed = (recipes or {}).get(model) if isinstance(model, EqualTimeSpec) else recipe
        model_rows = [] if changed is None else filter_rows(rows, changed, model, preset, None)
        score_rows = [row for row in model_rows if row["metric"] == style.metric]
        if not score_rows:
            continue

        summary = ModelSummary(model, params=int(score_rows[0]["params"]), flops=int(score_rows[0]["flops"]))
        summary.steps = int(score_rows[0]["steps"])
        for row in score_rows:
            summary.values.setdefault(row["split"], {})[int(row["seed"])] = style.factor * float(row["value"])
            summary.examples[row["split"]] = int(row["n_examples"])
        summary.left_plateau = {
            int(row["seed"]): int(row["value"]) for row in model_rows if row["metric"] == "plateau_left_at_step"
        }
        # Models are timed with the recipe's steps.
        timed_rows = filter_rows(rows, recipe, model, preset, None)
        summary.step_ms = results.latest_value(timed_rows, "step_ms_alone")
        solo_memory = results.latest_value(timed_rows, "peak_mem_mb_alone")
        training_memory = statistics.median(float(row["peak_mem_mb"]) for row in score_rows)
        summary.memory_mb = training_memory if solo_memory is None else solo_memory
        summaries.append(summary)
    return summaries


def ordered_splits(summaries: list[ModelSummary]) -> list[str]:
    """Return the names of all splits: test first, then dev, then the others by name."""
    names = {split for summary in summaries for split in summary.values}
    return sorted(names, key=lambda name: (name != "test", name != "dev", name))


def add_differences(
    summaries: list[ModelSummary], recipe: Recipe, preset: str, out: Path, setups: dict[ModelSpec, str]
) -> str:
    """Set the paired difference of each summary from the first one.

    The comparison uses the split with the most examples; among equally large splits, the first in the table. Two
    models are comparable only if both left the plateau or neither did.

    Args:
        summaries: Summaries to change in place.
        recipe: Recipe of the sweep.
        preset: Preset of the sweep.
        out: Results directory with the stored predictions.
        setups: Setup hash of each model.

    Returns:
        The split that was compared, or "" if no two models have predictions on the same examples.
    """
    first, *later = summaries
    factor = metric_format(recipe).factor
    split = max(ordered_splits([first]), key=lambda name: first.examples[name])

    def read_predictions(summary: ModelSummary) -> list[np.ndarray]:
        setup = setups.get(summary.row, "")
        keys = (
            predictions.PredictionsKey(recipe.name, summary.row, preset, seed, split, setup)
            for seed in summary.counted_seeds
        )
        return [stored for key in keys if (stored := predictions.read(out, key)) is not None]

    for summary in later:
        difference = predictions.paired_difference(read_predictions(summary), read_predictions(first))
        if difference is not None and summary.stuck != first.stuck:
            summary.difference = f"n/a: {summary.row if summary.stuck else first.row} stayed on the plateau"
        elif difference is not None:
            summary.difference = Difference(factor * difference.mean, factor * difference.half_width)
    return split if any(summary.difference for summary in later) else ""


class Column(NamedTuple):
    """Title of a column of the table, and the function that formats its cell for a model."""

    title: str
    cell: Callable[[ModelSummary], str]


def make_table(summaries: list[ModelSummary], recipe: Recipe, paired_split: str = "") -> list[list[str]]:
    """Return the table as text cells, the header first."""
    splits, style = ordered_splits(summaries), metric_format(recipe)
    columns = [Column("model", lambda summary: str(summary.row))]
    columns += [Column(f"{split} {style.title}", partial(_format_mean, split=split, style=style)) for split in splits]
    columns.append(Column("each seed", partial(_format_scores, split=splits[0])))
    if paired_split:
        title = f"minus {summaries[0].row}, {paired_split}{style.unit}"
        columns.append(Column(title, lambda summary: _format_difference(summary.difference, style.decimals)))
    if recipe.plateau is not None:
        columns.append(Column("left the plateau at step", _format_plateau))
    if recipe.paper:
        columns.append(Column("paper", lambda summary: _format_paper(recipe.paper.get(str(summary.row)))))
    if any(isinstance(summary.row, EqualTimeSpec) for summary in summaries):
        columns.append(Column("steps", lambda summary: f"{summary.steps:,}"))
    columns += [
        Column("parameters", lambda summary: f"{summary.params:,}"),
        Column("GFLOPs", lambda summary: f"{summary.flops / 1e9:.3f}"),
        Column("step, ms", lambda summary: NOT_MEASURED if summary.step_ms is None else f"{summary.step_ms:.1f}"),
        Column("memory, MB", lambda summary: f"{summary.memory_mb:,.0f}"),
    ]
    lines = [[column.cell(summary) for column in columns] for summary in summaries]
    return [[column.title for column in columns], *lines]


def _format_scores(summary: ModelSummary, split: str) -> str:
    values = summary.values.get(split, {})
    return " ".join(f"{values[seed]:.1f}" for seed in summary.seeds if seed in values)


def _format_plateau(summary: ModelSummary) -> str:
    steps = [summary.left_plateau[seed] for seed in summary.seeds if seed in summary.left_plateau]
    return " ".join(f"{step:,}" if step else "never" for step in steps)


def _format_paper(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _format_mean(summary: ModelSummary, split: str, style: MetricFormat) -> str:
    scores, spread = summary.scores(split), summary.spread(split, style)
    if not scores:
        return ""
    text = f"{statistics.mean(scores):.2f}" + ("" if spread is None else f" ± {spread:.2f}")
    counted, seeds = len(summary.counted_seeds), len(summary.seeds)
    return text if counted == seeds else f"{text} ({counted} of {seeds} seeds)"


def _format_difference(difference: Difference | str, decimals: int) -> str:
    if isinstance(difference, str):
        return difference
    return f"{difference.mean:+.{decimals}f} ± {difference.half_width:.{decimals}f}"


def baseline_scores(rows: list[dict[str, str]], recipe: Recipe) -> dict[str, float]:
    """Return the recorded test accuracies of baselines without a network, in per cent."""
    test_rows = [row for row in rows if row.get("recipe") == recipe.name and row.get("split") == "test"]
    scores = {row["metric"]: 100 * float(row["value"]) for row in test_rows}
    baselines = {name.removeprefix("baseline: "): scores[name] for name in scores if name.startswith("baseline: ")}
    return baselines | ({MAJORITY: scores["majority_share"]} if "majority_share" in scores else {})


def metric_notes(summaries: list[ModelSummary], recipe: Recipe) -> list[str]:
    """Return sentences on the metric, the meaning of ± and the FLOP count."""
    style = metric_format(recipe)
    cells = [
        (len(summary.scores(split)), summary.spread(split, style)) for summary in summaries for split in summary.values
    ]
    several = any(count > 1 for count, _ in cells)
    meanings = ["the standard deviation over seeds"] if several else []
    if any(count == 1 and spread is not None for count, spread in cells):
        meanings.append(f"{'with one seed ' if several else ''}half the 95 % interval of the test set")
    # The FLOPs of an adaptive softmax depend on the targets: a rare one needs a second softmax.
    targets = " whose targets are all frequent words" if recipe.model.get("cutoffs") else ""
    sentences = [style.note, f"± is {', or '.join(meanings)}." if meanings else "", f"{style.flops}{targets}."]
    return [sentence for sentence in sentences if sentence]


def column_notes(summaries: list[ModelSummary], recipe: Recipe, paired_split: str) -> list[str]:
    """Return sentences on the columns and entries that only some tables have."""
    sentences = []
    if any(len(summary.counted_seeds) < len(summary.seeds) for summary in summaries):
        sentences.append("(n of m seeds): mean over the n seeds that left the plateau; `each seed` lists all m.")
    if paired_split:
        style = metric_format(recipe)
        sentences.append(f"Minus {summaries[0].row}: {style.paired}, with its 95 % interval over examples.")
        sentences.append("The interval does not include the variation between seeds.")
    if any(isinstance(summary.difference, str) and summary.difference for summary in summaries):
        sentences.append("n/a: only one of the two models left the plateau.")
    if any(isinstance(summary.row, EqualTimeSpec) for summary in summaries):
        sentences.append("@time: as many steps as fit into the training time of the other model.")
    is_timed = [summary.step_ms is not None for summary in summaries]
    if any(is_timed):
        sentences.append("Step time: each model timed in isolation.")
    if not all(is_timed):
        sentences.append(f"{NOT_MEASURED}: not timed in isolation (use `--alone`).")
    return sentences


def write_report(
    recipe: Recipe,
    models: list[ModelSpec],
    preset: str,
    files: list[Path],
    out: Path,
    setups: dict[ModelSpec, str] | None = None,
    recipes: Mapping[EqualTimeSpec, Recipe] | None = None,
) -> list[list[str]]:
    """Write the table to `out`/NAME.md and the plot to `out`/NAME.png, where NAME is the recipe's name.

    There is no plot of fewer than `MIN_PLOTTED` models.

    Args:
        recipe: Recipe of the sweep.
        models: Rows of the table.
        preset: Preset of the sweep.
        files: Result files to read.
        out: Directory of the report and of the stored predictions.
        setups: Setup hash of each model; results with any other setup are ignored. None accepts all results.
        recipes: Recipes of the rows that have the training time of another model.

    Returns:
        The table as text cells, the header first.

    Raises:
        ValueError: If the files contain no results for any of the models.
    """
    all_rows = results.read(files)
    rows = all_rows if setups is None else [row for row in all_rows if row.get("setup") in setups.values()]
    summaries = summarize(rows, recipe, models, preset, recipes)
    if not summaries:
        raise ValueError(_no_results_message(all_rows, recipe, models, preset, out))
    paired_split = add_differences(summaries, recipe, preset, out, setups or {})
    lines = make_table(summaries, recipe, paired_split)
    baselines = baseline_scores(rows, recipe)
    sentences = metric_notes(summaries, recipe)
    if baselines:
        scores = ", ".join(f"{name} {value:.1f} %" for name, value in baselines.items())
        sentences.append(f"Without a network: {scores}.")
    sentences += column_notes(summaries, recipe, paired_split)
    page = [f"# {recipe.title}", "", markdown_table(lines), "", " ".join(sentences), ""]
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / f"{recipe.name}.md", "\n".join(page))
    write_plot(out / f"{recipe.name}.png", summaries, recipe, baselines.get(MAJORITY))
    return lines


def write_plot(path: Path, summaries: list[ModelSummary], recipe: Recipe, chance: float | None) -> None:
    """Write the plot, or remove it if there are fewer than `MIN_PLOTTED` models."""
    from mgk.analysis.report.drawing import save_png
    from mgk.training.report_figure import make_figure

    if len(summaries) < MIN_PLOTTED:
        path.unlink(missing_ok=True)
    else:
        save_png(make_figure(summaries, recipe, chance), path, dpi=140)


def _no_results_message(
    rows: list[dict[str, str]], recipe: Recipe, models: list[ModelSpec], preset: str, out: Path
) -> str:
    names = sorted({f"{row['variant']}:{row['heads']}" for row in rows if row.get("recipe") == recipe.name} - {":"})
    requested = [str(model) for model in models]
    message = f"{out} has no results of {', '.join(requested)} under recipe {recipe.name} and preset {preset}"
    if not names:
        return message
    hint = " with other settings or data (see --set)" if set(names) & set(requested) else ""
    return f"{message}; it has {', '.join(names)}{hint}"
