"""PeerRead's pairs: fair, the same each time, and without what would give the answer away."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from experiments.paper.peerread.baselines import TfidfIndex, logistic_regression, year_features
from experiments.paper.peerread.citations import Titles, strip_citations
from experiments.paper.peerread.communities import communities
from experiments.paper.peerread.task import CITATION, HARD, RANDOM, exchange
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
    facts = PAPERS.metadata(data)
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
    cosine = PAPERS.metadata(data)["mean cosine"]["train"]
    assert cosine["hard"] > 2 * cosine["random"]
    assert cosine["hard"] == pytest.approx(cosine["citations"], rel=0.2)


def test_without_hard_pairs_all_others_are_random(peerread, tmp_path):
    _, _, _, pairs = peerread
    make_peerread(tmp_path)
    easier = replace(PAPERS, name="easier", hard=False)
    easier.prepare(tmp_path)
    folder = next((tmp_path / ".mgk" / easier.name).glob("[!.]*/"))
    for name in easier.splits:
        kinds = Counter(np.load(folder / f"{name}.pairs.npy")[:, 2].tolist())
        assert (kinds[HARD], kinds[CITATION]) == (0, Counter(pairs[name][:, 2].tolist())[CITATION])
        # So few papers leave some citations without a mate.
        assert kinds[RANDOM] == pytest.approx(kinds[CITATION], rel=0.1)
    facts = easier.metadata(tmp_path)
    assert facts["mean cosine"]["train"].keys() == {"citations", "random"}
    assert "test, hard" not in easier.baselines(tmp_path)["bag of words"]


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
    corpus = TfidfIndex([" ".join(random.choice(words, 60)) for _ in range(100)])
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
