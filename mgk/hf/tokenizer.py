"""Transformers tokenizers: those of the vocabularies of mgk.models, and a check of loaded ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mgk.models.run_directory import RunDirectory
from mgk.models.vocabulary import (
    EOS,
    UNKNOWN,
    ByteVocabulary,
    SubwordVocabulary,
    Vocabulary,
    WordVocabulary,
    byte_characters,
    load_vocabulary,
)


def tokenizer_of_run(directory: str | Path) -> PreTrainedTokenizerFast:
    """Make the tokenizer of a language model's training run.

    Args:
        directory: Run directory of `mgk train`.

    Returns:
        A tokenizer with the token ids of the run. Words are padded on the left; bytes have no padding token.

    Examples:
        >>> from pathlib import Path
        >>> config = mgk.models.DecoderConfig(256, num_layers=1, embed_dim=32, num_heads=2)
        >>> mgk.models.save_model(mgk.models.LanguageModel(config), "run/best")  # as `mgk train` does
        >>> description = '{"task": "bytes", "recipe": "bytes", "row": "smgk:2", "seed": 0}'
        >>> written = Path("run/run.json").write_text(description)
        >>> mgk.hf.tokenizer_of_run("run")("key")["input_ids"]
        [107, 101, 121]
    """
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


def has_vocabulary(tokenizer: Any) -> bool:
    """Return whether a tokenizer was loaded, with its vocabulary; None stands for one that could not be loaded."""
    # Without vocabulary files some tokenizer classes load with special tokens alone.
    return tokenizer is not None and not set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens)


def make_tokenizer(vocabulary: Vocabulary) -> tuple[Tokenizer, dict[str, str]]:
    """Make a tokenizer with the ids of a vocabulary, and return it with its special tokens."""
    result: tuple[Tokenizer, dict[str, str]] = TOKENIZERS[type(vocabulary)](vocabulary)
    return result


def _word_tokenizer(vocabulary: Any) -> tuple[Tokenizer, dict[str, str]]:
    tokenizer = Tokenizer(models.WordLevel(vocabulary.index, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Replace("\n", f" {EOS} ")
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer, {"unk_token": UNKNOWN, "eos_token": EOS, "pad_token": EOS}


def _byte_tokenizer(vocabulary: Any) -> tuple[Tokenizer, dict[str, str]]:
    tokenizer = Tokenizer(models.BPE(byte_characters(), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # All 256 ids are bytes: there is no special token.
    return tokenizer, {}


TOKENIZERS: dict[type[Vocabulary], Any] = {
    WordVocabulary: _word_tokenizer,
    ByteVocabulary: _byte_tokenizer,
    # Byte-level BPE has no special token either.
    SubwordVocabulary: lambda vocabulary: (vocabulary.tokenizer, {}),
}
