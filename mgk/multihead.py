"""torch.nn.MultiheadAttention's constructor and forward, with mixture keys inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mgk._core.from_softmax import from_softmax
from mgk._core.how import AttentionArgs
from mgk._core.validation import fail, flag
from mgk.attention import Attention
from mgk.variants import Variant


class _NotATensor:
    """Stands where nn.TransformerEncoder looks for a softmax weight: it leaves its fast path on meeting such a type."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented


class MultiheadAttention(nn.Module):
    """A drop-in for nn.MultiheadAttention, also as `self_attn` inside nn.TransformerEncoderLayer.

    The first eleven arguments are torch's; add_bias_kv and add_zero_attn must stay False. The rest, by keyword, are
    those of `Attention`, but for is_causal, which is the forward's. dropout and bias are those given here, whatever the
    preset. As in torch's module, in **both masks True = hidden**.
    """

    # Of torch's module; we have none of them.
    bias_k = bias_v = None
    add_zero_attn = False

    # nn.TransformerEncoder and its layers have fast paths that compute softmax attention from these, past our forward:
    # with these values they do not take them.
    _qkv_same_embed_dim = False
    in_proj_bias = None
    in_proj_weight = _NotATensor()

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        variant: str | Variant = "smgk",
        num_components: int = 2,
        preset: str = "paper",
        feature_map: str | Callable[[Tensor], Tensor] = "elu",
        max_positions: int | None = None,
        rotary: float | Callable[[Tensor, Tensor], Tensor] | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        for name, given in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if flag(name, given):
                fail(name, "is not offered: mixture keys come from the input alone")
        self.batch_first = flag("batch_first", batch_first)
        self.attention = Attention(
            embed_dim,
            num_heads,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            kdim=kdim,
            vdim=vdim,
            variant=variant,
            num_components=num_components,
            preset=preset,
            feature_map=feature_map,
            max_positions=max_positions,
            rotary=rotary,
            dropout=dropout,
            bias=bias,
            backend=backend,
            device=device,
            dtype=dtype,
        )
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, self.attention.head_dim

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        if f"{prefix}in_proj_weight" in state_dict or f"{prefix}q_proj_weight" in state_dict:
            whose = "these are weights of torch.nn.MultiheadAttention: load them into one, and convert it"
            raise ValueError(f"{prefix.rstrip('.') or 'state_dict'}: {whose} with MultiheadAttention.from_softmax")
        super()._load_from_state_dict(state_dict, prefix, *others)

    @classmethod
    def from_softmax(
        cls,
        source: nn.MultiheadAttention,
        variant: str | Variant = "smgk",
        *,
        num_components: int = 2,
        noise: float = 0.01,
        backend: str = "auto",
    ) -> MultiheadAttention:
        """As `Attention.from_softmax`, in the place of the source: with its batch_first and its masks."""
        attention = from_softmax(Attention, source, variant, num_components, False, noise, backend)
        layer = cls(source.embed_dim, source.num_heads, batch_first=source.batch_first, device="meta")
        layer.attention = attention
        return layer.train(source.training)

    @property
    def kdim(self) -> int:
        return self.attention.kdim

    @property
    def vdim(self) -> int:
        return self.attention.vdim

    @property
    def dropout(self) -> float:
        return self.attention.dropout

    @property
    def out_proj(self) -> nn.Linear:
        return self.attention.out

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """query [L, B, E] (or [B, L, E] with batch_first, or [L, E] unbatched); the same for key and value.

        key_padding_mask: [B, S], bool True = hidden, or floating point, added.
        attn_mask: [L, S] or [B·H, L, S], bool True = hidden, or floating point, added.
        is_causal: says that attn_mask is the causal mask (torch's hint), or stands for it when there is none. As in
            torch, with need_weights the mask counts and not the hint (not in linear attention, which takes no mask).
        Returns the output and, with need_weights, the weights [B, L, S], or [B, H, L, S] if not averaged.
        """
        for name, given in (
            ("need_weights", need_weights),
            ("average_attn_weights", average_attn_weights),
            ("is_causal", is_causal),
        ):
            flag(name, given)
        batched = self._batched(query, key, value)
        # What is one tensor stays one: the layer then knows it for self-attention.
        turned = self._turned(query, batched)
        value = turned if value is query else self._turned(value, batched)
        key = turned if key is query else self._turned(key, batched)
        query = turned
        padding, bias = self._padding(key_padding_mask, batched, query, key)
        mask = self._mask(attn_mask, query, key)
        # With the hint the mask need not be read, and linear attention can be causal.
        if is_causal and mask is not None:
            trusted = not need_weights or self.attention.is_linear
            is_causal, mask = (True, None) if trusted else (False, mask)
        how = AttentionArgs(is_causal, padding, bias, mask, need_weights=need_weights)
        result = self.attention.attend(query, key, value, how)
        output, weights = result if need_weights else (result, None)
        output = output if self.batch_first else output.transpose(0, 1)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            output = output.squeeze(0 if self.batch_first else 1)
            weights = weights if weights is None else weights.squeeze(0)
        return output, weights

    def _turned(self, x: Tensor, batched: bool) -> Tensor:
        """[B, L, E]."""
        x = x if batched else x.unsqueeze(0 if self.batch_first else 1)
        return x if self.batch_first else x.transpose(0, 1)

    def _batched(self, query: Any, key: Any, value: Any) -> bool:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, Tensor) or x.dim() not in (2, 3):
                shapes = "[B, L, E]" if self.batch_first else "[L, B, E]"
                fail(name, f"must be a tensor {shapes}, or [L, E] without a batch")
            if x.dim() != query.dim():
                fail(name, f"has {x.dim()} dimensions, but query has {query.dim()}")
        return bool(query.dim() == 3)

    def _padding(self, mask: Any, batched: bool, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """A bool mask or a float bias, [B, S]."""
        if mask is None:
            return None, None
        shape = (query.shape[0], key.shape[1])
        if not isinstance(mask, Tensor) or (mask.dtype != torch.bool and not mask.is_floating_point()):
            fail("key_padding_mask", "must be a bool (True = hidden) or floating-point tensor [B, S]")
        mask = mask if batched or mask.dim() != 1 else mask.unsqueeze(0)
        if mask.shape != shape:
            fail("key_padding_mask", f"must have shape [B, S] = {list(shape)}, got {list(mask.shape)}")
        return (mask, None) if mask.dtype == torch.bool else (None, mask)

    def _mask(self, mask: Any, query: Tensor, key: Tensor) -> Tensor | None:
        """torch's attn_mask in SDPA's sense, [L, S] or [B, H, L, S]."""
        if mask is None:
            return None
        batch, length = query.shape[:2]
        one, many = (length, key.shape[1]), (batch * self.num_heads, length, key.shape[1])
        if not isinstance(mask, Tensor) or (mask.dtype != torch.bool and not mask.is_floating_point()):
            fail("attn_mask", "must be a bool (True = hidden) or floating-point tensor")
        if mask.shape not in (one, many):
            wanted = f"[L, S] = {list(one)} or [B·H, L, S] = {list(many)}"
            fail("attn_mask", f"must have shape {wanted}, got {list(mask.shape)}")
        mask = mask if mask.dim() == 2 else mask.unflatten(0, (batch, self.num_heads))
        return ~mask if mask.dtype == torch.bool else mask
