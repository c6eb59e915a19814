"""Transformers classes around the models of mgk.models.

Each wraps a model as its attribute `model`. It converts attention masks to padding masks and positions, manages caches
for `generate`, and computes the loss from labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutput

import mgk
from mgk._core.integers import ceil_div
from mgk._core.validation import fail, positive_integer
from mgk.cache import KeyValueCache
from mgk.hf.configuration import MGKConfig
from mgk.models import Classifier, LanguageModel
from mgk.models.adaptive_softmax import TiedEmbedding
from mgk.models.checkpoint import KINDS
from mgk.models.decoder import DecoderLayer
from mgk.models.encoder import EncoderLayer
from mgk.models.run_directory import RunDirectory

IGNORED = -100  # label of positions without a loss


class MGKCache(Cache):
    """Caches of all layers with the interface that `generate` uses; they grow as needed.

    Args:
        caches: One cache per layer, from `LanguageModel.make_caches`.

    Examples:
        >>> config = mgk.hf.MGKConfig(vocab_size=64, hidden_size=32, num_attention_heads=2, num_hidden_layers=3)
        >>> cache = mgk.hf.MGKForCausalLM(config).make_cache(batch_size=1, max_length=16)
        >>> len(cache), cache.get_seq_length()
        (3, 0)
    """

    def __init__(self, caches: Sequence[mgk.Cache]) -> None:
        super().__init__(layers=[])
        self.caches = list(caches)

    def __len__(self) -> int:
        return len(self.caches)

    @property
    def nbytes(self) -> int:
        """Size of all caches in bytes."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be removed; the states of linear attention do not allow it."""
        return all(isinstance(cache, KeyValueCache) for cache in self.caches)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.caches[layer_idx].length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: the caches grow as needed."""
        return -1

    def reserve(self, num_tokens: int) -> None:
        """Enlarge the caches to fit `num_tokens` more tokens; their size at least doubles, so that copies are rare."""
        for cache in self.caches:
            if cache.length + num_tokens > cache.max_length:
                cache.enlarge(max(cache.length + num_tokens, 2 * cache.max_length))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for cache in self.caches:
            cache.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        for cache in self.caches:
            cache.take(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for cache in self.caches:
            cache.take(torch.arange(cache.batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; their number is negative, as in Transformers."""
        if tokens_to_remove > 0:
            fail("tokens_to_remove", f"must be 0 or less, got {tokens_to_remove}")
        for cache in self.caches:
            cache.crop(cache.length + tokens_to_remove)

    def reset(self) -> None:
        for cache in self.caches:
            cache.reset()


class CheckpointedDecoderLayer(GradientCheckpointingLayer, DecoderLayer):
    """Decoder layer that supports the gradient checkpointing of Transformers."""


class CheckpointedEncoderLayer(GradientCheckpointingLayer, EncoderLayer):
    """Encoder layer that supports the gradient checkpointing of Transformers."""


CHECKPOINTED: dict[type, type] = {DecoderLayer: CheckpointedDecoderLayer, EncoderLayer: CheckpointedEncoderLayer}
Wrapper = TypeVar("Wrapper", bound="MGKPreTrainedModel")


class MGKPreTrainedModel(PreTrainedModel):
    """Base class of the wrappers.

    Args:
        config: Configuration of the kind that the class wraps.

    Examples:
        >>> model = mgk.models.LanguageModel(mgk.models.DecoderConfig(64, num_layers=1, embed_dim=32, num_heads=2))
        >>> wrapper = mgk.hf.MGKForCausalLM.of(model)
        >>> isinstance(wrapper, mgk.hf.MGKPreTrainedModel)
        True
    """

    config_class = MGKConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = [layer.__name__ for layer in CHECKPOINTED.values()]
    accepts_loss_kwargs = False
    kind: ClassVar[str]
    model: Any

    def __init__(self, config: MGKConfig) -> None:
        super().__init__(config)
        if config.kind != self.kind:
            fail("config", f"is for a {config.kind}, but {type(self).__name__} is a {self.kind}")
        self.model = KINDS[self.kind][1](config.settings())
        for layer in self.model.layers:
            layer.__class__ = CHECKPOINTED[type(layer)]
        _mark_as_initialized(self.state_dict(keep_vars=True).values())
        self.post_init()

    @classmethod
    def of(cls: type[Wrapper], model: LanguageModel | Classifier) -> Wrapper:
        """Wrap a copy of a model.

        Args:
            model: A model of mgk.models.

        Returns:
            A wrapper on the same device, with the same dtype and mode.

        Examples:
            >>> config = mgk.models.EncoderConfig(vocab_size=16, num_classes=3, max_length=20, num_heads=2)
            >>> wrapper = mgk.hf.MGKForSequenceClassification.of(mgk.models.Classifier(config))
            >>> wrapper.config.num_labels
            3
        """
        wrapper = cls(MGKConfig.of(model.config)).to(next(model.parameters()).dtype)
        wrapper.model.load_state_dict(model.state_dict())
        return wrapper.to(next(model.parameters()).device).train(model.training)

    @classmethod
    def from_run(cls: type[Wrapper], directory: str | Path) -> Wrapper:
        """Wrap the best model of a training run.

        `mgk.models.save_model(wrapper.model, directory)` writes it back.

        Args:
            directory: Run directory of `mgk train`.

        Returns:
            A wrapper in eval mode.

        Examples:
            >>> from pathlib import Path
            >>> config = mgk.models.DecoderConfig(64, num_layers=1, embed_dim=32, num_heads=2)
            >>> mgk.models.save_model(mgk.models.LanguageModel(config), "run/best")  # as `mgk train` does
            >>> description = '{"task": "bytes", "recipe": "bytes", "row": "smgk:2", "seed": 0}'
            >>> written = Path("run/run.json").write_text(description)
            >>> mgk.hf.MGKForCausalLM.from_run("run").config.vocab_size
            64
        """
        run = RunDirectory(directory)
        run.read_description()
        model: Any = run.load_best_model()
        return cls.of(model)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initialize the weights that a checkpoint lacks as in a new model; all others are initialized already."""
        state = self.state_dict(keep_vars=True)
        missing = [name for name, tensor in state.items() if not getattr(tensor, "_is_hf_initialized", False)]
        if missing:
            new_state = type(self.model)(self.model.config).state_dict()
            for name in missing:
                state[name].copy_(new_state[name.removeprefix("model.")])
            _mark_as_initialized(state[name] for name in missing)


class MGKForCausalLM(MGKPreTrainedModel, GenerationMixin):
    """Language model: input_ids [B, L] to logits [B, L, V] and, with labels, the loss.

    Examples:
        >>> config = mgk.hf.MGKConfig(vocab_size=64, hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
        >>> model = mgk.hf.MGKForCausalLM(config).eval()
        >>> model.generate(torch.randint(64, (1, 5)), max_new_tokens=3, do_sample=False).shape
        torch.Size([1, 8])
    """

    kind = "language-model"
    accepts_loss_kwargs = True
    model: LanguageModel

    def __init__(self, config: MGKConfig) -> None:
        if not config.tie_word_embeddings:
            fail("tie_word_embeddings", "must be True: the input embedding and the softmax share their weights")
        super().__init__(config)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # `forward` makes the cache: Transformers' caches do not support mixture keys.
        return False

    def make_cache(self, batch_size: int, max_length: int = 64) -> MGKCache:
        """Make an empty cache with an initial capacity of max_length tokens.

        Examples:
            >>> config = mgk.hf.MGKConfig(vocab_size=64, hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
            >>> model = mgk.hf.MGKForCausalLM(config).eval()
            >>> cache = model.make_cache(batch_size=2)
            >>> with torch.no_grad():
            ...     output = model(torch.randint(64, (2, 5)), past_key_values=cache)
            >>> cache.get_seq_length()
            5
        """
        return MGKCache(self.model.make_caches(batch_size, max_length))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MGKCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Compute logits of the next token, and the loss if labels are given.

        Args:
            input_ids: Token ids [B, L].
            attention_mask: [B, S], 0 = padding, left or right; with a cache, S includes the cached tokens.
            position_ids: [B, L]. Default: consecutive numbers of the tokens that are not padding.
            past_key_values: Cache of `make_cache` or of an earlier output.
            labels: [B, L], the input_ids, or -100 for positions without a loss; shifted by this method. In training
                mode the output then has no logits, which would be the largest tensor of a step.
            use_cache: Make and return a cache if none is given. Inference only.
            logits_to_keep: Number of last positions with logits (0 for all), or their indices.
            num_items_in_batch: Divisor of the summed loss. Default: the number of labels other than -100.
            output_hidden_states: Whether to return the inputs of all layers and the final output.
            output_attentions: Not supported.
            return_dict: False returns a tuple.

        Returns:
            A CausalLMOutputWithPast.
        """
        if output_attentions:
            fail("output_attentions", "is not supported: call a layer's mgk.Attention with need_weights=True")
        if past_key_values is not None and not isinstance(past_key_values, MGKCache):
            fail("past_key_values", f"must come from make_cache, got {type(past_key_values).__name__}")
        batch, length = input_ids.shape
        if past_key_values is None and use_cache:
            past_key_values = self.make_cache(batch, length + 64)
        cached = 0 if past_key_values is None else past_key_values.get_seq_length()
        padding, position_ids = _padding_and_positions(attention_mask, position_ids, batch, cached, length)
        if past_key_values is not None:
            past_key_values.reserve(length)
        with _layer_inputs(self.model, bool(output_hidden_states)) as inputs:
            hidden = self.model.hidden(
                input_ids,
                key_padding_mask=padding,
                position_ids=position_ids,
                caches=None if past_key_values is None else past_key_values.caches,
            )
        loss = None if labels is None else self._loss(hidden, labels, num_items_in_batch)
        logits = None
        if labels is None or not self.training:
            indices = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.model.table.logits(hidden[:, indices])
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values,
            hidden_states=(*inputs, hidden) if output_hidden_states else None,
        )
        return output.to_tuple() if return_dict is False else output

    def _loss(self, hidden: Tensor, labels: Tensor, count: int | Tensor | None) -> Tensor:
        targets = labels[:, 1:]
        has_loss = targets != IGNORED
        total = self.model.table.losses(hidden[:, :-1][has_loss], targets[has_loss]).sum()
        return total / (has_loss.sum().clamp(min=1) if count is None else count)

    def get_input_embeddings(self) -> TiedEmbedding:
        return self.model.table

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> TiedEmbedding:
        """Add or remove tokens at the end of the vocabulary, in the last cluster of an adaptive softmax.

        Args:
            new_num_tokens: New size of the vocabulary. Default: the current size.
            pad_to_multiple_of: Round the size up to a multiple of this.
            mean_resizing: Initialize new tokens with the mean of the old ones; False initializes as in a new model.

        Returns:
            The new table, or the old one if the size is unchanged.
        """
        old_table = self.model.table
        multiple = 1 if pad_to_multiple_of is None else positive_integer("pad_to_multiple_of", pad_to_multiple_of)
        requested = (
            old_table.vocab_size if new_num_tokens is None else positive_integer("new_num_tokens", new_num_tokens)
        )
        size = ceil_div(requested, multiple) * multiple
        if size == old_table.vocab_size:
            return old_table
        config = dataclasses.replace(self.model.config, vocab_size=size)
        table = TiedEmbedding(size, config.embed_dim, config.cutoffs, bias=config.head_bias).to(old_table.weight)
        with torch.no_grad():
            for new, old in zip(table.parameters(), old_table.parameters(), strict=True):
                # Parameters of the clusters keep their shape.
                if new.shape != old.shape and mean_resizing:
                    new.copy_(old.mean(0).expand_as(new))
                common = min(len(new), len(old))
                new[:common] = old[:common]
                new.requires_grad_(old.requires_grad)
        _mark_as_initialized(table.parameters())
        self.model.table, self.model.config, self.config.vocab_size = table, config, size
        return table


class MGKForSequenceClassification(MGKPreTrainedModel):
    """Classifier: input_ids [B, L], or [B, 2, L] for two documents, to logits [B, num_labels] and the loss.

    Examples:
        >>> sizes = {"vocab_size": 64, "max_position_embeddings": 20, "hidden_size": 32, "num_attention_heads": 2}
        >>> config = mgk.hf.MGKConfig(kind="classifier", num_labels=3, **sizes)
        >>> mgk.hf.MGKForSequenceClassification(config).eval()(torch.randint(64, (2, 10))).logits.shape
        torch.Size([2, 3])
    """

    kind = "classifier"
    model: Classifier

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Compute logits, and the loss if labels are given.

        Args:
            input_ids: Token ids [B, L], or [B, 2, L] for two documents.
            attention_mask: Same shape as input_ids, 0 = padding, at any position.
            labels: Labels of the form that config.problem_type requires.
            return_dict: False returns a tuple.

        Returns:
            A SequenceClassifierOutput.
        """
        lengths = None
        if attention_mask is not None:
            if attention_mask.shape != input_ids.shape:
                got = list(attention_mask.shape)
                fail("attention_mask", f"must have the shape of input_ids, {list(input_ids.shape)}, got {got}")
            # Move padding to the end of each row, as the model expects it.
            attention_mask = (attention_mask != 0).long()
            input_ids = input_ids.gather(-1, attention_mask.argsort(dim=-1, descending=True, stable=True))
            lengths = attention_mask.sum(-1)
        logits = self.model(input_ids, lengths)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        output = SequenceClassifierOutput(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.tokens = value
        self.model.config = dataclasses.replace(self.model.config, vocab_size=value.num_embeddings)


def _padding_and_positions(
    mask: Tensor | None, positions: Tensor | None, batch: int, cached: int, length: int
) -> tuple[Tensor | None, Tensor | None]:
    """Convert Transformers' mask [B, cached + L] and positions to the arguments of `LanguageModel.hidden`."""
    if mask is None:
        return None, positions
    if mask.shape != (batch, cached + length):
        shape = f"[{batch}, {cached + length}] and include cached tokens"
        fail("attention_mask", f"must have shape {shape}, got {list(mask.shape)}")
    is_token = mask != 0
    # Attention is faster without a mask.
    if not torch.compiler.is_compiling() and bool(is_token.all()):
        return None, positions
    if positions is None:
        positions = (is_token.long().cumsum(-1) - 1).clamp(min=0)[:, cached:]
    return ~is_token, positions


@contextmanager
def _layer_inputs(model: LanguageModel, enabled: bool) -> Iterator[list[Tensor]]:
    """Collect the input of each layer in the list that is yielded, if enabled."""
    inputs: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        for layer in (model.layers if enabled else [])
    ]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def _mark_as_initialized(tensors: Iterable[Any]) -> None:
    # Transformers initializes tensors without this attribute again.
    for tensor in tensors:
        tensor._is_hf_initialized = True
