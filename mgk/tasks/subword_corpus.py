"""Corpora for language models with subwords: a byte-level BPE trained on the training text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mgk._core.io import DataError
from mgk._core.progress import Progress
from mgk.models.vocabulary import SubwordVocabulary
from mgk.tasks.base import Array, check_utf8, write_array
from mgk.tasks.corpus import MEGABYTE, Corpus, SplitFile, existing_files, id_dtype, split_texts, text_files

# Lines encoded at a time; `tokenizers` encodes them in parallel.
BATCH_LINES = 10_000


@dataclass(frozen=True)
class SubwordCorpus(Corpus):
    """Text as subwords. The tokenizer is trained on the training text and stored beside the token ids.

    Without `parts`, the text is the user's: DIR/bpe/*.txt or DIR/*.txt, split as in `split_texts`.

    Attributes:
        parts: File of each split; the first trains the tokenizer.
        source: Download instructions for missing files, for messages.
        subwords: Maximum number of tokens in the vocabulary.
        tokenizer_bytes: Number of bytes of the training text that train the tokenizer.
    """

    unit: ClassVar[str] = "subword"
    name: str = "bpe"
    dataset: str = "own text, BPE"
    parts: tuple[SplitFile, ...] = ()
    source: str = "set --data-dir to a directory with your text"
    subwords: int = 8192
    tokenizer_bytes: int = 128 * MEGABYTE
    max_length: int = 512
    version: int = 1

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(part.split for part in self.parts) or super().splits

    def files(self, data_dir: Path) -> list[str]:
        if not self.parts:
            return text_files(data_dir, self.name)
        return existing_files(data_dir, self.parts, self.source)

    def build(self, data_dir: Path, folder: Path, workers: int, progress: Progress) -> dict[str, Any]:
        texts = self._texts(data_dir)
        progress("train the tokenizer", 0, 1)
        lines = itertools.chain.from_iterable(batches_of_lines(texts[0][: self.tokenizer_bytes]))
        vocabulary = SubwordVocabulary.train(lines, self.subwords)
        progress("train the tokenizer", 1, 1)
        vocabulary.save(folder)
        metadata: dict[str, Any] = {"vocabulary": len(vocabulary)}
        for split, text in zip(self.splits, texts, strict=True):
            count = write_ids(folder / f"{split}.ids.npy", vocabulary, text, f"encode {split}", progress)
            if count <= self.max_length:
                raise DataError(f"{data_dir}: {split} has {count} tokens, fewer than the {self.max_length + 1} needed")
            metadata[split] = {"tokens": count, "bytes": len(text.encode())}
        return metadata

    def _texts(self, data_dir: Path) -> list[str]:
        """Return the text of each split."""
        texts = {}
        for file in self.files(data_dir):
            content = (data_dir / file).read_bytes()
            texts[file] = check_utf8(content, str(data_dir / file), self.source).decode()
        if self.parts:
            return list(texts.values())
        return split_texts({Path(file).name: text for file, text in texts.items()}, "\n")

    def vocabulary(self, data_dir: Path) -> SubwordVocabulary:
        return SubwordVocabulary.load(self._prepared_folder(Path(data_dir)))

    def load_vocabulary(self, folder: Path) -> SubwordVocabulary:
        return SubwordVocabulary.load(folder)


def batches_of_lines(text: str) -> Iterator[list[str]]:
    """Yield lists of lines with their line breaks."""
    # splitlines() would also split at Unicode line breaks, which `SubwordVocabulary` does not.
    lines = [f"{line}\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    for start in range(0, len(lines), BATCH_LINES):
        yield lines[start : start + BATCH_LINES]


def write_ids(path: Path, vocabulary: SubwordVocabulary, text: str, stage: str, progress: Progress) -> int:
    """Write the token ids of a text as .npy and return their number."""
    dtype = id_dtype(vocabulary)

    def encode_batches() -> Iterator[Array]:
        characters = 0
        for lines in batches_of_lines(text):
            yield vocabulary.encode_lines(lines).astype(dtype)
            characters += sum(map(len, lines))
            progress(f"{stage}, MB", characters // MEGABYTE, len(text) // MEGABYTE)

    return write_array(path, encode_batches())
