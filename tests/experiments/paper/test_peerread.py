"""Pairs of PeerRead: splits, labels and balance, reproducibility, removal of citations, baselines."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from experiments.paper.peerread.baselines import TfidfIndex, fit_logistic_regression, year_features
from experiments.paper.peerread.citations import TitleIndex, strip_citations
from experiments.paper.peerread.communities import find_communities
from experiments.paper.peerread.task import CITATION, HARD, RANDOM, swap_columns
from tests.support.task_data import GENERATED, PAPERS, documents, make_peerread


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


def test_labels_kinds_and_texts_of_pairs(peerread):
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
    metadata = PAPERS.metadata(data)
    citations = sum(int((rows[:, 2] == CITATION).sum()) for rows in pairs.values())
    assert metadata["links across splits, dropped"] == 732 - citations > 0
    assert metadata["source"] == "PeerRead, a stand-in for AAN"


def test_order_frequency_and_year_do_not_predict_the_label(peerread):
    _, papers, links, pairs = peerread
    rows = pairs["train"]
    number = {paper["key"]: n for n, paper in enumerate(papers)}
    directed = {(number[a], number[b]) for a, b in links}
    forwards = [(a, b) in directed for a, b, kind in rows.tolist() if kind == CITATION]
    assert 0.4 < np.mean(forwards) < 0.6
    positive = rows[:, 2] == CITATION
    uses = [np.bincount(rows[mask, :2].reshape(-1), minlength=240) for mask in (positive, ~positive)]
    assert np.abs(uses[0] - uses[1]).sum() <= 0.05 * uses[0].sum()
    years = np.array([paper["year"] for paper in papers])
    difference = np.abs(years[rows[:, 0]] - years[rows[:, 1]])
    assert difference[positive].mean() == pytest.approx(difference[~positive].mean(), abs=0.8)


def test_hard_negatives_are_as_similar_as_citations(peerread):
    data, _, _, _ = peerread
    cosine = PAPERS.metadata(data)["mean cosine"]["train"]
    assert cosine["hard"] > 2 * cosine["random"]
    assert cosine["hard"] == pytest.approx(cosine["citations"], rel=0.2)


def test_all_negatives_are_random_if_none_is_hard(peerread, tmp_path):
    _, _, _, pairs = peerread
    make_peerread(tmp_path)
    easier = replace(PAPERS, name="easier", hard=False)
    easier.prepare(tmp_path)
    folder = next((tmp_path / ".mgk" / easier.name).glob("[!.]*/"))
    for name in easier.splits:
        kinds = Counter(np.load(folder / f"{name}.pairs.npy")[:, 2].tolist())
        assert (kinds[HARD], kinds[CITATION]) == (0, Counter(pairs[name][:, 2].tolist())[CITATION])
        # With this few papers some citations have no negative.
        assert kinds[RANDOM] == pytest.approx(kinds[CITATION], rel=0.1)
    assert easier.metadata(tmp_path)["mean cosine"]["train"].keys() == {"citations", "random"}
    assert "test, hard" not in easier.baselines(tmp_path)["bag of words"]


def test_preparation_is_reproducible(peerread, tmp_path):
    data, _, _, _ = peerread
    make_peerread(tmp_path)
    for name in PAPERS.splits:
        first, second = (PAPERS.split(folder, name) for folder in (data, tmp_path))
        assert np.array_equal(first.tokens, second.tokens)
        assert np.array_equal(first.labels, second.labels)


def test_accuracy_of_baselines(peerread):
    data, _, _, _ = peerread
    scores = PAPERS.baselines(data)
    assert {"bag of words", "citation strings", "years apart"} <= set(scores)
    for row in scores.values():
        assert {"dev", "test", "test, citations", "test, hard", "test, random"} == set(row)
        assert all(0 <= value <= 1 for value in row.values())
    # Each topic has its own words, so the bag of words detects random pairs of different topics, but not hard pairs.
    assert scores["bag of words"]["test, random"] > scores["bag of words"]["test, hard"] + 0.3
    assert GENERATED.baselines(data) == {}


def test_logistic_regression_and_year_features():
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 3))
    assert np.mean(fit_logistic_regression(x, x[:, 1] > 0.3)(x) == (x[:, 1] > 0.3)) > 0.97
    years = [2000, 2001, 2004, 2030]
    difference = year_features(years, np.array([0, 0, 0]), np.array([1, 2, 3])).argmax(axis=1)
    assert difference.tolist() == [1, 4, 6]


def test_similarities_are_exact_integers():
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefgh"), 5)) for _ in range(1500)]
    corpus = TfidfIndex([" ".join(random.choice(words, 60)) for _ in range(100)])
    exact = corpus.vectors.astype(np.int64) @ corpus.vectors.astype(np.int64).T
    assert np.array_equal(corpus.similarities(np.arange(100), np.arange(100)), exact)
    assert corpus.cosines(np.arange(100), np.arange(100)) == pytest.approx(np.ones(100), abs=0.01)


def test_communities_of_two_cliques_and_a_bridge():
    cliques = [itertools.combinations(range(8), 2), itertools.combinations(range(8, 16), 2), [(0, 8)]]
    community = find_communities([link for clique in cliques for link in clique], [bytes([n]) for n in range(16)])
    assert len({community[n] for n in range(8)} | {community[n] for n in range(8, 16)}) == 2
    assert community[1] != community[9]


def test_swap_columns_minimizes_the_cost_without_duplicates():
    cost = np.array([[9, 1, 9], [9, 9, 1], [1, 9, 9], [9, 9, 9]], dtype=np.float64)
    assert swap_columns(cost, np.arange(4), np.array([0, 1, 2, 2]))[:3].tolist() == [1, 2, 0]
    row, column = np.array([0, 0, 1, 1]), np.array([0, 0, 1, 1])
    result = swap_columns(np.zeros((4, 2)), row, column)
    assert sorted(zip(row.tolist(), result.tolist(), strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    "text, expected",
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
def test_citations_are_removed(text, expected):
    titles = TitleIndex(["attention is all you need", "deep learning"])
    stripped = strip_citations(f"Deep Learning Is All You Need (2014)\n{text}", titles)
    assert stripped.split() == f"Deep Learning Is All You Need (2014)\n{expected}".split()
