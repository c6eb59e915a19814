"""Investigate why models stay at chance on the PeerRead pairs by training simpler models on the same bytes.

    python -m experiments.paper.peerread.probe --data-dir DIR        about a quarter of an hour on one core

The probes:

    regression  logistic regression on counts of byte n-grams
    bag         the matcher without attention: a bag of n-grams with the head and the optimizer of the recipe
    heart       the matcher on a few pairs, which it must memorize
    plain       the matcher on the first bytes of all documents, without attention and positions
    short       the matcher on the first bytes of all documents

Results are appended to results/retrieval-probe.csv.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.paper.peerread.baselines import fit_logistic_regression
from mgk import tasks
from mgk._core.validation import one_of
from mgk.models import Classifier, EncoderConfig
from mgk.training import config as recipes
from mgk.training import results
from mgk.training.config import TrainConfig
from mgk.training.data import DeviceDataset, EpochPermutation
from mgk.training.module import SCHEDULERS

RECIPE, TASK = "retrieval-probe", "retrieval-peerread"
HASH_BUCKETS = 4096  # number of buckets for n-grams with n > 1
TEST_SPLITS = ("dev", "test")
MEMORIZED_SPLIT = "these pairs"
# Learning rate, steps and n.
BAGS = ((1e-4, 3000, 1), (1e-3, 3000, 1), (1e-3, 12000, 1), (1e-4, 3000, 3), (1e-3, 3000, 3))
MEMORIZED_PAIRS, MEMORIZED_BYTES = 64, 256
SHORT_BYTES = 128


@dataclass(frozen=True)
class Measurement:
    """Accuracy of a probe."""

    metric: str
    split: str
    value: float  # per cent
    training: TrainConfig | None = None


class Pairs:
    """The documents without duplicates, and the pairs of each split as indices of documents."""

    def __init__(self, data_dir: Path) -> None:
        task = tasks.get_task(TASK)
        task.prepare(data_dir, os.cpu_count() or 1)
        self.splits = {name: task.split(data_dir, name) for name in ("train", *TEST_SPLITS)}
        self.documents: list[np.ndarray] = []
        self.indices: dict[str, Tensor] = {}
        self.labels: dict[str, Tensor] = {}
        index_of: dict[bytes, int] = {}
        for name, split in self.splits.items():
            tokens, edges = np.asarray(split.tokens), np.asarray(split.offsets)
            indices = []
            for start, end in pairwise(edges):
                text = tokens[start:end]
                indices.append(index_of.setdefault(text.tobytes(), len(index_of)))
                if indices[-1] == len(self.documents):
                    self.documents.append(text)
            self.indices[name] = torch.tensor(indices).reshape(-1, 2)
            self.labels[name] = torch.from_numpy(np.array(split.labels)).long()

    def frequencies(self, n: int) -> Tensor:
        """Return the relative frequencies of byte n-grams, [documents, buckets]."""
        buckets = 512 if n == 1 else HASH_BUCKETS
        counts = np.zeros((len(self.documents), buckets), np.float32)
        for row, text in zip(counts, self.documents, strict=True):
            grams = np.zeros(len(text) - n + 1, np.int64)
            for shift in range(n):
                grams = grams * 1_000_003 + text[shift : len(grams) + shift]
            row += np.bincount(grams if n == 1 else grams * 2_654_435_761 % 2**31 % buckets, minlength=buckets)
        return torch.from_numpy(counts / counts.sum(1, keepdims=True))


def probe_regression(pairs: Pairs, n: int) -> Iterator[Measurement]:
    """Fit a logistic regression on the similarity of the log frequencies of two documents."""
    frequencies = pairs.frequencies(n)
    vectors = (frequencies / frequencies[frequencies > 0].min()).log1p()
    vectors = nn.functional.normalize(vectors - vectors.mean(0), dim=1)

    def features(name: str) -> np.ndarray:
        first, second = (vectors[index] for index in pairs.indices[name].T)
        cosine = (first * second).sum(1)
        return torch.stack([cosine, cosine**2, (first - second).abs().sum(1)], 1).numpy()

    predict = fit_logistic_regression(features("train"), pairs.labels["train"].numpy())
    for name in TEST_SPLITS:
        correct = predict(features(name)) == pairs.labels[name].numpy()
        yield Measurement(f"logistic regression on byte {n}-grams", name, 100 * float(correct.mean()))


class BagMatcher(nn.Module):
    """The matcher without attention: n-grams instead of tokens, and the same pooling, norms and head."""

    def __init__(self, config: EncoderConfig, frequencies: Tensor) -> None:
        super().__init__()
        matcher = Classifier(config)
        self.frequencies, self.head, self.norm = frequencies, matcher.head, matcher.norm
        self.grams = nn.Parameter(torch.randn(frequencies.shape[1], config.embed_dim) * 0.02)
        layer: Any = matcher.layers[0]
        self.mlp, self.mlp_norm = layer.mlp, layer.mlp_norm

    def forward(self, indices: Tensor) -> Tensor:
        """Return the logits of pairs of document indices, [B, 2] -> [B, 2]."""
        encoded = self.norm(self.grams + self.mlp(self.mlp_norm(self.grams)))
        x, y = (self.frequencies[index] @ encoded for index in indices.T)
        logits: Tensor = self.head(torch.cat([x, y, x * y, x - y], dim=-1))
        return logits


def probe_bag(pairs: Pairs, lr: float, steps: int, n: int) -> Iterator[Measurement]:
    """Train the matcher without attention on all pairs."""
    recipe = recipes.load_recipe(TASK)
    warmup_share = recipe.training.warmup / recipe.training.steps
    config = TrainConfig(steps=steps, lr=lr, warmup=round(warmup_share * steps), batch_size=recipe.training.batch_size)
    encoder = EncoderConfig(512, 2, MEMORIZED_BYTES, variant="softmax", documents=2, dropout=0.0)
    torch.manual_seed(0)
    model = BagMatcher(encoder, pairs.frequencies(n))
    indices, labels = pairs.indices["train"], pairs.labels["train"]
    train(model, lambda batch: cross_entropy(model(indices[batch]), labels[batch]), len(labels), config)
    with torch.no_grad():
        for name in TEST_SPLITS:
            correct = model(pairs.indices[name]).argmax(1) == pairs.labels[name]
            metric = f"the matcher's head on a bag of byte {n}-grams, lr {lr:g}, {steps:,} steps"
            yield Measurement(metric, name, 100 * float(correct.float().mean()), config)


def train(model: nn.Module, loss_of: Callable[[Tensor], Tensor], count: int, config: TrainConfig) -> None:
    """Train a model.

    Args:
        model: Model whose parameters are trained.
        loss_of: Function that computes the loss of a batch from the indices of its pairs.
        count: Number of training pairs.
        config: Training settings.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, eps=config.eps, weight_decay=0.0)
    schedule = SCHEDULERS[config.schedule](optimizer, config)
    order = EpochPermutation(count, 0)
    for step in range(config.steps):
        loss = loss_of(torch.from_numpy(order.take(step * config.batch_size, config.batch_size)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def train_matcher(model: nn.Module, examples: DeviceDataset, config: TrainConfig, count: int) -> None:
    """Train the matcher on the first `count` pairs."""

    def loss_of(batch: Tensor) -> Tensor:
        tokens, lengths, labels = examples.batch(batch, examples.max_length)
        return cross_entropy(model(tokens, lengths), labels)

    train(model, loss_of, count, config)


@torch.no_grad()
def measure_accuracy(model: nn.Module, examples: DeviceDataset, count: int) -> float:
    """Return the accuracy on the first `count` pairs, in per cent."""
    correct = 0
    for batch in torch.arange(count).split(128):
        tokens, lengths, labels = examples.batch(batch, examples.max_length)
        correct += int((model(tokens, lengths).argmax(1) == labels).sum())
    return 100 * correct / count


def probe_memorization(pairs: Pairs) -> Iterator[Measurement]:
    """Train the matcher on a few truncated pairs. An error in packing or labels would prevent memorization."""
    torch.manual_seed(0)
    count, length = MEMORIZED_PAIRS, MEMORIZED_BYTES
    examples = DeviceDataset(pairs.splits["train"], length, torch.device("cpu"))
    model = Classifier(EncoderConfig(512, 2, length, variant="softmax", documents=2, num_heads=2, dropout=0.0))
    config = TrainConfig(steps=150, warmup=0, lr=1e-3, schedule="constant")
    train_matcher(model, examples, config, count)
    metric = f"the matcher, 2 softmax heads, on {count} training pairs of {length} bytes, {config.steps} steps"
    yield Measurement(metric, MEMORIZED_SPLIT, measure_accuracy(model, examples, count), config)


class NoAttention(nn.Module):
    """Replacement for attention that returns zeros."""

    def forward(self, x: Tensor, **unused: Any) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(x)


def probe_short(pairs: Pairs, has_attention: bool) -> Iterator[Measurement]:
    """Train the matcher on the first bytes of all documents, with or without attention and positions."""
    torch.manual_seed(0)
    examples = {name: DeviceDataset(split, SHORT_BYTES, torch.device("cpu")) for name, split in pairs.splits.items()}
    model = Classifier(EncoderConfig(512, 2, SHORT_BYTES, variant="softmax", documents=2, num_heads=1, dropout=0.0))
    config = TrainConfig(steps=2000, warmup=533, lr=1e-3)
    if not has_attention:
        model.positions.data.zero_()
        model.positions.requires_grad_(False)
        for layer in model.layers:
            layer.attention = NoAttention()
    train_matcher(model, examples["train"], config, len(examples["train"]))
    metric = f"the matcher on the first {SHORT_BYTES} bytes, lr {config.lr:g}, {config.steps:,} steps, "
    metric += "1 softmax head" if has_attention else "neither attention nor positions"
    for name in TEST_SPLITS:
        yield Measurement(metric, name, measure_accuracy(model, examples[name], len(examples[name])), config)


PROBES: dict[str, Callable[[Pairs], Iterator[Measurement]]] = {
    "regression": lambda pairs: chain.from_iterable(probe_regression(pairs, n) for n in (1, 2, 3, 4)),
    "bag": lambda pairs: chain.from_iterable(probe_bag(pairs, *bag) for bag in BAGS),
    "heart": probe_memorization,
    "plain": lambda pairs: probe_short(pairs, has_attention=False),
    "short": lambda pairs: probe_short(pairs, has_attention=True),
}


def main() -> None:
    """Run the probes and append their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="data directory")
    parser.add_argument("--results", type=Path, default=Path("results") / f"{RECIPE}.csv", help="results file")
    parser.add_argument("--only", default=",".join(PROBES), help="probes, separated by commas (default: all)")
    options = parser.parse_args()
    pairs = Pairs(options.data_dir)
    common: dict[str, Any] = {
        "recipe": RECIPE, "task": TASK, "dataset": "peerread", "seed": 0, "dtype": "fp32",
        "command": "python -m experiments.paper.peerread.probe", **results.environment(),
    }  # fmt: skip
    for name in options.only.split(","):
        probe = PROBES[one_of("--only", name, PROBES)](pairs)
        for measured in probe:
            print(f"{measured.metric}, {measured.split}: {measured.value:.2f} %", flush=True)
            config = measured.training
            training = {"steps": config.steps, "lr": config.lr, "batch": config.batch_size} if config else {}
            count = MEMORIZED_PAIRS if measured.split == MEMORIZED_SPLIT else len(pairs.labels[measured.split])
            row = {**common, **training, "split": measured.split, "n_examples": count, "metric": measured.metric}
            results.append(options.results, [{**row, "value": f"{measured.value:.2f}"}])


if __name__ == "__main__":
    main()
