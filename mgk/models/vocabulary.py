"""Vocabularies: words in WikiText's format, subwords, or bytes."""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgk._core.checksums import verify
from mgk._core.io import DataError, write_atomically

EOS, UNKNOWN = "<eos>", "<unk>"
FILE = "vocabulary.txt"
SUBWORD_FILE = "tokenizer.json"
NUM_BYTES = 256
# Characters of a word that trains a BPE. The time grows with the square of the length: a word of 2 MB takes minutes.
MAX_WORD = 10_000


class Vocabulary(ABC):
    """Base class of the mappings between text and token ids.

    Attributes:
        spaced: Whether decoded tokens end with a space.
        file_name: Name of the file that `save` writes, or None.
    """

    spaced: bool
    file_name: str | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def encode(self, text: str) -> tuple[NDArray[Any], int]:
        """Return the token ids of a text, and the number of tokens that are not in the vocabulary."""

    @abstractmethod
    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield the text of each token id."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the files that `load_vocabulary` reads."""

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.pieces(ids))


class WordVocabulary(Vocabulary):
    """Words by decreasing frequency, <eos> first. The id of a word is its line in the file.

    White space separates words, and every line of text ends with <eos>. Words of equal frequency keep the order of
    their first occurrence. If the text has no <unk>, it is appended as the last word.
    """

    spaced = True
    file_name = FILE

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.index = {word: n for n, word in enumerate(words)}
        self.unknown = self.index[UNKNOWN]

    @classmethod
    def of_counts(cls, counts: Counter[str]) -> WordVocabulary:
        """Build a vocabulary from the number of occurrences of each word."""
        words = [EOS, *(word for word, _ in counts.most_common() if word != EOS)]
        return cls(words if UNKNOWN in counts else [*words, UNKNOWN])

    @classmethod
    def load(cls, folder: Path) -> WordVocabulary:
        """Read vocabulary.txt from a folder; raise DataError if it is missing or damaged."""
        path = folder / FILE
        try:
            verify(path)
            # splitlines() would also split at Unicode line breaks, which words may contain.
            words = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        if words[0] != EOS or UNKNOWN not in words or len(set(words)) != len(words):
            raise DataError(f"{path} is damaged: it must begin with {EOS}, contain {UNKNOWN}, and have no word twice")
        return cls(words)

    def save(self, folder: Path) -> None:
        write_atomically(folder / FILE, "\n".join(self.words) + "\n")

    def __len__(self) -> int:
        return len(self.words)

    def encode_line(self, words: list[str]) -> tuple[NDArray[Any], int]:
        """Return the ids of a line including its <eos>, and the number of unknown words."""
        ids = np.fromiter((self.index.get(word, -1) for word in [*words, EOS]), dtype=np.int64, count=len(words) + 1)
        missing = ids < 0
        ids[missing] = self.unknown
        return ids, int(missing.sum())

    def encode(self, text: str) -> tuple[NDArray[Any], int]:
        """Encode a text; the last line gets an <eos> only if it ends with a line break."""
        lines = [self.encode_line(line.split()) for line in text.split("\n")]
        return np.concatenate([ids for ids, _ in lines])[:-1], sum(missing for _, missing in lines)

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        for token in ids:
            yield "\n" if token == 0 else f"{self.words[token]} "


class ByteVocabulary(Vocabulary):
    """Bytes of UTF-8 text; the id is the value of the byte."""

    spaced = False

    def __len__(self) -> int:
        return NUM_BYTES

    def encode(self, text: str) -> tuple[NDArray[Any], int]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64), 0

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in ids:
            yield decoder.decode(bytes([token]))
        yield decoder.decode(b"", final=True)

    def save(self, folder: Path) -> None:
        """Write nothing: the byte vocabulary has no file."""


def byte_characters() -> dict[str, int]:
    """Map the characters that `tokenizers` uses for bytes to the bytes.

    A printable byte is the character with its code point; the others are the code points from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(NUM_BYTES) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(unprintable)}


class SubwordVocabulary(Vocabulary):
    """Byte-level BPE of the `tokenizers` library. Every text can be encoded: no token is unknown.

    Args:
        tokenizer: A `tokenizers.Tokenizer` with a byte-level BPE model.
    """

    spaced = False
    file_name = SUBWORD_FILE

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int) -> SubwordVocabulary:
        """Train on lines of text; the vocabulary is smaller than `vocab_size` if the text has too few pairs."""
        tokenizers = _import_tokenizers()
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        # Tokens do not cross lines, so that a corpus can be encoded line by line.
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Split("\n", behavior="merged_with_previous"),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        # The sorted alphabet gives byte-level tokens the same ids in every vocabulary.
        alphabet = sorted(byte_characters())
        tokenizer.train_from_iterator(
            (part for line in lines for part in cut_long_words(line)),
            tokenizers.trainers.BpeTrainer(
                vocab_size=vocab_size, initial_alphabet=alphabet, min_frequency=2, show_progress=False
            ),
        )
        return cls(tokenizer)

    @classmethod
    def load(cls, folder: Path) -> SubwordVocabulary:
        """Read tokenizer.json from a folder; raise DataError if it is missing or damaged."""
        path = folder / SUBWORD_FILE
        tokenizers = _import_tokenizers()
        try:
            tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # `tokenizers` raises plain Exceptions
            first_line = str(error).partition("\n")[0]
            raise DataError(f"{path} cannot be read: {first_line}") from error
        if not isinstance(tokenizer.model, tokenizers.models.BPE):
            raise DataError(f"{path} is damaged: it must be a byte-level BPE")
        return cls(tokenizer)

    def save(self, folder: Path) -> None:
        write_atomically(folder / SUBWORD_FILE, self.tokenizer.to_str())

    def __len__(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def encode_lines(self, lines: list[str]) -> NDArray[Any]:
        """Encode lines, each with its line break, in parallel."""
        encodings = self.tokenizer.encode_batch_fast(lines)
        return np.concatenate([np.zeros(0, np.int64), *(np.asarray(e.ids, dtype=np.int64) for e in encodings)])

    def encode(self, text: str) -> tuple[NDArray[Any], int]:
        return np.asarray(self.tokenizer.encode(text).ids, dtype=np.int64), 0

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        table = byte_characters()
        for token in ids:
            yield decoder.decode(bytes(table[character] for character in self.tokenizer.id_to_token(token)))
        yield decoder.decode(b"", final=True)


def cut_long_words(line: str) -> list[str]:
    """Return a line in parts, if it has a word or a space of more than MAX_WORD characters; otherwise as it is."""
    if len(line) <= MAX_WORD or all(len(word) <= MAX_WORD for word in re.findall(r"\S+|\s+", line)):
        return [line]
    return [line[start : start + MAX_WORD] for start in range(0, len(line), MAX_WORD)]


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        message = "subword vocabularies require the extra 'train': pip install 'mgk[train]', or '.[train]' in a clone"
        raise ModuleNotFoundError(message, name=error.name) from error
    return tokenizers


def load_vocabulary(folder: Path, vocab_size: int) -> Vocabulary:
    """Load the vocabulary that `Vocabulary.save` wrote to a folder.

    Args:
        folder: A folder with vocabulary.txt or tokenizer.json, or with neither for bytes.
        vocab_size: Vocabulary size of the model; only a model of 256 tokens can do without a file.

    Raises:
        DataError: The file is missing or damaged.
    """
    if (folder / SUBWORD_FILE).exists() and not (folder / FILE).exists():
        return SubwordVocabulary.load(folder)
    if vocab_size == NUM_BYTES and not (folder / FILE).exists():
        return ByteVocabulary()
    return WordVocabulary.load(folder)


def check_size(vocabulary: Vocabulary, folder: Path, vocab_size: int) -> None:
    """Raise a DataError if the vocabulary of a folder does not have the size of the model's."""
    if len(vocabulary) == vocab_size:
        return
    if vocabulary.file_name is None:
        raise DataError(f"the model in {folder} must have a vocabulary of {len(vocabulary)} bytes, got {vocab_size}")
    sizes = f"{len(vocabulary)} tokens, and the model's vocabulary has {vocab_size}"
    raise DataError(f"{folder / vocabulary.file_name} is damaged: it has {sizes}; restore it, or train again")
