"""Corpora for language models: words in WikiText's format, or the bytes of any text.

The vocabulary is built as in the paper's code: all words of the training text in order of frequency, with <eos> at the
end of each line. Other words become <unk>; the metadata records their share.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, AnyStr, ClassVar

import numpy as np

from mgk._core.io import DataError
from mgk._core.progress import Progress
from mgk.models.vocabulary import ByteVocabulary, Vocabulary, WordVocabulary
from mgk.tasks.base import Array, Task, write_array
from mgk.tasks.data_cache import read_manifest

MEGABYTE = 1 << 20
# Share of the dev split, and of the test split, in a text without separate files; both are taken from its end.
HELD_OUT = 0.05


@dataclass(frozen=True)
class TokenStream:
    """A continuous text. Example n is tokens n·length to (n + 1)·length; the targets are the next tokens.

    Attributes:
        tokens: Token ids, uint8, uint16 or uint32.
        length: Length of an example.
        unknown_share: Share of tokens that are not in the vocabulary.
        bytes_per_token: Mean length of a token in bytes of UTF-8, if the tokens determine the text.
    """

    tokens: Array
    length: int
    unknown_share: float = 0.0
    bytes_per_token: float | None = None

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)


@dataclass(frozen=True)
class SplitFile:
    """A split, its file in the data directory and, if known, its number of tokens."""

    split: str
    file: str
    tokens: int | None = None


class Corpus(Task):
    """Base class of corpora for language models.

    Attributes:
        unit: Unit of a token: "word", "subword" or "byte".
        max_length: Length of training segments and of the evaluation window.
    """

    objective: ClassVar[str] = "language-model"
    unit: ClassVar[str]
    max_length: int

    @abstractmethod
    def vocabulary(self, data_dir: Path) -> Vocabulary:
        """Return the vocabulary of the prepared data."""

    @abstractmethod
    def load_vocabulary(self, folder: Path) -> Vocabulary:
        """Load the vocabulary from a run directory."""

    def read(self, folder: Path, name: str) -> TokenStream:
        path = folder / f"{name}.ids.npy"
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: remove {folder} to prepare it again") from error
        facts = read_manifest(folder)["facts"][name]
        size = len(tokens) if self.unit == "byte" else facts.get("bytes")
        bytes_per_token = None if size is None else size / len(tokens)
        return TokenStream(tokens, self.max_length, facts.get("unknown_share", 0.0), bytes_per_token)


@dataclass(frozen=True)
class WordCorpus(Corpus):
    """Word-level text in WikiText's format: one file per split, tokens separated by spaces."""

    unit: ClassVar[str] = "word"
    name: str
    dataset: str
    parts: tuple[SplitFile, ...]
    source: str  # download instructions for missing files, for messages
    max_length: int = 256
    version: int = 1  # version of the conversion to ids

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(part.split for part in self.parts)

    def files(self, data_dir: Path) -> list[str]:
        return existing_files(data_dir, self.parts, self.source)

    def build(self, data_dir: Path, folder: Path, workers: int, progress: Progress) -> dict[str, Any]:
        counts: Counter[str] = Counter()
        for words in read_lines(data_dir / self.parts[0].file, "count", self.source, progress):
            counts.update(words)
        vocabulary = WordVocabulary.of_counts(counts)
        vocabulary.save(folder)
        metadata: dict[str, Any] = {"vocabulary": len(vocabulary)}
        for part in self.parts:
            path = data_dir / part.file
            lines = read_lines(path, f"encode {part.split}", self.source, progress)
            total, unknown = write_word_ids(folder / f"{part.split}.ids.npy", vocabulary, lines)
            if part.tokens not in (None, total):
                raise DataError(f"{path} has {total:,} tokens instead of {part.tokens:,}: {self.source}")
            if total < 2:
                raise DataError(f"{path} is empty: {self.source}")
            metadata[part.split] = {"tokens": total, "unknown_share": unknown / total}
        return metadata

    def vocabulary(self, data_dir: Path) -> WordVocabulary:
        return WordVocabulary.load(self._prepared_folder(Path(data_dir)))

    def load_vocabulary(self, folder: Path) -> WordVocabulary:
        return WordVocabulary.load(folder)


def existing_files(data_dir: Path, parts: Sequence[SplitFile], remedy: str) -> list[str]:
    """Return the files of all splits, relative to the data directory; raise a DataError if one is missing."""
    for part in parts:
        if not (data_dir / part.file).is_file():
            raise DataError(f"{data_dir / part.file} is missing: {remedy}")
    return [part.file for part in parts]


def id_dtype(vocabulary: Vocabulary) -> np.dtype[Any]:
    """Return the smallest unsigned dtype of at least 16 bits that holds all token ids."""
    return np.dtype(np.uint16 if len(vocabulary) <= 1 << 16 else np.uint32)


def write_word_ids(path: Path, vocabulary: WordVocabulary, lines: Iterable[list[str]]) -> tuple[int, int]:
    """Write the token ids of lines of words as .npy; return the number of tokens and of unknown words."""
    dtype, unknown = id_dtype(vocabulary), 0

    def encode_lines() -> Iterator[Array]:
        nonlocal unknown
        for words in lines:
            ids, unknown_in_line = vocabulary.encode_line(words)
            unknown += unknown_in_line
            yield ids.astype(dtype)

    total = write_array(path, encode_lines())
    return total, unknown


def read_lines(path: Path, stage: str, remedy: str, progress: Progress) -> Iterator[list[str]]:
    """Yield the words of each line.

    Args:
        path: Text file.
        stage: Name of the stage, for the progress callback.
        remedy: Suggested fix for a damaged file, for the message.
        progress: Progress callback.
    """
    size, done, reported = path.stat().st_size, 0, 0
    with path.open("rb") as file:
        for line in file:
            try:
                yield line.decode().split()
            except UnicodeDecodeError as error:
                raise DataError(f"{path} is damaged at byte {done + error.start}: {remedy}") from error
            done += len(line)
            if done - reported >= MEGABYTE:
                reported = done
                progress(f"{stage}, MB", done // MEGABYTE, size // MEGABYTE + 1)
    progress(f"{stage}, MB", size // MEGABYTE + 1, size // MEGABYTE + 1)


@dataclass(frozen=True)
class ByteCorpus(Corpus):
    """The bytes of the user's text: DIR/bytes/*.txt or DIR/*.txt.

    Files train.txt, valid.txt and test.txt are the splits. Any other files are concatenated in the order of their
    names, and the last tenth is held out.
    """

    unit: ClassVar[str] = "byte"
    name: str = "bytes"
    dataset: str = "own text, bytes"
    max_length: int = 256
    version: int = 1

    def files(self, data_dir: Path) -> list[str]:
        return text_files(data_dir, "bytes")

    def build(self, data_dir: Path, folder: Path, workers: int, progress: Progress) -> dict[str, Any]:
        texts = {Path(file).name: (data_dir / file).read_bytes() for file in self.files(data_dir)}
        pieces = split_texts(texts, b"\n")
        for split, piece in zip(self.splits, pieces, strict=True):
            if len(piece) <= self.max_length:
                raise DataError(
                    f"{data_dir}: {split} has {len(piece)} bytes, fewer than the {self.max_length + 1} of a segment"
                )
            np.save(folder / f"{split}.ids.npy", np.frombuffer(piece, dtype=np.uint8))
        return {split: {"tokens": len(piece)} for split, piece in zip(self.splits, pieces, strict=True)}

    def vocabulary(self, data_dir: Path) -> ByteVocabulary:
        return ByteVocabulary()

    def load_vocabulary(self, folder: Path) -> ByteVocabulary:
        return ByteVocabulary()


def text_files(data_dir: Path, folder: str) -> list[str]:
    """Return the names of the user's *.txt, in `folder` of the data directory or in the directory itself."""
    for directory in (folder, "."):
        paths = sorted(path for path in (data_dir / directory).glob("*.txt") if path.is_file())
        if paths:
            return [str(path.relative_to(data_dir)) for path in paths]
    raise DataError(f"{data_dir} has no *.txt: set --data-dir to a directory with your text")


def split_texts(texts: Mapping[str, AnyStr], line_break: AnyStr) -> list[AnyStr]:
    """Return the train, dev and test part of texts by file name.

    Files train.txt, valid.txt and test.txt are the splits. Any other files are concatenated, and the last tenth is
    held out.
    """
    split_files = [f"{name}.txt" for name in ("train", "valid", "test")]
    if set(split_files) <= set(texts):
        return [texts[name] for name in split_files]
    whole = line_break.join(texts.values())
    cuts = [int(len(whole) * (1 - 2 * HELD_OUT)), int(len(whole) * (1 - HELD_OUT))]
    return [whole[: cuts[0]], whole[cuts[0] : cuts[1]], whole[cuts[1] :]]


def wikitext(name: str, dataset: str, tokens: tuple[int, int, int]) -> WordCorpus:
    """Return the task of a WikiText version, with the expected numbers of tokens in train, dev and test."""
    files = [f"{name}/wiki.{split}.tokens" for split in ("train", "valid", "test")]
    source = f"download https://wikitext.smerity.com/{name}-v1.zip (the word-level version) and unpack it there"
    parts = tuple(map(SplitFile, ("train", "dev", "test"), files, tokens))
    return WordCorpus(name, dataset, parts, source)


WIKITEXT_103 = wikitext("wikitext-103", "WikiText-103", (103_227_021, 217_646, 245_569))
WIKITEXT_2 = wikitext("wikitext-2", "WikiText-2", (2_088_628, 217_646, 245_569))
# Wikipedia in WikiText's format: a substitute for WikiText-103's training text.
ENWIKI_LM = WordCorpus(
    "enwiki-lm",
    "enwiki-lm (a stand-in for WikiText-103)",
    (
        SplitFile("train", "enwiki-lm/wiki.train.tokens", 51_906_581),
        SplitFile("dev", "enwiki-lm/wiki.valid.tokens", 227_847),
        SplitFile("wikitext-103-valid", "wikitext-103/wiki.valid.tokens", 217_646),
    ),
    "enwiki-lm is not published; for a text of your own in WikiText's format use the task words",
)
# The user's corpus in WikiText's format.
USER_WORDS = WordCorpus(
    "words",
    "own text, words",
    tuple(
        SplitFile(split, f"wiki.{name}.tokens")
        for split, name in (("train", "train"), ("dev", "valid"), ("test", "test"))
    ),
    "put your corpus there as wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, words separated by spaces",
)
CORPORA: tuple[Corpus, ...] = (WIKITEXT_103, WIKITEXT_2, ENWIKI_LM, USER_WORDS, ByteCorpus())
