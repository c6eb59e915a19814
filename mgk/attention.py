"""The attention layer: any variant, with projections, masks, caches and EM.

B batch, H query heads, Hk key heads, M components, L queries, S keys, D head width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mgk import functional
from mgk.arguments import MixtureCall, check_cu_seqlens, check_feature_map, fail, flag, number, one_of, positive_integer
from mgk.cache import Cache, KeyValueCache, StateCache
from mgk.kernels.masks import segments
from mgk.kernels.statistics import em_statistics
from mgk.keys import KEYS, KeyLayout
from mgk.priors import PRIORS, VARIANCES
from mgk.rotary import Rotary
from mgk.variants import PRESETS, VARIANTS, Variant


class Attention(nn.Module):
    """Multi-head attention whose keys are mixtures: y = attn(x).

    The paper's saving comes from fewer heads **of the same width**: pass head_dim. With 8 softmax heads of width 64
    replaced by 4 mixture heads: Attention(512, 4, head_dim=64).

    Args:
        embed_dim: width of the input and the output.
        num_heads: query heads H.
        head_dim: D; default embed_dim // num_heads, as in torch.
        num_kv_heads: key heads Hk, a divisor of num_heads (GQA); default num_heads.
        kdim, vdim: widths of key and value inputs; default embed_dim.
        variant: a name in VARIANTS or a Variant.
        num_components: M. Variants that are no mixture (softmax, linear) have one component whatever it says.
        preset: a name in PRESETS: "paper", or the settings of the authors' code, "ref-lra" and "ref-lm".
        feature_map: for linear variants: "elu", "relu" or a module such as FAVOR(head_dim) or DPFP().
        dropout: on the attention weights, in training. None takes the preset's (0 in "paper").
        bias: of the projections. None takes the preset's (True in "paper").
        is_causal: a query sees keys up to its own position.
        max_positions: EM priors are kept for each key position up to this one; None shares them over positions.
        rotary: None, a base (10000.0), or a callable (x [B, H, (M,) S, D], positions [S] or [B, S]) -> x. Shifts are
            added after the rotation.
        backend: as in the operators.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        variant: str | Variant = "smgk",
        num_components: int = 2,
        preset: str = "paper",
        feature_map: str | Callable[[Tensor], Tensor] = "elu",
        dropout: float | None = None,
        bias: bool | None = None,
        is_causal: bool = False,
        max_positions: int | None = None,
        rotary: float | Callable[[Tensor, Tensor], Tensor] | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        place = _check_place(device, dtype)
        self.variant = variant if isinstance(variant, Variant) else VARIANTS[one_of("variant", variant, VARIANTS)]
        self.preset = PRESETS[one_of("preset", preset, PRESETS)]
        self.embed_dim = positive_integer("embed_dim", embed_dim)
        self.num_heads = positive_integer("num_heads", num_heads)
        if head_dim is None and embed_dim % num_heads:
            fail("num_heads", f"= {num_heads} does not divide embed_dim = {embed_dim}: pass head_dim")
        self.head_dim = embed_dim // num_heads if head_dim is None else positive_integer("head_dim", head_dim)
        self.num_kv_heads = num_heads if num_kv_heads is None else positive_integer("num_kv_heads", num_kv_heads)
        if num_heads % self.num_kv_heads:
            fail("num_kv_heads", f"= {num_kv_heads} must divide num_heads = {num_heads}")
        self.kdim = embed_dim if kdim is None else positive_integer("kdim", kdim)
        self.vdim = embed_dim if vdim is None else positive_integer("vdim", vdim)
        self.num_components = self.variant.components or positive_integer("num_components", num_components)
        self.dropout = self.preset.dropout if dropout is None else number("dropout", dropout, 0, 1)
        bias = self.preset.bias if bias is None else flag("bias", bias)
        self.is_causal = flag("is_causal", is_causal)
        positions = self.preset.max_positions if max_positions is None else positive_integer("max_positions", max_positions)
        backends = functional.LINEAR_BACKENDS if self.is_linear else functional.MIXTURE_BACKENDS
        self.backend = one_of("backend", backend, ["auto", *backends])
        self.rotary = self._make_rotary(rotary)
        self.feature_map = check_feature_map(feature_map) if self.is_linear else None

        heads, width, components = self.num_kv_heads, self.head_dim, self.num_components
        self.query = nn.Linear(embed_dim, num_heads * width, bias=bias, **place)
        self.keys: KeyLayout = KEYS[self.variant.keys](
            self.kdim, heads, components, width, bias=bias, preset=self.preset, **place
        )
        self.value = nn.Linear(self.vdim, heads * width, bias=bias, **place)
        self.out = nn.Linear(num_heads * width, embed_dim, bias=bias, **place)
        self.prior = PRIORS[self.variant.prior](heads, components, self.variant, self.preset, positions, **place)
        self.variance = VARIANCES[self.variant.variance](heads, components, width, self.variant, self.preset, **place)
        self.tau = nn.Parameter(torch.ones(heads, **place)) if self.variant.similarity == "between" else None
        for projection in (self.query, self.value, self.out):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    @property
    def is_linear(self) -> bool:
        return self.variant.similarity == "linear"

    def extra_repr(self) -> str:
        axes = ", ".join(f"{field.name}={getattr(self.variant, field.name)!r}" for field in dataclasses.fields(Variant)[:5])
        return f"{self.embed_dim}, heads={self.num_heads}, head_dim={self.head_dim}, components={self.num_components}, {axes}"

    def _make_rotary(self, rotary: Any) -> Callable[[Tensor, Tensor], Tensor] | None:
        if rotary is None or callable(rotary):
            return rotary  # type: ignore[no-any-return]
        return Rotary(self.head_dim, number("rotary", rotary, 0, above=True))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: Cache | None = None,
        need_weights: bool = False,
    ) -> Any:
        """Self-attention, or cross-attention when key (and value) are given.

        Args:
            query: [B, L, embed_dim].
            key: [B, S, kdim], by default the query. value: [B, S, vdim], by default the key.
            key_padding_mask: bool [B, S], **True = padding**, as in torch's module. With a cache: of all keys held.
            attn_mask: broadcastable to [B, H, L, S]: bool **True = attend**, as in SDPA, or floating point, added.
            position_ids: [L] or [B, L], for rotary positions and per-position priors of self-attention; by default
                they count from 0, or on from the cache.
            cu_seqlens: int32 [N + 1] offsets of N sequences packed along L, with B = 1 (self-attention).
            cache: from `make_cache`; keys and values are appended to it. For inference only.
            need_weights: also return the weights [B, H, L, S].

        Returns:
            [B, L, embed_dim], or with need_weights a tuple of it and the weights.
        """
        flag("need_weights", need_weights)
        return self.attend(
            query, key, value, self.is_causal, key_padding_mask, attn_mask, position_ids, cu_seqlens, cache, need_weights
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        is_causal: bool,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        position_ids: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: Cache | None,
        need_weights: bool,
    ) -> Any:
        """`forward`, with causality as an argument."""
        _check_input("query", query, self.embed_dim)
        self_attention = key is None
        key = query if key is None else _check_input("key", key, self.kdim, query)
        value = key if value is None else _check_input("value", value, self.vdim, query)
        if self_attention and (self.kdim != self.embed_dim or self.vdim != self.embed_dim):
            fail("key", f"is needed: this layer takes keys of width {self.kdim} and values of width {self.vdim}")
        if key.shape[1] != value.shape[1]:
            fail("value", f"has length {value.shape[1]}, but key has {key.shape[1]}")
        if cu_seqlens is not None:
            if not self_attention or cache is not None:
                fail("cu_seqlens", "goes with self-attention without a cache")
            check_cu_seqlens("cu_seqlens", cu_seqlens, query, query.shape[1])
        q_positions, k_positions = self._positions(query, key, self_attention, position_ids, cu_seqlens, cache)

        q = self.query(query).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        keys = self.keys(key)
        v = self.value(value).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
        if self.variant.normalise:
            q, keys = nn.functional.normalize(q, dim=-1), nn.functional.normalize(keys, dim=-1)
        if self.rotary is not None:
            q, keys = self.rotary(q, _count(q_positions, query)), self.rotary(keys, _count(k_positions, key))
        attend = self._linear if self.is_linear else self._mixture
        output, weights = attend(
            q, keys, v, is_causal, key_padding_mask, attn_mask, k_positions, cu_seqlens, cache, need_weights
        )
        output = self.out(output.transpose(1, 2).flatten(2))
        return (output, weights) if need_weights else output

    def _positions(
        self,
        query: Tensor,
        key: Tensor,
        self_attention: bool,
        position_ids: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: Cache | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Positions of queries and new keys, [L] or [B, L]; None counts from 0."""
        positions = position_ids
        if position_ids is not None:
            if not isinstance(position_ids, Tensor) or position_ids.is_floating_point() or position_ids.is_complex():
                fail("position_ids", "must be an integer tensor [L] or [B, L]")
            if position_ids.shape not in ((query.shape[1],), (query.shape[0], query.shape[1]), (1, query.shape[1])):
                fail("position_ids", f"must have shape [L] or [B, L], got {list(position_ids.shape)}")
            if position_ids.device != query.device:
                fail("position_ids", f"is on {position_ids.device} but query is on {query.device}: move it there")
        elif cu_seqlens is not None:
            positions = segments(cu_seqlens, query.shape[1])[1]
        elif cache is not None:
            positions = torch.arange(cache.length, cache.length + query.shape[1], device=query.device)
        return positions, positions if self_attention else None

    def _log_prior(self, length: int, positions: Tensor | None, normaliser: Tensor | None) -> Tensor | None:
        log_prior: Tensor | None = self.prior(length, positions)
        if normaliser is None:
            return log_prior
        return normaliser if log_prior is None else log_prior + normaliser

    def _mixture(
        self,
        query: Tensor,
        keys: Tensor,
        value: Tensor,
        is_causal: bool,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: Cache | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        causal: bool | str = is_causal
        if cache is not None:
            held = _for_inference(cache, KeyValueCache, query, keys, value)
            if positions is not None and positions.dim() == 1:
                positions = positions.expand(query.shape[0], -1)
            keys, value, positions = held.append(keys, value, positions)
            causal = "bottom-right" if is_causal else False
        length = keys.shape[-2]
        scale, normaliser = self.variance()
        call = functional.mixture_call(
            query,
            keys,
            value,
            self._mask(query, length, key_padding_mask, attn_mask),
            shift=self.keys.shift,
            shifted=self.keys.shift is not None,
            is_causal=causal,
            dropout_p=self.dropout if self.training else 0.0,
            scale=scale,
            log_prior=self._log_prior(length, positions, normaliser),
            similarity=self.tau if self.tau is not None else self.variant.similarity,
            assignment=self.variant.assignment,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            return_weights=need_weights,
        )
        result = functional.run_mixture(call, self.backend)
        self._update(call, positions)
        return result if need_weights else (result, None)

    def _update(self, call: MixtureCall, positions: Tensor | None) -> None:
        """EM: what this training batch says replaces the prior (and variance) that it has used."""
        updated = [part for part in (self.prior, self.variance) if hasattr(part, "update")]
        if updated and self.training and torch.is_grad_enabled() and not _recomputing():
            statistics = em_statistics(call)
            for part in updated:
                part.update(statistics, positions)

    def _mask(
        self, query: Tensor, length: int, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> Tensor | None:
        """One mask in SDPA's sense."""
        if key_padding_mask is None:
            return attn_mask
        attend = ~_check_padding(key_padding_mask, query.shape[0], length, query)[:, None, None, :]
        if not isinstance(attn_mask, Tensor):
            return attend if attn_mask is None else attn_mask
        if attn_mask.dtype == torch.bool:
            return attn_mask & attend
        return attn_mask.masked_fill(~attend, -math.inf)

    def _linear(
        self,
        query: Tensor,
        keys: Tensor,
        value: Tensor,
        is_causal: bool,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: Cache | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        if attn_mask is not None:
            fail("attn_mask", "does not go with linear attention, which forms no weights: use key_padding_mask")
        form = self.preset.linear
        length = keys.shape[-2]
        if key_padding_mask is not None:
            total = length if cache is None else cache.length + length
            key_padding_mask = _check_padding(key_padding_mask, query.shape[0], total, query)[:, -length:]
        state = None
        if form.length_scaled:
            for name, given in (("cache", cache), ("cu_seqlens", cu_seqlens)):
                if given is not None:
                    fail(name, "does not go with preset 'ref-lra', whose linear attention is scaled by the whole length")
        if cache is not None:
            state = _for_inference(cache, StateCache, query, keys, value).state
        log_prior, shift = self._log_prior(length, positions, None), self.keys.shift
        if form.mix_before_map:
            keys, shift, log_prior = _mix(keys, shift, log_prior), None, None
        assert self.feature_map is not None
        call = functional.linear_call(
            query,
            keys,
            value,
            shift=shift,
            shifted=shift is not None,
            log_prior=log_prior,
            feature_map=_L1Features(self.feature_map) if form.l1_features else self.feature_map,
            key_mask=None if key_padding_mask is None else ~key_padding_mask,
            is_causal=is_causal,
            cu_seqlens=cu_seqlens,
            initial_state=state,
            return_state=cache is not None,
            return_weights=need_weights,
            normalise=form.normalise,
        )
        results = functional.run_linear(call, self.backend)
        output, *extras = results if isinstance(results, tuple) else (results,)
        if isinstance(cache, StateCache):
            cache.replace(extras[-1], length)
        factor = (length**-0.5 if form.length_scaled else 1.0) * (self.head_dim**-0.5 if form.width_scaled else 1.0)
        weights = extras[0] * factor if need_weights else None
        output = output * factor if factor != 1.0 else output
        # Attention weights are dropped in the softmax family; here, as in linear transformers, the output is.
        return nn.functional.dropout(output, self.dropout, self.training), weights

    def make_cache(self, batch_size: int, max_length: int) -> Cache:
        """An empty cache for decoding `batch_size` sequences of up to `max_length` tokens."""
        positive_integer("batch_size", batch_size)
        positive_integer("max_length", max_length)
        like = self.value.weight
        heads, width = self.num_kv_heads, self.head_dim
        if self.is_linear:
            nothing = like.new_zeros(batch_size, heads, 0, width).detach()
            _, state = functional.mlk_attention(
                nothing, nothing.unsqueeze(2), nothing, feature_map=self.feature_map, return_state=True
            )
            return StateCache(batch_size, max_length, state)
        components = () if self.keys.shift is not None else (self.num_components,)
        keys = like.new_zeros(batch_size, heads, *components, max_length, width)
        value = like.new_zeros(batch_size, heads, max_length, width)
        positions = None
        if getattr(self.prior, "positions", None) is not None:
            positions = torch.zeros(batch_size, max_length, dtype=torch.long, device=like.device)
        return KeyValueCache(max_length, keys.detach(), value.detach(), positions)

    @classmethod
    def from_softmax(
        cls,
        source: nn.MultiheadAttention,
        variant: str | Variant = "smgk",
        *,
        num_components: int = 2,
        is_causal: bool = False,
        noise: float = 0.01,
        backend: str = "auto",
    ) -> Attention:
        """A mixture layer that starts as a trained nn.MultiheadAttention and can learn from there.

        The similarity becomes "between", with τ = 0 at the start: shifts and a shared prior then cancel, and τ has a
        gradient. Independent keys start as copies that differ by `noise` times the spread of the weights: exact up to
        the square of the noise. Note that inputs are [B, L, embed_dim] whatever the source's batch_first.
        """
        if not isinstance(source, nn.MultiheadAttention):
            fail("source", f"must be an nn.MultiheadAttention, got {type(source).__name__}")
        if source.bias_k is not None or source.add_zero_attn:
            fail("source", "has add_bias_kv or add_zero_attn, which mixture keys do not have")
        target = variant if isinstance(variant, Variant) else VARIANTS[one_of("variant", variant, VARIANTS)]
        if target.similarity == "linear":
            fail("variant", "is linear: softmax attention has no exact linear form")
        if target.components is None:
            target = dataclasses.replace(target, similarity="between")
        weight = source.out_proj.weight
        layer = cls(
            source.embed_dim,
            source.num_heads,
            kdim=source.kdim,
            vdim=source.vdim,
            variant=target,
            num_components=num_components,
            dropout=source.dropout,
            bias=source.in_proj_bias is not None,
            is_causal=is_causal,
            backend=backend,
            device=weight.device,
            dtype=weight.dtype,
        )
        if source.in_proj_weight is not None:
            weights = source.in_proj_weight.chunk(3)
        else:
            weights = (source.q_proj_weight, source.k_proj_weight, source.v_proj_weight)
        biases = (None,) * 3 if source.in_proj_bias is None else source.in_proj_bias.chunk(3)
        with torch.no_grad():
            for projection, index in ((layer.query, 0), (layer.value, 2)):
                projection.weight.copy_(weights[index])
                if biases[index] is not None:
                    projection.bias.copy_(biases[index])
            layer.keys.load_softmax_keys(weights[1], biases[1], noise)
            layer.out.weight.copy_(source.out_proj.weight)
            if source.out_proj.bias is not None:
                layer.out.bias.copy_(source.out_proj.bias)
            if layer.tau is not None:
                layer.tau.zero_()
        return layer.train(source.training)


class _L1Features:
    """A feature map whose features sum to 1 for each token."""

    def __init__(self, feature_map: Callable[[Tensor], Tensor]) -> None:
        self.feature_map = feature_map

    def __call__(self, x: Tensor) -> Tensor:
        features = self.feature_map(x)
        return features / features.sum(-1, keepdim=True).clamp(min=torch.finfo(features.dtype).tiny)


def _mix(keys: Tensor, shift: Tensor | None, log_prior: Tensor | None) -> Tensor:
    """Σ_r π_r k_jr as one component, [B, Hk, 1, S, D]."""
    components = keys.shape[2] if shift is None else shift.shape[1]
    prior = keys.new_full((1, components, 1), 1 / components) if log_prior is None else log_prior.exp()
    prior = prior.unsqueeze(-1)  # [(B,) Hk or 1, M, S or 1, 1]
    if shift is None:
        return (prior * keys).sum(2, keepdim=True).to(keys.dtype)
    mixed = keys.unsqueeze(2) * prior.sum(-3, keepdim=True) + (prior * shift.unsqueeze(-2)).sum(-3, keepdim=True)
    return mixed.to(keys.dtype)


def _recomputing() -> bool:
    """True inside a backward: activation checkpointing runs the forward a second time there."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _count(positions: Tensor | None, x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device) if positions is None else positions


def _for_inference(cache: Any, kind: type, *tensors: Tensor) -> Any:
    if not isinstance(cache, kind):
        fail("cache", f"must come from this layer's make_cache, got {type(cache).__name__}")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        fail("cache", "is for inference: wrap the call in torch.no_grad()")
    return cache


def _check_input(name: str, x: Any, width: int, like: Tensor | None = None) -> Tensor:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        fail(name, f"must be a floating-point tensor [B, L, {width}]")
    if x.dim() != 3 or x.shape[-1] != width:
        fail(name, f"must have shape [B, L, {width}], got {list(x.shape)}")
    if like is not None and x.shape[0] != like.shape[0]:
        fail(name, f"must have query's batch {like.shape[0]}, got {list(x.shape)}")
    if like is not None and x.device != like.device:
        fail(name, f"is on {x.device} but query is on {like.device}: move it there")
    return x


def _check_padding(mask: Any, batch: int, length: int, like: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        fail("key_padding_mask", "must be a bool tensor [B, S], True = padding")
    if mask.shape != (batch, length):
        fail("key_padding_mask", f"must have shape [B, S] = [{batch}, {length}], got {list(mask.shape)}")
    if mask.device != like.device:
        fail("key_padding_mask", f"is on {mask.device} but query is on {like.device}: move it there")
    return mask


def _check_place(device: Any, dtype: Any) -> dict[str, Any]:
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        fail("dtype", f"must be a floating-point torch.dtype, got {dtype!r}")
    try:
        device = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be a torch device, got {device!r}") from error
    return {"device": device, "dtype": dtype}
