"""Language model: a causal decoder with any variant of attention in each layer.

The configuration selects kind and placement of the norms, position encoding, feed-forward layer and softmax. FORMS has
the settings of the paper's architecture and of a modern one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mgk._core.calls import AttentionArgs
from mgk._core.layer_checks import check_positions, check_tokens
from mgk._core.validation import fail, flag, one_of, positive_integer
from mgk.attention import Attention
from mgk.cache import Cache
from mgk.models.adaptive_softmax import TiedEmbedding, check_cutoffs
from mgk.models.attention_layer import AttentionConfig, make_attention
from mgk.variants import VARIANTS

# Number of layers compiled together. Calls of compiled functions have overhead on the host: for forward and backward of
# 16 layers 13 ms in groups of 1, 4.5 ms in groups of 4, 4.9 ms in one group (measured on a CPU with empty layers).
GROUP_SIZE = 4

# Place of the norm of a sublayer f: x + f(norm(x)), or norm(x + f(x)) as in the original Transformer.
NORM_PLACES = ("pre", "post")
NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": lambda width: nn.RMSNorm(width, eps=1e-6)}


@dataclass(frozen=True)
class PositionEncoding:
    """Position encoding: sinusoids added to the embedding, rotary embeddings of a given base, or neither."""

    added: bool = False
    rotary: float | None = None


POSITIONS = {
    "sinusoidal": PositionEncoding(added=True),
    "rotary": PositionEncoding(rotary=10000.0),
    "none": PositionEncoding(),
}


class SwiGLU(nn.Module):
    """Feed-forward layer down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(width, 2 * hidden, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        down: Tensor = self.down(self.dropout(nn.functional.silu(gate) * up))
        return down


class MLP(nn.Sequential):
    """Feed-forward layer of two projections with an activation and dropout between them."""

    def forward(self, x: Tensor) -> Tensor:
        up, activation, dropout, down = self
        x = activation(up(x))
        result: Tensor = down(dropout(x) if self.training else x)
        return result


def _mlp_with(activation: Callable[[], nn.Module]) -> Callable[[int, int, float], nn.Module]:
    return lambda width, hidden, dropout: MLP(
        nn.Linear(width, hidden), activation(), nn.Dropout(dropout), nn.Linear(hidden, width)
    )


MLPS: dict[str, Callable[[int, int, float], nn.Module]] = {
    "relu": _mlp_with(nn.ReLU),
    "gelu": _mlp_with(nn.GELU),
    "swiglu": SwiGLU,
}

FORMS: dict[str, dict[str, Any]] = {
    "paper": {"norm": "layer", "norm_place": "post", "positions": "sinusoidal", "mlp": "relu", "head_bias": True},
    "modern": {"norm": "rms", "norm_place": "pre", "positions": "rotary", "mlp": "swiglu", "head_bias": False},
}


@dataclass(frozen=True)
class DecoderConfig(AttentionConfig):
    """Configuration of a LanguageModel. The defaults are the paper's model for WikiText-103.

    `DecoderConfig(vocab_size, **FORMS["modern"])` is the modern architecture.

    Attributes:
        vocab_size: Number of tokens.
        max_length: Length of training sequences. Longer input is possible unless the preset has priors per position.
        embed_dim: Dimension of the model.
        ffn_dim: Hidden dimension of the feed-forward layers.
        num_layers: Number of layers.
        num_heads: Number of query heads.
        num_kv_heads: Number of value heads, and of key heads by default. Default: num_heads.
        head_dim: Dimension of a head. It does not depend on num_heads: models with fewer heads are smaller.
        variant: Attention variant of all layers, or one for each layer.
        num_components: Number of Gaussians per key.
        preset: Preset of the attention layers, a key of PRESETS.
        feature_map: Feature map of linear variants: "elu", "relu", "favor" or "dpfp".
        norm: Kind of norm, "layer" or "rms".
        norm_place: "pre" normalizes the input of a sublayer, "post" the sum of its input and output.
        positions: Position encoding: "sinusoidal", "rotary" or "none".
        mlp: Feed-forward layer: "relu", "gelu" or "swiglu".
        cutoffs: First token ids of the adaptive softmax's tail clusters; empty for a full softmax.
        head_bias: Whether the logits have a bias.
        dropout: Dropout of embeddings, sublayers and feed-forward layers.
        attention_dropout: Dropout of attention weights. None selects the preset's.
        backend: Backend of the attention operators.
        num_key_heads: Number of key heads. Default: num_kv_heads.

    Examples:
        >>> mgk.models.DecoderConfig(1000, num_layers=2, variant="smgk", num_heads=4, num_kv_heads=2).layer_variants
        ('smgk', 'smgk')
    """

    vocab_size: int
    max_length: int = 256
    embed_dim: int = 128
    ffn_dim: int = 2048
    num_layers: int = 16
    num_heads: int = 8
    num_kv_heads: int | None = None
    head_dim: int = 16
    variant: str | tuple[str, ...] = "smgk"
    num_components: int = 2
    preset: str = "paper"
    feature_map: str = "elu"
    norm: str = "layer"
    norm_place: str = "post"
    positions: str = "sinusoidal"
    mlp: str = "relu"
    cutoffs: tuple[int, ...] = ()
    head_bias: bool = True
    dropout: float = 0.1
    attention_dropout: float | None = 0.0
    backend: str = "auto"
    num_key_heads: int | None = None

    def __post_init__(self) -> None:
        for name in "vocab_size max_length embed_dim ffn_dim num_layers num_heads head_dim".split():
            positive_integer(name, getattr(self, name))
        if isinstance(self.cutoffs, list):
            object.__setattr__(self, "cutoffs", tuple(self.cutoffs))
        self.check_attention_fields()
        one_of("norm", self.norm, NORMS)
        one_of("norm_place", self.norm_place, NORM_PLACES)
        one_of("positions", self.positions, POSITIONS)
        one_of("mlp", self.mlp, MLPS)
        check_cutoffs(self.cutoffs, self.vocab_size)
        flag("head_bias", self.head_bias)


def make_norms(config: DecoderConfig) -> tuple[nn.Module | None, nn.Module | None]:
    """Make the norms before and after a sublayer; the one that the configuration does not place is None."""
    norm = NORMS[config.norm](config.embed_dim)
    return (norm, None) if config.norm_place == "pre" else (None, norm)


class DecoderLayer(nn.Module):
    """Attention and a feed-forward layer, each with a residual connection and a norm before or after it."""

    def __init__(self, config: DecoderConfig, variant: str, layer_index: int = 0) -> None:
        super().__init__()
        rotary = POSITIONS[config.positions].rotary
        self.attention = make_attention(config, variant, layer_index, is_causal=True, rotary=rotary)
        self.mlp = MLPS[config.mlp](config.embed_dim, config.ffn_dim, config.dropout)
        self.before_attention, self.after_attention = make_norms(config)
        self.before_mlp, self.after_mlp = make_norms(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, positions: Tensor | None = None, padding: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        normed = _apply(self.before_attention, x)
        attended = self.attention(normed, key_padding_mask=padding, position_ids=positions, cache=cache)
        return self._add_and_feed_forward(x, attended)

    def forward_last(self, x: Tensor) -> Tensor:
        """Compute the output of the last position only, [B, 1, d]; its query attends to all keys."""
        if not isinstance(self.attention, Attention):
            return self(x)[:, -1:]
        normed = _apply(self.before_attention, x)
        position = torch.full((1,), x.shape[1] - 1, device=x.device)
        attended = self.attention.attend(normed[:, -1:], normed, None, AttentionArgs(is_causal=False), position)
        return self._add_and_feed_forward(x[:, -1:], attended)

    def _add_and_feed_forward(self, x: Tensor, attended: Tensor) -> Tensor:
        x = _apply(self.after_attention, x + self._drop(attended))
        return _apply(self.after_mlp, x + self._drop(self.mlp(_apply(self.before_mlp, x))))

    def _drop(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(x) if self.training else x
        return result


def _apply(module: nn.Module | None, x: Tensor) -> Tensor:
    # None instead of nn.Identity: the overhead of a module call is measurable.
    result: Tensor = x if module is None else module(x)
    return result


def run_group(
    layers: Sequence[DecoderLayer],
    x: Tensor,
    position_ids: Tensor | None,
    key_padding_mask: Tensor | None,
    caches: Sequence[Cache] | None,
) -> Tensor:
    """Run consecutive layers: the unit that `LanguageModel.compile_layers` compiles."""
    for n, layer in enumerate(layers):
        x = layer(x, position_ids, key_padding_mask, None if caches is None else caches[n])
    return x


class LanguageModel(nn.Module):
    """Causal language model: token ids [B, L] to logits of the next token [B, L, V].

    Use `losses` for training and evaluation: it does not materialize the logits.

    Args:
        config: Sizes and settings.

    Examples:
        >>> config = mgk.models.DecoderConfig(100, embed_dim=32, ffn_dim=64, num_layers=1, num_heads=2, head_dim=16)
        >>> model, tokens = mgk.models.LanguageModel(config), torch.randint(100, (2, 17))
        >>> model.losses(tokens[:, :-1], tokens[:, 1:]).shape  # nats per token
        torch.Size([2, 16])
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.table = TiedEmbedding(config.vocab_size, config.embed_dim, config.cutoffs, bias=config.head_bias)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            DecoderLayer(config, variant, index) for index, variant in enumerate(config.layer_variants)
        )
        # Only pre-norm models have a final norm: the output of a post-norm layer is already normalized.
        self.norm, _ = make_norms(config)
        self._run_group: Callable[..., Tensor] = run_group
        # As in the paper's code; small weights keep post-norm layers close to the identity at the start of training.
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def make_caches(self, batch_size: int, max_length: int) -> list[Cache]:
        """Return an empty cache for each layer, for decoding up to max_length tokens.

        Examples:
            >>> config = mgk.models.DecoderConfig(100, embed_dim=32, ffn_dim=64, num_layers=1, num_heads=2)
            >>> model = mgk.models.LanguageModel(config).eval()
            >>> caches = model.make_caches(batch_size=1, max_length=20)
            >>> with torch.no_grad():
            ...     logits = model(torch.randint(100, (1, 12)), caches=caches)  # the prompt
            ...     logits = model(torch.randint(100, (1, 1)), caches=caches)  # one more token
            >>> caches[0].length, logits.shape
            (13, torch.Size([1, 1, 100]))
        """
        for name in self.config.layer_variants:
            one_of("variant of a model that decodes with a cache", name, VARIANTS)
        return [layer.attention.make_cache(batch_size, max_length) for layer in self._layers()]

    def embed(self, tokens: Tensor, position_ids: Tensor | None = None, start: int = 0) -> Tensor:
        """Embed tokens [B, L], and add sinusoidal positions if the model has them.

        Args:
            tokens: Token ids [B, L].
            position_ids: Positions [L] or [B, L]. Default: consecutive from `start`.
            start: Position of the first token.
        """
        x = self.table.embed(tokens) * math.sqrt(self.config.embed_dim)
        if POSITIONS[self.config.positions].added:
            if position_ids is None:
                position_ids = torch.arange(start, start + tokens.shape[1], device=tokens.device)
            # Before the sum, which would broadcast x to the shape of wrong positions.
            check_positions(position_ids, x)
            x = x + sinusoids(position_ids, self.config.embed_dim).to(x.dtype)
        return self.dropout(x)

    def hidden(
        self,
        tokens: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Run the decoder without the softmax, [B, L] to [B, L, d].

        Args:
            tokens: Token ids [B, L].
            key_padding_mask: Bool [B, S], True = padding; with caches, S includes the cached keys.
            position_ids: Positions [L] or [B, L], required if the input is padded on the left. Default: consecutive
                from 0, or from the length of the caches.
            caches: Caches of `make_caches`; the tokens are appended.
            inputs: Precomputed output of `embed`, [B, L, d].
        """
        check_tokens(tokens, "B", "L")
        if caches is not None and len(caches) != len(self.layers):
            fail("caches", f"must have {len(self.layers)} entries, one for each layer, got {len(caches)}")
        start = caches[0].length if caches else 0
        x = self.embed(tokens, position_ids, start) if inputs is None else inputs
        return _apply(self.norm, self._run(self._layers(), x, position_ids, key_padding_mask, caches))

    def last_hidden(self, tokens: Tensor) -> Tensor:
        """Compute `hidden` of the last position, [B, d]; the last layer runs for that position only."""
        check_tokens(tokens, "B", "L")
        *layers, last = self._layers()
        return _apply(self.norm, last.forward_last(self._run(layers, self.embed(tokens))))[:, 0]

    def compile_layers(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile the layers in groups. All groups share their code, so that one compilation serves all."""
        self._run_group = torch.compile(run_group, backend=backend)

    def _run(
        self,
        layers: Sequence[DecoderLayer],
        x: Tensor,
        position_ids: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        for start in range(0, len(layers), GROUP_SIZE):
            group = slice(start, start + GROUP_SIZE)
            x = self._run_group(layers[group], x, position_ids, key_padding_mask, caches and caches[group])
        return x

    def losses(self, tokens: Tensor, targets: Tensor, capacities: Sequence[int] | None = None) -> Tensor:
        """Compute -log p of each target in fp32.

        Args:
            tokens: Token ids [B, L].
            targets: Token ids [B, L]; no id is ignored.
            capacities: For an adaptive softmax, maximum number of targets in each tail cluster. Default:
                `model.table.cluster_capacities(targets)`, which synchronizes with the device. If a cluster has more
                targets, the losses are NaN.

        Returns:
            Losses [B, L].

        Examples:
            >>> config = mgk.models.DecoderConfig(100, embed_dim=32, ffn_dim=64, num_layers=1, num_heads=2)
            >>> model, tokens = mgk.models.LanguageModel(config), torch.randint(100, (2, 17))
            >>> losses = model.losses(tokens[:, :-1], tokens[:, 1:])
            >>> losses.mean().backward()
        """
        return self.table.losses(self.hidden(tokens), targets, capacities)

    def forward(
        self,
        tokens: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        """Compute the logits of the next token, [B, L, V]. Arguments as in `hidden`.

        Examples:
            >>> config = mgk.models.DecoderConfig(100, embed_dim=32, ffn_dim=64, num_layers=1, num_heads=2)
            >>> mgk.models.LanguageModel(config)(torch.randint(100, (2, 17))).shape
            torch.Size([2, 17, 100])
        """
        hidden = self.hidden(tokens, key_padding_mask=key_padding_mask, position_ids=position_ids, caches=caches)
        return self.table.logits(hidden)

    def _layers(self) -> list[Any]:
        # A list: a slice of a ModuleList would be a new module.
        return list(self.layers)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Encode positions [...] as [..., width]: sines, then cosines, of wavelengths from 2π to 2π · 10,000."""
    rates = 10000.0 ** (-torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    angles = positions.to(torch.float32).unsqueeze(-1) * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[..., :width]
