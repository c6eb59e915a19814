"""The corpus of the study: English Wikipedia as subwords, in segments of 1,024."""

from __future__ import annotations

from dataclasses import replace

from mgk.tasks.corpus import ENWIKI_LM, SplitFile
from mgk.tasks.subword_corpus import SubwordCorpus

# The development set selects the best checkpoint. WikiText-103's validation set selects nothing: results are judged
# on it.
ENWIKI_BPE = SubwordCorpus(
    name="enwiki-bpe",
    dataset="enwiki-lm as subwords",
    parts=tuple(SplitFile(part.split, part.file) for part in ENWIKI_LM.parts),
    source=ENWIKI_LM.source,
    subwords=16_384,
    max_length=1024,
)

# For machines without a GPU: a small vocabulary, because the output layer would take most of a small model's time.
ENWIKI_BPE_SMALL = replace(ENWIKI_BPE, name="enwiki-bpe-small", subwords=4096, max_length=256)
