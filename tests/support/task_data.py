"""Small data sets in the formats that the tasks read."""

import itertools
import json
import tarfile

import numpy as np

from experiments.paper.peerread.task import PeerRead
from mgk.tasks.listops import ListOps, Rules
from mgk.tasks.retrieval import AAN
from mgk.tasks.text import Text

TEXT = Text(reviews=8, dev=2)
PAIRS = AAN(counts={"train": 4, "dev": 2, "test": 3}, max_length=20)
TRAIN_PAIRS = "aan/new_aan_pairs.train.tsv"
PAPERS = PeerRead(papers=240, links=732, held_out=0.2, max_length=500)
GENERATED = ListOps(rules=Rules(3, 3, 4, 30), counts={"test": 20, "dev": 10, "train": 50}, reads_tsv=False)


def documents(split, example):
    """Return the texts of an example."""
    ends = split.offsets[example * split.documents : (example + 1) * split.documents + 1].tolist()
    return [bytes((split.tokens[a:b] - 1).tolist()) for a, b in itertools.pairwise(ends)]


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
    """Write 12 topics of 20 papers; each paper cites 3 of its topic, the first one also a paper of the next topic."""
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


def prepared_directories(data, task):
    """Return the directories of prepared data, unfinished ones included."""
    root = data / ".mgk" / task.name
    return [path for path in root.glob("*") if path.is_dir()] if root.is_dir() else []
