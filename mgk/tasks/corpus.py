"""Corpora for language models: words in WikiText's layout, or the bytes of any text.

The vocabulary is that of the paper's code base: every word of the training text, in order of frequency, with <eos> at
the end of each line. What other splits have beyond it is <unk>, and its share is among the facts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mgk._core.io import DataError
from mgk.models.vocabulary import ByteVocabulary, Vocabulary, WordVocabulary
from mgk.tasks.base import Array, Progress, Task, npy_header, read_manifest

MEGABYTE = 1 << 20
# Of a text that comes in one piece: the last part is for testing, the one before for development.
HELD_OUT = 0.05


@dataclass(frozen=True)
class TokenStream:
    """A running text. Example n is tokens n·length to (n + 1)·length, and predicts each token's successor."""

    tokens: Array  # uint8, uint16 or uint32
    length: int
    unknown_share: float = 0.0  # of its tokens that are not in the vocabulary

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)


@dataclass(frozen=True)
class SplitFile:
    """A split: its file in the data directory and, where they are known, how many tokens it has."""

    split: str
    file: str
    tokens: int | None = None


class Corpus(Task):
    """A text to model. `max_length` is that of a training segment and of an evaluation's window."""

    objective: ClassVar[str] = "language-model"
    unit: ClassVar[str]  # what a token is
    max_length: int

    @abstractmethod
    def vocabulary(self, data_dir: Path) -> Vocabulary: ...

    @abstractmethod
    def vocabulary_in(self, folder: Path) -> Vocabulary:
        """The vocabulary that a run has kept."""

    def read(self, folder: Path, name: str) -> TokenStream:
        path = folder / f"{name}.ids.npy"
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: remove {folder} to have it made again") from error
        return TokenStream(tokens, self.max_length, read_manifest(folder)["facts"][name].get("unknown_share", 0.0))


@dataclass(frozen=True)
class Words(Corpus):
    """Word-level text in WikiText's layout: one file a split, tokens between spaces."""

    unit: ClassVar[str] = "word"
    name: str
    dataset: str
    parts: tuple[SplitFile, ...]
    source: str  # where to get what is missing
    max_length: int = 256
    version: int = 1  # of the way in which the ids are made

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(part.split for part in self.parts)

    def files(self, data_dir: Path) -> list[str]:
        for part in self.parts:
            if not (data_dir / part.file).is_file():
                raise DataError(f"{data_dir / part.file} is missing: {self.source}")
        return [part.file for part in self.parts]

    def build(self, data_dir: Path, folder: Path, workers: int, progress: Progress) -> dict[str, Any]:
        counts: Counter[str] = Counter()
        for words in read_lines(data_dir / self.parts[0].file, "count", self.source, progress):
            counts.update(words)
        vocabulary = WordVocabulary.of_counts(counts)
        vocabulary.save(folder)
        facts: dict[str, Any] = {"vocabulary": len(vocabulary)}
        dtype = np.dtype(np.uint16 if len(vocabulary) <= 1 << 16 else np.uint32)
        for part in self.parts:
            path, total, missing = data_dir / part.file, 0, 0
            with (folder / f"{part.split}.ids.npy").open("wb") as file:
                file.write(npy_header(dtype, 0))
                for words in read_lines(path, f"encode {part.split}", self.source, progress):
                    ids, unknown = vocabulary.encode_line(words)
                    file.write(ids.astype(dtype).tobytes())
                    total, missing = total + len(ids), missing + unknown
                file.seek(0)
                file.write(npy_header(dtype, total))
            if part.tokens not in (None, total):
                raise DataError(f"{path} has {total:,} tokens instead of {part.tokens:,}: {self.source}")
            if total < 2:
                raise DataError(f"{path} is empty: {self.source}")
            facts[part.split] = {"tokens": total, "unknown_share": missing / total}
        return facts

    def vocabulary(self, data_dir: Path) -> WordVocabulary:
        return WordVocabulary.load(self._folder(Path(data_dir)))

    def vocabulary_in(self, folder: Path) -> WordVocabulary:
        return WordVocabulary.load(folder)


def read_lines(path: Path, stage: str, what_to_do: str, progress: Progress) -> Iterator[list[str]]:
    """The words of each line."""
    size, done, told = path.stat().st_size, 0, 0
    with path.open("rb") as file:
        for line in file:
            try:
                yield line.decode().split()
            except UnicodeDecodeError as error:
                raise DataError(f"{path} is damaged at byte {done + error.start}: {what_to_do}") from error
            done += len(line)
            if done - told >= MEGABYTE:
                told = done
                progress(f"{stage}, MB", done // MEGABYTE, size // MEGABYTE + 1)
    progress(f"{stage}, MB", size // MEGABYTE + 1, size // MEGABYTE + 1)


@dataclass(frozen=True)
class Bytes(Corpus):
    """The bytes of a user's own text: DIR/bytes/*.txt or DIR/*.txt.

    Files train.txt, valid.txt and test.txt are the splits; any other files are one text in the order of their names,
    of which the last tenth is held out.
    """

    unit: ClassVar[str] = "byte"
    name: str = "bytes"
    dataset: str = "own text, bytes"
    max_length: int = 256
    version: int = 1

    def files(self, data_dir: Path) -> list[str]:
        for folder in ("bytes", "."):
            found = sorted(path for path in (data_dir / folder).glob("*.txt") if path.is_file())
            if found:
                return [str(path.relative_to(data_dir)) for path in found]
        raise DataError(f"{data_dir} has no *.txt: point --data-dir at a folder with your text")

    def build(self, data_dir: Path, folder: Path, workers: int, progress: Progress) -> dict[str, Any]:
        texts = {Path(file).name: (data_dir / file).read_bytes() for file in self.files(data_dir)}
        named = [f"{name}.txt" for name in ("train", "valid", "test")]
        if set(named) <= set(texts):
            pieces = [texts[name] for name in named]
        else:
            whole = b"\n".join(texts.values())
            cuts = [int(len(whole) * (1 - 2 * HELD_OUT)), int(len(whole) * (1 - HELD_OUT))]
            pieces = [whole[: cuts[0]], whole[cuts[0] : cuts[1]], whole[cuts[1] :]]
        for split, piece in zip(self.splits, pieces, strict=True):
            if len(piece) <= self.max_length:
                raise DataError(f"{data_dir}: {split} has {len(piece)} bytes, a segment takes {self.max_length + 1}")
            np.save(folder / f"{split}.ids.npy", np.frombuffer(piece, dtype=np.uint8))
        return {split: {"tokens": len(piece)} for split, piece in zip(self.splits, pieces, strict=True)}

    def vocabulary(self, data_dir: Path) -> ByteVocabulary:
        return ByteVocabulary()

    def vocabulary_in(self, folder: Path) -> ByteVocabulary:
        return ByteVocabulary()


def wikitext(name: str, dataset: str, tokens: tuple[int, int, int]) -> Words:
    files = [f"{name}/wiki.{split}.tokens" for split in ("train", "valid", "test")]
    source = f"get https://wikitext.smerity.com/{name}-v1.zip, the word-level one, and unpack it there"
    return Words(name, dataset, tuple(map(SplitFile, ("train", "dev", "test"), files, tokens)), source)


WIKITEXT_103 = wikitext("wikitext-103", "WikiText-103", (103_227_021, 217_646, 245_569))
WIKITEXT_2 = wikitext("wikitext-2", "WikiText-2", (2_088_628, 217_646, 245_569))
# Wikipedia in WikiText's form: a stand-in where WikiText-103's training text is not to be had.
ENWIKI_LM = Words(
    "enwiki-lm",
    "enwiki-lm (a stand-in for WikiText-103)",
    (
        SplitFile("train", "enwiki-lm/wiki.train.tokens", 51_906_581),
        SplitFile("dev", "enwiki-lm/wiki.valid.tokens", 227_847),
        SplitFile("wikitext-103-valid", "wikitext-103/wiki.valid.tokens", 217_646),
    ),
    "it is not published: put a text of your own there in WikiText's form, and WikiText-103's validation set",
)
# A user's own corpus in WikiText's layout.
OWN_WORDS = Words(
    "words",
    "own text, words",
    tuple(
        SplitFile(split, f"wiki.{name}.tokens")
        for split, name in (("train", "train"), ("dev", "valid"), ("test", "test"))
    ),
    "put your corpus there as wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, words between spaces",
)
CORPORA: tuple[Corpus, ...] = (WIKITEXT_103, WIKITEXT_2, ENWIKI_LM, OWN_WORDS, Bytes())
