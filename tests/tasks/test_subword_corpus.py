"""Subword corpora: the tokenizer, token ids of the splits, and training on a user's text."""

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from mgk import tasks
from mgk._core.io import DataError
from mgk.cli import commands
from mgk.models.vocabulary import SubwordVocabulary, load_vocabulary
from mgk.tasks.corpus import SplitFile
from mgk.tasks.subword_corpus import SubwordCorpus

TEXT = "".join(f"the cat {n % 7} sat on the mat\n\n\n  — é\u2028日本 {n % 5}\r\n" for n in range(120)) + "no line break"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_bytes(TEXT[600:].encode())
    (tmp_path / "a.txt").write_bytes(TEXT[:600].encode())
    return tmp_path


def test_splits_decode_to_the_text_and_a_tokenizer_lies_beside_them(folder):
    task = SubwordCorpus(subwords=300, max_length=8)
    vocabulary = task.vocabulary(folder)
    assert 256 < len(vocabulary) <= 300
    texts = [vocabulary.decode(task.split(folder, name).tokens.tolist()) for name in task.splits]
    assert "".join(texts) == TEXT[:600] + "\n" + TEXT[600:]
    assert len(texts[0]) == int(0.9 * len("".join(texts)))
    facts = task.metadata(folder)
    for name, text in zip(task.splits, texts, strict=True):
        stream = task.split(folder, name)
        assert stream.tokens.dtype == np.uint16
        assert stream.bytes_per_token == pytest.approx(len(text.encode()) / len(stream.tokens))
        assert facts[name] == {"tokens": len(stream.tokens), "bytes": len(text.encode())}


def test_splits_of_files_with_the_same_name_stay_apart(tmp_path):
    texts = {"a/train.tokens": TEXT, "a/valid.tokens": TEXT[:300], "b/valid.tokens": TEXT[300:700]}
    for file, text in texts.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(text.encode())
    parts = tuple(map(SplitFile, ("train", "dev", "other-valid"), texts))
    task = SubwordCorpus(parts=parts, subwords=300, max_length=8)
    vocabulary = task.vocabulary(tmp_path)
    decoded = [vocabulary.decode(task.split(tmp_path, part.split).tokens.tolist()) for part in parts]
    assert decoded == list(texts.values())


def test_a_corpus_is_encoded_as_its_whole_text(folder):
    task = SubwordCorpus(subwords=300, max_length=8)
    vocabulary = task.vocabulary(folder)
    whole = TEXT[:600] + "\n" + TEXT[600:]
    train = task.split(folder, "train").tokens
    assert vocabulary.encode(whole[: int(0.9 * len(whole))])[0].tolist() == train.tolist()
    assert vocabulary.encode("")[0].tolist() == []
    assert [piece for piece in vocabulary.pieces(vocabulary.encode("日")[0].tolist()) if piece] == ["日"]


def test_the_tokenizer_is_reproducible_and_trained_on_train_alone(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for name, text in (("train", TEXT), ("valid", "zyx zyx zyx zyx\n" * 20), ("test", TEXT)):
        (other / f"{name}.txt").write_text(text, encoding="utf-8")
    task = SubwordCorpus(subwords=400, max_length=8)
    first, second = SubwordVocabulary.train([TEXT], 400), SubwordVocabulary.train([TEXT], 400)
    assert first.tokenizer.to_str() == second.tokenizer.to_str()
    tokens = task.vocabulary(other).tokenizer.get_vocab()
    assert "cat" in {token.strip("Ġ") for token in tokens}
    assert "zyx" not in {token.strip("Ġ") for token in tokens}


def test_save_and_load(tmp_path):
    vocabulary = SubwordVocabulary.train([TEXT], 300)
    vocabulary.save(tmp_path)
    loaded = load_vocabulary(tmp_path, len(vocabulary))
    assert isinstance(loaded, SubwordVocabulary)
    assert loaded.encode(TEXT)[0].tolist() == vocabulary.encode(TEXT)[0].tolist()
    for content in ("{}", "x", '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(DataError, match=r"tokenizer\.json"):
            SubwordVocabulary.load(tmp_path)


def test_wrong_texts(tmp_path):
    with pytest.raises(DataError, match=r"has no \*.txt"):
        SubwordCorpus().prepare(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"abc \xff" * 100)
    with pytest.raises(DataError, match=r"a.txt is not UTF-8 \(byte 4\)"):
        SubwordCorpus().prepare(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"abc def " * 100)
    with pytest.raises(DataError, match=r"has \d+ tokens, fewer than the 513 needed"):
        SubwordCorpus().prepare(tmp_path)
    task = SubwordCorpus(parts=(SplitFile("train", "t.txt"),), source="look there")
    with pytest.raises(DataError, match=r"t\.txt is missing: look there"):
        task.prepare(tmp_path)


def test_training_reports_bits_per_byte_and_perplexity_of_segments(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "bpe", SubwordCorpus(subwords=300, max_length=8))
    out = tmp_path / "run"
    options = "steps=2 warmup=1 batch_size=4 eval_every=2 eval_batch_size=64 stride=4 precision=fp32 compile=false"
    options += " model.num_layers=1 model.embed_dim=16 model.ffn_dim=16 model.head_dim=8"
    settings = [part for option in options.split() for part in ("--set", option)]
    arguments = ["train", "bpe", "--data-dir", str(folder), "--out", str(out), "--heads", "2", *settings]
    result = CliRunner().invoke(commands.app, arguments)
    assert result.exception is None, result.output
    rows = json.loads((out / "result.json").read_text())
    values = {row["metric"]: row["value"] for row in rows if row["split"] == "test"}
    stream = tasks.TASKS["bpe"].split(folder, "test")
    bits = values["loss_stride_4"] / math.log(2) / stream.bytes_per_token
    assert values["bits_per_byte_stride_4"] == pytest.approx(bits)
    assert values["perplexity_segments"] != values["perplexity_stride_4"]
    generated = CliRunner().invoke(commands.app, ["generate", str(out), "--prompt", "the", "--max-tokens", "4"])
    assert generated.output.startswith("the"), generated.output
