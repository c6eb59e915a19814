"""Classification of token sequences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from mgk.models import Classifier, EncoderConfig
from mgk.training.config import ModelSpec, Recipe
from mgk.training.data import DeviceDataset, SequentialSampler
from mgk.training.objectives.base import Metric, MetricFormat, NotFiniteError, Objective, repeat_to_size


class Classification(Objective):
    """Cross-entropy of an example's class; accuracy."""

    metric, higher_is_better, predictions_file = "accuracy", True, "correct"
    format = MetricFormat(
        metric="accuracy",
        title="accuracy, %",
        factor=100.0,
        paired="points on the same examples",
        unit="",
        decimals=2,
        note="",
        flops="GFLOPs: forward pass of one example",
    )
    config_class: ClassVar[type] = EncoderConfig
    model_class: ClassVar[type[nn.Module]] = Classifier

    @classmethod
    def make_config(cls, recipe: Recipe, row: ModelSpec, preset: str, task: Any, data_dir: Path) -> Any:
        """Return the encoder's configuration; ref-lra pools over padded positions, as the authors' code does."""
        defaults = {
            "vocab_size": task.vocab_size,
            "num_classes": task.num_classes,
            "max_length": task.max_length,
            "documents": task.documents,
            "pooling": "mean-padded" if preset == "ref-lra" else "mean",
        }
        return cls.resolve_config(recipe, row, preset, defaults)

    def load_split(self, split: Any) -> DeviceDataset:
        return DeviceDataset(split, self.model.config.max_length, self.device)

    def compile_network(self) -> Any:
        return torch.compile(self.model)

    @property
    def is_packed(self) -> bool:
        """Whether batches hold concatenated documents without padding between them."""
        return self.settings.padding == "packed" and self.model.config.supports_packing and self.device.type == "cuda"

    def batch(self, indices: Tensor, split: str) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Return tokens, document ends and labels.

        Packed: tokens [T] and offsets. Otherwise: tokens [B, L] or [B, 2, L] and lengths.
        """
        rows, examples = indices.numpy(), self.examples[split]
        if self.is_packed:
            return examples.packed(rows), ()
        width = examples.width(rows) if self.settings.padding == "longest" else examples.max_length
        return examples.batch(indices.to(self.device), width), ()

    def predict(self, tokens: Tensor, ends: Tensor) -> Tensor:
        """Compute the logits of a batch."""
        if not self.is_packed:
            return self.network(tokens, ends)
        torch._dynamo.maybe_mark_dynamic(tokens, 0)
        return self.network(tokens, cu_seqlens=ends)

    def logits(self, indices: Tensor, split: str) -> tuple[Tensor, Tensor]:
        """Return the logits and labels of examples of a split."""
        count = len(indices)
        if self.is_compiled and split != "train":
            indices = repeat_to_size(indices, self.settings.eval_batch_size)
        (tokens, ends, labels), _ = self.batch(indices, split)
        return self.predict(tokens, ends)[:count], labels[:count]

    def measure(self, indices: Tensor, split: str) -> dict[str, Tensor]:
        return self._means(*self.logits(indices, split))

    def measure_batch(self, *batch: Any) -> dict[str, Tensor]:
        tokens, ends, labels = batch
        return self._means(self.predict(tokens, ends), labels)

    @staticmethod
    def _means(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(logits.float(), labels)
        return {"loss": loss, "accuracy": (logits.argmax(-1) == labels).float().mean()}

    def metric_value(self, means: dict[str, float]) -> float:
        return means["accuracy"]

    @staticmethod
    def format_metric(value: float) -> str:
        return f"accuracy {100 * value:.2f} %"

    @staticmethod
    def test_splits(task: Any) -> list[str]:
        return [name for name in task.splits if name not in ("train", "dev")]

    def evaluate(self, split: str, directory: Path | None) -> Iterator[Metric]:
        correct = self.correct(split)
        self.save_predictions(directory, split, correct)
        shares = self.splits[split].class_shares(self.task.num_classes)
        yield Metric(len(correct), "majority_share", float(shares.max()))
        yield Metric(len(correct), "accuracy", float(correct.mean()))

    @torch.no_grad()
    def correct(self, split: str) -> np.ndarray:
        """Return whether the predicted class is correct, for each example of a split.

        Raises:
            NotFiniteError: A logit is NaN or infinite. `argmax` would give a class all the same.
        """
        parts = []
        is_finite = torch.ones((), dtype=torch.bool, device=self.device)
        for indices in SequentialSampler(len(self.splits[split]), self.settings.eval_batch_size):
            with self.autocast():
                logits, labels = self.logits(indices, split)
            parts.append(logits.argmax(-1) == labels)
            is_finite &= logits.isfinite().all()
        if not is_finite:
            raise NotFiniteError("a logit", split)
        return torch.cat(parts).cpu().numpy()

    @staticmethod
    def run_example(model: Any, length: int) -> None:
        shape = (1, length) if model.config.documents == 1 else (1, 2, length)
        model(torch.empty(shape, dtype=torch.long), torch.empty(shape[:-1], dtype=torch.long))
