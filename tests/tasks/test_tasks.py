"""Registry of tasks, and the splits of Text and AAN."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import experiments.cost_quality  # noqa: F401  (registers its task)
from mgk.cli import commands
from mgk.tasks import TASKS, get_task
from mgk.tasks.text import dev_names
from tests.support.task_data import PAIRS, TEXT, documents, make_aan, make_archive, make_imdb, review

# Names of the data sets in results; a substitute never has the name of the original.
DATASETS = {
    "listops": "listops",
    "listops-short": "listops-short",
    "text": "imdb",
    "retrieval-aan": "aan",
    "retrieval-peerread": "peerread",
    "retrieval-peerread-random": "peerread, random negatives",
    "wikitext-103": "WikiText-103",
    "wikitext-2": "WikiText-2",
    "enwiki-lm": "enwiki-lm (a stand-in for WikiText-103)",
    "enwiki-bpe": "enwiki-lm as subwords",
    "enwiki-bpe-small": "enwiki-lm as subwords",
    "words": "own text, words",
    "bytes": "own text, bytes",
    "bpe": "own text, BPE",
    "image": "CIFAR-10, greyscale",
    "image-patches": "CIFAR-10, greyscale",
}


def test_data_command_accepts_a_recipe(tmp_path):
    answer = CliRunner().invoke(commands.app, ["data", "text-5k", "--data-dir", str(tmp_path)])
    assert "aclImdb" in str(answer.exception or answer.output)


def test_names_of_tasks_and_data_sets():
    assert {name: task.dataset for name, task in TASKS.items()} == DATASETS
    with pytest.raises(ValueError, match="'listops', 'listops-short', 'text', 'retrieval-aan', 'wikitext-103'"):
        get_task("retrieval")
    with pytest.raises(ValueError, match="split must be one of 'train', 'dev', 'test'"):
        get_task("text").split(Path("nowhere"), "valid")


@pytest.mark.parametrize(
    "make",
    [
        make_imdb,
        make_archive,
        lambda data: make_archive(data, ".tar.xz", "w:xz"),
        lambda data: make_archive(data, ".tar", "w"),
    ],
)
def test_splits_of_text(tmp_path, make):
    make(tmp_path)
    stages = set()
    TEXT.prepare(tmp_path, 1, lambda stage, done, total: stages.add(stage))
    assert {"checksum", "read", "write"} <= stages
    sizes, paths = {"train": 12, "dev": 4, "test": 16}, []
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
            paths.append(path)
    assert len(set(paths)) == 32
    assert TEXT.metadata(tmp_path)["examples"] == sizes


def test_dev_split_has_fixed_runs_of_reviews():
    names = [f"train/pos/{number}_7.txt" for number in range(12_500)]
    dev = dev_names(names, 1250)
    assert sorted(dev) == sorted(dev_names(names[::-1], 1250))
    numbers = {int(name.split("/")[2].split("_")[0]) for name in dev}
    assert len(numbers) == 1250
    assert len({number // 50 for number in numbers}) == 25
    assert min(numbers) == 150


def test_splits_of_aan(tmp_path):
    make_aan(tmp_path)
    train = PAIRS.split(tmp_path, "train")
    assert train.labels.tolist() == [0, 1, 0, 1]
    assert documents(train, 2) == [b"one train 2", "two é long long long ".encode()[:20]]
    assert [len(PAIRS.split(tmp_path, name)) for name in ("dev", "test")] == [2, 3]
    assert train.batch([0, 1])[0].shape == (2, 2, 20)
