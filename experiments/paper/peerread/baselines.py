"""Simple baselines of the task: logistic regression on bags of words, citation strings and years."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mgk.tasks.base import Array

WORD = re.compile(r"[a-z]{3,}")
CAPITALIZED = re.compile(r"\b[A-Z][A-Za-z\-]{2,}")
MAX_WORDS = 8192
MIN_DOCUMENTS = 3  # minimum number of documents that contain a word
MAX_SHARE = 0.1  # maximum share of documents; more frequent words are not specific to a topic
LEVELS = 2048  # integer levels of a weight: dot products stay below 2²⁴, where float32 adds integers exactly
OPENING = 1500  # number of characters at the start, which contain the names of the authors
RARE_SHARE = 0.01  # maximum share of documents that contain a rare name
MAX_YEARS = 6


class TfidfIndex:
    """TF-IDF vectors rounded to integers, so that similarities are identical on every machine."""

    def __init__(self, texts: Sequence[str]) -> None:
        bags = [Counter(WORD.findall(text.lower())) for text in texts]
        documents: Counter[str] = Counter()
        for bag in bags:
            documents.update(bag.keys())
        self.documents = documents
        limit = max(MAX_SHARE * len(texts), MIN_DOCUMENTS)
        words = [word for word, count in documents.items() if MIN_DOCUMENTS <= count <= limit]
        words = sorted(words, key=lambda word: (-documents[word], word))[:MAX_WORDS]
        column = {word: number for number, word in enumerate(words)}
        self.vectors = np.zeros((len(texts), max(len(words), 1)), dtype=np.float32)
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
        """Return the cosines times LEVELS², [len(rows), len(columns)]."""
        unique, inverse = np.unique(rows, return_inverse=True)
        return (self.vectors[unique] @ self.vectors[columns].T)[inverse]

    def cosines(self, first: Array, second: Array) -> Array:
        """Return the cosine of each pair of documents, [len(first)]."""
        parts = np.array_split(np.arange(len(first)), len(first) // 1024 + 1)
        products = [(self.vectors[first[part]] * self.vectors[second[part]]).sum(axis=1) for part in parts]
        return np.concatenate(products).astype(np.float64) / LEVELS**2

    def overlaps(self, first: Array, second: Array) -> Array:
        """Return the share of the words of each pair that are in both documents, [len(first)]."""
        present = self.vectors > 0
        parts = np.array_split(np.arange(len(first)), len(first) // 1024 + 1)
        shared = np.concatenate([(present[first[p]] & present[second[p]]).sum(axis=1) for p in parts])
        count = present.sum(axis=1)
        return shared / np.maximum(count[first] + count[second] - shared, 1)


def topic_features(corpus: TfidfIndex, first: Array, second: Array) -> Array:
    """Return features of the words that the documents of each pair share, [pairs, 5]."""
    cosine, overlap = corpus.cosines(first, second), corpus.overlaps(first, second)
    return np.stack([cosine, cosine**2, np.log(cosine + 0.01), overlap, overlap**2], axis=1)


def string_features(
    texts: Sequence[str], titles: Sequence[str], years: Sequence[int]
) -> Callable[[Array, Array], Array]:
    """Return a function that computes the features of pairs [n] and [n].

    The features measure whether one text contains the title words of the other, rare names from its opening, or its
    year. They do not depend on the order of the two papers.
    """
    bags = [set(re.findall(r"[a-z]+|\d{4}", text.lower())) for text in texts]
    documents: Counter[str] = Counter()
    for bag in bags:
        documents.update(bag)
    idf = {word: math.log(len(texts) / count) for word, count in documents.items()}
    rare = max(RARE_SHARE * len(texts), 2)
    names = [
        {name for name in map(str.lower, CAPITALIZED.findall(text[:OPENING])) if 0 < documents[name] <= rare}
        for text in texts
    ]
    headings = [[word for word in title.split() if word in idf] for title in titles]

    def mentions(citing: int, cited: int) -> list[float]:
        bag, heading = bags[citing], headings[cited]
        total = sum(idf[word] for word in heading)
        return [
            sum(idf[word] for word in heading if word in bag) / (total or 1.0),
            idf[heading[0]] * (heading[0] in bag) if heading else 0.0,
            math.log1p(len(names[cited] & bag)),
            float(str(years[cited]) in bag),
        ]

    def features(first: Array, second: Array) -> Array:
        forward = np.array([mentions(a, b) for a, b in zip(first.tolist(), second.tolist(), strict=True)])
        backward = np.array([mentions(b, a) for a, b in zip(first.tolist(), second.tolist(), strict=True)])
        return np.concatenate([forward + backward, np.maximum(forward, backward)], axis=1)

    return features


def year_features(years: Sequence[int], first: Array, second: Array) -> Array:
    """Return the difference in years as one-hot vectors, [n, MAX_YEARS + 1]. The last class is "or more"."""
    year = np.asarray(years)
    difference = np.minimum(np.abs(year[first] - year[second]), MAX_YEARS)
    return np.eye(MAX_YEARS + 1)[difference]


def fit_logistic_regression(
    features: Array, labels: Array, penalty: float = 1e-3, steps: int = 25
) -> Callable[[Array], Array]:
    """Fit a logistic regression by Newton's method.

    Args:
        features: Inputs, [n, features].
        labels: Classes, 0 or 1, [n].
        penalty: Weight of the squared norm of the coefficients.
        steps: Newton steps.

    Returns:
        A function that predicts the class, 0 or 1, from features.
    """
    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-9

    def standardize(x: Array) -> Array:
        return np.concatenate([(x - mean) / deviation, np.ones((len(x), 1))], axis=1)

    x, weight = standardize(features), np.zeros(features.shape[1] + 1)
    for _ in range(steps):
        probability = 1 / (1 + np.exp(-np.clip(x @ weight, -30, 30)))
        gradient = x.T @ (probability - labels) / len(x) + penalty * weight
        hessian = (x * (probability * (1 - probability))[:, None]).T @ x / len(x) + penalty * np.eye(len(weight))
        weight = weight - np.linalg.solve(hessian, gradient)
    return lambda x: (standardize(x) @ weight > 0).astype(np.int64)


Pairs = tuple[Array, Array, Array]  # first paper, second paper, kind


def score_features(
    features: Callable[[Array, Array], Array], splits: Mapping[str, Pairs], kinds: Mapping[str, int], positive: int
) -> dict[str, float]:
    """Return the accuracy of a logistic regression fitted on train.

    Args:
        features: Function that computes the features of pairs.
        splits: Pairs of train, dev and test.
        kinds: Number of each kind of pair.
        positive: Kind whose label is 1.

    Returns:
        Accuracy on dev, on test, and on each kind of test pairs.
    """
    first, second, kind = splits["train"]
    predict = fit_logistic_regression(features(first, second), kind == positive)
    accuracy = {}
    for split in ("dev", "test"):
        first, second, kind = splits[split]
        correct = predict(features(first, second)) == (kind == positive)
        accuracy[split] = round(float(correct.mean()), 4)
        if split == "test":
            masks = {name: kind == number for name, number in kinds.items() if (kind == number).any()}
            accuracy |= {f"test, {name}": round(float(correct[mask].mean()), 4) for name, mask in masks.items()}
    return accuracy
