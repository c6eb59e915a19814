"""The language model: a causal decoder with any variant of attention in each layer.

Its form is a few settings, each a row of a table: where the norms stand and of what kind they are, how positions enter,
what the feed-forward part is, and whether the softmax is adaptive. FORMS has the paper's form and a modern one.
B batch, L length, d embed_dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mgk._core.calls import AttentionArgs
from mgk._core.validation import check_tokens, fail, number, one_of, positive_integer
from mgk.attention import Attention
from mgk.cache import Cache
from mgk.features import NAMED
from mgk.models.adaptive_softmax import TiedEmbedding, check_cutoffs
from mgk.variants import PRESETS, check_layers, layers_of

# Layers that are compiled as one. Calling what is compiled costs the host time: for 16 layers forward and backward
# 13 ms one by one, 4.5 ms in fours, 4.9 ms as one (measured on a CPU, with nothing to compute).
GROUP = 4

# Before and after a part: x + f(norm(x)), or norm(x + f(x)) as in the first transformer.
NORM_PLACES: dict[str, Callable[[Callable[[], nn.Module]], tuple[nn.Module | None, nn.Module | None]]] = {
    "pre": lambda norm: (norm(), None),
    "post": lambda norm: (None, norm()),
}
NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": lambda width: nn.RMSNorm(width, eps=1e-6)}


@dataclass(frozen=True)
class Positions:
    """How positions enter: added to the embedding, as rotations in attention, or not at all."""

    added: bool = False
    rotary: float | None = None  # the base


POSITIONS = {"sinusoidal": Positions(added=True), "rotary": Positions(rotary=10000.0), "none": Positions()}


class SwiGLU(nn.Module):
    """SwiGLU: silu(gate) ∘ up, then down."""

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
    """Up, an activation, dropout, down."""

    def forward(self, x: Tensor) -> Tensor:
        up, activation, dropout, down = self
        x = activation(up(x))
        result: Tensor = down(dropout(x) if self.training else x)
        return result


def _plain(activation: Callable[[], nn.Module]) -> Callable[[int, int, float], nn.Module]:
    return lambda width, hidden, dropout: MLP(
        nn.Linear(width, hidden), activation(), nn.Dropout(dropout), nn.Linear(hidden, width)
    )


MLPS: dict[str, Callable[[int, int, float], nn.Module]] = {
    "relu": _plain(nn.ReLU),
    "gelu": _plain(nn.GELU),
    "swiglu": SwiGLU,
}

FORMS: dict[str, dict[str, Any]] = {
    "paper": {"norm": "layer", "norm_place": "post", "positions": "sinusoidal", "mlp": "relu", "head_bias": True},
    "modern": {"norm": "rms", "norm_place": "pre", "positions": "rotary", "mlp": "swiglu", "head_bias": False},
}


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that determines a LanguageModel's shape; the defaults are the paper's model for WikiText-103.

    variant: one name for all layers, or one for each. head_dim stays the same whatever num_heads: that is where fewer
    heads save. max_length: the length it is trained at; without a preset that keeps priors per position longer input is
    possible. feature_map: of linear variants, one of "elu", "relu", "favor" and "dpfp". cutoffs: where the clusters of
    the adaptive softmax begin, none for a plain one. attention_dropout None takes the preset's.
    DecoderConfig(V, **FORMS["modern"]) is the modern form.
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

    def __post_init__(self) -> None:
        for name in "vocab_size max_length embed_dim ffn_dim num_layers num_heads head_dim".split():
            positive_integer(name, getattr(self, name))
        for name in ("variant", "cutoffs"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        check_layers(self.layer_variants, self.num_layers)
        for name, table in TABLES.items():
            one_of(name, getattr(self, name), table)
        check_cutoffs(self.cutoffs, self.vocab_size)
        number("dropout", self.dropout, 0, 1)

    @property
    def layer_variants(self) -> tuple[str, ...]:
        """The variant of each layer."""
        return layers_of(self.variant, self.num_layers)


TABLES: dict[str, dict[str, Any]] = {
    "preset": PRESETS,
    "feature_map": NAMED,
    "norm": NORMS,
    "norm_place": NORM_PLACES,
    "positions": POSITIONS,
    "mlp": MLPS,
}


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each with its norm before or after."""

    def __init__(self, config: DecoderConfig, variant: str) -> None:
        super().__init__()
        width = config.embed_dim
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
            is_causal=True,
            # The paper shares priors over positions, the authors' code keeps one for each.
            max_positions=None if config.preset == "paper" else config.max_length,
            rotary=POSITIONS[config.positions].rotary,
            backend=config.backend,
        )
        self.mlp = MLPS[config.mlp](width, config.ffn_dim, config.dropout)
        place = NORM_PLACES[config.norm_place]
        self.before_attention, self.after_attention = place(lambda: NORMS[config.norm](width))
        self.before_mlp, self.after_mlp = place(lambda: NORMS[config.norm](width))
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, positions: Tensor | None = None, padding: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        seen = _through(self.before_attention, x)
        attended = self.attention(seen, key_padding_mask=padding, position_ids=positions, cache=cache)
        return self._rest(x, attended)

    def last(self, x: Tensor) -> Tensor:
        """The layer's output at the last position alone, [B, 1, d]: one query over all keys, nothing to hide."""
        seen = _through(self.before_attention, x)
        position = torch.full((1,), x.shape[1] - 1, device=x.device)
        attended = self.attention.attend(seen[:, -1:], seen, None, AttentionArgs(is_causal=False), position)
        return self._rest(x[:, -1:], attended)

    def _rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = _through(self.after_attention, x + self._dropped(attended))
        return _through(self.after_mlp, x + self._dropped(self.mlp(_through(self.before_mlp, x))))

    def _dropped(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(x) if self.training else x
        return result


def _through(part: nn.Module | None, x: Tensor) -> Tensor:
    """Calling a module that does nothing takes the host as long as a small one that does something."""
    result: Tensor = x if part is None else part(x)
    return result


def run_group(
    layers: Sequence[DecoderLayer],
    x: Tensor,
    position_ids: Tensor | None,
    key_padding_mask: Tensor | None,
    caches: Sequence[Cache] | None,
) -> Tensor:
    for n, layer in enumerate(layers):
        x = layer(x, position_ids, key_padding_mask, None if caches is None else caches[n])
    return x


class LanguageModel(nn.Module):
    """Token ids [B, L] to scores of the next token [B, L, V].

    `losses` is for training and evaluation: it never holds the scores. `hidden` is the decoder without the softmax.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.table = TiedEmbedding(config.vocab_size, config.embed_dim, config.cutoffs, bias=config.head_bias)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(DecoderLayer(config, variant) for variant in config.layer_variants)
        # After the last of the layers that have their norms first, nothing has been normalised.
        self.norm, _ = NORM_PLACES[config.norm_place](lambda: NORMS[config.norm](config.embed_dim))
        self._run_group: Callable[..., Tensor] = run_group
        # As the paper's code base starts; small weights keep post-norm layers near the identity at first.
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def make_caches(self, batch_size: int, max_length: int) -> list[Cache]:
        """An empty cache for each layer, for decoding up to max_length tokens."""
        return [layer.attention.make_cache(batch_size, max_length) for layer in self._layers()]

    def embed(self, tokens: Tensor, position_ids: Tensor | None = None, start: int = 0) -> Tensor:
        """Token vectors, plus their positions where these are added: position_ids [L] or [B, L], else from `start`."""
        x = self.table.embed(tokens) * math.sqrt(self.config.embed_dim)
        if POSITIONS[self.config.positions].added:
            if position_ids is None:
                position_ids = torch.arange(start, start + tokens.shape[1], device=tokens.device)
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
        """[B, L] to [B, L, d].

        key_padding_mask: bool [B, S], True = padding; with caches, of all keys held. position_ids: [L] or [B, L], where
        they do not count on from 0 or from the caches (padding on the left). caches: from `make_caches`; the tokens are
        appended. inputs: what `embed` would give, already made.
        """
        self._check_tokens(tokens)
        if caches is not None and len(caches) != len(self.layers):
            fail("caches", f"must be {len(self.layers)}, one for each layer, got {len(caches)}")
        held = caches[0].length if caches else 0
        x = self.embed(tokens, position_ids, held) if inputs is None else inputs
        return _through(self.norm, self._run(self._layers(), x, position_ids, key_padding_mask, caches))

    def last_hidden(self, tokens: Tensor) -> Tensor:
        """`hidden` at the last position alone, [B, d]: the last layer works for that position only."""
        self._check_tokens(tokens)
        *layers, last = self._layers()
        return _through(self.norm, last.last(self._run(layers, self.embed(tokens))))[:, 0]

    def compile_layers(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """From now on layers run compiled. All groups of them run the same code, so that one is compiled for all."""
        self._run_group = torch.compile(run_group, backend=backend)

    def _run(
        self,
        layers: Sequence[DecoderLayer],
        x: Tensor,
        position_ids: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        for start in range(0, len(layers), GROUP):
            part = slice(start, start + GROUP)
            x = self._run_group(layers[part], x, position_ids, key_padding_mask, caches and caches[part])
        return x

    def losses(self, tokens: Tensor, targets: Tensor, rooms: Sequence[int] | None = None) -> Tensor:
        """−log p of each target [B, L], in fp32; no target is ignored.

        rooms: for the adaptive softmax, one number for each cluster of rare words that there are at most so many
        targets in, where the caller knows one; `model.table.rooms(targets)` finds them. More targets give NaN.
        """
        return self.table.losses(self.hidden(tokens), targets, rooms)

    def forward(
        self,
        tokens: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        """Scores of the next token [B, L, V]; their softmax is its probability. Arguments as in `hidden`."""
        hidden = self.hidden(tokens, key_padding_mask=key_padding_mask, position_ids=position_ids, caches=caches)
        return self.table.logits(hidden)

    def breakdown(self) -> dict[str, int]:
        """How many parameters lie where."""
        parts: dict[str, Sequence[nn.Module]] = {
            "embedding and softmax": [self.table],
            "attention": [layer.attention for layer in self._layers()],
            "feed-forward": [layer.mlp for layer in self._layers()],
        }
        counts = {name: sum(p.numel() for m in modules for p in m.parameters()) for name, modules in parts.items()}
        return {**counts, "norms": sum(p.numel() for p in self.parameters()) - sum(counts.values())}

    def _layers(self) -> list[Any]:
        return list(self.layers)

    def _check_tokens(self, tokens: Tensor) -> None:
        check_tokens(tokens, "B L")


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """[...] to [..., width]: sines, then cosines, of wavelengths from 2π to 2π · 10,000."""
    rates = 10000.0 ** (-torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    angles = positions.to(torch.float32).unsqueeze(-1) * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[..., :width]
