"""Corpora and vocabularies: token ids of a text, and messages for missing or damaged files."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from mgk import tasks
from mgk._core.io import DataError
from mgk.tasks.corpus import USER_WORDS, ByteCorpus, TokenStream
from mgk.training import config
from mgk.training.data import TokenSegments

TRAIN = " = Title = \n \n the cat , the <unk> . \n the dog and a cat \n"
VALID = "the bird and a cat\n"


@pytest.fixture
def own_words(tmp_path):
    for name, text in (("train", TRAIN), ("valid", VALID), ("test", VALID)):
        (tmp_path / f"wiki.{name}.tokens").write_text(text)
    return tmp_path


def test_vocabulary_is_sorted_by_frequency_and_lines_end_with_eos(own_words):
    task = tasks.get_task("words")
    vocabulary = task.vocabulary(own_words)
    assert vocabulary.words == ["<eos>", "the", "=", "cat", "Title", ",", "<unk>", ".", "dog", "and", "a"]
    train = task.split(own_words, "train")
    assert train.tokens.tolist() == [2, 4, 2, 0, 0, 1, 3, 5, 1, 6, 7, 0, 1, 8, 9, 10, 3, 0]
    assert train.tokens.dtype == np.uint16
    assert vocabulary.decode(train.tokens[4:12].tolist()) == "\nthe cat , the <unk> . \n"


def test_words_not_in_train_become_unknown_and_are_counted(own_words):
    dev = tasks.get_task("words").split(own_words, "dev")
    assert dev.tokens.tolist() == [1, 6, 9, 10, 3, 0]
    assert dev.unknown_share == pytest.approx(1 / 6)
    assert tasks.get_task("words").split(own_words, "train").unknown_share == 0


def test_vocabulary_always_has_the_unknown_word(own_words):
    (own_words / "wiki.train.tokens").write_text("a b b\n")
    assert tasks.get_task("words").vocabulary(own_words).words == ["<eos>", "b", "a", "<unk>"]


def test_byte_corpus_with_and_without_files_of_splits(tmp_path):
    task = ByteCorpus(max_length=4)
    (tmp_path / "b.txt").write_bytes(bytes(range(100, 200)))
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    whole = np.concatenate([task.split(tmp_path, name).tokens for name in task.splits])
    assert whole.tolist() == [*range(100), ord("\n"), *range(100, 200)]
    assert [len(task.split(tmp_path, name).tokens) for name in task.splits] == [180, 10, 11]
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.txt").write_text(name * 3)
    assert [bytes(task.split(tmp_path, name).tokens).decode()[:5] for name in task.splits] == [
        "train",
        "valid",
        "testt",
    ]


def test_segments_have_next_tokens_as_targets_and_cluster_counts():
    stream = TokenStream(np.arange(0, 60, 2).astype(np.uint16), 7)
    assert len(stream) == 4
    segments = TokenSegments(stream, (10, 40), torch.device("cpu"))
    tokens, targets, rooms = segments.batch(torch.tensor([3, 0]))
    assert tokens.tolist() == [[42, 44, 46, 48, 50, 52, 54], [0, 2, 4, 6, 8, 10, 12]]
    assert targets.tolist() == [[44, 46, 48, 50, 52, 54, 56], [2, 4, 6, 8, 10, 12, 14]]
    assert segments.counts[[3, 0]].tolist() == [[0, 7], [3, 0]]
    assert rooms == (64, 64)


def test_missing_and_damaged_corpora(own_words, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    for name in ("words", "wikitext-103", "enwiki-lm", "wikitext-2"):
        with pytest.raises(DataError, match=r"wiki\.train\.tokens is missing"):
            tasks.get_task(name).prepare(empty)
    with pytest.raises(DataError, match=r"has no \*\.txt"):
        tasks.get_task("bytes").prepare(empty)
    (own_words / "wiki.valid.tokens").write_bytes(b"the \xff\n")
    with pytest.raises(DataError, match="is damaged at byte 4"):
        tasks.get_task("words").prepare(own_words)
    (own_words / "wiki.valid.tokens").write_bytes(b"")
    with pytest.raises(DataError, match="is empty"):
        tasks.get_task("words").prepare(own_words)
    (own_words / "a.txt").write_text("short")
    with pytest.raises(DataError, match="fewer than the 257 of a segment"):
        tasks.get_task("bytes").prepare(own_words)


def test_prepared_data_is_used_without_its_source(own_words, tmp_path_factory):
    key, tmp_path = USER_WORDS.checksum(own_words), tmp_path_factory.mktemp("other")
    shutil.copytree(own_words / ".mgk", tmp_path / ".mgk")
    USER_WORDS.prepare(tmp_path)
    assert USER_WORDS.checksum(tmp_path) == key
    (ids,) = tmp_path.glob(".mgk/words/*/train.ids.npy")
    # The source is required if the data is damaged, has other settings or is ambiguous.
    ids.write_bytes(ids.read_bytes()[:-1] + b"!")
    with pytest.raises(DataError, match="missing"):
        USER_WORDS.prepare(tmp_path)
    shutil.copyfile(next(own_words.glob(".mgk/words/*/train.ids.npy")), ids)
    USER_WORDS.prepare(tmp_path)
    with pytest.raises(DataError, match="missing"):
        dataclasses.replace(USER_WORDS, max_length=5).prepare(tmp_path)
    shutil.copytree(ids.parent, ids.parent.with_name("abc"))
    with pytest.raises(DataError, match="missing"):
        USER_WORDS.prepare(tmp_path)


def test_truncated_corpus_is_reported(own_words):
    task = tasks.get_task("words")
    parts = tuple(dataclasses.replace(part, tokens=18 if part.split == "train" else 7) for part in task.parts)
    with pytest.raises(DataError, match="has 6 tokens instead of 7"):
        dataclasses.replace(task, parts=parts).prepare(own_words)


def test_substitute_is_named_as_such():
    assert "stand-in" in tasks.get_task("enwiki-lm").dataset


def test_download_instructions_do_not_change_the_data(own_words):
    task = tasks.get_task("words")
    task.prepare(own_words)
    dataclasses.replace(task, source="get it elsewhere").prepare(own_words)
    assert len([*(own_words / ".mgk" / "words").glob("[0-9a-f]*")]) == 1


def test_recipe_of_a_user_corpus_extends_another(tmp_path):
    path = tmp_path / "words.yaml"
    path.write_text("extends: wikitext-2\ntask: words\n")
    assert config.load_recipe(str(path)).task == "words"
    assert config.load_recipe(str(path)).training == config.load_recipe("wikitext-2").training


def test_data_of_an_earlier_version_is_used_without_its_source(own_words):
    """Earlier versions stored the download instructions in the manifest."""
    task = tasks.get_task("words")
    task.prepare(own_words)
    [manifest] = (own_words / ".mgk" / "words").glob("*/cache.json")
    contents = json.loads(manifest.read_text())
    contents["settings"]["source"] = "get it there"
    manifest.write_text(json.dumps(contents))
    for path in own_words.glob("*.tokens"):
        path.unlink()
    assert len(task.split(own_words, "train").tokens) > 0
