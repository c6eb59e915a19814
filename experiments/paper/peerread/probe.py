"""Why a model stays at chance on PeerRead's pairs: what is in the bytes, and what the matcher's head makes of it.

    python -m experiments.paper.peerread.probe --data-dir DIR        about a quarter of an hour on one core

Counts of byte n-grams judged by logistic regression; the matcher without attention, a bag of n-grams under the recipe's
head and optimiser; the matcher itself on a few pairs, which it must learn by heart, and on the beginnings of all.
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

from experiments.paper.peerread.baselines import logistic_regression
from mgk import tasks
from mgk._core.validation import one_of
from mgk.models import Classifier, EncoderConfig
from mgk.training import config as recipes
from mgk.training import results
from mgk.training.config import TrainConfig
from mgk.training.data import DeviceDataset, EpochPermutation
from mgk.training.module import SCHEDULERS

RECIPE, TASK = "retrieval-probe", "retrieval-peerread"
HASHED = 4096  # buckets of n-grams, n > 1
JUDGED = ("dev", "test")
# Learning rate, steps and n of the n-grams of the bags.
BAGS = ((1e-4, 3000, 1), (1e-3, 3000, 1), (1e-3, 12000, 1), (1e-4, 3000, 3), (1e-3, 3000, 3))
PAIRS, BYTES = 64, 256  # learnt by heart
SHORT = 128  # bytes of the beginnings


@dataclass(frozen=True)
class Probed:
    metric: str
    split: str
    value: float  # per cent
    training: TrainConfig | None = None


class Pairs:
    """Documents once each, and the pairs of each split as places among them."""

    def __init__(self, data_dir: Path) -> None:
        task = tasks.get_task(TASK)
        task.prepare(data_dir, os.cpu_count() or 1)
        self.splits = {name: task.split(data_dir, name) for name in ("train", *JUDGED)}
        self.documents: list[np.ndarray] = []
        self.places: dict[str, Tensor] = {}
        self.labels: dict[str, Tensor] = {}
        known: dict[bytes, int] = {}
        for name, split in self.splits.items():
            tokens, edges = np.asarray(split.tokens), np.asarray(split.offsets)
            places = []
            for start, end in pairwise(edges):
                text = tokens[start:end]
                places.append(known.setdefault(text.tobytes(), len(known)))
                if places[-1] == len(self.documents):
                    self.documents.append(text)
            self.places[name] = torch.tensor(places).reshape(-1, 2)
            self.labels[name] = torch.from_numpy(np.array(split.labels)).long()

    def counts(self, n: int) -> Tensor:
        """Shares of byte n-grams, [documents, buckets]."""
        buckets = 512 if n == 1 else HASHED
        found = np.zeros((len(self.documents), buckets), np.float32)
        for row, text in zip(found, self.documents, strict=True):
            grams = np.zeros(len(text) - n + 1, np.int64)
            for shift in range(n):
                grams = grams * 1_000_003 + text[shift : len(grams) + shift]
            row += np.bincount(grams if n == 1 else grams * 2_654_435_761 % 2**31 % buckets, minlength=buckets)
        return torch.from_numpy(found / found.sum(1, keepdims=True))


def regression(pairs: Pairs, n: int) -> Iterator[Probed]:
    """On how near the logarithms of the counts of two documents are."""
    counts = pairs.counts(n)
    vectors = (counts / counts[counts > 0].min()).log1p()
    vectors = nn.functional.normalize(vectors - vectors.mean(0), dim=1)

    def features(name: str) -> np.ndarray:
        first, second = (vectors[place] for place in pairs.places[name].T)
        cosine = (first * second).sum(1)
        return torch.stack([cosine, cosine**2, (first - second).abs().sum(1)], 1).numpy()

    answer = logistic_regression(features("train"), pairs.labels["train"].numpy())
    for name in JUDGED:
        right = answer(features(name)) == pairs.labels[name].numpy()
        yield Probed(f"logistic regression on byte {n}-grams", name, 100 * float(right.mean()))


class Bag(nn.Module):
    """The matcher without attention: n-grams instead of tokens, and the same pooling, norms and head."""

    def __init__(self, config: EncoderConfig, counts: Tensor) -> None:
        super().__init__()
        whole = Classifier(config)
        self.counts, self.head, self.norm = counts, whole.head, whole.norm
        self.grams = nn.Parameter(torch.randn(counts.shape[1], config.embed_dim) * 0.02)
        layer: Any = whole.layers[0]
        self.mlp, self.mlp_norm = layer.mlp, layer.mlp_norm

    def forward(self, places: Tensor) -> Tensor:
        encoded = self.norm(self.grams + self.mlp(self.mlp_norm(self.grams)))
        x, y = (self.counts[place] @ encoded for place in places.T)
        logits: Tensor = self.head(torch.cat([x, y, x * y, x - y], dim=-1))
        return logits


def bag(pairs: Pairs, lr: float, steps: int, n: int) -> Iterator[Probed]:
    recipe = recipes.load_recipe(TASK)
    share = recipe.training.warmup / recipe.training.steps
    settings = TrainConfig(steps=steps, lr=lr, warmup=round(share * steps), batch_size=recipe.training.batch_size)
    torch.manual_seed(0)
    model = Bag(EncoderConfig(512, 2, BYTES, variant="softmax", documents=2, dropout=0.0), pairs.counts(n))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=settings.eps, weight_decay=0.0)
    schedule = SCHEDULERS[settings.schedule](optimizer, settings)
    order = EpochPermutation(len(pairs.labels["train"]), 0)
    for step in range(steps):
        chosen = torch.from_numpy(order.take(step * settings.batch_size, settings.batch_size))
        loss = nn.functional.cross_entropy(model(pairs.places["train"][chosen]), pairs.labels["train"][chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        for name in JUDGED:
            right = model(pairs.places[name]).argmax(1) == pairs.labels[name]
            words = f"the matcher's head on a bag of byte {n}-grams, lr {lr:g}, {steps:,} steps"
            yield Probed(words, name, 100 * float(right.float().mean()), settings)


def fit(model: nn.Module, examples: DeviceDataset, settings: TrainConfig, among: int) -> None:
    """Trains the matcher on the first `among` pairs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, eps=settings.eps, weight_decay=0.0)
    schedule = SCHEDULERS[settings.schedule](optimizer, settings)
    order = EpochPermutation(among, 0)
    for step in range(settings.steps):
        chosen = torch.from_numpy(order.take(step * settings.batch_size, settings.batch_size))
        tokens, lengths, labels = examples.batch(chosen, examples.max_length)
        loss = nn.functional.cross_entropy(model(tokens, lengths), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, examples: DeviceDataset, count: int) -> float:
    """In per cent, of the first pairs."""
    right = 0
    for chosen in torch.arange(count).split(128):
        tokens, lengths, labels = examples.batch(chosen, examples.max_length)
        right += int((model(tokens, lengths).argmax(1) == labels).sum())
    return 100 * right / count


def by_heart(pairs: Pairs) -> Iterator[Probed]:
    """The matcher itself on a few pairs, cut short: a mistake in packing or labels would show."""
    torch.manual_seed(0)
    examples = DeviceDataset(pairs.splits["train"], BYTES, torch.device("cpu"))
    model = Classifier(EncoderConfig(512, 2, BYTES, variant="softmax", documents=2, num_heads=2, dropout=0.0))
    settings = TrainConfig(steps=150, warmup=0, lr=1e-3, schedule="constant")
    fit(model, examples, settings, PAIRS)
    words = f"the matcher, 2 softmax heads, on {PAIRS} training pairs of {BYTES} bytes, {settings.steps} steps"
    yield Probed(words, "these pairs", accuracy(model, examples, PAIRS), settings)


class Nothing(nn.Module):
    """In the place of attention."""

    def forward(self, x: Tensor, **unused: Any) -> Tensor:
        return torch.zeros_like(x)


def short(pairs: Pairs, attends: bool) -> Iterator[Probed]:
    """The matcher on the beginnings of all documents, with attention and positions or with neither."""
    torch.manual_seed(0)
    examples = {name: DeviceDataset(split, SHORT, torch.device("cpu")) for name, split in pairs.splits.items()}
    model = Classifier(EncoderConfig(512, 2, SHORT, variant="softmax", documents=2, num_heads=1, dropout=0.0))
    settings = TrainConfig(steps=2000, warmup=533, lr=1e-3)
    if not attends:
        model.positions.data.zero_()
        model.positions.requires_grad_(False)
        for layer in model.layers:
            layer.attention = Nothing()
    fit(model, examples["train"], settings, len(examples["train"]))
    words = f"the matcher on the first {SHORT} bytes, lr {settings.lr:g}, {settings.steps:,} steps, "
    words += "1 softmax head" if attends else "neither attention nor positions"
    for name in JUDGED:
        yield Probed(words, name, accuracy(model, examples[name], len(examples[name])), settings)


PROBES: dict[str, Callable[[Pairs], Iterator[Probed]]] = {
    "regression": lambda pairs: chain.from_iterable(regression(pairs, n) for n in (1, 2, 3, 4)),
    "bag": lambda pairs: chain.from_iterable(bag(pairs, *each) for each in BAGS),
    "heart": by_heart,
    "plain": lambda pairs: short(pairs, attends=False),
    "short": lambda pairs: short(pairs, attends=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path("results") / f"{RECIPE}.csv")
    parser.add_argument("--only", default=",".join(PROBES), help=f"some of {', '.join(PROBES)}")
    options = parser.parse_args()
    pairs = Pairs(options.data_dir)
    common: dict[str, Any] = {
        "recipe": RECIPE, "task": TASK, "dataset": "peerread", "seed": 0, "dtype": "fp32",
        "command": "python -m experiments.paper.peerread.probe", **results.environment(),
    }  # fmt: skip
    for name in options.only.split(","):
        probe = PROBES[one_of("--only", name, PROBES)](pairs)
        for found in probe:
            print(f"{found.metric}, {found.split}: {found.value:.2f} %", flush=True)
            settings = found.training
            asked = (
                {} if settings is None else {"steps": settings.steps, "lr": settings.lr, "batch": settings.batch_size}
            )
            count = PAIRS if found.split == "these pairs" else len(pairs.labels[found.split])
            row = {**common, **asked, "split": found.split, "n_examples": count, "metric": found.metric}
            results.append(options.results, [{**row, "value": f"{found.value:.2f}"}])


if __name__ == "__main__":
    main()
