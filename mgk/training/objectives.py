"""What a model learns and how it is judged: a row of OBJECTIVES for each kind of task.

The training loop knows neither tokens nor metrics: it asks the objective for the loss of some examples.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mgk._core.validation import one_of
from mgk.models import Classifier, DecoderConfig, EncoderConfig, LanguageModel
from mgk.models.cuda_graphs import GraphedBackward
from mgk.models.sliding_window import sliding_losses
from mgk.training.config import ModelSpec, Recipe, TrainConfig
from mgk.training.data import DeviceDataset, SequentialSampler, TokenSegments


class Metric(NamedTuple):
    """One number of a finished model."""

    n_examples: int
    metric: str
    value: float


def filled(indices: Tensor, size: int) -> Tensor:
    """As many as in any other batch, some a second time: one more shape would be compiled for the last."""
    return torch.from_numpy(np.resize(indices.numpy(), size))


class Objective(ABC):
    """A model with the examples it is trained and judged on, in the memory of a device."""

    metric: ClassVar[str]  # what the best model is chosen by, on the development set
    left: ClassVar[str]  # what `judge` leaves for each split is a file of this name
    better: ClassVar[int]  # 1 where more of it is better, -1 where less is
    config_class: ClassVar[type]
    model_class: ClassVar[type[nn.Module]]
    entries: ClassVar[tuple[str, ...]] = ()  # methods beside forward by which training enters the model

    def __init__(self, model: Any, settings: TrainConfig, task: Any, splits: dict[str, Any]) -> None:
        self.model, self.settings, self.task, self.splits = model, settings, task, splits
        self.device = torch.device("cpu")
        self.network: Any = model
        self.compiles = False
        self.examples: dict[str, Any] = {}

    @classmethod
    @abstractmethod
    def config(cls, recipe: Recipe, row: ModelSpec, preset: str, task: Any, data_dir: Path) -> Any:
        """The model's resolved configuration."""

    @classmethod
    def resolve(cls, recipe: Recipe, row: ModelSpec, preset: str, settings: dict[str, Any]) -> Any:
        """The recipe's settings of the model over `settings`, and what the row says over both."""
        known = {field.name for field in fields(cls.config_class)}
        for name in recipe.model:
            one_of("model.* (from --set or the recipe)", name, sorted(known))
        chosen = {"variant": row.variant, "num_heads": row.heads, "num_kv_heads": row.kv_heads, "preset": preset}
        try:
            return cls.config_class(**{**settings, **recipe.model, **chosen})
        except ValueError as error:
            if str(error).partition(" ")[0] not in recipe.model.keys() - chosen.keys():
                raise
            raise ValueError(f"model.{error} (from --set or the recipe)") from None

    @classmethod
    @abstractmethod
    def keep(cls, task: Any, data_dir: Path, directory: Path) -> None:
        """Leaves in the run's directory what its model needs beside its weights."""

    def place(self, device: torch.device, compiled: Any = None) -> None:
        """Examples go to the device; what is to be compiled, is, unless that is at hand for this model."""
        if not self.examples:
            self.device = device
            self.examples = {name: self.hold(split) for name, split in self.splits.items()}
            self.compiles = self.settings.compile and device.type == "cuda"
            if self.compiles:
                # Not by its truth: what PyTorch compiled would be asked for its length.
                self.network = self.compiled() if compiled is None else compiled

    @abstractmethod
    def hold(self, split: Any) -> Any:
        """A split in the memory of the device."""

    @abstractmethod
    def compiled(self) -> Any:
        """The network that is called in the model's place."""

    @abstractmethod
    def measure(self, indices: Tensor, split: str) -> dict[str, Tensor]:
        """Means over these examples: "loss", and what else tells how it goes."""

    @abstractmethod
    def batch(self, indices: Tensor, split: str) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Examples as tensors on the device, and the numbers that decide shapes beside theirs."""

    @abstractmethod
    def measure_batch(self, *batch: Any) -> dict[str, Tensor]:
        """`measure` of the tensors and numbers of a batch."""

    def recorder(self) -> Callable[[Tensor], dict[str, Tensor]] | None:
        """What measures training examples and leaves the gradients of their loss in the parameters, by recorded steps;
        None where steps cannot be recorded: where nothing is compiled."""
        if not self.compiles:
            return None
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        graphs = GraphedBackward(parameters, self.measure_batch, buffers=self.model.buffers)
        return lambda indices: graphs(*self.batch(indices, "train"))

    @abstractmethod
    def value(self, means: dict[str, float]) -> float:
        """The metric, from means of `measure` over a split."""

    @classmethod
    def judged_by(cls, settings: TrainConfig) -> str:
        """The name of the metric among the results of a finished model."""
        return cls.metric

    @staticmethod
    @abstractmethod
    def told(value: float) -> str:
        """The metric in words."""

    @staticmethod
    @abstractmethod
    def judged_on(task: Any) -> list[str]:
        """The splits that a finished model is judged on."""

    @abstractmethod
    def judge(self, split: str, directory: Path | None) -> Iterator[Metric]:
        """What the model is worth on a split; what each example says goes to the directory."""

    def answers(self, directory: Path) -> Iterator[tuple[str, np.ndarray]]:
        """What `judge` left in a directory: each split and a number for each of its examples."""
        for path in sorted(directory.glob(f"{self.left}-*.npy")):
            yield path.stem.removeprefix(f"{self.left}-"), np.load(path, allow_pickle=False)

    @torch.no_grad()
    def means(self, split: str) -> dict[str, float]:
        """`measure` over a whole split."""
        totals: dict[str, float] = {}
        for indices in SequentialSampler(len(self.splits[split]), self.settings.eval_batch_size):
            with self.autocast():
                measured = self.measure(indices, split)
            for name, value in measured.items():
                totals[name] = totals.get(name, 0.0) + float(value) * len(indices)
        return {name: total / len(self.splits[split]) for name, total in totals.items()}

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16")


class Classification(Objective):
    """The class of an example; accuracy."""

    metric, left, better = "accuracy", "correct", 1
    config_class, model_class = EncoderConfig, Classifier

    @classmethod
    def config(cls, recipe: Recipe, row: ModelSpec, preset: str, task: Any, data_dir: Path) -> EncoderConfig:
        """Pooling over the padded length is what the authors' code does."""
        settings = {
            "vocab_size": task.vocab_size,
            "num_classes": task.num_classes,
            "max_length": task.max_length,
            "documents": task.documents,
            "pooling": "mean-padded" if preset == "ref-lra" else "mean",
        }
        config: EncoderConfig = cls.resolve(recipe, row, preset, settings)
        return config

    @classmethod
    def keep(cls, task: Any, data_dir: Path, directory: Path) -> None:
        pass

    def hold(self, split: Any) -> DeviceDataset:
        return DeviceDataset(split, self.model.config.max_length, self.device)

    def compiled(self) -> Any:
        return torch.compile(self.model)

    @property
    def packs(self) -> bool:
        return self.settings.padding == "packed" and self.model.config.packs and self.device.type == "cuda"

    def batch(self, indices: Tensor, split: str) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Tokens, where their documents end, labels: packed [T], offsets; else [n, L] or [n, 2, L], lengths."""
        chosen, examples = indices.numpy(), self.examples[split]
        if self.packs:
            return examples.packed(chosen), ()
        width = examples.width(chosen) if self.settings.padding == "longest" else examples.max_length
        return examples.batch(indices.to(self.device), width), ()

    def predict(self, tokens: Tensor, ends: Tensor) -> Tensor:
        if not self.packs:
            return self.network(tokens, ends)
        torch._dynamo.maybe_mark_dynamic(tokens, 0)
        return self.network(tokens, cu_seqlens=ends)

    def logits(self, indices: Tensor, split: str) -> tuple[Tensor, Tensor]:
        count = len(indices)
        if self.compiles and split != "train":
            indices = filled(indices, self.settings.eval_batch_size)
        (tokens, ends, labels), _ = self.batch(indices, split)
        return self.predict(tokens, ends)[:count], labels[:count]

    def measure(self, indices: Tensor, split: str) -> dict[str, Tensor]:
        return self.means_of(*self.logits(indices, split))

    def measure_batch(self, *batch: Any) -> dict[str, Tensor]:
        tokens, ends, labels = batch
        return self.means_of(self.predict(tokens, ends), labels)

    @staticmethod
    def means_of(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(logits.float(), labels)
        return {"loss": loss, "accuracy": (logits.argmax(-1) == labels).float().mean()}

    def value(self, means: dict[str, float]) -> float:
        return means["accuracy"]

    @staticmethod
    def told(value: float) -> str:
        return f"accuracy {100 * value:.2f} %"

    @staticmethod
    def judged_on(task: Any) -> list[str]:
        return [name for name in task.splits if name not in ("train", "dev")]

    def judge(self, split: str, directory: Path | None) -> Iterator[Metric]:
        correct = self.correct(split)
        if directory is not None:
            np.save(directory / f"{self.left}-{split}.npy", correct, allow_pickle=False)
        shares = self.splits[split].class_shares(self.task.num_classes)
        yield Metric(len(correct), "majority_share", float(shares.max()))
        yield Metric(len(correct), "accuracy", float(correct.mean()))

    @torch.no_grad()
    def correct(self, split: str) -> np.ndarray:
        """For every example of a split, whether the prediction is right."""
        parts = []
        for indices in SequentialSampler(len(self.splits[split]), self.settings.eval_batch_size):
            with self.autocast():
                logits, labels = self.logits(indices, split)
            parts.append(logits.argmax(-1) == labels)
        return torch.cat(parts).cpu().numpy()


class LanguageModelling(Objective):
    """The next token. While training, perplexity within segments; a finished model is judged by the sliding window."""

    metric, left, better = "perplexity", "losses", -1
    config_class, model_class, entries = DecoderConfig, LanguageModel, ("losses",)

    @classmethod
    def config(cls, recipe: Recipe, row: ModelSpec, preset: str, task: Any, data_dir: Path) -> DecoderConfig:
        size = len(task.vocabulary(data_dir))
        config: DecoderConfig = cls.resolve(recipe, row, preset, {"vocab_size": size, "max_length": task.max_length})
        return config

    @classmethod
    def keep(cls, task: Any, data_dir: Path, directory: Path) -> None:
        task.vocabulary(data_dir).save(directory)

    def hold(self, split: Any) -> TokenSegments:
        return TokenSegments(split, self.model.config.cutoffs, self.device)

    def compiled(self) -> Any:
        self.model.compile_layers()
        return self.model

    def batch(self, indices: Tensor, split: str) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Tokens and their successors [n, L], and room for the rare ones."""
        *tensors, rooms = self.examples[split].batch(indices)
        return tuple(tensors), rooms

    def losses(self, tokens: Tensor, targets: Tensor, *rooms: int) -> Tensor:
        losses: Tensor = self.network.losses(tokens, targets, rooms)
        return losses

    def measure(self, indices: Tensor, split: str) -> dict[str, Tensor]:
        count = len(indices)
        if self.compiles and split != "train":
            indices = filled(indices, self.settings.eval_batch_size)
        (tokens, targets), rooms = self.batch(indices, split)
        return {"loss": self.losses(tokens, targets, *rooms)[:count].mean()}

    def measure_batch(self, *batch: Any) -> dict[str, Tensor]:
        return {"loss": self.losses(*batch).mean()}

    def value(self, means: dict[str, float]) -> float:
        return math.exp(min(means["loss"], 100.0))

    @classmethod
    def judged_by(cls, settings: TrainConfig) -> str:
        """Anything but the paper's evaluation says so in its name."""
        return cls.metric if settings.stride == 1 else f"{cls.metric}_stride_{settings.stride}"

    @staticmethod
    def told(value: float) -> str:
        return f"perplexity {value:.2f}"

    @staticmethod
    def judged_on(task: Any) -> list[str]:
        return [name for name in task.splits if name != "train"]

    def judge(self, split: str, directory: Path | None) -> Iterator[Metric]:
        tokens = self.examples[split].tokens
        window = self.model.config.max_length
        with self.autocast():
            losses = sliding_losses(
                self.model, tokens, window=window, stride=self.settings.stride, batch_size=self.settings.eval_batch_size
            )
        count, mean = len(losses), float(losses.double().mean())
        if directory is not None:
            np.save(directory / f"{self.left}-{split}.npy", losses.cpu().numpy(), allow_pickle=False)
        suffix = self.judged_by(self.settings).removeprefix(self.metric)
        yield Metric(count, f"perplexity{suffix}", math.exp(min(mean, 100.0)))
        yield Metric(count, f"loss{suffix}", mean)
        yield Metric(count, "unknown_share", self.splits[split].unknown_share)
        if self.task.unit == "byte":
            yield Metric(count, f"bits_per_byte{suffix}", mean / math.log(2))


OBJECTIVES: dict[str, type[Objective]] = {"classification": Classification, "language-model": LanguageModelling}
