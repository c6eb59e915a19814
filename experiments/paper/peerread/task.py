"""Retrieval from PeerRead: a stand-in for LRA's AAN, never to be reported as AAN. Does one paper cite the other?

No paper is in two splits. Half of the pairs are citations; for each there is a pair that is none, and half of these
are hard (in the easier form of the task none): as near to the citation in topic as the other rules leave room for. A
paper is as often in citations as in other pairs, and the years are matched, so that neither a paper's fame nor its age
tells. What names a cited paper is stripped from the texts, and which paper comes first is random. `facts` has what was
lost, how near the hard pairs are, and how far simpler methods get.
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

from experiments.paper.peerread.baselines import TfidfIndex, score, string_features, topic_features, year_features
from experiments.paper.peerread.citations import Titles, strip_citations
from experiments.paper.peerread.communities import communities
from mgk._core.io import DataError
from mgk.tasks.base import Array, Example, Task, byte_tokens, write_split
from mgk.tasks.data_cache import Progress

DOCS, LINKS = "docs.jsonl", "citation_links.tsv"
GET_IT = (
    "make it from allenai/PeerRead (docs.jsonl: an object with key, year and text a line, the text from its title on; "
    "citation_links.tsv: key, tab, cited key a line)"
)
KINDS = {"citations": 0, "hard": 1, "random": 2}
CITATION, HARD, RANDOM = KINDS.values()
RESOLUTION = 4  # of the communities: PeerRead has 397 then, 50 of them of 50 to 266 papers
NEAR_YEARS = 1
SWEEPS = 5
FAR, BARRED = 2.0**30, 2.0**40  # costs, well above any difference of similarities

Link = tuple[int, int]  # citing paper, cited paper


@dataclass(frozen=True)
class Paper:
    key: str  # the title in small letters, without punctuation
    year: int  # 0 where it is not known
    text: str


def place(*keys: Any) -> bytes:
    """A random but fixed order that needs no random numbers: the same on every machine."""
    return hashlib.sha256("\t".join(map(str, keys)).encode()).digest()


def read_papers(path: Path, expected: int, progress: Progress) -> list[Paper]:
    papers: list[Paper] = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line.decode())
                paper = Paper(row["key"], row["year"], row["text"])
            except (ValueError, KeyError, TypeError) as error:
                problem = f"not a JSON object with key, year and text ({error})"
                raise DataError(f"{path}, line {number} is {problem}: {GET_IT}") from error
            wrong = (type(paper.key), type(paper.year), type(paper.text)) != (str, int, str)
            if wrong or not paper.key.strip() or not paper.text.strip():
                raise DataError(f"{path}, line {number} has a key, year or text that is empty or no text: {GET_IT}")
            papers.append(paper)
            if number % 1000 == 0:
                progress("read", number, expected)
    if len(papers) != expected:
        raise DataError(f"{path} has {len(papers)} papers instead of {expected}: {GET_IT}")
    twice = [key for key, count in Counter(paper.key for paper in papers).items() if count > 1]
    if twice:
        raise DataError(f"{path} has {twice[0]!r} twice: {GET_IT}")
    return papers


def read_links(path: Path, expected: int, papers: Sequence[Paper]) -> list[Link]:
    """One link for each two papers, also where each cites the other."""
    number_of = {paper.key: number for number, paper in enumerate(papers)}
    links: dict[frozenset[int], Link] = {}
    with open(path, "rb") as file:
        for line_number, line in enumerate(file, start=1):
            where = f"{path}, line {line_number}"
            try:
                keys = line.decode().rstrip("\r\n").split("\t")
            except UnicodeDecodeError as error:
                raise DataError(f"{where} is not UTF-8: {GET_IT}") from error
            if len(keys) != 2:
                raise DataError(f"{where} has {len(keys)} columns instead of 2: {GET_IT}")
            unknown = [key for key in keys if key not in number_of]
            if unknown:
                raise DataError(f"{where} has {unknown[0][:80]!r}, which {DOCS} has not: {GET_IT}")
            citing, cited = (number_of[key] for key in keys)
            if citing != cited:
                links.setdefault(frozenset((citing, cited)), (citing, cited))
    if len(links) != expected:
        raise DataError(f"{path} links {len(links)} pairs of papers instead of {expected}: {GET_IT}")
    return list(links.values())


def assign(papers: Sequence[Paper], links: Sequence[Link], held_out: float) -> dict[int, str]:
    """The split of each paper that has a link: whole communities go to test and dev until they are full.

    Papers drawn one by one would lose a third of the links, and keep 1 % of them in test.
    """
    group = communities(links, [place(paper.key) for paper in papers], RESOLUTION)
    members: dict[int, list[int]] = {}
    for paper, number in group.items():
        members.setdefault(number, []).append(paper)
    room = {name: held_out * len(group) for name in ("test", "dev")}
    result = {}
    for ours in sorted(members.values(), key=lambda ours: min(place("split", papers[paper].key) for paper in ours)):
        split = next((name for name, left in room.items() if len(ours) <= left), "train")
        if split != "train":
            room[split] -= len(ours)
        result.update(dict.fromkeys(ours, split))
    return result


def negatives(
    links: Sequence[Link], papers: Sequence[Paper], taken: Mapping[int, set[int]], corpus: TfidfIndex | None
) -> list[Link]:
    """The citing papers of the links with each other's cited papers: pairs that are not `taken`, each once.

    A cited paper takes the place of one of nearly its year; with a corpus, of one that is as similar to the citing
    paper as itself.
    """
    if len(links) < 2:
        return []
    links = sorted(links, key=lambda link: place("draw", *(papers[paper].key for paper in link)))
    citing, row = np.unique([a for a, _ in links], return_inverse=True)
    cited, own = np.unique([b for _, b in links], return_inverse=True)
    years = np.array([papers[b].year for b in cited.tolist()])
    # What it costs to have each cited paper at each link, [links, cited]: whole numbers, so that no rounding decides.
    cost = FAR * (np.abs(years - years[own][:, None]) > NEAR_YEARS)
    barred = np.array([[b in taken[a] or a == b for b in cited.tolist()] for a in citing.tolist()])
    cost += BARRED * barred[row]
    if corpus is not None:
        likeness = corpus.similarities(citing, cited)[row]
        cost += np.abs(likeness - likeness[np.arange(len(links)), own][:, None])
    column = exchange(cost, row, np.roll(own, 1))
    found = []
    for a, b in zip(citing[row].tolist(), cited[column].tolist(), strict=True):
        if a != b and b not in taken[a]:
            found.append((a, b))
            taken[a].add(b)
            taken[b].add(a)
    return found


def exchange(cost: Array, row: Array, column: Array) -> Array:
    """The columns with which each of the links, [links], costs little, and no row has a column twice.

    Two links at a time change columns as long as the sum of their costs falls.
    """
    by_column = np.ascontiguousarray(cost.T)
    column = column.copy()
    now = cost[np.arange(len(row)), column]
    used = np.zeros((row.max() + 1, cost.shape[1]), dtype=np.int64)
    np.add.at(used, (row, column), 1)
    for _ in range(SWEEPS):
        exchanged = False
        for link, ours in enumerate(row.tolist()):
            here = column[link]
            twice = used[ours, here] > 1
            if not twice and now[link] == 0:
                continue
            gain = now[link] + BARRED * twice + now - cost[link, column] - by_column[here]
            gain -= BARRED * ((used[ours, column] > 0) | (used[row, here] > 0))
            gain[(column == here) | (row == ours)] = 0
            other = int(gain.argmax())
            if gain[other] > 0:
                both = [link, other]
                used[row[both], column[both]] -= 1
                column[both] = column[both[::-1]]
                used[row[both], column[both]] += 1
                now[both] = cost[both, column[both]]
                exchanged = True
        if not exchanged:
            break
    return column


def make_pairs(
    links: Sequence[Link], papers: Sequence[Paper], taken: Mapping[int, set[int]], corpus: TfidfIndex, hard: bool
) -> Array:
    """First paper, second paper and kind of each pair, in random order and either way round, [n, 3]."""
    links = sorted(links, key=lambda link: place("half", *(papers[paper].key for paper in link)))
    middle = len(links) // 2 if hard else 0
    pairs = [(*link, CITATION) for link in links]
    pairs += [(*pair, HARD) for pair in negatives(links[:middle], papers, taken, corpus)]
    pairs += [(*pair, RANDOM) for pair in negatives(links[middle:], papers, taken, None)]
    placed = {pair: place("pair", *sorted(papers[paper].key for paper in pair[:2])) for pair in pairs}
    turned = [
        (second, first, kind) if placed[first, second, kind][-1] % 2 else (first, second, kind)
        for first, second, kind in sorted(pairs, key=placed.__getitem__)
    ]
    return np.array(turned, dtype=np.int64).reshape(-1, 3)


@dataclass(frozen=True)
class PeerRead(Task):
    name: str = "retrieval-peerread"
    dataset: str = "peerread"
    vocab_size: int = 512
    num_classes: int = 2
    max_length: int = 4000
    documents: int = 2
    held_out: float = 0.1  # of the papers for test, and as many for dev
    papers: int = 6_430
    links: int = 17_925  # pairs of papers of which at least one cites the other
    hard: bool = True  # half of the pairs without a citation are as near in topic as citations
    version: int = 1  # of the way in which the examples are made

    def files(self, data_dir: Path) -> list[str]:
        files = [f"peerread/{DOCS}", f"peerread/{LINKS}"]
        missing = [name for name in files if not (data_dir / name).is_file()]
        if missing:
            raise DataError(f"{data_dir} has no {', '.join(missing)}: {GET_IT}")
        return files

    def build(self, data_dir: Path, folder: Path, workers: int, progress: Progress) -> dict[str, Any]:
        docs_path, links_path = (data_dir / name for name in self.files(data_dir))
        papers = read_papers(docs_path, self.papers, progress)
        links = read_links(links_path, self.links, papers)
        titles = Titles(paper.key for paper in papers)
        texts = []
        for done, paper in enumerate(papers):
            if done % 200 == 0:
                progress("strip citations", done, len(papers))
            texts.append(cut(strip_citations(paper.text, titles), self.max_length))
        split_of = assign(papers, links, self.held_out)
        taken: dict[int, set[int]] = defaultdict(set)
        for a, b in links:
            taken[a].add(b)
            taken[b].add(a)
        progress("compare topics", 0, 1)
        corpus = TfidfIndex(texts)
        pairs = {}
        tokens = [byte_tokens(text.encode()) for text in texts]
        for done, split in enumerate(self.splits):
            progress("draw pairs", done, len(self.splits))
            ours = [link for link in links if split_of[link[0]] == split_of[link[1]] == split]
            pairs[split] = make_pairs(ours, papers, taken, corpus, self.hard)
            np.save(folder / f"{split}.pairs.npy", pairs[split])
            write_split(folder, split, examples(pairs[split], tokens), self.documents)
        progress("baselines", 0, 1)
        facts = {
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
            "baselines": baselines(papers, texts, corpus, pairs, self.max_length),
        }
        progress("baselines", 1, 1)
        return facts


# Easier: no pair is chosen to be near in topic; and shorter, of titles and abstracts.
PEERREAD_RANDOM = PeerRead(
    name="retrieval-peerread-random", dataset="peerread, random negatives", max_length=1000, hard=False
)


def cut(text: str, length: int) -> str:
    """The first `length` bytes, no character broken."""
    return text.encode()[:length].decode(errors="ignore")


def examples(pairs: Array, tokens: Sequence[Array]) -> Iterator[Example]:
    for first, second, kind in pairs.tolist():
        yield (tokens[first], tokens[second]), int(kind == CITATION)


def baselines(
    papers: Sequence[Paper], texts: Sequence[str], corpus: TfidfIndex, pairs: Mapping[str, Array], length: int
) -> dict[str, dict[str, float]]:
    splits = {split: (rows[:, 0], rows[:, 1], rows[:, 2]) for split, rows in pairs.items()}
    keys, years = [paper.key for paper in papers], [paper.year for paper in papers]
    methods: dict[str, Callable[[Array, Array], Array]] = {
        "bag of words": partial(topic_features, corpus),
        "citation strings": string_features(texts, keys, years),
        "citation strings, before they were stripped": string_features(
            [cut(paper.text, length) for paper in papers], keys, years
        ),
        "years apart": partial(year_features, years),
    }
    first_three = ["bag of words", "citation strings", "years apart"]
    methods["these together"] = lambda first, second: np.concatenate(
        [methods[name](first, second) for name in first_three], axis=1
    )
    return {name: score(features, splits, KINDS, CITATION) for name, features in methods.items()}
