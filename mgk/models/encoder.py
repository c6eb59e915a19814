"""The encoder of the Long Range Arena experiments: classifies one document, or the relation between two.

Pre-LN, learned positions, a mean over tokens and an MLP head, as in the configuration the paper takes over from
Nyströmformer. B batch, L length, d embed_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mgk._core.masks import cu_seqlens_to_segments
from mgk._core.validation import check_tokens, fail, number, one_of, positive_integer
from mgk.attention import Attention
from mgk.features import NAMED
from mgk.models.embedding import lookup
from mgk.variants import PRESETS, VARIANTS, check_layers, layers_of

POOLINGS = ("mean", "mean-padded")


@dataclass(frozen=True)
class EncoderConfig:
    """Everything that determines a Classifier's shape.

    variant: one name for all layers, or one for each. head_dim stays the same whatever num_heads: that is where
    fewer heads save. pooling: "mean" over the real tokens, or "mean-padded", their sum over max_length.
    feature_map: of linear variants, one of "elu", "relu", "favor" and "dpfp". attention_dropout None takes the
    preset's. documents 2 makes the matcher: one encoder for both, and a head on [x, y, x∘y, x−y]. token_std: of the
    token vectors at first; 0.02 is that of the paper's configuration.
    """

    vocab_size: int
    num_classes: int
    max_length: int
    documents: int = 1
    embed_dim: int = 64
    ffn_dim: int = 128
    hidden_dim: int = 128
    num_layers: int = 2
    num_heads: int = 8
    num_kv_heads: int | None = None
    head_dim: int = 32
    variant: str | tuple[str, ...] = "smgk"
    num_components: int = 2
    preset: str = "paper"
    feature_map: str = "elu"
    dropout: float = 0.1
    attention_dropout: float | None = None
    pooling: str = "mean"
    backend: str = "auto"
    token_std: float = 0.02

    def __post_init__(self) -> None:
        sizes = "vocab_size num_classes max_length embed_dim ffn_dim hidden_dim num_layers num_heads head_dim"
        for name in sizes.split():
            positive_integer(name, getattr(self, name))
        if self.documents not in (1, 2):
            fail("documents", f"must be 1 or 2, got {self.documents!r}")
        if isinstance(self.variant, list):
            object.__setattr__(self, "variant", tuple(self.variant))
        check_layers(self.layer_variants, self.num_layers)
        one_of("preset", self.preset, PRESETS)
        one_of("feature_map", self.feature_map, NAMED)
        one_of("pooling", self.pooling, POOLINGS)
        number("dropout", self.dropout, 0, 1)
        number("token_std", self.token_std, 0, above=True)

    @property
    def packs(self) -> bool:
        """Whether packed documents are faster and the same: linear attention pads them, and EM would count
        the padding behind the last one."""
        layers = [VARIANTS[name] for name in self.layer_variants]
        return not any(v.similarity == "linear" or "em" in (v.prior, v.variance) for v in layers)

    @property
    def layer_variants(self) -> tuple[str, ...]:
        """The variant of each layer."""
        return layers_of(self.variant, self.num_layers)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class EncoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: EncoderConfig, variant: str) -> None:
        super().__init__()
        width = config.embed_dim
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(
            width,
            config.num_heads,
            head_dim=config.head_dim,
            num_kv_heads=config.num_kv_heads,
            variant=variant,
            num_components=config.num_components,
            preset=config.preset,
            feature_map=NAMED[config.feature_map](config.head_dim),
            dropout=config.attention_dropout,
            # The paper shares priors over positions, the authors' code keeps one for each.
            max_positions=None if config.preset == "paper" else config.max_length,
            backend=config.backend,
        )
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            _linear(width, config.ffn_dim), nn.GELU(), nn.Dropout(config.dropout), _linear(config.ffn_dim, width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, padding: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
        normed = self.attention_norm(x)
        attended = self.attention(normed, key_padding_mask=padding, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        x = x + self.dropout(attended)
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Classifier(nn.Module):
    """Token ids [B, L] (or [B, 2, L] for two documents) and their lengths to logits [B, num_classes]."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        width = config.embed_dim
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Parameter(torch.empty(config.max_length, width))
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(EncoderLayer(config, variant) for variant in config.layer_variants)
        self.norm = nn.LayerNorm(width)
        features = width if config.documents == 1 else 4 * width
        self.head = nn.Sequential(
            _linear(features, config.hidden_dim), nn.ReLU(), _linear(config.hidden_dim, config.num_classes)
        )
        nn.init.normal_(self.tokens.weight, std=config.token_std)
        nn.init.normal_(self.positions, std=0.02)

    def encode(self, tokens: Tensor, lengths: Tensor | None) -> Tensor:
        """[B, L] to [B, d]: the mean over tokens of the last layer."""
        length = tokens.shape[1]
        if length > self.config.max_length:
            fail("tokens", f"have length {length}, and the model has {self.config.max_length} positions")
        padding = None if lengths is None else torch.arange(length, device=tokens.device) >= lengths[:, None]
        x = self.dropout(lookup(tokens, self.tokens.weight) + self.positions[:length])
        for layer in self.layers:
            x = layer(x, padding, None, None)
        x = self.norm(x)
        # Not by the width of the batch: a prediction does not depend on the examples beside it.
        whole = self.config.max_length if self.config.pooling == "mean-padded" else None
        if padding is None or lengths is None:
            return x.mean(1) if whole is None else x.sum(1) / whole
        total = x.masked_fill(padding.unsqueeze(-1), 0).sum(1)
        return total / (lengths.clamp(min=1)[:, None] if whole is None else whole)

    def encode_packed(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[T] to [N, d] for the N sequences that lie one after another; what lies behind the last one is padding."""
        # The padding is a sequence of its own, so that nothing attends to it.
        edges = torch.cat([cu_seqlens, cu_seqlens.new_full((1,), tokens.shape[0])])
        sequence, position = cu_seqlens_to_segments(edges, tokens.shape[0])
        x = self.dropout(lookup(tokens, self.tokens.weight) + nn.functional.embedding(position, self.positions))[None]
        for layer in self.layers:
            x = layer(x, None, edges, self.config.max_length)
        # A product with the membership, not a scatter: the same sum each time, also on a GPU. Not in
        # bf16: autocast leaves a plain mean in fp32 too.
        member = sequence == torch.arange(cu_seqlens.shape[0] - 1, device=tokens.device)[:, None]
        normed = self.norm(x)[0]
        with torch.autocast(x.device.type, enabled=False):
            total = member.to(normed.dtype) @ normed
        mean_padded = self.config.pooling == "mean-padded"
        return total / (self.config.max_length if mean_padded else cu_seqlens.diff().clamp(min=1)[:, None])

    def forward(self, tokens: Tensor, lengths: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Padded: tokens [B, L] or [B, 2, L], and lengths [B] or [B, 2], the number of real tokens at the start of
        each row; None takes all as real. Packed: tokens [T] and cu_seqlens, int32 [N + 1], the offsets of N sequences
        that lie one after another, of two documents each after its mate."""
        check_tokens(tokens, "T" if cu_seqlens is not None else "B L" if self.config.documents == 1 else "B 2 L")
        if tokens.shape[-1] == 0:
            fail("tokens", f"must hold at least one token, got {list(tokens.shape)}")
        if cu_seqlens is not None:
            both = self.encode_packed(tokens, cu_seqlens)
        elif self.config.documents == 1:
            both = self.encode(tokens, lengths)
        else:
            # Both documents in one batch: twice the rows, half the launches.
            both = self.encode(tokens.flatten(0, 1), None if lengths is None else lengths.flatten())
        if self.config.documents == 2:
            x, y = both.unflatten(0, (-1, 2)).unbind(1)
            both = torch.cat([x, y, x * y, x - y], dim=-1)
        logits: Tensor = self.head(both)
        return logits
