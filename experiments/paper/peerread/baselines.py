"""How far one gets with two papers without reading them: bags of words, citation strings, years."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mgk.tasks.base import Array

WORD = re.compile(r"[a-z]{3,}")
CAPITALISED = re.compile(r"\b[A-Z][A-Za-z\-]{2,}")
MAX_WORDS = 8192
LEAST_DOCUMENTS = 3
LARGEST_SHARE = 0.1  # of the documents: more frequent words say little about the topic
LEVELS = 2048  # of a weight: products of unit vectors stay below 2²⁴, where float32 adds whole numbers exactly
OPENING = 1500  # characters, where the authors' names are
RARE_SHARE = 0.01
MOST_YEARS = 6


class TfidfIndex:
    """TF-IDF vectors in whole numbers, so that similarities are the same on every machine."""

    def __init__(self, texts: Sequence[str]) -> None:
        bags = [Counter(WORD.findall(text.lower())) for text in texts]
        documents: Counter[str] = Counter()
        for bag in bags:
            documents.update(bag.keys())
        self.documents = documents
        most = max(LARGEST_SHARE * len(texts), LEAST_DOCUMENTS)
        known = [word for word, count in documents.items() if LEAST_DOCUMENTS <= count <= most]
        known = sorted(known, key=lambda word: (-documents[word], word))[:MAX_WORDS]
        column = {word: number for number, word in enumerate(known)}
        self.vectors = np.zeros((len(texts), max(len(known), 1)), dtype=np.float32)
        for row, bag in zip(self.vectors, bags, strict=True):
            weights = {
                column[word]: (1 + math.log(count)) * math.log(len(texts) / documents[word])
                for word, count in bag.items()
                if word in column
            }
            norm = math.sqrt(math.fsum(weight * weight for weight in weights.values())) or 1.0
            for number, weight in weights.items():
                row[number] = round(LEVELS * weight / norm)

    def similarities(self, rows: Array, columns: Array) -> Array:
        """Cosines in units of LEVELS⁻², [len(rows), len(columns)]."""
        unique, place = np.unique(rows, return_inverse=True)
        return (self.vectors[unique] @ self.vectors[columns].T)[place]

    def cosines(self, first: Array, second: Array) -> Array:
        """Of pairs, [len(first)]."""
        parts = np.array_split(np.arange(len(first)), len(first) // 1024 + 1)
        products = [(self.vectors[first[part]] * self.vectors[second[part]]).sum(axis=1) for part in parts]
        return np.concatenate(products).astype(np.float64) / LEVELS**2

    def overlaps(self, first: Array, second: Array) -> Array:
        """Shared words as a share of all words of the pair."""
        present = self.vectors > 0
        parts = np.array_split(np.arange(len(first)), len(first) // 1024 + 1)
        shared = np.concatenate([(present[first[p]] & present[second[p]]).sum(axis=1) for p in parts])
        count = present.sum(axis=1)
        return shared / np.maximum(count[first] + count[second] - shared, 1)


def topic_features(corpus: TfidfIndex, first: Array, second: Array) -> Array:
    cosine, overlap = corpus.cosines(first, second), corpus.overlaps(first, second)
    return np.stack([cosine, cosine**2, np.log(cosine + 0.01), overlap, overlap**2], axis=1)


def string_features(
    texts: Sequence[str], titles: Sequence[str], years: Sequence[int]
) -> Callable[[Array, Array], Array]:
    """Does one text have the other's title words, rare names of its opening, its year? Either way round."""
    bags = [set(re.findall(r"[a-z]+|\d{4}", text.lower())) for text in texts]
    documents: Counter[str] = Counter()
    for bag in bags:
        documents.update(bag)
    worth = {word: math.log(len(texts) / count) for word, count in documents.items()}
    rare = max(RARE_SHARE * len(texts), 2)
    names = [
        {name for name in map(str.lower, CAPITALISED.findall(text[:OPENING])) if 0 < documents[name] <= rare}
        for text in texts
    ]
    headings = [[word for word in title.split() if word in worth] for title in titles]

    def found(reader: int, read: int) -> list[float]:
        bag, heading = bags[reader], headings[read]
        value = sum(worth[word] for word in heading)
        return [
            sum(worth[word] for word in heading if word in bag) / (value or 1.0),
            worth[heading[0]] * (heading[0] in bag) if heading else 0.0,
            math.log1p(len(names[read] & bag)),
            float(str(years[read]) in bag),
        ]

    def features(first: Array, second: Array) -> Array:
        there = np.array([found(a, b) for a, b in zip(first.tolist(), second.tolist(), strict=True)])
        back = np.array([found(b, a) for a, b in zip(first.tolist(), second.tolist(), strict=True)])
        return np.concatenate([there + back, np.maximum(there, back)], axis=1)

    return features


def year_features(years: Sequence[int], first: Array, second: Array) -> Array:
    """Which of 0, 1, … MOST_YEARS the papers lie apart."""
    known = np.asarray(years)
    apart = np.minimum(np.abs(known[first] - known[second]), MOST_YEARS)
    return np.eye(MOST_YEARS + 1)[apart]


def logistic_regression(
    features: Array, labels: Array, penalty: float = 1e-3, steps: int = 25
) -> Callable[[Array], Array]:
    """Newton's method; the result answers features with 0 or 1."""
    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-9

    def prepared(x: Array) -> Array:
        return np.concatenate([(x - mean) / deviation, np.ones((len(x), 1))], axis=1)

    x, weight = prepared(features), np.zeros(features.shape[1] + 1)
    for _ in range(steps):
        probability = 1 / (1 + np.exp(-np.clip(x @ weight, -30, 30)))
        slope = x.T @ (probability - labels) / len(x) + penalty * weight
        curve = (x * (probability * (1 - probability))[:, None]).T @ x / len(x) + penalty * np.eye(len(weight))
        weight = weight - np.linalg.solve(curve, slope)
    return lambda x: (prepared(x) @ weight > 0).astype(np.int64)


Pairs = tuple[Array, Array, Array]  # first paper, second paper, kind


def score(
    make: Callable[[Array, Array], Array], splits: Mapping[str, Pairs], kinds: Mapping[str, int], positive: int
) -> dict[str, float]:
    """Accuracy on dev and test of a logistic regression fitted on train, and on each kind of test pair."""
    first, second, kind = splits["train"]
    answer = logistic_regression(make(first, second), kind == positive)
    result = {}
    for name in ("dev", "test"):
        first, second, kind = splits[name]
        right = answer(make(first, second)) == (kind == positive)
        result[name] = round(float(right.mean()), 4)
        if name == "test":
            some = {k: kind == n for k, n in kinds.items() if (kind == n).any()}
            result |= {f"test, {k}": round(float(right[chosen].mean()), 4) for k, chosen in some.items()}
    return result
