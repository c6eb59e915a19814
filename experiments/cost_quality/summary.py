"""Summaries of the arms from results: quality, training time, cache and parameters, and answers to the questions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.cost_quality.plan import PRESET, Arm, Plan, Question, Stage, is_language_model, runs_of
from experiments.result_rows import Row, Rows
from experiments.statistics import EQUIVALENCE, Interval, Spread, compare, pooled_spread
from mgk import tasks
from mgk.models.attention_layer import make_attention
from mgk.training import predictions, results
from mgk.training.config import ModelSpec, Recipe, load_recipe
from mgk.training.equal_time import STEP_TIME
from mgk.training.objectives import OBJECTIVES, LanguageModelling

SEGMENTS = "perplexity_segments"  # metric: text in segments without overlap
CACHE_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class ArmSummary:
    """Results of one arm.

    Attributes:
        arm: The arm.
        recipe: Its recipe, with the number of steps that it trained.
        values: Loss in nats per token, or accuracy, by seed.
        setup: Setup hash of the runs.
        minutes: Training time, steps times the step time in isolation; None if it was not measured.
        step_ms: Step time in isolation.
        params: Number of parameters.
        cache_bytes: Bytes of cache per token in bf16; None for a classifier.
        segments: Perplexity over segments without overlap; None if it was not measured.
        is_selection: Whether the runs select settings: judged on another split, and compared only with each other.
    """

    arm: Arm
    recipe: Recipe
    values: dict[int, float]
    setup: str
    minutes: float | None
    step_ms: float | None
    params: int
    cache_bytes: int | None
    segments: float | None = None
    is_selection: bool = False

    @property
    def is_language_model(self) -> bool:
        return self.cache_bytes is not None

    @property
    def quality(self) -> float:
        """Perplexity, or accuracy in per cent, of the mean value."""
        mean = float(np.mean(list(self.values.values())))
        return math.exp(mean) if self.is_language_model else 100 * mean


def cache_bytes_per_token(recipe: Recipe, model: ModelSpec) -> int:
    """Count the bytes that one token adds to the caches of all layers, in bf16."""
    sizes = {"vocab_size": 2, "max_length": 1}
    config: Any = LanguageModelling.resolve_config(recipe, model, PRESET, sizes)
    total = 0
    for index, variant in enumerate(config.layer_variants):
        with torch.device("meta"):
            layer = make_attention(config, variant, index, is_causal=True, rotary=10000.0)
        # The layers of this package have no cache for decoding, but a property with its width.
        if hasattr(layer, "cache_width"):
            total += layer.cache_width * CACHE_DTYPE.itemsize
        else:
            total += layer.to(CACHE_DTYPE).make_cache(1, 1).nbytes
    return total


def metric_of(recipe: Recipe, plan: Plan, selection_split: str | None = None) -> tuple[str, str]:
    """Return the split and the metric that judge the runs of a recipe.

    Args:
        recipe: The recipe.
        plan: The plan, with the judged split.
        selection_split: Split of runs that select settings; their metric is that of the best checkpoint.
    """
    objective = OBJECTIVES[tasks.get_task(recipe.task).objective]
    metric = objective.test_metric(recipe.training)
    if selection_split is not None:
        return selection_split, f"best_{objective.metric}"
    if is_language_model(recipe):
        return plan.judged_split, metric.replace("perplexity", "loss", 1)
    return "test", metric


def summarize(plan: Plan, rows: Rows) -> dict[Arm, ArmSummary]:
    """Summarize the arms that have results; runs of several setups of one arm raise a ValueError."""
    summaries = {}
    for arm in plan.arms:
        recipe = arm.resolve(rows)
        if recipe is None:
            continue
        selection_split = plan.selection_split(arm)
        split, metric = metric_of(recipe, plan, selection_split)
        runs = runs_of(rows, arm, recipe)
        judged = [row for row in runs if row["split"] == split and row["metric"] == metric]
        if not judged:
            continue
        setups = {row["setup"] for row in judged}
        if len(setups) > 1:
            raise ValueError(f"{arm} of {arm.recipe} has results of {len(setups)} different settings or data")
        # Models are timed with the recipe's own settings: a time-matched arm has the step time of its model.
        step_ms = results.latest_value(runs_of(rows, arm, load_recipe(arm.recipe)), STEP_TIME)
        summaries[arm] = ArmSummary(
            arm,
            recipe,
            {int(row["seed"]): _as_loss(row) for row in results.latest(judged, ["seed"])},
            setups.pop(),
            None if step_ms is None else recipe.training.steps * step_ms / 60_000,
            step_ms,
            int(judged[-1]["params"]),
            cache_bytes_per_token(recipe, arm.model) if is_language_model(recipe) else None,
            _segments(runs, split),
            selection_split is not None,
        )
    return summaries


def _segments(runs: Rows, split: str) -> float | None:
    """Return the perplexity over segments, the geometric mean of the seeds; None without a measurement."""
    rows = [row for row in runs if row["split"] == split and row["metric"] == SEGMENTS]
    values = [math.log(float(row["value"])) for row in results.latest(rows, ["seed"])]
    return math.exp(float(np.mean(values))) if values else None


def _as_loss(row: Row) -> float:
    """Return the value of a row, a perplexity as its logarithm."""
    value = float(row["value"])
    return math.log(value) if "perplexity" in row["metric"] else value


def family_spread(plan: Plan, summaries: dict[Arm, ArmSummary], recipe: str) -> Spread | None:
    """Pool the deviation over seeds of the arms of a recipe and of the other recipes of its family."""
    family = plan.family(recipe)
    members = [summary for arm, summary in summaries.items() if arm.recipe in family and not summary.is_selection]
    return pooled_spread([list(summary.values.values()) for summary in members])


def blocks_by_seed(summary: ArmSummary, plan: Plan, folder: Path) -> dict[int, np.ndarray | None]:
    """Read the losses per block of text, or correctness per example; None for a seed without stored values."""
    split, _ = metric_of(summary.recipe, plan)
    name, model, setup = summary.recipe.name, summary.arm.model, summary.setup
    keys = {
        seed: predictions.PredictionsKey(name, model, PRESET, seed, split, setup) for seed in sorted(summary.values)
    }
    return {seed: predictions.read(folder, key) for seed, key in keys.items()}


def read_blocks(summary: ArmSummary, plan: Plan, folder: Path) -> np.ndarray | None:
    """Read the losses per block of text (or correctness per example), averaged over the seeds of an arm."""
    arrays = [array for array in blocks_by_seed(summary, plan, folder).values() if array is not None]
    is_complete = len(arrays) == len(summary.values) and len({len(array) for array in arrays}) == 1
    return np.asarray(np.mean(arrays, axis=0)) if is_complete else None


@dataclass(frozen=True)
class Answer:
    """The comparison of a question. The interval is in per cent of perplexity, or in points of accuracy.

    Attributes:
        question: The question.
        interval: First arm minus second arm; None without runs.
        unit: "%" or "points".
        unknown: Reason why the half-width is unknown, "" if it is known.
        log_interval: The interval of a language model in hundredths of a nat, which decides: unlike per cent, it does
            not depend on which arm is the first. None for accuracy.
    """

    question: Question
    interval: Interval | None
    unit: str
    unknown: str = ""
    log_interval: Interval | None = None

    @property
    def deciding_interval(self) -> Interval | None:
        """The interval that the rules are applied to."""
        return self.log_interval or self.interval

    @property
    def words(self) -> str:
        """The answer in words, by the rules of `experiments.statistics`."""
        interval = self.deciding_interval
        if interval is None:
            return "no runs yet"
        if math.isnan(interval.half_width):
            return f"undecided ({self.unknown})"
        if interval.is_within(EQUIVALENCE):
            return f"equal within {EQUIVALENCE:g} {self.unit}"
        if not interval.excludes_zero:
            return "undecided"
        lower_is_better = self.unit != "points"
        return "better" if (interval.difference < 0) == lower_is_better else "worse"


def answer(question: Question, plan: Plan, summaries: dict[Arm, ArmSummary], folder: Path) -> Answer:
    """Compare the two arms of a question."""
    first, second = summaries.get(question.first), summaries.get(question.second)
    if first is None or second is None:
        return Answer(question, None, "%")
    interval = compare(
        list(first.values.values()),
        list(second.values.values()),
        family_spread(plan, summaries, question.first.recipe),
        (read_blocks(first, plan, folder), read_blocks(second, plan, folder)),
    )
    unknown = unknown_error(plan, summaries, (first, second), folder) if math.isnan(interval.half_width) else ""
    hundredths = Interval(100 * interval.difference, 100 * interval.half_width)
    if first.is_language_model:
        # A difference of d nats changes the perplexity by the factor exp(d).
        factor = math.exp(interval.difference)
        percent = Interval(100 * math.expm1(interval.difference), factor * hundredths.half_width)
        return Answer(question, percent, "%", unknown, hundredths)
    return Answer(question, hundredths, "points", unknown)


def unknown_error(
    plan: Plan, summaries: dict[Arm, ArmSummary], pair: tuple[ArmSummary, ArmSummary], folder: Path
) -> str:
    """Return the reason why the interval of two arms is unknown."""
    if family_spread(plan, summaries, pair[0].arm.recipe) is None:
        return "the error over seeds is unknown with one seed per arm"
    what = "losses per block of text" if pair[0].is_language_model else "predictions per example"
    missing = []
    for summary in pair:
        seeds = [str(seed) for seed, array in blocks_by_seed(summary, plan, folder).items() if array is None]
        missing += [f"`{summary.arm}` (seed {', '.join(seeds)})"] if seeds else []
    if missing:
        return f"results/answers lacks the {what} of {' and '.join(missing)}"
    return f"the {what} of the arms are of different data"


def next_seeds(plan: Plan, stage: Stage, rows: Rows, folder: Path) -> dict[Arm, int]:
    """Return the arms of a stage with one more seed each; empty if its rule needs none.

    The rule looks at the half-widths of the primary questions, and not at the differences.

    Args:
        plan: The plan.
        stage: A stage with `until_half_width`.
        rows: Rows of all results files.
        folder: Results directory, for stored losses.
    """
    summaries = summarize(plan, rows)
    counts = [len(summaries[arm].values) if arm in summaries else 0 for arm in stage.arms]
    is_complete = all(count >= plan.arms.get(arm, 1) for arm, count in zip(stage.arms, counts, strict=True))
    intervals = [answer(question, plan, summaries, folder).deciding_interval for question in plan.primary_questions]
    widths = [math.nan if interval is None else interval.half_width for interval in intervals]
    # Seeds do not help if an interval is unknown.
    if not is_complete or any(map(math.isnan, widths)) or max(widths) <= (stage.until_half_width or math.inf):
        return {}
    count = min(counts) + 1
    return {arm: count for arm, most in stage.arms.items() if count <= most}
