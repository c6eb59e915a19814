"""The interface of torch.nn.MultiheadAttention, with mixture keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mgk._core.calls import AttentionArgs
from mgk._core.from_softmax import from_softmax
from mgk._core.layer_checks import check_torch_attn_mask, check_torch_padding_mask
from mgk._core.validation import fail, flag
from mgk.attention import Attention
from mgk.variants import Variant


class _NotATensor:
    """Placeholder for `in_proj_weight`: a type with `__torch_function__` disables nn.TransformerEncoder's fast path."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented


class MultiheadAttention(nn.Module):
    """A drop-in replacement for torch.nn.MultiheadAttention, also as `self_attn` of nn.TransformerEncoderLayer.

    As in torch's module, **True means masked in both masks**.

    Args:
        embed_dim: Dimension of the input and the output.
        num_heads: Number of query heads.
        dropout: Dropout probability on the attention weights during training, regardless of the preset.
        bias: Whether the projections have a bias, regardless of the preset.
        add_bias_kv, add_zero_attn: Must be False.
        kdim, vdim: Dimensions of the key and the value input. Default: ``embed_dim``.
        batch_first: If True, inputs and outputs are [B, L, E], else [L, B, E].
        device, dtype: Device and dtype of the parameters.
        head_dim, num_kv_heads, num_key_heads, variant, num_components, preset: As in ``Attention``.
        feature_map, max_positions, rotary, backend: As in ``Attention``.

    Examples:
        >>> attention = mgk.MultiheadAttention(512, 4, head_dim=64, batch_first=True)
        >>> x = torch.randn(2, 10, 512)
        >>> output, weights = attention(x, x, x)
        >>> output.shape, weights.shape
        (torch.Size([2, 10, 512]), torch.Size([2, 10, 10]))
    """

    # Options of torch's module that are not supported.
    bias_k = bias_v = None
    add_zero_attn = False

    # nn.TransformerEncoder and its layers have fast paths that compute softmax attention from these attributes without
    # calling forward. These values disable them.
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
        num_key_heads: int | None = None,
        variant: str | Variant = "smgk",
        num_components: int = 2,
        preset: str = "paper",
        feature_map: str | Callable[[Tensor], Tensor] = "elu",
        max_positions: int | None = None,
        rotary: float | Callable[[Tensor, Tensor], Tensor] | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        for name, option in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if flag(name, option):
                fail(name, "is not supported: mixture keys come from the input only")
        self.batch_first = flag("batch_first", batch_first)
        self.attention = Attention(
            embed_dim,
            num_heads,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            num_key_heads=num_key_heads,
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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}in_proj_weight" in state_dict or f"{prefix}q_proj_weight" in state_dict:
            advice = "these are weights of torch.nn.MultiheadAttention: load them into that module, and convert it"
            raise ValueError(f"{prefix.rstrip('.') or 'state_dict'}: {advice} with MultiheadAttention.from_softmax")
        super()._load_from_state_dict(state_dict, prefix, *args)

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
        """Make a replacement for a trained torch.nn.MultiheadAttention, with its batch_first and mask conventions.

        See `Attention.from_softmax` for the arguments.

        Examples:
            >>> source = torch.nn.MultiheadAttention(64, 2)
            >>> layer, x = mgk.MultiheadAttention.from_softmax(source), torch.randn(10, 1, 64)
            >>> torch.allclose(layer(x, x, x)[0], source(x, x, x)[0], atol=1e-5)
            True
        """
        attention = from_softmax(
            Attention, source, variant, num_components=num_components, is_causal=False, noise=noise, backend=backend
        )
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
        """Compute attention with the arguments of torch.nn.MultiheadAttention.

        Args:
            query: [L, B, E], [B, L, E] with batch_first, or [L, E] unbatched.
            key: [S, B, kdim], in the layout of the query.
            value: [S, B, vdim], in the layout of the query.
            key_padding_mask: [B, S], bool, **True = masked**, or floating point, added to the logits.
            need_weights: If True, return the weights.
            attn_mask: [L, S] or [B·H, L, S], bool, **True = masked**, or floating point, added to the logits.
            average_attn_weights: If True, average the weights over heads.
            is_causal: If True, attention is causal. A given attn_mask must then be the causal mask, and is ignored. As
                in torch, attn_mask is used instead with need_weights, except by linear attention, which takes no mask.

        Returns:
            A tuple of the output, in the layout of the query, and the weights [B, L, S] ([B, H, L, S] if not averaged),
            or None without need_weights.

        Examples:
            >>> attention, x = mgk.MultiheadAttention(64, 2), torch.randn(10, 3, 64)
            >>> masked = torch.ones(10, 10, dtype=torch.bool).triu(1)  # True = masked
            >>> output, weights = attention(x, x, x, attn_mask=masked, average_attn_weights=False)
            >>> output.shape, weights.shape
            (torch.Size([10, 3, 64]), torch.Size([3, 2, 10, 10]))
        """
        flag("need_weights", need_weights)
        flag("average_attn_weights", average_attn_weights)
        flag("is_causal", is_causal)
        batched = self._check_batched(query, key, value)
        # Equal inputs stay the same object, by which the layer recognizes self-attention.
        first = self._to_batch_first(query, batched)
        value = first if value is query else self._to_batch_first(value, batched)
        key = first if key is query else self._to_batch_first(key, batched)
        query = first
        padding = bias = mask = None
        if key_padding_mask is not None:
            key_mask = check_torch_padding_mask(key_padding_mask, batched, query, key)
            if key_mask.dtype == torch.bool:
                padding = key_mask
            else:
                bias = key_mask
        if attn_mask is not None:
            mask = check_torch_attn_mask(attn_mask, query, key, self.num_heads)
            mask = ~mask if mask.dtype == torch.bool else mask
        # With is_causal the mask is redundant, and linear attention supports only is_causal.
        if is_causal and mask is not None:
            if need_weights and not self.attention.is_linear:
                is_causal = False
            else:
                mask = None
        args = AttentionArgs(is_causal, padding, bias, mask, need_weights=need_weights)
        result = self.attention.attend(query, key, value, args)
        output, weights = result if need_weights else (result, None)
        output = output if self.batch_first else output.transpose(0, 1)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            output = output.squeeze(0 if self.batch_first else 1)
            weights = None if weights is None else weights.squeeze(0)
        return output, weights

    def _to_batch_first(self, x: Tensor, batched: bool) -> Tensor:
        x = x if batched else x.unsqueeze(0 if self.batch_first else 1)
        return x if self.batch_first else x.transpose(0, 1)

    def _check_batched(self, query: Any, key: Any, value: Any) -> bool:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, Tensor) or x.dim() not in (2, 3):
                shapes = "[B, L, E]" if self.batch_first else "[L, B, E]"
                got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
                fail(name, f"must be a tensor {shapes}, or [L, E] without a batch, got {got}")
            if x.dim() != query.dim():
                fail(name, f"has {x.dim()} dimensions, but query has {query.dim()}")
        return bool(query.dim() == 3)
