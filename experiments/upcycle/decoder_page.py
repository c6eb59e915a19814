"""Section of docs/upcycling.md about merged decoders, from results/upcycle-decoder.csv and the results of the study."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.cost_quality import decoding
from experiments.cost_quality.page import format_interval
from experiments.cost_quality.plan import Arm, Plan, Stage
from experiments.cost_quality.summary import ArmSummary, family_spread, read_blocks, summarize
from experiments.result_rows import Rows, read_results
from experiments.statistics import Interval, SquaredError, compare, half_width, paired_error
from experiments.upcycle.decoder_arms import (
    MEAN,
    ORIGINAL,
    RECIPE,
    SVD,
    WITHOUT_REFIT,
    DecoderArm,
    arm_columns,
    is_match,
    merged_models,
    predictions_key,
    training_after,
)
from mgk._core.io import write_atomically
from mgk._core.markdown import fill_marked_parts, format_number, markdown_table
from mgk.training import predictions, results
from mgk.training.config import ModelSpec, Recipe, load_recipe

MARKER = "decoder"
SPEEDS = (decoding.PREFILL, decoding.DECODE, decoding.CACHE)


def cell(numbers: Sequence[float], digits: int = 3) -> str:
    """Format the mean of the seeds, with their standard deviation and number if there are several."""
    if len(numbers) < 2:
        return format_number(numbers[0] if numbers else None, digits)
    return f"{statistics.mean(numbers):.{digits}f} ± {statistics.stdev(numbers):.{digits}f} ({len(numbers)})"


@dataclass(frozen=True)
class Losses:
    """Losses of an arm in nats per token.

    Attributes:
        values: Mean loss by seed.
        blocks: Mean losses of blocks of text by seed; empty if they were not stored.
    """

    values: dict[int, float]
    blocks: dict[int, np.ndarray]

    @property
    def perplexities(self) -> list[float]:
        return [math.exp(value) for value in self.values.values()]

    def mean_blocks(self) -> np.ndarray | None:
        """Return the blocks averaged over the seeds, or None if those of a seed are missing."""
        if set(self.blocks) != set(self.values) or not self.blocks:
            return None
        return np.asarray(np.mean(list(self.blocks.values()), axis=0))


def read_losses(rows: Rows, folder: Path, recipe: str, arm: DecoderArm) -> Losses:
    """Return the latest losses of an arm."""
    key = arm_columns(arm, recipe)
    measured = [row for row in rows if row["metric"].startswith("loss") and is_match(row, key)]
    values, blocks = {}, {}
    for row in results.latest(measured, ["seed"]):
        seed = int(row["seed"])
        values[seed] = float(row["value"])
        stored = predictions.read(folder, predictions_key(row, arm.model, row["split"]))
        if stored is not None:
            blocks[seed] = stored
    return Losses(values, blocks)


def as_percent(interval: Interval) -> str:
    """Format a difference in nats per token as one of the perplexity in per cent."""
    return format_interval(Interval(100 * math.expm1(interval.difference), 100 * interval.half_width))


def compare_merges(first: Losses, second: Losses) -> str:
    """Format the difference of two merges of the same runs: paired by seed and by text."""
    seeds = sorted(set(first.values) & set(second.values))
    if not seeds:
        return "–"
    differences = [first.values[seed] - second.values[seed] for seed in seeds]
    difference = float(np.mean(differences))
    if len(seeds) < 2 or not all(seed in losses.blocks for seed in seeds for losses in (first, second)):
        return as_percent(Interval(difference, math.nan))
    blocks = [np.mean([losses.blocks[seed] for seed in seeds], axis=0) for losses in (first, second)]
    text = paired_error(*blocks)
    if text is None:
        return as_percent(Interval(difference, math.nan))
    over_seeds = SquaredError(float(np.var(differences, ddof=1)) / len(seeds), len(seeds) - 1)
    return as_percent(Interval(difference, half_width([over_seeds, text])))


def compare_with_start(
    merged: Losses, summary: ArmSummary | None, plan: Plan, summaries: Mapping[Arm, ArmSummary], folder: Path
) -> str:
    """Format the difference between a merged model and the same model trained from the start: independent runs."""
    if summary is None or not merged.values:
        return "–"
    blocks = merged.mean_blocks(), read_blocks(summary, plan, folder)
    spread = family_spread(plan, dict(summaries), summary.arm.recipe)
    return as_percent(compare(list(merged.values.values()), list(summary.values.values()), spread, blocks))


def table(rows: Rows, study_rows: Rows, folder: Path, recipe: Recipe, model: ModelSpec, split: str) -> str:
    """Return the table of perplexities: numbers of heads and training tokens by method.

    Args:
        rows: Rows of merged decoders.
        study_rows: Rows of all results, with the models trained from the start.
        folder: Results directory, for stored losses.
        recipe: Recipe of the runs.
        model: Their model.
        split: Judged split.
    """
    specs = merged_models(model)
    plan = Plan((Stage("merged", {Arm(recipe.name, spec): 1 for spec in (model, *specs)}),), (), split)
    summaries = summarize(plan, study_rows)
    steps = training_after(recipe).training.steps
    header = ["model", "cache", "training", "SVD", "SVD without refit", "mean", "SVD − mean, %", "from the start"]
    lines = [[*header, "SVD − from the start, %"]]
    for spec in specs:
        start = summaries.get(Arm(recipe.name, spec))
        share = ((spec.key_heads or spec.kv_heads or spec.heads) + (spec.kv_heads or spec.heads)) / (2 * spec.heads)
        for trained_steps in (0, steps):
            svd, without_refit, mean = (
                read_losses(rows, folder, recipe.name, DecoderArm(method, spec, trained_steps))
                for method in (SVD, WITHOUT_REFIT, MEAN)
            )
            lines.append(
                [
                    f"`{spec}`",
                    f"{share:.2f}",
                    f"{100 * trained_steps / recipe.training.steps:.3g} %",
                    *(cell(losses.perplexities, 2) for losses in (svd, without_refit, mean)),
                    compare_merges(svd, mean),
                    cell([] if start is None else [math.exp(loss) for loss in start.values.values()], 2),
                    compare_with_start(svd, start, plan, summaries, folder),
                ]
            )
    return markdown_table(lines)


def section(folder: Path) -> str:
    """Return the section from a results directory: one part per model of a recipe."""
    rows = [row for row in results.read([folder / f"{RECIPE}.csv"]) if row["recipe"] == RECIPE]
    if not rows:
        return "No merge has been measured yet."
    study_rows = read_results(folder)
    parts: list[str] = []
    for name, heads, split in dict.fromkeys((row["task"], row["heads"], row["split"]) for row in rows if row["method"]):
        model_rows = [row for row in rows if (row["task"], row["heads"], row["split"]) == (name, heads, split)]
        parts += model_part(model_rows, study_rows, folder, load_recipe(name), ModelSpec("softmax", int(heads)), split)
    speeds = decoding.table([{**row, "recipe": decoding.RECIPE} for row in rows if row["metric"] in SPEEDS])
    parts += [speeds] if speeds else []
    last = rows[-1]
    parts.append(
        f"Measured on {last['date']} with torch {last['torch']}, Transformers {last['transformers']}, {last['gpu']}, "
        f"commit {last['commit']};\n`results/{RECIPE}.csv`."
    )
    return "\n\n".join(parts)


def model_part(
    rows: Rows, study_rows: Rows, folder: Path, recipe: Recipe, model: ModelSpec, split: str
) -> tuple[str, str, str]:
    """Return the title, the description and the table of a model; the arguments are those of `table`."""
    after = training_after(recipe).training
    original, trained = (
        cell(read_losses(rows, folder, recipe.name, DecoderArm(ORIGINAL, model, steps)).perplexities, 2)
        for steps in (0, after.steps)
    )
    tokens = recipe.training.steps * recipe.training.batch_size * int(rows[0]["length"])
    description = (
        f"Perplexity on `{split}`, mean ± standard deviation (number of seeds). The original, `{model}`, has "
        f"{original}, and {trained} after\nthe same training: {after.steps} steps with a peak learning "
        f"rate of {after.lr:g}. Training from the start takes {tokens:,} tokens."
    )
    title = f"### `{recipe.name}`: {recipe.title}"
    return title, description, table(rows, study_rows, folder, recipe, model, split)


def write_section(folder: Path, page: Path) -> None:
    """Write the section between its markers; the rest of the page stays."""
    text = fill_marked_parts(page.read_text(encoding="utf-8"), {MARKER: section(folder)}, keep_others=True)
    write_atomically(page, text)
