"""Language modelling of a token stream."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgk._core.checksums import add_checksum, file_checksum
from mgk.models import DecoderConfig, LanguageModel
from mgk.models.sliding_window import sliding_losses
from mgk.models.vocabulary import FILE as VOCABULARY
from mgk.training.config import ModelSpec, Recipe, TrainConfig
from mgk.training.data import TokenSegments
from mgk.training.objectives.base import Metric, MetricFormat, Objective, repeat_to_size


class LanguageModelling(Objective):
    """Next-token cross-entropy; perplexity over segments in training, with a sliding window in evaluation."""

    metric, higher_is_better, predictions_file = "perplexity", False, "losses"
    format = MetricFormat(
        metric="perplexity",
        title="perplexity",
        factor=1.0,
        paired="nats per token on the same text",
        unit=", nats per token",
        decimals=4,
        note="Perplexity is evaluated with a sliding window.",
        flops="GFLOPs: forward pass of one segment",
    )
    config_class, model_class = DecoderConfig, LanguageModel
    fsdp_entry_points, uses_stride = ("losses",), True

    @classmethod
    def make_config(cls, recipe: Recipe, row: ModelSpec, preset: str, task: Any, data_dir: Path) -> DecoderConfig:
        defaults = {"vocab_size": len(task.vocabulary(data_dir)), "max_length": task.max_length}
        config: DecoderConfig = cls.resolve_config(recipe, row, preset, defaults)
        return config

    @classmethod
    def save_assets(cls, task: Any, data_dir: Path, directory: Path) -> None:
        task.vocabulary(data_dir).save(directory)
        if (path := directory / VOCABULARY).exists():
            add_checksum(path, file_checksum(path), count=1)

    def load_split(self, split: Any) -> TokenSegments:
        return TokenSegments(split, self.model.config.cutoffs, self.device)

    def compile_network(self) -> Any:
        self.model.compile_layers()
        return self.model

    def batch(self, indices: Tensor, split: str) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Return tokens and targets [B, L], and the capacity of each tail cluster of the adaptive softmax."""
        *tensors, capacities = self.examples[split].batch(indices)
        return tuple(tensors), capacities

    def losses(self, tokens: Tensor, targets: Tensor, *capacities: int) -> Tensor:
        """Compute the loss of each target."""
        losses: Tensor = self.network.losses(tokens, targets, capacities)
        return losses

    def measure(self, indices: Tensor, split: str) -> dict[str, Tensor]:
        count = len(indices)
        if self.is_compiled and split != "train":
            indices = repeat_to_size(indices, self.settings.eval_batch_size)
        (tokens, targets), capacities = self.batch(indices, split)
        return {"loss": self.losses(tokens, targets, *capacities)[:count].mean()}

    def measure_batch(self, *batch: Any) -> dict[str, Tensor]:
        return {"loss": self.losses(*batch).mean()}

    def metric_value(self, means: dict[str, float]) -> float:
        return math.exp(min(means["loss"], 100.0))

    @staticmethod
    def format_metric(value: float) -> str:
        return f"perplexity {value:.2f}"

    @classmethod
    def test_metric(cls, settings: TrainConfig) -> str:
        """Return the name of the metric, which includes the stride unless it is the paper's 1."""
        return cls.metric if settings.stride == 1 else f"{cls.metric}_stride_{settings.stride}"

    @classmethod
    def describe_test(cls, settings: TrainConfig, count: int) -> str:
        """Describe what the metric of a finished run was computed on: the stride unless it is 1, and the tokens."""
        return f"{count:,} tokens" if settings.stride == 1 else f"stride {settings.stride}, {count:,} tokens"

    @classmethod
    def table_format(cls, settings: TrainConfig) -> MetricFormat:
        """Return the format of the metric; the title includes the stride unless it is 1."""
        columns = super().table_format(settings)
        return columns if settings.stride == 1 else replace(columns, title=f"perplexity at stride {settings.stride}")

    @staticmethod
    def test_splits(task: Any) -> list[str]:
        return [name for name in task.splits if name != "train"]

    def evaluate(self, split: str, directory: Path | None) -> Iterator[Metric]:
        tokens = self.examples[split].tokens
        window = self.model.config.max_length
        with self.autocast():
            losses = sliding_losses(
                self.model, tokens, window=window, stride=self.settings.stride, batch_size=self.settings.eval_batch_size
            )
        count, mean = len(losses), float(losses.double().mean())
        self.save_predictions(directory, split, losses.cpu().numpy())
        suffix = self.test_metric(self.settings).removeprefix(self.metric)
        yield Metric(count, f"perplexity{suffix}", math.exp(min(mean, 100.0)))
        yield Metric(count, f"loss{suffix}", mean)
        yield Metric(count, "unknown_share", self.splits[split].unknown_share)
        bytes_per_token = self.splits[split].bytes_per_token
        if bytes_per_token is not None:
            yield Metric(count, f"bits_per_byte{suffix}", mean / math.log(2) / bytes_per_token)
        if self.task.unit == "subword" and self.settings.stride < window:
            # Segments without overlap: the usual evaluation of language models with subwords.
            loss = self.evaluate_means(split)["loss"]
            yield Metric(len(self.splits[split]) * window, "perplexity_segments", math.exp(min(loss, 100.0)))

    @staticmethod
    def run_example(model: Any, length: int) -> None:
        """Run one segment whose targets are all frequent tokens; the share of rare ones depends on the text."""
        tokens = torch.empty((1, length), dtype=torch.long)
        model.losses(tokens, tokens, [0] * len(model.config.cutoffs))
