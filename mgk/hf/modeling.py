"""The shells: each has one of our models as its attribute `model` and computes nothing itself.

It turns attention masks into padding and positions, keeps caches for `generate`, and makes the loss from labels.
B batch, L length, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutput

from mgk._core.validation import fail, positive_integer
from mgk.hf.cache import MGKCache
from mgk.hf.configuration import MGKConfig
from mgk.models import Classifier, LanguageModel
from mgk.models.adaptive_softmax import TiedEmbedding
from mgk.models.checkpoint import KINDS
from mgk.models.decoder import DecoderLayer
from mgk.models.encoder import EncoderLayer
from mgk.models.run_directory import RunDirectory

IGNORED = -100  # the label of positions that are not to be learned


class CheckpointedDecoderLayer(GradientCheckpointingLayer, DecoderLayer):
    """Recomputed in the backward, if Transformers is told to."""


class CheckpointedEncoderLayer(GradientCheckpointingLayer, EncoderLayer):
    """Recomputed in the backward, if Transformers is told to."""


CHECKPOINTED: dict[type, type] = {DecoderLayer: CheckpointedDecoderLayer, EncoderLayer: CheckpointedEncoderLayer}
Shell = TypeVar("Shell", bound="MGKPreTrainedModel")


class MGKPreTrainedModel(PreTrainedModel):
    """What both shells share: one of our models as `model`, checkpointing of its layers, and where it comes from."""

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
            fail("config", f"is of a {config.kind}; {type(self).__name__} holds a {self.kind}")
        self.model = KINDS[self.kind][1](config.settings())
        for layer in self.model.layers:
            layer.__class__ = CHECKPOINTED[type(layer)]
        _mark_as_initialised(self.state_dict(keep_vars=True).values())
        self.post_init()

    @classmethod
    def of(cls: type[Shell], model: LanguageModel | Classifier) -> Shell:
        """A shell with a copy of the weights of one of our models; in eval mode if the model is."""
        shell = cls(MGKConfig.of(model.config)).to(next(model.parameters()).dtype)
        shell.model.load_state_dict(model.state_dict())
        return shell.to(next(model.parameters()).device).train(model.training)

    @classmethod
    def from_run(cls: type[Shell], directory: str | Path) -> Shell:
        """The best model of a run of `mgk train`. Back: `mgk.models.save_model(shell.model, directory)`."""
        run = RunDirectory(directory)
        run.read_description()
        model: Any = run.load_best_model()
        return cls.of(model)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Our modules have initialised themselves. What a loaded file lacks starts as in a new model."""
        held = self.state_dict(keep_vars=True)
        missing = [name for name, tensor in held.items() if not getattr(tensor, "_is_hf_initialized", False)]
        if missing:
            new = type(self.model)(self.model.config).state_dict()
            for name in missing:
                held[name].copy_(new[name.removeprefix("model.")])
            _mark_as_initialised(held[name] for name in missing)


class MGKForCausalLM(MGKPreTrainedModel, GenerationMixin):
    """The language model: input_ids [B, L] to logits [B, L, V], and with labels the loss."""

    kind = "language-model"
    accepts_loss_kwargs = True
    model: LanguageModel

    def __init__(self, config: MGKConfig) -> None:
        if not config.tie_word_embeddings:
            fail("tie_word_embeddings", "must be True: input and softmax share one table")
        super().__init__(config)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Then `generate` leaves it to `forward` to make a cache: keys of mixtures do not fit Transformers' own."""
        return False

    def make_cache(self, batch_size: int, max_length: int = 64) -> MGKCache:
        """An empty cache with room for max_length tokens at first."""
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
        """Scores of the next token, and the loss.

        Args:
            attention_mask: [B, S], 0 = padding, left or right. With a cache: of all tokens held and these.
            position_ids: [B, L]; by default they count real tokens.
            past_key_values: from `make_cache`, or from the output of an earlier call.
            labels: [B, L], input_ids themselves or -100 where nothing is to be learned; shifted here. In training
                mode the output then has no logits: [B, L, V] of them would be the largest tensor of a step.
            use_cache: make a cache where none is given, and return it. Not in training.
            logits_to_keep: how many of the last positions to score, 0 for all, or which ones.
            num_items_in_batch: what the summed loss is divided by, instead of the number of labels.
        """
        if output_attentions:
            fail("output_attentions", "is not offered: mgk.Attention's need_weights returns a layer's weights")
        if past_key_values is not None and not isinstance(past_key_values, MGKCache):
            fail("past_key_values", f"must come from make_cache, got {type(past_key_values).__name__}")
        batch, length = input_ids.shape
        if past_key_values is None and use_cache:
            past_key_values = self.make_cache(batch, length + 64)
        held = 0 if past_key_values is None else past_key_values.get_seq_length()
        padding, position_ids = _padding_and_positions(attention_mask, position_ids, batch, held, length)
        if past_key_values is not None:
            past_key_values.make_room(length)
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
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.model.table.logits(hidden[:, kept])
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values,
            hidden_states=(*inputs, hidden) if output_hidden_states else None,
        )
        return output.to_tuple() if return_dict is False else output

    def _loss(self, hidden: Tensor, labels: Tensor, count: int | Tensor | None) -> Tensor:
        targets = labels[:, 1:]
        real = targets != IGNORED
        total = self.model.table.losses(hidden[:, :-1][real], targets[real]).sum()
        return total / (real.sum().clamp(min=1) if count is None else count)

    def get_input_embeddings(self) -> TiedEmbedding:
        return self.model.table

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> TiedEmbedding:
        """Tokens are added or left out at the end: with an adaptive softmax, in its last cluster.

        New ones start as the mean of the old, or with mean_resizing False as in a new model.
        """
        old, settings = self.model.table, self.model.config
        multiple = 1 if pad_to_multiple_of is None else positive_integer("pad_to_multiple_of", pad_to_multiple_of)
        wanted = old.vocab_size if new_num_tokens is None else positive_integer("new_num_tokens", new_num_tokens)
        size = -(-wanted // multiple) * multiple
        if size == old.vocab_size:
            return old
        settings = dataclasses.replace(settings, vocab_size=size)
        table = TiedEmbedding(size, settings.embed_dim, settings.cutoffs, bias=settings.head_bias).to(old.weight)
        with torch.no_grad():
            for new, before in zip(table.parameters(), old.parameters(), strict=True):
                # What belongs to the clusters stays as it is.
                if new.shape != before.shape and mean_resizing:
                    new.copy_(before.mean(0).expand_as(new))
                common = min(len(new), len(before))
                new[:common] = before[:common]
                new.requires_grad_(before.requires_grad)
        _mark_as_initialised(table.parameters())
        self.model.table, self.model.config, self.config.vocab_size = table, settings, size
        return table


class MGKForSequenceClassification(MGKPreTrainedModel):
    """The classifier: input_ids [B, L], of two documents [B, 2, L], to logits [B, num_labels], and the loss."""

    kind = "classifier"
    model: Classifier

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """attention_mask: as input_ids, 0 = padding, anywhere. labels: as config.problem_type has them."""
        lengths = None
        if attention_mask is not None:
            if attention_mask.shape != input_ids.shape:
                fail("attention_mask", f"must have input_ids' shape {list(input_ids.shape)}")
            # Real tokens to the start of each row: there the model has its positions.
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
    mask: Tensor | None, positions: Tensor | None, batch: int, held: int, length: int
) -> tuple[Tensor | None, Tensor | None]:
    """What `LanguageModel.hidden` takes, from Transformers' mask [B, held + L] and positions."""
    if mask is None:
        return None, positions
    if mask.shape != (batch, held + length):
        fail("attention_mask", f"must have shape [{batch}, {held + length}], all tokens, got {list(mask.shape)}")
    real = mask != 0
    # Without padding attention is faster.
    if not torch.compiler.is_compiling() and bool(real.all()):
        return None, positions
    if positions is None:
        positions = (real.long().cumsum(-1) - 1).clamp(min=0)[:, held:]
    return ~real, positions


@contextmanager
def _layer_inputs(model: LanguageModel, wanted: bool) -> Iterator[list[Tensor]]:
    """A list to which each layer adds its input, if wanted."""
    inputs: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        for layer in (model.layers if wanted else [])
    ]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def _mark_as_initialised(tensors: Any) -> None:
    """Transformers would draw them anew."""
    for tensor in tensors:
        tensor._is_hf_initialized = True
