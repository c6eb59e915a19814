"""The tasks on data made here: what a split holds, the cache, and one clear line for each way the data can be wrong."""

import io
import itertools
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mgk.tasks import PAD, TASKS, DataError, Split, task
from mgk.tasks.baselines import Corpus, logistic_regression, year_features
from mgk.tasks.citations import Titles, strip_citations
from mgk.tasks.communities import communities
from mgk.tasks.listops import ListOps, Rules
from mgk.tasks.peerread import CITATION, HARD, RANDOM, PeerRead, exchange
from mgk.tasks.retrieval import AAN
from mgk.tasks.store import write_split
from mgk.tasks.text import Text, dev_names

TEXT = Text(reviews=8, dev=2)
PAIRS = AAN(counts={"train": 4, "dev": 2, "test": 3}, max_length=20)
PAPERS = PeerRead(papers=240, links=732, held_out=0.2, max_length=500)
GENERATED = ListOps(rules=Rules(3, 3, 4, 30), counts={"test": 20, "dev": 10, "train": 50}, reads_tsv=False)


def documents(split, example):
    """The texts of an example."""
    ends = split.offsets[example * split.documents : (example + 1) * split.documents + 1].tolist()
    return [bytes((split.tokens[a:b] - 1).tolist()) for a, b in itertools.pairwise(ends)]


# --- data -------------------------------------------------------------------------------------------------------------


def review(name):
    return f"What a film, é: {name}<br />" + "x" * (len(name) % 7)


def make_imdb(data):
    for split, label in itertools.product(("train", "test"), ("neg", "pos")):
        folder = data / "aclImdb" / split / label
        folder.mkdir(parents=True)
        for number in range(8):
            name = f"{number * 40}_{9 if label == 'pos' else 2}.txt"
            (folder / name).write_text(review(f"{split}/{label}/{name}"), encoding="utf-8")
    (data / "aclImdb" / "train" / "labeledBow.feat").write_text("9 0:9")
    (data / "aclImdb" / "train" / "unsup").mkdir()
    (data / "aclImdb" / "train" / "unsup" / "0_0.txt").write_text("no label")


def make_archive(data, suffix=".tar.gz", mode="w:gz"):
    make_imdb(data / "made")
    with tarfile.open(data / f"aclImdb_v1{suffix}", mode) as archive:
        archive.add(data / "made" / "aclImdb", "aclImdb")


def make_aan(data):
    (data / "aan").mkdir(parents=True)
    for file, count in (("train", 4), ("eval", 2), ("test", 3)):
        lines = [f"{n % 2}.0\tid{n}\tid{n + 1}\tone {file} {n}\ttwo é {'long ' * 9}" for n in range(count)]
        (data / "aan" / f"new_aan_pairs.{file}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_peerread(data):
    """12 topics with words of their own, 20 papers each, each of which cites 3 of its topic, and one the next topic."""
    random = np.random.default_rng(0)
    papers, links = [], []
    for topic, number in itertools.product(range(12), range(20)):
        words = [f"topic{chr(97 + topic)}{chr(97 + w)}" for w in range(26)]
        chosen = random.choice(words, 40)
        key = f"a study of {words[0]} number {chr(97 + number)}"
        text = f"{key.title()}\n{' '.join(chosen)} common words (Doe et al., 2014) and é more."
        papers.append({"key": key, "year": 2010 + number % 3, "text": text})
        links += [(key, f"a study of {words[0]} number {chr(97 + (number + n) % 20)}") for n in (1, 5, 9)]
        if number == 0:
            links.append((key, f"a study of topic{chr(97 + (topic + 1) % 12)}a number h"))
    (data / "peerread").mkdir(parents=True)
    (data / "peerread" / "docs.jsonl").write_text("\n".join(map(json.dumps, papers)))
    (data / "peerread" / "citation_links.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in links))
    return papers, links


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_example", [1, 2])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("length", [None, 3, 50])
def test_batch(tmp_path, per_example, dtype, length):
    random = np.random.default_rng(0)
    examples = [
        ([random.integers(1, 200, random.integers(1, 9)).astype(dtype) for _ in range(per_example)], n % 3)
        for n in range(7)
    ]
    assert write_split(tmp_path, "train", iter(examples), per_example) == 7
    arrays = (np.load(tmp_path / f"train.{name}.npy", allow_pickle=False) for name in ("tokens", "offsets", "labels"))
    split = Split(*arrays, documents=per_example)
    assert split.tokens.dtype == dtype
    assert len(split) == 7
    chosen = [5, 0, 5, 2]
    tokens, lengths, labels = split.batch(chosen, length)
    assert tokens.dtype == lengths.dtype == labels.dtype == torch.int64
    assert labels.tolist() == [n % 3 for n in chosen]
    width = length or max(len(part) for n in chosen for part in examples[n][0])
    assert tokens.shape == ((4, width) if per_example == 1 else (4, 2, width))
    for row, size, part in zip(
        tokens.reshape(-1, width), lengths.reshape(-1), [p for n in chosen for p in examples[n][0]], strict=True
    ):
        kept = part[:width].tolist()
        assert row.tolist() == kept + [PAD] * (width - len(kept))
        assert size == len(kept)


def test_batch_takes_what_a_sampler_gives(tmp_path):
    split = GENERATED.split(tmp_path, "train")
    for indices in (range(3), torch.arange(3), np.arange(3), [0, 1, 2]):
        assert torch.equal(split.batch(indices)[0], split.batch([0, 1, 2])[0])
    assert split.batch([])[0].shape == (0, 0)
    for wrong in ([-1], [50], [0, 99]):
        with pytest.raises(ValueError, match="indices must be at least 0 and below 50"):
            split.batch(wrong)
    with pytest.raises(ValueError, match="length"):
        split.batch([0], 0)
    assert split.class_shares(10).sum() == pytest.approx(1)
    assert split.class_shares(10)[3] == np.mean(split.labels == 3)


def test_tokens_of_the_wrong_kind_are_refused(tmp_path):
    for examples in ([([np.ones(3)], 0)], [([np.ones(3, np.uint8)] * 2, 0)]):
        with pytest.raises(ValueError, match="must"):
            write_split(tmp_path, "x", examples)


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_names():
    assert list(TASKS) == ["listops", "listops-short", "text", "retrieval-aan", "retrieval-peerread"]
    assert [t.dataset for t in TASKS.values()] == ["listops", "listops-short", "imdb", "aan", "peerread"]
    with pytest.raises(ValueError, match="'listops', 'listops-short', 'text', 'retrieval-aan', 'retrieval-peerread'"):
        task("retrieval")
    with pytest.raises(ValueError, match="split must be one of 'train', 'dev', 'test'"):
        task("text").split(Path("nowhere"), "valid")


@pytest.mark.parametrize(
    "make",
    [
        make_imdb,
        make_archive,
        lambda data: make_archive(data, ".tar.xz", "w:xz"),
        lambda data: make_archive(data, ".tar", "w"),
    ],
)
def test_text(tmp_path, make):
    make(tmp_path)
    stages = set()
    TEXT.prepare(tmp_path, 1, lambda stage, done, total: stages.add(stage))
    assert {"checksum", "read", "write"} <= stages
    sizes, seen = {"train": 12, "dev": 4, "test": 16}, []
    for name, size in sizes.items():
        split = TEXT.split(tmp_path, name)
        assert len(split) == size
        assert split.class_shares(2).tolist() == [0.5, 0.5]
        for example, label in enumerate(split.labels.tolist()):
            text = documents(split, example)[0].decode()
            path = text.split(": ")[1].split("<")[0]
            assert text == review(path)
            assert path.startswith("test/" if name == "test" else "train/")
            assert label == ("/pos/" in path)
            seen.append(path)
    assert len(set(seen)) == 32
    assert TEXT.facts(tmp_path)["examples"] == sizes


def test_dev_takes_neighbouring_reviews_and_never_changes():
    names = [f"train/pos/{number}_7.txt" for number in range(12_500)]
    dev = dev_names(names, 1250)
    assert sorted(dev) == sorted(dev_names(names[::-1], 1250))
    numbers = {int(name.split("/")[2].split("_")[0]) for name in dev}
    assert len(numbers) == 1250
    assert len({number // 50 for number in numbers}) == 25
    assert min(numbers) == 150


def test_aan(tmp_path):
    make_aan(tmp_path)
    train = PAIRS.split(tmp_path, "train")
    assert train.labels.tolist() == [0, 1, 0, 1]
    assert documents(train, 2) == [b"one train 2", "two é long long long ".encode()[:20]]
    assert [len(PAIRS.split(tmp_path, name)) for name in ("dev", "test")] == [2, 3]
    assert train.batch([0, 1])[0].shape == (2, 2, 20)


@pytest.fixture(scope="module")
def peerread(tmp_path_factory):
    data = tmp_path_factory.mktemp("peerread")
    papers, links = make_peerread(data)
    PAPERS.prepare(data)
    folder = next((data / ".mgk" / PAPERS.name).glob("[!.]*/"))
    pairs = {name: np.load(folder / f"{name}.pairs.npy") for name in PAPERS.splits}
    return data, papers, links, pairs


def test_no_paper_is_in_two_splits(peerread):
    _, _, _, pairs = peerread
    papers = [set(rows[:, :2].reshape(-1).tolist()) for rows in pairs.values()]
    assert all(papers)
    assert not any(a & b for a, b in itertools.combinations(papers, 2))


def test_pairs_are_what_they_are_said_to_be(peerread):
    data, papers, links, pairs = peerread
    linked = {frozenset(link) for link in links}
    for name, rows in pairs.items():
        split = PAPERS.split(data, name)
        kinds = Counter(rows[:, 2].tolist())
        assert kinds[CITATION] == pytest.approx(kinds[HARD] + kinds[RANDOM], rel=0.05)
        assert kinds[HARD] == pytest.approx(kinds[RANDOM], rel=0.1)
        assert len({frozenset(row[:2]) for row in rows.tolist()}) == len(rows) == len(split)
        for number, (first, second, kind) in enumerate(rows.tolist()):
            keys = [papers[first]["key"], papers[second]["key"]]
            assert first != second
            assert (frozenset(keys) in linked) == (kind == CITATION) == bool(split.labels[number])
            texts = [text.decode() for text in documents(split, number)]
            assert [text.split("\n")[0].lower() for text in texts] == keys
            assert not any("Doe" in text for text in texts)
    facts = PAPERS.facts(data)
    kept = sum(int((rows[:, 2] == CITATION).sum()) for rows in pairs.values())
    assert facts["links across splits, dropped"] == 732 - kept > 0
    assert facts["source"] == "PeerRead, a stand-in for AAN"


def test_neither_order_nor_fame_nor_year_tells(peerread):
    _, papers, links, pairs = peerread
    rows = pairs["train"]
    number = {paper["key"]: n for n, paper in enumerate(papers)}
    directed = {(number[a], number[b]) for a, b in links}
    forwards = [(a, b) in directed for a, b, kind in rows.tolist() if kind == CITATION]
    assert 0.4 < np.mean(forwards) < 0.6
    positive = rows[:, 2] == CITATION
    seen = [np.bincount(rows[chosen, :2].reshape(-1), minlength=240) for chosen in (positive, ~positive)]
    assert np.abs(seen[0] - seen[1]).sum() <= 0.05 * seen[0].sum()
    years = np.array([paper["year"] for paper in papers])
    apart = np.abs(years[rows[:, 0]] - years[rows[:, 1]])
    assert apart[positive].mean() == pytest.approx(apart[~positive].mean(), abs=0.8)


def test_hard_pairs_are_near(peerread):
    data, _, _, _ = peerread
    cosine = PAPERS.facts(data)["mean cosine"]["train"]
    assert cosine["hard"] > 2 * cosine["random"]
    assert cosine["hard"] == pytest.approx(cosine["citations"], rel=0.2)


def test_peerread_is_the_same_again(peerread, tmp_path):
    data, _, _, _ = peerread
    make_peerread(tmp_path)
    for name in PAPERS.splits:
        ours, again = (PAPERS.split(place, name) for place in (data, tmp_path))
        assert np.array_equal(ours.tokens, again.tokens)
        assert np.array_equal(ours.labels, again.labels)


def test_baselines(peerread):
    data, _, _, _ = peerread
    scores = PAPERS.baselines(data)
    assert {"bag of words", "citation strings", "years apart"} <= set(scores)
    for row in scores.values():
        assert {"dev", "test", "test, citations", "test, hard", "test, random"} == set(row)
        assert all(0 <= value <= 1 for value in row.values())
    # Topics have words of their own: the bag of words knows random pairs from other topics, and not the hard ones.
    assert scores["bag of words"]["test, random"] > scores["bag of words"]["test, hard"] + 0.3
    assert GENERATED.baselines(data) == {}


def test_logistic_regression_finds_what_there_is():
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 3))
    assert np.mean(logistic_regression(x, x[:, 1] > 0.3)(x) == (x[:, 1] > 0.3)) > 0.97
    years = [2000, 2001, 2004, 2030]
    apart = year_features(years, np.array([0, 0, 0]), np.array([1, 2, 3])).argmax(axis=1)
    assert apart.tolist() == [1, 4, 6]


def test_similarities_are_whole_numbers():
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefgh"), 5)) for _ in range(1500)]
    corpus = Corpus([" ".join(random.choice(words, 60)) for _ in range(100)])
    exact = corpus.vectors.astype(np.int64) @ corpus.vectors.astype(np.int64).T
    ours = corpus.similarities(np.arange(100), np.arange(100))
    assert np.array_equal(ours, exact)
    assert corpus.cosines(np.arange(100), np.arange(100)) == pytest.approx(np.ones(100), abs=0.01)


def test_communities_of_two_cliques_and_a_bridge():
    cliques = [itertools.combinations(range(8), 2), itertools.combinations(range(8, 16), 2), [(0, 8)]]
    found = communities([link for clique in cliques for link in clique], [bytes([n]) for n in range(16)])
    assert len({found[n] for n in range(8)} | {found[n] for n in range(8, 16)}) == 2
    assert found[1] != found[9]


def test_exchange_finds_the_cheapest_and_no_pair_twice():
    cost = np.array([[9, 1, 9], [9, 9, 1], [1, 9, 9], [9, 9, 9]], dtype=np.float64)
    assert exchange(cost, np.arange(4), np.array([0, 1, 2, 2]))[:3].tolist() == [1, 2, 0]
    row, column = np.array([0, 0, 1, 1]), np.array([0, 0, 1, 1])
    found = exchange(np.zeros((4, 2)), row, column)
    assert sorted(zip(row.tolist(), found.tolist(), strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    "text, kept",
    [
        ("as in (Kingma and Ba, 2014) here", "as in here"),
        ("as in (Lu et al. 2013; Jacob, Obozinski, and Vert 2009), here", "as in, here"),
        ("Kingma and Ba (2014) showed", "showed"),
        ("of van den Oord et al. (2016b), who", "of, who"),
        ("by Täckström et al. again", "by again"),
        ("as Jordan, et al., say", "as, say"),
        ("known [12] and [3, 7-9] and [7, Section 4]", "known and and"),
        ("known [KB14, Mik+13] well", "known well"),
        ("in [Kingma and Ba, 2014] too", "in too"),
        ("(Fishburn (1970); Machina (1988))", ""),
        ("see arXiv:1412.6980v9 and arXiv preprint arXiv:1412.6980", "see and"),
        ("at https://github.com/a/b-c now", "at now"),
        ("we use Attention, is ALL you need: now", "we use: now"),
        ("the range [0, 1] and f(x) stay (mostly)", "the range [0, 1] and f(x) stay (mostly)"),
        ("text\nReferences\n[1] Kingma. Adam.", "text"),
    ],
)
def test_citations_are_stripped(text, kept):
    titles = Titles(["attention is all you need", "deep learning"])
    stripped = strip_citations(f"Deep Learning Is All You Need (2014)\n{text}", titles)
    assert stripped.split() == f"Deep Learning Is All You Need (2014)\n{kept}".split()


# --- wrong data -------------------------------------------------------------------------------------------------------


def edit(path, change):
    return lambda data: (data / path).write_bytes(change((data / path).read_bytes()))


def rewrite_line(number, change):
    def changed(content):
        lines = content.split(b"\n")
        lines[number] = change(lines[number])
        return b"\n".join(lines)

    return changed


def archive_without(name):
    def make(data):
        make_archive(data)
        (data / "made" / "aclImdb" / name).unlink()
        with tarfile.open(data / "aclImdb_v1.tar.gz", "w:gz") as archive:
            archive.add(data / "made" / "aclImdb", "aclImdb")

    return make


REVIEW = "aclImdb/test/neg/0_2.txt"
ARCHIVE = "aclImdb_v1.tar.gz"
TRAIN_PAIRS = "aan/new_aan_pairs.train.tsv"
DOCS, LINKS = "peerread/docs.jsonl", "peerread/citation_links.tsv"


CUT = "damaged or not complete|reviews instead of 8"  # it may be cut between two reviews


def nothing(data):
    pass


DAMAGE = {
    "no imdb": (TEXT, nothing, nothing, "no aclImdb folder or archive: get https://ai.stanford.edu"),
    "a review missing": (TEXT, make_imdb, lambda d: (d / REVIEW).unlink(), "test/neg has 7 reviews instead of 8: get"),
    "a folder missing": (TEXT, make_imdb, lambda d: (d / "aclImdb/train").rename(d / "x"), "train/neg has 0 reviews"),
    "a review empty": (TEXT, make_imdb, edit(REVIEW, lambda _: b""), "test/neg/0_2.txt is empty"),
    "a review not UTF-8": (TEXT, make_imdb, edit(REVIEW, lambda c: c + b"\xff"), "test/neg/0_2.txt is not UTF-8"),
    "half an archive": (TEXT, make_archive, edit(ARCHIVE, lambda c: c[: len(c) // 2]), CUT),
    "half an xz archive": (
        TEXT,
        lambda data: make_archive(data, ".tar.xz", "w:xz"),
        edit("aclImdb_v1.tar.xz", lambda c: c[: len(c) // 2]),
        CUT,
    ),
    "a damaged archive": (
        TEXT,
        make_archive,
        edit(ARCHIVE, lambda c: c[:300] + bytes(200) + c[500:]),
        CUT,
    ),
    "no archive": (TEXT, make_archive, edit(ARCHIVE, lambda c: b"<html>404</html>"), "damaged or not complete"),
    "an empty archive": (TEXT, make_archive, edit(ARCHIVE, lambda c: b""), "damaged or not complete"),
    "an archive short of a review": (TEXT, archive_without("train/pos/0_9.txt"), nothing, "train/pos has 7 reviews"),
    "no aan": (PAIRS, nothing, nothing, "aan has no new_aan_pairs.train.tsv, .*long-range-arena"),
    "some of aan": (PAIRS, make_aan, lambda d: (d / TRAIN_PAIRS).unlink(), "no aan/new_aan_pairs.train.tsv beside"),
    "aan columns": (PAIRS, make_aan, edit(TRAIN_PAIRS, rewrite_line(2, lambda c: c[:9])), "line 3 has 3 columns"),
    "aan label": (PAIRS, make_aan, edit(TRAIN_PAIRS, rewrite_line(1, lambda c: b"7" + c)), "line 2 has label b'71.0'"),
    "aan UTF-8": (
        PAIRS,
        make_aan,
        edit(TRAIN_PAIRS, rewrite_line(1, lambda c: c + b"\xc3")),
        "line 2, text is not UTF",
    ),
    "aan no text": (
        PAIRS,
        make_aan,
        edit(TRAIN_PAIRS, rewrite_line(1, lambda c: b"1\ta\tb\t\ttext")),
        "line 2, text is empty",
    ),
    "aan short": (PAIRS, make_aan, edit(TRAIN_PAIRS, lambda c: c[: c.rindex(b"1.0")]), "has 3 pairs instead of 4"),
    "aan empty": (PAIRS, make_aan, edit(TRAIN_PAIRS, lambda c: b""), "has 0 pairs instead of 4"),
    "no peerread": (PAPERS, nothing, nothing, "no peerread/docs.jsonl, peerread/citation_links.tsv: .*PeerRead"),
    "no links": (PAPERS, make_peerread, lambda d: (d / LINKS).unlink(), "no peerread/citation_links.tsv"),
    "bad JSON": (
        PAPERS,
        make_peerread,
        edit(DOCS, rewrite_line(4, lambda c: c[:-9])),
        "docs.jsonl, line 5 is not a JSON",
    ),
    "not an object": (PAPERS, make_peerread, edit(DOCS, rewrite_line(4, lambda c: b"3")), "docs.jsonl, line 5 is not"),
    "no year": (
        PAPERS,
        make_peerread,
        edit(DOCS, rewrite_line(0, lambda c: b'{"key": "a", "text": "b"}')),
        "line 1 .*year",
    ),
    "no text": (
        PAPERS,
        make_peerread,
        edit(DOCS, rewrite_line(0, lambda c: b'{"key": "a", "year": 1, "text": ""}')),
        "line 1 has a key, year or text that is empty",
    ),
    "a text that is a number": (
        PAPERS,
        make_peerread,
        edit(DOCS, rewrite_line(0, lambda c: b'{"key": "a", "year": 1, "text": 5}')),
        "line 1 has a key, year or text",
    ),
    "docs not UTF-8": (
        PAPERS,
        make_peerread,
        edit(DOCS, rewrite_line(7, lambda c: c[:30] + b"\xff" + c[30:])),
        "line 8",
    ),
    "papers short": (
        PAPERS,
        make_peerread,
        edit(DOCS, lambda c: c[: c.rindex(b"\n")]),
        "has 239 papers instead of 240",
    ),
    "a paper twice": (
        PAPERS,
        make_peerread,
        edit(DOCS, lambda c: b"\n".join([*c.split(b"\n")[:-1], c.split(b"\n")[0]])),
        "twice",
    ),
    "link columns": (
        PAPERS,
        make_peerread,
        edit(LINKS, rewrite_line(3, lambda c: c + b"\tx")),
        "tsv, line 4 has 3 columns",
    ),
    "unknown paper": (PAPERS, make_peerread, edit(LINKS, rewrite_line(3, lambda c: c + b"x")), "line 4 has .* has not"),
    "links not UTF-8": (
        PAPERS,
        make_peerread,
        edit(LINKS, rewrite_line(3, lambda c: b"\xff" + c)),
        "line 4 is not UTF-8",
    ),
    "links short": (
        PAPERS,
        make_peerread,
        edit(LINKS, lambda c: c[: c.rindex(b"\n", 0, -1)]),
        "links 731 pairs of papers instead of 732",
    ),
    "no room for a cache": (
        GENERATED,
        nothing,
        lambda d: (d / ".mgk").write_text(""),
        "must be readable and .*writable",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_wrong_data_gives_one_clear_line_and_no_cache(tmp_path, damage):
    ours, make, spoil, message = DAMAGE[damage]
    make(tmp_path)
    spoil(tmp_path)
    for use in (lambda: ours.prepare(tmp_path), lambda: ours.split(tmp_path, "train")):
        with pytest.raises(DataError, match=message) as error:
            use()
        assert "\n" not in str(error.value)
        assert str(tmp_path) in str(error.value)
        assert made(tmp_path, ours) == []


# --- cache ------------------------------------------------------------------------------------------------------------


def made(data, ours):
    """Caches and what is left of unfinished ones."""
    root = data / ".mgk" / ours.name
    return [path for path in root.glob("*") if path.is_dir()] if root.is_dir() else []


class Counting(ListOps):
    """A task that counts how often it was made."""

    times = 0

    def build(self, *args):
        Counting.times += 1
        return super().build(*args)


def test_made_once_and_again_when_settings_change(tmp_path):
    Counting.times = 0
    ours = Counting(rules=GENERATED.rules, counts=GENERATED.counts, reads_tsv=False)
    for _ in range(2):
        ours.prepare(tmp_path)
        ours.split(tmp_path, "dev")
    assert Counting.times == 1
    other = replace(ours, seed=1)
    assert rows(other.split(tmp_path, "dev")) != rows(ours.split(tmp_path, "dev"))
    assert Counting.times == 2
    assert len(made(tmp_path, ours)) == 2


def rows(split):
    return [split.tokens[a:b].tobytes() for a, b in itertools.pairwise(split.offsets.tolist())]


def test_a_changed_source_is_read_again(tmp_path):
    make_aan(tmp_path)
    before = documents(PAIRS.split(tmp_path, "train"), 0)
    path = tmp_path / TRAIN_PAIRS
    path.write_bytes(path.read_bytes().replace(b"one", b"new text"))
    after = documents(PAIRS.split(tmp_path, "train"), 0)
    assert (before[0], after[0]) == (b"one train 0", b"new text train 0")
    # Of the same size and the same time: only prepare, which reads it, can tell.
    stamp = path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes().replace(b"new", b"old"))
    os.utime(path, ns=(stamp, stamp))
    PAIRS.prepare(tmp_path)
    assert documents(PAIRS.split(tmp_path, "train"), 0)[0] == b"old text train 0"


def test_a_touched_or_moved_source_is_not_read_again(tmp_path):
    make_aan(tmp_path / "here")
    PAIRS.prepare(tmp_path / "here")
    before = made(tmp_path / "here", PAIRS)
    os.utime(tmp_path / "here" / TRAIN_PAIRS, (1, 1))
    PAIRS.prepare(tmp_path / "here")
    assert made(tmp_path / "here", PAIRS) == before
    (tmp_path / "here").rename(tmp_path / "there")
    PAIRS.prepare(tmp_path / "there")
    assert [path.name for path in made(tmp_path / "there", PAIRS)] == [path.name for path in before]


@pytest.mark.parametrize("file", ["train.tokens.npy", "dev.offsets.npy", "test.labels.npy", "cache.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "changed"])
def test_a_damaged_cache_is_made_again(tmp_path, file, damage):
    expected = {name: rows(GENERATED.split(tmp_path, name)) for name in GENERATED.splits}
    path = made(tmp_path, GENERATED)[0] / file
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        # The labels' last byte is the highest of an int64.
        path.write_bytes(content[:-8] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 64]))
    if damage == "changed":
        GENERATED.prepare(tmp_path)
    assert {name: rows(GENERATED.split(tmp_path, name)) for name in GENERATED.splits} == expected
    GENERATED.prepare(tmp_path)
    assert path.read_bytes() == content
    assert len(made(tmp_path, GENERATED)) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_cache_is_never_seen(tmp_path, error):
    def stop(stage, done, total):
        if stage == "train":
            raise error

    with pytest.raises(error):
        GENERATED.prepare(tmp_path, 1, stop)
    assert made(tmp_path, GENERATED) == []
    assert len(GENERATED.split(tmp_path, "train")) == 50


PREPARE = """
import os, signal, sys, time
from pathlib import Path
from mgk.tasks.listops import ListOps, Rules
task = ListOps(rules=Rules(3, 3, 4, 30), counts={"test": 20, "dev": 10, "train": 50}, reads_tsv=False)
def progress(stage, done, total):
    if sys.argv[2] == "killed" and stage == "train":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
print("ready", flush=True)
sys.stdin.readline()
task.prepare(Path(sys.argv[1]), 1, progress)
print(task.split(Path(sys.argv[1]), "train").labels.sum())
"""


def test_several_processes_at_once_and_one_that_is_killed(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PREPARE, str(tmp_path), fate],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for fate in ("killed", "lives", "lives")
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    killed, *living = processes
    killed.communicate("\n", timeout=60)
    assert killed.returncode < 0
    (left,) = made(tmp_path, GENERATED)
    assert left.name.startswith(".making-")
    for process in living:
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0] for process in living]
    assert answers == [f"{GENERATED.split(tmp_path, 'train').labels.sum()}\n"] * 2
    # What the killed one left is not touched as long as it might be at work.
    assert len(made(tmp_path, GENERATED)) == 2
    os.utime(left, (0, 0))
    replace(GENERATED, seed=1).prepare(tmp_path)
    assert left not in made(tmp_path, GENERATED)


def test_nothing_is_unpickled(tmp_path):
    GENERATED.prepare(tmp_path)
    folder = made(tmp_path, GENERATED)[0]
    stream = io.BytesIO()
    np.save(stream, np.array([{}], dtype=object), allow_pickle=True)
    path = folder / "train.labels.npy"
    path.write_bytes(stream.getvalue())
    manifest = json.loads((folder / "cache.json").read_text())
    manifest["files"][path.name]["bytes"] = len(stream.getvalue())
    (folder / "cache.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="cannot be read: remove"):
        GENERATED.split(tmp_path, "train")
