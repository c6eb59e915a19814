"""Encoder of the Long Range Arena experiments, which classifies one document or the relation between two.

Pre-norm layers, learned positions, mean pooling and an MLP head, as in Nyströmformer's configuration, which the paper
uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mgk._core.layer_checks import check_tokens
from mgk._core.masks import cu_seqlens_to_segments
from mgk._core.operator_checks import check_max_seqlen
from mgk._core.validation import fail, number, one_of, positive_integer
from mgk.models.adaptive_softmax import embed_tokens
from mgk.models.attention_layer import AttentionConfig, make_attention
from mgk.variants import VARIANTS

if TYPE_CHECKING:
    from mgk.models.vision import VisionConfig

POOLINGS = ("mean", "mean-padded")


@dataclass(frozen=True)
class EncoderConfig(AttentionConfig):
    """Configuration of a Classifier.

    Attributes:
        vocab_size: Number of tokens.
        num_classes: Number of classes.
        max_length: Maximum length of a document.
        documents: Documents per example. 2 encodes both with the same weights and classifies [x, y, x * y, x - y].
        embed_dim: Dimension of the model.
        ffn_dim: Hidden dimension of the feed-forward layers.
        hidden_dim: Hidden dimension of the classification head.
        num_layers: Number of layers.
        num_heads: Number of query heads.
        num_kv_heads: Number of value heads, and of key heads by default. Default: num_heads.
        head_dim: Dimension of a head. It does not depend on num_heads: models with fewer heads are smaller.
        variant: Attention variant of all layers, or one for each layer.
        num_components: Number of Gaussians per key.
        preset: Preset of the attention layers, a key of PRESETS.
        feature_map: Feature map of linear variants: "elu", "relu", "favor" or "dpfp".
        dropout: Dropout of embeddings, sublayers and feed-forward layers.
        attention_dropout: Dropout of attention weights. None selects the preset's.
        pooling: "mean" over the tokens of a document, or "mean-padded", their sum divided by max_length.
        backend: Backend of the attention operators.
        token_std: Standard deviation of the initial token vectors; 0.02 is the paper's.
        num_key_heads: Number of key heads. Default: num_kv_heads.

    Examples:
        >>> mgk.models.EncoderConfig(vocab_size=16, num_classes=4, max_length=64, num_heads=2).variant
        'smgk'
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
    num_key_heads: int | None = None

    def __post_init__(self) -> None:
        sizes = "vocab_size num_classes max_length embed_dim ffn_dim hidden_dim num_layers num_heads head_dim"
        for name in sizes.split():
            positive_integer(name, getattr(self, name))
        if self.documents not in (1, 2):
            fail("documents", f"must be 1 or 2, got {self.documents!r}")
        self.check_attention_fields()
        one_of("pooling", self.pooling, POOLINGS)
        number("token_std", self.token_std, 0, above=True)

    @property
    def supports_packing(self) -> bool:
        """Whether packed batches are exact and faster: EM would count the padding, linear attention would pad again."""
        layers = [VARIANTS.get(name) for name in self.layer_variants]
        return not any(v is None or v.similarity == "linear" or "em" in (v.prior, v.variance) for v in layers)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class EncoderLayer(nn.Module):
    """Pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: EncoderConfig | VisionConfig, variant: str, layer_index: int = 0) -> None:
        super().__init__()
        width = config.embed_dim
        self.attention_norm = nn.LayerNorm(width)
        self.attention = make_attention(config, variant, layer_index)
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
    """Classifier of one or two documents.

    Args:
        config: Sizes and settings.

    Examples:
        >>> config = mgk.models.EncoderConfig(vocab_size=16, num_classes=4, max_length=64, num_heads=2)
        >>> mgk.models.Classifier(config).eval()(torch.randint(1, 16, (3, 40))).shape
        torch.Size([3, 4])
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        width = config.embed_dim
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Parameter(torch.empty(config.max_length, width))
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            EncoderLayer(config, variant, index) for index, variant in enumerate(config.layer_variants)
        )
        self.norm = nn.LayerNorm(width)
        features = width if config.documents == 1 else 4 * width
        self.head = nn.Sequential(
            _linear(features, config.hidden_dim), nn.ReLU(), _linear(config.hidden_dim, config.num_classes)
        )
        nn.init.normal_(self.tokens.weight, std=config.token_std)
        nn.init.normal_(self.positions, std=0.02)

    def encode(self, tokens: Tensor, lengths: Tensor | None) -> Tensor:
        """Encode tokens [B, L] of documents with lengths [B] as [B, d], the mean over the tokens of the last layer."""
        length = tokens.shape[1]
        if length > self.config.max_length:
            fail("tokens", f"must have length at most max_length = {self.config.max_length}, got {length}")
        padding = None if lengths is None else torch.arange(length, device=tokens.device) >= lengths[:, None]
        x = self.dropout(embed_tokens(tokens, self.tokens.weight) + self.positions[:length])
        for layer in self.layers:
            x = layer(x, padding, None, None)
        x = self.norm(x)
        # max_length, not the padded length of the batch: a prediction must not depend on the other examples.
        denominator = self.config.max_length if self.config.pooling == "mean-padded" else None
        if padding is None or lengths is None:
            return x.mean(1) if denominator is None else x.sum(1) / denominator
        total = x.masked_fill(padding.unsqueeze(-1), 0).sum(1)
        return total / (lengths.clamp(min=1)[:, None] if denominator is None else denominator)

    def encode_packed(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Encode N packed sequences [T] as [N, d]; tokens after the last sequence are padding.

        The padding, too, has at most max_length tokens.
        """
        # The padding becomes a separate sequence, so that no document attends to it.
        edges = torch.cat([cu_seqlens, cu_seqlens.new_full((1,), tokens.shape[0])])
        check_max_seqlen("max_length", self.config.max_length, edges)
        sequence, position = cu_seqlens_to_segments(edges, tokens.shape[0])
        positions = nn.functional.embedding(position, self.positions)
        x = self.dropout(embed_tokens(tokens, self.tokens.weight) + positions)[None]
        for layer in self.layers:
            x = layer(x, None, edges, self.config.max_length)
        # A GEMM with the membership matrix instead of a scatter, which is not deterministic on a GPU. Without autocast,
        # because autocast computes the mean of a padded batch in fp32, too.
        member = sequence == torch.arange(cu_seqlens.shape[0] - 1, device=tokens.device)[:, None]
        normed = self.norm(x)[0]
        with torch.autocast(x.device.type, enabled=False):
            total = member.to(normed.dtype) @ normed
        mean_padded = self.config.pooling == "mean-padded"
        return total / (self.config.max_length if mean_padded else cu_seqlens.diff().clamp(min=1)[:, None])

    def forward(self, tokens: Tensor, lengths: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Compute the logits [B, num_classes] of a padded batch, or of a packed batch if `cu_seqlens` is given.

        Args:
            tokens: Padded: token ids [B, L], or [B, 2, L] for two documents. Packed: [T], the two documents of an
                example one after the other.
            lengths: Padded: number of tokens of each document, [B] or [B, 2]. Default: no padding.
            cu_seqlens: Packed: offsets of N documents, int32 [N + 1].

        Examples:
            >>> config = mgk.models.EncoderConfig(vocab_size=16, num_classes=4, max_length=64, num_heads=2)
            >>> model, tokens = mgk.models.Classifier(config).eval(), torch.randint(1, 16, (2, 40))
            >>> padded = model(tokens, lengths=torch.tensor([40, 25]))
            >>> packed = torch.cat([tokens[0], tokens[1, :25]])
            >>> offsets = torch.tensor([0, 40, 65], dtype=torch.int32)
            >>> torch.allclose(model(packed, cu_seqlens=offsets), padded, atol=1e-5)
            True
        """
        documents = self.config.documents
        if cu_seqlens is not None:
            check_tokens(tokens, "T")
        elif documents == 1:
            check_tokens(tokens, "B", "L")
        else:
            check_tokens(tokens, "B", documents, "L")
        if tokens.shape[-1] == 0:
            fail("tokens", f"must have at least one token, got {list(tokens.shape)}")
        if cu_seqlens is not None:
            if (cu_seqlens.shape[0] - 1) % documents:
                fail("cu_seqlens", f"must have two documents for each example, got {cu_seqlens.shape[0] - 1} documents")
            encoded = self.encode_packed(tokens, cu_seqlens)
        elif documents == 1:
            encoded = self.encode(tokens, lengths)
        else:
            # Both documents in one batch: half the kernel launches.
            encoded = self.encode(tokens.flatten(0, 1), None if lengths is None else lengths.flatten())
        if documents == 2:
            x, y = encoded.unflatten(0, (-1, 2)).unbind(1)
            encoded = torch.cat([x, y, x * y, x - y], dim=-1)
        logits: Tensor = self.head(encoded)
        return logits
