"""Our vocabularies as tokenizers of Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mgk.models.run_directory import RunDirectory
from mgk.models.vocabulary import EOS, UNKNOWN, ByteVocabulary, Vocabulary, WordVocabulary, load_vocabulary


def tokenizer_of_run(directory: str | Path) -> PreTrainedTokenizerFast:
    """What turns text into the tokens of a run's language model; words also pad, on the left."""
    run = RunDirectory(directory)
    run.read_description()
    config = run.load_language_model().config
    tokenizer, special = make_tokenizer(load_vocabulary(run.path, config.vocab_size))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="left",
        model_max_length=config.max_length,
        clean_up_tokenization_spaces=False,
        **special,
    )


def make_tokenizer(vocabulary: Vocabulary) -> tuple[Tokenizer, dict[str, str]]:
    """A tokenizer that gives the vocabulary's ids, and which tokens have a part of their own."""
    result: tuple[Tokenizer, dict[str, str]] = TOKENIZERS[type(vocabulary)](vocabulary)
    return result


def _of_words(vocabulary: Any) -> tuple[Tokenizer, dict[str, str]]:
    tokenizer = Tokenizer(models.WordLevel(vocabulary.index, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Replace("\n", f" {EOS} ")
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer, {"unk_token": UNKNOWN, "eos_token": EOS, "pad_token": EOS}


def _of_bytes(vocabulary: Any) -> tuple[Tokenizer, dict[str, str]]:
    # The library writes a byte as itself where that is a visible letter, the others as letters from 256 on.
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # No byte is left over for padding.
    return tokenizer, {}


TOKENIZERS: dict[type[Vocabulary], Any] = {WordVocabulary: _of_words, ByteVocabulary: _of_bytes}
