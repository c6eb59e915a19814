"""Vocabularies encode, decode, save and load."""

import pytest

from mgk._core.io import DataError
from mgk.models.vocabulary import (
    ByteVocabulary,
    SubwordVocabulary,
    WordVocabulary,
    check_size,
    cut_long_words,
    load_vocabulary,
)


def test_save_and_load_round_trip_with_unusual_words(tmp_path):
    words = ["<eos>", "a", "<unk>", "line\u2028break", "é"]
    WordVocabulary(words).save(tmp_path)
    assert WordVocabulary.load(tmp_path).words == words
    assert (tmp_path / "vocabulary.txt").read_text(encoding="utf-8").split("\n") == [*words, ""]


@pytest.mark.parametrize("text", ["a\n<unk>\n", "<eos>\na\n", "<eos>\n<unk>\na\na\n"])
def test_damaged_vocabulary_raises(tmp_path, text):
    (tmp_path / "vocabulary.txt").write_text(text)
    with pytest.raises(DataError, match="is damaged"):
        WordVocabulary.load(tmp_path)


def test_encode_words(tmp_path):
    vocabulary = WordVocabulary(["<eos>", "<unk>", "the", "cat"])
    ids, unknown = vocabulary.encode("the dog\nthe  cat")
    assert (ids.tolist(), unknown) == ([2, 1, 0, 2, 3], 1)
    assert vocabulary.encode("")[0].tolist() == []


def test_bytes_are_ids_and_pieces_are_whole_characters():
    vocabulary = ByteVocabulary()
    ids, unknown = vocabulary.encode("é→x")
    assert ids.tolist() == list("é→x".encode())
    assert unknown == 0
    assert [piece for piece in vocabulary.pieces(ids.tolist()) if piece] == ["é", "→", "x"]
    assert vocabulary.decode([0xC3]) == "\ufffd"


def test_load_vocabulary_without_file_requires_256_tokens(tmp_path):
    assert isinstance(load_vocabulary(tmp_path, 256), ByteVocabulary)
    with pytest.raises(DataError, match=r"vocabulary\.txt cannot be read"):
        load_vocabulary(tmp_path, 257)
    WordVocabulary(["<eos>", "<unk>"]).save(tmp_path)
    assert isinstance(load_vocabulary(tmp_path, 256), WordVocabulary)


def test_wrong_size_names_the_file_of_the_vocabulary(tmp_path):
    words, subwords = WordVocabulary(["<eos>", "<unk>"]), SubwordVocabulary.train(["cat cat"], 300)
    check_size(words, tmp_path, 2)
    for vocabulary, message in (
        (words, r"vocabulary\.txt is damaged: it has 2 tokens, and the model's vocabulary has 3"),
        (subwords, r"tokenizer\.json is damaged: it has \d+ tokens, and the model's vocabulary has 3"),
        (ByteVocabulary(), "must have a vocabulary of 256 bytes, got 3"),
    ):
        with pytest.raises(DataError, match=message):
            check_size(vocabulary, tmp_path, 3)


def test_long_words_are_cut_for_the_training_of_a_tokenizer(monkeypatch):
    monkeypatch.setattr("mgk.models.vocabulary.MAX_WORD", 6)
    line = "some short words\n"
    assert cut_long_words(line) == [line]
    for long in ("a b " + 20 * "x" + " c\n", 13 * " "):
        parts = cut_long_words(long)
        assert "".join(parts) == long
        assert max(map(len, parts)) == 6
    vocabulary = SubwordVocabulary.train([40 * "x"], 300)
    longest = max(vocabulary.tokenizer.get_vocab(), key=len)
    assert 2 <= len(longest) <= 6
    ids, _ = vocabulary.encode(40 * "x")
    assert vocabulary.decode(ids.tolist()) == 40 * "x"
