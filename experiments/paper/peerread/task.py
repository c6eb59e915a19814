"""Retrieval from PeerRead: predict whether one paper cites another.

A stand-in for LRA's AAN; its results must not be reported as AAN.

- No paper is in two splits.
- Half of the pairs are citations (positives). Each positive has a matching negative, a pair without a citation.
- Half of the negatives are hard: as similar in topic as the citation, as far as the other rules allow. The easier form
  of the task has no hard negatives.
- Each paper occurs equally often in positives and negatives, and the years are matched, so that neither the number of
  citations nor the age of a paper predicts the label.
- Citations are removed from the texts, and the order of the two papers is random.

The metadata records the number of dropped links, the similarity of the pairs, and the accuracy of simple baselines.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.paper.peerread.baselines import (
    TfidfIndex,
    score_features,
    string_features,
    topic_features,
    year_features,
)
from experiments.paper.peerread.citations import TitleIndex, strip_citations
from experiments.paper.peerread.communities import find_communities
from mgk._core.io import DataError
from mgk._core.progress import Progress
from mgk.tasks.base import Array, Example, Task, byte_tokens, write_split

DOCS, LINKS = "docs.jsonl", "citation_links.tsv"
REMEDY = (
    "create it from allenai/PeerRead (docs.jsonl: one JSON object per line with key, year and text, which begins with "
    "the title; citation_links.tsv: one line per citation with key, tab, cited key)"
)
KINDS = {"citations": 0, "hard": 1, "random": 2}
CITATION, HARD, RANDOM = KINDS.values()
RESOLUTION = 4  # gives 397 communities of PeerRead, 50 of them with 50 to 266 papers
MAX_YEARS = 1  # between the cited papers of a link and of its negative
SWEEPS = 5  # maximum number of passes over all links
YEARS_COST, FORBIDDEN_COST = 2.0**30, 2.0**40  # well above any difference of similarities

Link = tuple[int, int]  # citing paper, cited paper


@dataclass(frozen=True)
class Paper:
    """A paper of PeerRead."""

    key: str  # title in lower case without punctuation
    year: int  # 0 if unknown
    text: str


def shuffle_key(*keys: Any) -> bytes:
    """Return a sort key for a fixed pseudo-random order that is identical on every machine."""
    return hashlib.sha256("\t".join(map(str, keys)).encode()).digest()


def read_papers(path: Path, expected: int, progress: Progress) -> list[Paper]:
    """Read docs.jsonl.

    Args:
        path: File with one JSON object per line.
        expected: Number of papers.
        progress: Called with stage, done and total.

    Raises:
        DataError: If a line is damaged, a paper occurs twice, or the number of papers is wrong.
    """
    papers: list[Paper] = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line.decode())
                paper = Paper(row["key"], row["year"], row["text"])
            except (ValueError, KeyError, TypeError) as error:
                problem = f"not a JSON object with key, year and text ({error})"
                raise DataError(f"{path}, line {number} is {problem}: {REMEDY}") from error
            has_types = (type(paper.key), type(paper.year), type(paper.text)) == (str, int, str)
            if not has_types or not paper.key.strip() or not paper.text.strip():
                raise DataError(
                    f"{path}, line {number} has a key, year or text that is empty or of a wrong type: {REMEDY}"
                )
            papers.append(paper)
            if number % 1000 == 0:
                progress("read", number, expected)
    if len(papers) != expected:
        raise DataError(f"{path} has {len(papers)} papers instead of {expected}: {REMEDY}")
    duplicates = [key for key, count in Counter(paper.key for paper in papers).items() if count > 1]
    if duplicates:
        raise DataError(f"{path} has {duplicates[0]!r} twice: {REMEDY}")
    return papers


def read_links(path: Path, expected: int, papers: Sequence[Paper]) -> list[Link]:
    """Read citation_links.tsv: one link per pair of papers, even if they cite each other.

    Args:
        path: File with one line per citation.
        expected: Number of links.
        papers: Papers that the links refer to.

    Raises:
        DataError: If a line is damaged, a paper is unknown, or the number of links is wrong.
    """
    number_of = {paper.key: number for number, paper in enumerate(papers)}
    links: dict[frozenset[int], Link] = {}
    with open(path, "rb") as file:
        for line_number, line in enumerate(file, start=1):
            location = f"{path}, line {line_number}"
            try:
                keys = line.decode().rstrip("\r\n").split("\t")
            except UnicodeDecodeError as error:
                raise DataError(f"{location} is not UTF-8: {REMEDY}") from error
            if len(keys) != 2:
                raise DataError(f"{location} has {len(keys)} columns instead of 2: {REMEDY}")
            unknown = [key for key in keys if key not in number_of]
            if unknown:
                raise DataError(f"{location} has {unknown[0][:80]!r}, which is not in {DOCS}: {REMEDY}")
            citing, cited = (number_of[key] for key in keys)
            if citing != cited:
                links.setdefault(frozenset((citing, cited)), (citing, cited))
    if len(links) != expected:
        raise DataError(f"{path} links {len(links)} pairs of papers instead of {expected}: {REMEDY}")
    return list(links.values())


def assign_splits(papers: Sequence[Paper], links: Sequence[Link], held_out: float) -> dict[int, str]:
    """Return the split of each paper that has a link.

    Whole communities are added to test and dev as long as they fit. A random split of the papers would lose a third of
    the links and keep 1 % of them in test.

    Args:
        papers: All papers.
        links: Pairs of papers.
        held_out: Share of the papers in test, and in dev.
    """
    community_of = find_communities(links, [shuffle_key(paper.key) for paper in papers], RESOLUTION)
    communities: dict[int, list[int]] = {}
    for paper, number in community_of.items():
        communities.setdefault(number, []).append(paper)
    capacity = {split: held_out * len(community_of) for split in ("test", "dev")}

    def order(members: list[int]) -> bytes:
        return min(shuffle_key("split", papers[paper].key) for paper in members)

    split_of = {}
    for members in sorted(communities.values(), key=order):
        split = next((name for name, free in capacity.items() if len(members) <= free), "train")
        if split != "train":
            capacity[split] -= len(members)
        split_of.update(dict.fromkeys(members, split))
    return split_of


def draw_negatives(
    links: Sequence[Link], papers: Sequence[Paper], used_with: Mapping[int, set[int]], corpus: TfidfIndex | None
) -> list[Link]:
    """Draw negatives by permuting the cited papers of the links.

    A cited paper is replaced with one of nearly the same year; with a corpus, also of nearly the same similarity to
    the citing paper. No pair occurs twice.

    Args:
        links: Citations, [n].
        papers: All papers.
        used_with: Papers that already form a pair with each paper; the negatives are added.
        corpus: TF-IDF vectors for hard negatives; None draws random negatives.

    Returns:
        At most n pairs.
    """
    if len(links) < 2:
        return []
    links = sorted(links, key=lambda link: shuffle_key("draw", *(papers[paper].key for paper in link)))
    citing, row = np.unique([a for a, _ in links], return_inverse=True)
    cited, original = np.unique([b for _, b in links], return_inverse=True)
    years = np.array([papers[b].year for b in cited.tolist()])
    # Cost of each cited paper for each link, [links, cited]. Integers, so that rounding does not affect the result.
    cost = YEARS_COST * (np.abs(years - years[original][:, None]) > MAX_YEARS)
    is_forbidden = np.array([[b in used_with[a] or a == b for b in cited.tolist()] for a in citing.tolist()])
    cost += FORBIDDEN_COST * is_forbidden[row]
    if corpus is not None:
        similarity = corpus.similarities(citing, cited)[row]
        cost += np.abs(similarity - similarity[np.arange(len(links)), original][:, None])
    column = swap_columns(cost, row, np.roll(original, 1))
    negatives = []
    for a, b in zip(citing[row].tolist(), cited[column].tolist(), strict=True):
        if a != b and b not in used_with[a]:
            negatives.append((a, b))
            used_with[a].add(b)
            used_with[b].add(a)
    return negatives


def swap_columns(cost: Array, row: Array, column: Array) -> Array:
    """Reduce the total cost of the links by swapping the columns of two links at a time.

    Args:
        cost: Cost of each column for each link, [links, columns].
        row: Row of each link, [links]. Links of one row should not share a column.
        column: Initial column of each link, [links].

    Returns:
        The column of each link, [links].
    """
    by_column = np.ascontiguousarray(cost.T)
    column = column.copy()
    current_cost = cost[np.arange(len(row)), column]
    uses = np.zeros((row.max() + 1, cost.shape[1]), dtype=np.int64)
    np.add.at(uses, (row, column), 1)
    for _ in range(SWEEPS):
        swapped = False
        for link, link_row in enumerate(row.tolist()):
            link_column = column[link]
            is_duplicate = uses[link_row, link_column] > 1
            if not is_duplicate and current_cost[link] == 0:
                continue
            gain = current_cost[link] + FORBIDDEN_COST * is_duplicate + current_cost
            gain = gain - cost[link, column] - by_column[link_column]
            gain -= FORBIDDEN_COST * ((uses[link_row, column] > 0) | (uses[row, link_column] > 0))
            gain[(column == link_column) | (row == link_row)] = 0
            other = int(gain.argmax())
            if gain[other] > 0:
                both = [link, other]
                uses[row[both], column[both]] -= 1
                column[both] = column[both[::-1]]
                uses[row[both], column[both]] += 1
                current_cost[both] = cost[both, column[both]]
                swapped = True
        if not swapped:
            break
    return column


def make_pairs(
    links: Sequence[Link], papers: Sequence[Paper], used_with: Mapping[int, set[int]], corpus: TfidfIndex, hard: bool
) -> Array:
    """Return the first paper, second paper and kind of each pair, [n, 3].

    Args:
        links: Citations of a split.
        papers: All papers.
        used_with: Papers that already form a pair with each paper; the negatives are added.
        corpus: TF-IDF vectors of the papers.
        hard: Whether half of the negatives are hard.
    """
    links = sorted(links, key=lambda link: shuffle_key("half", *(papers[paper].key for paper in link)))
    middle = len(links) // 2 if hard else 0
    pairs = [(*link, CITATION) for link in links]
    pairs += [(*pair, HARD) for pair in draw_negatives(links[:middle], papers, used_with, corpus)]
    pairs += [(*pair, RANDOM) for pair in draw_negatives(links[middle:], papers, used_with, None)]
    keys = {pair: shuffle_key("pair", *sorted(papers[paper].key for paper in pair[:2])) for pair in pairs}
    shuffled = [
        (second, first, kind) if keys[first, second, kind][-1] % 2 else (first, second, kind)
        for first, second, kind in sorted(pairs, key=keys.__getitem__)
    ]
    return np.array(shuffled, dtype=np.int64).reshape(-1, 3)


@dataclass(frozen=True)
class PeerRead(Task):
    """Citation between two papers of PeerRead."""

    name: str = "retrieval-peerread"
    dataset: str = "peerread"
    vocab_size: int = 512
    num_classes: int = 2
    max_length: int = 4000
    documents: int = 2
    held_out: float = 0.1  # share of the papers in test, and in dev
    papers: int = 6_430
    links: int = 17_925  # pairs of papers with a citation in at least one direction
    hard: bool = True  # half of the negatives are as similar in topic as citations
    version: int = 1  # version of the conversion to examples

    def files(self, data_dir: Path) -> list[str]:
        files = [f"peerread/{DOCS}", f"peerread/{LINKS}"]
        missing = [name for name in files if not (data_dir / name).is_file()]
        if missing:
            raise DataError(f"{data_dir} has no {', '.join(missing)}: {REMEDY}")
        return files

    def build(self, data_dir: Path, folder: Path, workers: int, progress: Progress) -> dict[str, Any]:
        docs_path, links_path = (data_dir / name for name in self.files(data_dir))
        papers = read_papers(docs_path, self.papers, progress)
        links = read_links(links_path, self.links, papers)
        titles = TitleIndex(paper.key for paper in papers)
        texts = []
        for done, paper in enumerate(papers):
            if done % 200 == 0:
                progress("strip citations", done, len(papers))
            texts.append(truncate(strip_citations(paper.text, titles), self.max_length))
        split_of = assign_splits(papers, links, self.held_out)
        used_with: dict[int, set[int]] = defaultdict(set)
        for a, b in links:
            used_with[a].add(b)
            used_with[b].add(a)
        progress("compare topics", 0, 1)
        corpus = TfidfIndex(texts)
        pairs = {}
        tokens = [byte_tokens(text.encode()) for text in texts]
        for done, split in enumerate(self.splits):
            progress("draw pairs", done, len(self.splits))
            split_links = [link for link in links if split_of[link[0]] == split_of[link[1]] == split]
            pairs[split] = make_pairs(split_links, papers, used_with, corpus, self.hard)
            np.save(folder / f"{split}.pairs.npy", pairs[split])
            write_split(folder, split, make_examples(pairs[split], tokens), self.documents)
        progress("baselines", 0, 1)
        metadata = {
            "source": "PeerRead, a stand-in for AAN",
            "examples": {split: len(rows) for split, rows in pairs.items()},
            "papers": dict(Counter(split_of.values())),
            "papers without a link": len(papers) - len(split_of),
            "links": len(links),
            "links across splits, dropped": sum(split_of[a] != split_of[b] for a, b in links),
            "pairs": {
                split: {kind: int((rows[:, 2] == number).sum()) for kind, number in KINDS.items()}
                for split, rows in pairs.items()
            },
            "mean cosine": {
                split: {
                    kind: round(float(corpus.cosines(*rows[rows[:, 2] == number, :2].T).mean()), 4)
                    for kind, number in KINDS.items()
                    if (rows[:, 2] == number).any()
                }
                for split, rows in pairs.items()
            },
            "baselines": score_baselines(papers, texts, corpus, pairs, self.max_length),
        }
        progress("baselines", 1, 1)
        return metadata


# Easier form: no hard negatives, and only the first 1,000 bytes (title and abstract).
PEERREAD_RANDOM = PeerRead(
    name="retrieval-peerread-random", dataset="peerread, random negatives", max_length=1000, hard=False
)


def truncate(text: str, length: int) -> str:
    """Return the characters that fit into the first `length` bytes."""
    return text.encode()[:length].decode(errors="ignore")


def make_examples(pairs: Array, tokens: Sequence[Array]) -> Iterator[Example]:
    """Yield the examples of pairs: the tokens of both papers, and whether one cites the other."""
    for first, second, kind in pairs.tolist():
        yield (tokens[first], tokens[second]), int(kind == CITATION)


def score_baselines(
    papers: Sequence[Paper], texts: Sequence[str], corpus: TfidfIndex, pairs: Mapping[str, Array], length: int
) -> dict[str, dict[str, float]]:
    """Return the accuracy of each baseline on dev, on test, and on each kind of test pairs."""
    splits = {split: (rows[:, 0], rows[:, 1], rows[:, 2]) for split, rows in pairs.items()}
    keys, years = [paper.key for paper in papers], [paper.year for paper in papers]
    methods: dict[str, Callable[[Array, Array], Array]] = {
        "bag of words": partial(topic_features, corpus),
        "citation strings": string_features(texts, keys, years),
        "citation strings, before they were stripped": string_features(
            [truncate(paper.text, length) for paper in papers], keys, years
        ),
        "years apart": partial(year_features, years),
    }
    combined = ["bag of words", "citation strings", "years apart"]
    methods["these together"] = lambda first, second: np.concatenate(
        [methods[name](first, second) for name in combined], axis=1
    )
    return {name: score_features(features, splits, KINDS, CITATION) for name, features in methods.items()}
