"""Corpora and vocabularies: what a text becomes, and what is said where it is missing or damaged."""

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


def test_words_are_in_order_of_frequency_then_of_appearance_and_lines_end(own_words):
    task = tasks.get_task("words")
    vocabulary = task.vocabulary(own_words)
    assert vocabulary.words == ["<eos>", "the", "=", "cat", "Title", ",", "<unk>", ".", "dog", "and", "a"]
    train = task.split(own_words, "train")
    assert train.tokens.tolist() == [2, 4, 2, 0, 0, 1, 3, 5, 1, 6, 7, 0, 1, 8, 9, 10, 3, 0]
    assert train.tokens.dtype == np.uint16
    assert vocabulary.decode(train.tokens[4:12].tolist()) == "\nthe cat , the <unk> . \n"


def test_what_training_has_not_seen_is_unknown_and_counted(own_words):
    dev = tasks.get_task("words").split(own_words, "dev")
    assert dev.tokens.tolist() == [1, 6, 9, 10, 3, 0]
    assert dev.unknown_share == pytest.approx(1 / 6)
    assert tasks.get_task("words").split(own_words, "train").unknown_share == 0


def test_without_unknown_words_in_the_text_there_is_one_in_the_vocabulary(own_words):
    (own_words / "wiki.train.tokens").write_text("a b b\n")
    assert tasks.get_task("words").vocabulary(own_words).words == ["<eos>", "b", "a", "<unk>"]


def test_own_text_as_bytes_with_and_without_splits_of_its_own(tmp_path):
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


def test_segments_predict_the_next_token_and_know_their_clusters():
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


def test_what_was_prepared_is_enough_where_the_source_is_not(own_words, tmp_path_factory):
    key, tmp_path = USER_WORDS.checksum(own_words), tmp_path_factory.mktemp("other")
    shutil.copytree(own_words / ".mgk", tmp_path / ".mgk")
    USER_WORDS.prepare(tmp_path)
    assert USER_WORDS.checksum(tmp_path) == key
    (ids,) = tmp_path.glob(".mgk/words/*/train.ids.npy")
    # Damaged, of other settings, or one of two: then the source is asked for.
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


def test_a_known_corpus_that_is_cut_short_is_noticed(own_words):
    task = tasks.get_task("words")
    parts = tuple(dataclasses.replace(part, tokens=18 if part.split == "train" else 7) for part in task.parts)
    with pytest.raises(DataError, match="has 6 tokens instead of 7"):
        dataclasses.replace(task, parts=parts).prepare(own_words)


def test_the_stand_in_is_named_as_one():
    assert "stand-in" in tasks.get_task("enwiki-lm").dataset


def test_words_on_where_to_get_a_corpus_make_no_other_data(own_words):
    task = tasks.get_task("words")
    task.prepare(own_words)
    dataclasses.replace(task, source="get it elsewhere").prepare(own_words)
    assert len([*(own_words / ".mgk" / "words").glob("[0-9a-f]*")]) == 1


def test_a_recipe_for_an_own_corpus_takes_two_lines(tmp_path):
    path = tmp_path / "words.yaml"
    path.write_text("extends: wikitext-2\ntask: words\n")
    assert config.load_recipe(str(path)).task == "words"
    assert config.load_recipe(str(path)).training == config.load_recipe("wikitext-2").training


def test_data_that_was_prepared_with_other_words_on_its_source_is_found_without_it(own_words):
    """As on a machine that only .mgk was copied to; earlier versions wrote those words down."""
    task = tasks.get_task("words")
    task.prepare(own_words)
    [manifest] = (own_words / ".mgk" / "words").glob("*/cache.json")
    described = json.loads(manifest.read_text())
    described["settings"]["source"] = "get it there"
    manifest.write_text(json.dumps(described))
    for path in own_words.glob("*.tokens"):
        path.unlink()
    assert len(task.split(own_words, "train").tokens) > 0
