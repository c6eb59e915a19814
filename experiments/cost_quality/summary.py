"""Summaries of the arms from results: quality, training time, cache and parameters, and answers to the questions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.cost_quality.plan import PRESET, Arm, Plan, Question, is_language_model, runs_of
from experiments.result_rows import Row, Rows
from experiments.statistics import Interval, Spread, compare, pooled_spread
from mgk import tasks
from mgk.models.attention_layer import make_attention
from mgk.training import predictions, results
from mgk.training.config import ModelSpec, Recipe, load_recipe
from mgk.training.equal_time import STEP_TIME
from mgk.training.objectives import OBJECTIVES, LanguageModelling

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
            selection_split is not None,
        )
    return summaries


def _as_loss(row: Row) -> float:
    """Return the value of a row, a perplexity as its logarithm."""
    value = float(row["value"])
    return math.log(value) if "perplexity" in row["metric"] else value


def family_spread(summaries: dict[Arm, ArmSummary], recipe: str) -> Spread | None:
    """Pool the deviation over seeds of the arms of a recipe."""
    return pooled_spread(
        [list(s.values.values()) for arm, s in summaries.items() if arm.recipe == recipe and not s.is_selection]
    )


def read_blocks(summary: ArmSummary, plan: Plan, folder: Path) -> np.ndarray | None:
    """Read the losses per block of text (or correctness per example), averaged over the seeds of an arm."""
    split, _ = metric_of(summary.recipe, plan)
    arrays = []
    for seed in summary.values:
        key = predictions.PredictionsKey(summary.recipe.name, summary.arm.model, PRESET, seed, split, summary.setup)
        array = predictions.read(folder, key)
        if array is None:
            return None
        arrays.append(array)
    return np.asarray(np.mean(arrays, axis=0)) if len({len(array) for array in arrays}) == 1 else None


@dataclass(frozen=True)
class Answer:
    """The comparison of a question. The interval is in per cent of perplexity, or in points of accuracy."""

    question: Question
    interval: Interval | None
    unit: str

    @property
    def words(self) -> str:
        """The answer in words, by the rule that an interval without 0 decides."""
        if self.interval is None:
            return "no runs yet"
        if math.isnan(self.interval.half_width):
            return "undecided: the error is unknown with one seed per arm"
        if not self.interval.excludes_zero:
            return "undecided"
        lower_is_better = self.unit != "points"
        return "better" if (self.interval.difference < 0) == lower_is_better else "worse"


def answer(question: Question, plan: Plan, summaries: dict[Arm, ArmSummary], folder: Path) -> Answer:
    """Compare the two arms of a question."""
    first, second = summaries.get(question.first), summaries.get(question.second)
    if first is None or second is None:
        return Answer(question, None, "%")
    interval = compare(
        list(first.values.values()),
        list(second.values.values()),
        family_spread(summaries, question.first.recipe),
        (read_blocks(first, plan, folder), read_blocks(second, plan, folder)),
    )
    # A difference of d nats changes the perplexity by the factor exp(d); below 5 % both agree to a fortieth.
    if first.is_language_model:
        return Answer(question, Interval(100 * math.expm1(interval.difference), 100 * interval.half_width), "%")
    return Answer(question, Interval(100 * interval.difference, 100 * interval.half_width), "points")
