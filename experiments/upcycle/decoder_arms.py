"""Merged versions of the study's trained decoders, and the measurements of one of them."""

from __future__ import annotations

import json
import math
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.cost_quality import decoding
from experiments.cost_quality.plan import PRESET, Arm, is_language_model
from experiments.result_rows import Row, Rows
from mgk import tasks
from mgk._core.validation import fail
from mgk.models import LanguageModel
from mgk.models.run_directory import RunDirectory
from mgk.training import predictions, results
from mgk.training.config import ModelSpec, Recipe
from mgk.training.data import EpochPermutation, seed_of
from mgk.training.evaluate import result_columns
from mgk.training.objectives import LanguageModelling
from mgk.training.objectives.base import Metric
from mgk.training.runs import finished_runs
from mgk.training.trainer import Run, check_same_settings, continue_training

RECIPE = "upcycle-decoder"  # of the results: rows of the study are not confused with these
EXTRA_COLUMNS = ("method", "tokens", "transformers")
# The settings of the training were fixed before any result was seen, and are the same for all arms.
# Share of the recipe's training tokens.
SHARE = 0.05
# Peak of the learning rate relative to the recipe's. The geometric mean of the recipe's peak and its final rate, a
# tenth of it, is 0.32: the weights are those of a trained model, but the merged projections have to change.
RATE = 0.3
WARMUP = 0.1  # share of the steps
# Text for the calibration, in tokens per dimension of the keys: `mgk.hf.upcycle` uses 20 and holds out a tenth.
CALIBRATION = 24
ORIGINAL, SVD, WITHOUT_REFIT, MEAN = "none", "svd", "svd without refit", "mean"


@dataclass(frozen=True)
class DecoderArm:
    """A merged decoder.

    Attributes:
        method: ORIGINAL for the model as it is, SVD, WITHOUT_REFIT or MEAN.
        model: Numbers of heads.
        steps: Steps of training after the merge.
    """

    method: str
    model: ModelSpec
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.model}, {self.method}, {self.steps} steps"


def merged_models(model: ModelSpec) -> list[ModelSpec]:
    """Return the models with half of the key heads, with one, and with half of all key heads and value heads."""
    if model.variant != "softmax" or model.kv_heads or model.key_heads or model.heads % 2:
        fail("--model", f"must be softmax:HEADS with an even number of heads, got {model}")
    heads, half = model.heads, model.heads // 2
    numbers = [(half, heads), (1, heads), (half, half)]
    return list(dict.fromkeys(ModelSpec.parse(f"softmax:{heads}/{keys}/{values}") for keys, values in numbers))


def training_after(recipe: Recipe) -> Recipe:
    """Return the recipe with the settings of the training after a merge."""
    steps = max(1, round(SHARE * recipe.training.steps))
    settings = replace(
        recipe.training,
        steps=steps,
        lr=RATE * recipe.training.lr,
        warmup=int(WARMUP * steps),
        schedule="cosine",
    )
    return replace(recipe, training=settings)


def plan_arms(recipe: Recipe, model: ModelSpec) -> list[DecoderArm]:
    """Return all arms, those without training first."""
    merged, steps = merged_models(model), training_after(recipe).training.steps
    arms = [DecoderArm(ORIGINAL, model)]
    arms += [DecoderArm(method, item) for item in merged for method in (SVD, MEAN, WITHOUT_REFIT)]
    arms += [DecoderArm(method, item, steps) for item in merged for method in (SVD, MEAN)]
    return [*arms, DecoderArm(ORIGINAL, model, steps)]


class DecoderStudy:
    """Measure merged versions of the trained runs of one model of a recipe.

    Args:
        recipe: Recipe of the runs, of a language model.
        model: Model of the runs.
        runs: Parent directory of the run directories.
        data_dir: Data directory.
        split: Split that is judged.
        device: Device of the models.
    """

    def __init__(
        self, recipe: Recipe, model: ModelSpec, runs: Path, data_dir: Path, split: str, device: torch.device
    ) -> None:
        self.recipe, self.model, self.data_dir, self.split, self.device = recipe, model, data_dir, split, device
        self.task: Any = tasks.get_task(recipe.task)
        if not is_language_model(recipe):
            fail("--recipe", f"{recipe.name} trains no language model")
        self.arms = plan_arms(recipe, model)
        self.runs = self._find_runs(runs)

    def _find_runs(self, runs: Path) -> dict[int, Path]:
        """Return the directories of the finished runs by seed, after checking their settings and data."""
        directories = {}
        for directory in finished_runs(runs, self.recipe.name, self.model, PRESET):
            stored = RunDirectory(directory).read_description("seed")
            run = Run(self.recipe, self.model, PRESET, stored["seed"], self.data_dir, directory)
            check_same_settings(directory, stored, json.loads(json.dumps(run.describe(self.task))))
            directories[run.seed] = directory
        if not directories:
            command = "python -m experiments.cost_quality --run"
            fail("--runs", f"{runs} has no finished run of {self.model} of {self.recipe.name}: run {command}")
        return dict(sorted(directories.items()))

    def run_of(self, arm: DecoderArm, seed: int) -> Run:
        """Return the run whose settings are those of an arm."""
        recipe = training_after(self.recipe) if arm.steps else self.recipe
        return Run(recipe, arm.model, PRESET, seed, self.data_dir, self.runs[seed])

    def key(self, arm: DecoderArm, seed: int) -> dict[str, str]:
        """Return the columns of results that identify a measurement."""
        return {
            **arm_columns(arm, self.recipe.name),
            "seed": str(seed),
            "setup": self.run_of(arm, seed).setup(self.task),
        }

    def missing(self, rows: Rows, seeds: Iterable[int]) -> list[tuple[DecoderArm, int]]:
        """Return the arms and seeds that results lack."""
        measured = [row for row in rows if row["metric"].startswith("loss")]
        keys = {(arm, seed): self.key(arm, seed) for arm in self.arms for seed in seeds}
        return [item for item, key in keys.items() if not any(is_match(row, key) for row in measured)]

    def calibration(self, seed: int) -> list[dict[str, torch.Tensor]]:
        """Return segments of the training text, one per batch, in the order of the run."""
        stream = self.task.split(self.data_dir, "train")
        config = RunDirectory(self.runs[seed]).load_language_model().config
        count = max(2, math.ceil(CALIBRATION * config.num_heads * config.head_dim / stream.length))
        order = EpochPermutation(len(stream), seed_of(seed, 1)).take(0, count)
        segments = [stream.tokens[n * stream.length : (n + 1) * stream.length] for n in order]
        return [{"input_ids": torch.from_numpy(part.astype(np.int64))[None]} for part in segments]

    def make(self, arm: DecoderArm, seed: int) -> LanguageModel:
        """Return the model of an arm before its training, in eval mode."""
        import mgk.hf

        directory = self.runs[seed]
        if arm.method == ORIGINAL:
            return RunDirectory(directory).load_language_model(self.device)
        values = arm.model.kv_heads or arm.model.heads
        merged, _ = mgk.hf.upcycle(
            mgk.hf.MGKForCausalLM.from_run(directory).to(self.device),
            num_key_heads=arm.model.key_heads or values,
            num_value_heads=values,
            calibration=self.calibration(seed),
            method=arm.method.split()[0],
            refit=arm.method == SVD,
        )
        # The layers of the wrapper support gradient checkpointing of Transformers; those of a run do not.
        model = LanguageModel(merged.model.config).to(self.device)
        model.load_state_dict(merged.model.state_dict())
        return model.eval()

    def train(self, model: LanguageModel, seed: int) -> None:
        """Train a model in place, on the first examples of the run's order."""
        settings = training_after(self.recipe).training
        splits = {"train": self.task.split(self.data_dir, "train")}
        objective = LanguageModelling(model.train(), settings, self.task, splits)
        continue_training(objective, seed, "gpu" if self.device.type == "cuda" else "cpu")

    def evaluate(self, model: LanguageModel) -> tuple[list[Metric], np.ndarray]:
        """Return the metrics of a model on the judged split, and the loss of each token."""
        splits = {self.split: self.task.split(self.data_dir, self.split)}
        # Not compiled: every arm has other shapes, and compiling takes longer than one pass over the split.
        settings = replace(self.recipe.training, compile=False)
        objective = LanguageModelling(model.to(self.device).eval(), settings, self.task, splits)
        objective.to_device(self.device)
        with tempfile.TemporaryDirectory() as folder:
            metrics = list(objective.evaluate(self.split, Path(folder)))
            losses = dict(objective.read_predictions(Path(folder)))[self.split]
        return metrics, losses

    def measure(self, arm: DecoderArm, seed: int, out: Path) -> list[dict[str, Any]]:
        """Make, train and evaluate an arm; return its result rows, and store its losses in `out`."""
        model = self.make(arm, seed)
        if arm.steps:
            self.train(model, seed)
        metrics, losses = self.evaluate(model)
        # All models share the code of their layers, whose compiled versions are limited in number.
        torch.compiler.reset()
        run, key = self.run_of(arm, seed), self.key(arm, seed)
        predictions.save(out, predictions_key(key, arm.model, self.split), losses)
        settings = run.recipe.training
        columns = {
            **result_columns(run, self.task, model.config),
            **key,
            "lr": settings.lr if arm.steps else "",
            "tokens": arm.steps * settings.batch_size * self.task.max_length,
            "split": self.split,
            **origin(),
        }
        return [{**columns, **metric._asdict()} for metric in metrics]

    def missing_speeds(self, rows: Rows, lengths: Iterable[int]) -> list[tuple[ModelSpec, int]]:
        """Return the models and lengths whose speed was not measured on this device."""
        present = {"metric": decoding.DECODE, "gpu": results.environment()["gpu"]}
        models = (self.model, *merged_models(self.model))
        keys = {
            (model, length): {**speed_key(self.recipe.name, model), **present, "length": str(length)}
            for length in lengths
            for model in models
        }
        return [item for item, key in keys.items() if not any(is_match(row, key) for row in rows)]

    def measure_speed(self, model: ModelSpec, length: int) -> list[dict[str, Any]]:
        """Return result rows with tokens per second and bytes of cache; the weights are random."""
        config = Run(self.recipe, model, PRESET, 0, self.data_dir, Path()).model_config(self.task)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        network = LanguageModel(config).to(self.device, dtype).eval()
        values = decoding.measure(network, length)
        rows = decoding.result_rows(Arm(self.recipe.name, model), network, length, values)
        return [{**row, **speed_key(self.recipe.name, model), **origin()} for row in rows]


def arm_columns(arm: DecoderArm, recipe: str) -> dict[str, str]:
    """Return the columns of results that identify an arm."""
    return {
        "recipe": RECIPE,
        "task": recipe,
        "method": arm.method,
        **_numbers(arm.model),
        "steps": str(arm.steps),
    }


def speed_key(recipe: str, model: ModelSpec) -> dict[str, str]:
    """Return the columns of results that identify the speed of a model; it does not depend on the method."""
    return {"recipe": RECIPE, "task": recipe, "method": "", **_numbers(model)}


def _numbers(model: ModelSpec) -> dict[str, str]:
    return {
        "variant": model.variant,
        "heads": str(model.heads),
        "kv_heads": str(model.kv_heads or model.heads),
        "key_heads": str(model.key_heads or ""),
    }


def origin() -> dict[str, Any]:
    """Return the columns about the command and the version of Transformers."""
    return {
        "command": shlex.join(["python", "-m", "experiments.upcycle.decoder", *sys.argv[1:]]),
        "transformers": results.version_of("transformers"),
    }


def is_match(row: Row, key: dict[str, str]) -> bool:
    """Return whether a row has the values of a key."""
    return all((row.get(column) or "") == value for column, value in key.items())


def predictions_key(key: dict[str, str], model: ModelSpec, split: str) -> predictions.PredictionsKey:
    """Return the key of the stored losses of a measurement."""
    name = f"{key['method'].replace(' ', '-')}-{key['setup']}"
    return predictions.PredictionsKey(RECIPE, model, PRESET, int(key["seed"]), split, name)


def select_seeds(text: str | None, available: Sequence[int]) -> list[int]:
    """Parse --seeds, and check that all have runs; None selects all."""
    if text is None:
        return list(available)
    if not all(part.strip().isdecimal() for part in text.split(",")):
        fail("--seeds", f"must be integers separated by commas, got {text!r}")
    seeds = [int(part) for part in text.split(",")]
    if absent := [seed for seed in seeds if seed not in available]:
        finished = ", ".join(map(str, available))
        fail("--seeds", f"seed {absent[0]} has no finished run; the seeds that have one are {finished}")
    return seeds
