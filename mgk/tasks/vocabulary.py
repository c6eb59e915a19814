"""Between text and token ids: words as WikiText has them, or bytes."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from mgk._core.io import write_atomically
from mgk.tasks.base import Array, DataError

EOS, UNKNOWN = "<eos>", "<unk>"
FILE = "vocabulary.txt"


class Vocabulary(ABC):
    """Text to ids and back."""

    spaced: bool  # whether a space ends each piece

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def encode(self, text: str) -> tuple[Array, int]:
        """The ids, and how many units of the text it does not know."""

    @abstractmethod
    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of ids as they come, piece by piece."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Leaves in a folder what `load_vocabulary` needs."""

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.pieces(ids))


class WordVocabulary(Vocabulary):
    """Words in order of their frequency, <eos> first; an id is a line of the file.

    A line's words are what white space separates, and each line ends with <eos>. Words that are as frequent stand in
    the order in which the text has them first. Where the text has no <unk>, that is the last word.
    """

    spaced = True

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.index = {word: n for n, word in enumerate(words)}
        self.unknown = self.index[UNKNOWN]

    @classmethod
    def of_counts(cls, counts: Counter[str]) -> WordVocabulary:
        words = [EOS, *(word for word, _ in counts.most_common() if word != EOS)]
        return cls(words if UNKNOWN in counts else [*words, UNKNOWN])

    @classmethod
    def load(cls, folder: Path) -> WordVocabulary:
        path = folder / FILE
        try:
            # Not splitlines: a word may hold what Unicode calls a line break.
            words = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        if words[0] != EOS or UNKNOWN not in words or len(set(words)) != len(words):
            raise DataError(f"{path} is damaged: it must begin with {EOS}, hold {UNKNOWN}, and no word twice")
        return cls(words)

    def save(self, folder: Path) -> None:
        write_atomically(folder / FILE, "\n".join(self.words) + "\n")

    def __len__(self) -> int:
        return len(self.words)

    def encode_line(self, words: list[str]) -> tuple[Array, int]:
        """The ids of a line with its <eos>, and how many words are unknown."""
        ids = np.fromiter((self.index.get(word, -1) for word in [*words, EOS]), dtype=np.int64, count=len(words) + 1)
        missing = ids < 0
        ids[missing] = self.unknown
        return ids, int(missing.sum())

    def encode(self, text: str) -> tuple[Array, int]:
        """The last line goes on: it has no <eos> unless the text ends with a line break."""
        lines = [self.encode_line(line.split()) for line in text.split("\n")]
        return np.concatenate([ids for ids, _ in lines])[:-1], sum(missing for _, missing in lines)

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        for token in ids:
            yield "\n" if token == 0 else f"{self.words[token]} "


class ByteVocabulary(Vocabulary):
    """A byte is its own id."""

    spaced = False

    def __len__(self) -> int:
        return 256

    def encode(self, text: str) -> tuple[Array, int]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64), 0

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in ids:
            yield decoder.decode(bytes([token]))
        yield decoder.decode(b"", final=True)

    def save(self, folder: Path) -> None:
        """Nothing to keep."""
