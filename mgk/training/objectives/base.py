"""Base class of the objectives: model, splits, metric and evaluation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mgk._core.io import replacing
from mgk._core.validation import fail, spelling_hint
from mgk.models.cuda_graphs import GraphedBackward
from mgk.models.run_directory import RunDirectory
from mgk.training.config import ModelSpec, Recipe, TrainConfig, settable_names
from mgk.training.data import SequentialSampler


class NotFiniteError(ValueError):
    """The outputs of a model are NaN or infinite: it has diverged, or its weights are damaged."""

    def __init__(self, name: str, split: str) -> None:
        super().__init__(f"{name} on {split} is not finite: the model has diverged, or its weights are damaged")


class Metric(NamedTuple):
    """One metric of an evaluated model."""

    n_examples: int
    metric: str
    value: float


@dataclass(frozen=True)
class MetricFormat:
    """Format of an objective's metric in tables and plots.

    Attributes:
        metric: Name of the metric in the results.
        title: Column title.
        factor: Factor from the stored to the printed value.
        paired: Unit of a paired difference, in words.
        unit: Suffix of the title of the differences column, if its unit is not the metric's.
        decimals: Decimals of a paired difference.
        note: Sentence about the metric under the table.
        flops: Sentence that defines the FLOPs column.
    """

    metric: str
    title: str
    factor: float
    paired: str
    unit: str
    decimals: int
    note: str
    flops: str


def repeat_to_size(indices: Tensor, size: int) -> Tensor:
    """Repeat indices to fill a batch, so that a smaller last batch does not trigger a recompilation."""
    return torch.from_numpy(np.resize(indices.numpy(), size))


class Objective(ABC):
    """A model and the splits that it is trained and evaluated on.

    Attributes:
        metric: Metric that selects the best model on the development set.
        higher_is_better: Direction of the metric.
        predictions_file: First part of the name of the files with one prediction per example.
        format: Format of the metric in tables.
        config_class: Configuration of the model.
        model_class: Class of the model.
        fsdp_entry_points: Methods besides `forward` through which training calls the model.
        uses_stride: Whether `TrainConfig.stride` affects the evaluation.
    """

    metric: ClassVar[str]
    higher_is_better: ClassVar[bool]
    predictions_file: ClassVar[str]
    format: ClassVar[MetricFormat]
    config_class: ClassVar[type]
    model_class: ClassVar[type[nn.Module]]
    fsdp_entry_points: ClassVar[tuple[str, ...]] = ()
    uses_stride: ClassVar[bool] = False

    def __init__(self, model: Any, settings: TrainConfig, task: Any, splits: dict[str, Any]) -> None:
        self.model, self.settings, self.task, self.splits = model, settings, task, splits
        self.device = torch.device("cpu")
        self.network: Any = model  # the model, or its compiled form
        self.is_compiled = False
        self.examples: dict[str, Any] = {}  # splits on the device

    @classmethod
    @abstractmethod
    def make_config(cls, recipe: Recipe, row: ModelSpec, preset: str, task: Any, data_dir: Path) -> Any:
        """Return the resolved configuration of the model."""

    @classmethod
    def resolve_config(cls, recipe: Recipe, row: ModelSpec, preset: str, defaults: dict[str, Any]) -> Any:
        """Build the configuration from `defaults`, the recipe and the model spec; later ones take precedence."""
        known = {field.name for field in fields(cls.config_class)}
        settable = settable_names(cls.config_class)
        for name in recipe.model:
            if name not in known:
                advice = f"use one of {', '.join(settable)}{spelling_hint(name, settable)}"
                fail(f"model.{name}", f"(from --set or the recipe) is not a setting: {advice}")
        chosen = {
            "variant": row.variant,
            "num_heads": row.heads,
            "num_kv_heads": row.kv_heads,
            "num_key_heads": row.key_heads,
            "preset": preset,
        }
        try:
            return cls.config_class(**{**defaults, **recipe.model, **chosen})
        except ValueError as error:
            if str(error).partition(" ")[0] not in recipe.model.keys() - chosen.keys():
                raise
            raise ValueError(f"model.{error} (from --set or the recipe)") from None

    @classmethod  # noqa: B027  (optional: most models need no assets)
    def save_assets(cls, task: Any, data_dir: Path, directory: Path) -> None:
        """Save the files that the model needs besides its weights to the run directory."""

    def to_device(self, device: torch.device, compiled: Any = None) -> None:
        """Move the splits to the device and compile the model there, unless a compiled network is passed."""
        if not self.examples:
            self.device = device
            self.examples = {name: self.load_split(split) for name, split in self.splits.items()}
            self.is_compiled = self.settings.compile and device.type == "cuda"
            if self.is_compiled:
                # `compiled or ...` would call __len__, which compiled modules do not have.
                self.network = self.compile_network() if compiled is None else compiled

    @abstractmethod
    def load_split(self, split: Any) -> Any:
        """Copy a split to the device."""

    @abstractmethod
    def compile_network(self) -> Any:
        """Return the compiled form of the model."""

    @abstractmethod
    def measure(self, indices: Tensor, split: str) -> dict[str, Tensor]:
        """Return means over these examples: "loss" and other metrics."""

    @abstractmethod
    def batch(self, indices: Tensor, split: str) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Return the examples as tensors on the device, and integers that determine other shapes."""

    @abstractmethod
    def measure_batch(self, *batch: Any) -> dict[str, Tensor]:
        """Return the means of `measure` for the tensors and integers of a batch."""

    def graphed_step(self) -> Callable[[Tensor], dict[str, Tensor]] | None:
        """Return a function that runs forward and backward as a CUDA graph, or None if the model is not compiled.

        The function takes indices of training examples, returns the means of `measure`, and leaves the gradients in
        the parameters.
        """
        if not self.is_compiled:
            return None
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        graphs = GraphedBackward(parameters, self.measure_batch, buffers=self.model.buffers)
        return lambda indices: graphs(*self.batch(indices, "train"))

    @classmethod
    def worst_value(cls) -> float:
        """Return a value worse than every finite value of the metric."""
        return -math.inf if cls.higher_is_better else math.inf

    @classmethod
    def is_better(cls, value: float, best: float) -> bool:
        """Return whether `value` improves on `best`."""
        return value > best if cls.higher_is_better else value < best

    @abstractmethod
    def metric_value(self, means: dict[str, float]) -> float:
        """Compute the metric from the means of `measure` over a split."""

    @staticmethod
    @abstractmethod
    def format_metric(value: float) -> str:
        """Format the metric with its name and unit."""

    @classmethod
    def test_metric(cls, settings: TrainConfig) -> str:
        """Return the name of the metric in the results of a finished run."""
        return cls.metric

    @classmethod
    def describe_test(cls, settings: TrainConfig, count: int) -> str:
        """Describe what the metric of a finished run was computed on, of `count` examples."""
        return f"{count:,} examples"

    @classmethod
    def table_format(cls, settings: TrainConfig) -> MetricFormat:
        """Return the format of the metric in a table of runs with these settings."""
        return replace(cls.format, metric=cls.test_metric(settings))

    @staticmethod
    @abstractmethod
    def test_splits(task: Any) -> list[str]:
        """Return the splits that a finished model is evaluated on."""

    @abstractmethod
    def evaluate(self, split: str, directory: Path | None) -> Iterator[Metric]:
        """Evaluate the model on a split.

        Args:
            split: Name of the split.
            directory: Run directory to save the per-example predictions to, or None.

        Yields:
            The metrics of the split.
        """

    def save_predictions(self, directory: Path | None, split: str, predictions: np.ndarray) -> None:
        """Save one value per example of a split to a run directory."""
        if directory is not None:
            path = RunDirectory(directory).predictions(self.predictions_file, split)
            with replacing(path) as temporary, temporary.open("wb") as file:
                np.save(file, predictions, allow_pickle=False)

    def read_predictions(self, directory: Path) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the split and the values of each predictions file in a run directory."""
        run = RunDirectory(directory)
        for path in sorted(directory.glob(run.predictions(self.predictions_file, "*").name)):
            try:
                values = np.load(path, allow_pickle=False)
            except (ValueError, EOFError) as error:
                reason = f"{path} is damaged ({error})"
                raise ValueError(f"{reason}: remove {run.result} to evaluate the model again") from None
            yield path.stem.removeprefix(f"{self.predictions_file}-"), values

    @torch.no_grad()
    def evaluate_means(self, split: str) -> dict[str, float]:
        """Return the means of `measure` over a whole split."""
        totals: dict[str, float] = {}
        for indices in SequentialSampler(len(self.splits[split]), self.settings.eval_batch_size):
            with self.autocast():
                means = self.measure(indices, split)
            for name, value in means.items():
                totals[name] = totals.get(name, 0.0) + float(value) * len(indices)
        return {name: total / len(self.splits[split]) for name, total in totals.items()}

    @staticmethod
    @abstractmethod
    def run_example(model: Any, length: int) -> None:
        """Run the forward pass of one example of `length` tokens, for counting its FLOPs."""

    def autocast(self) -> torch.autocast:
        """Return the autocast context of the configured precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16")
